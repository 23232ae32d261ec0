"""Run the commands and the code of a page, in its order, as its reader would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.patience import PATIENCE

_NOTE = re.compile(r"<!-- ((?:not )?run: .+) -->")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str
    line: int
    """Number of its first line, from 1."""
    note: str
    """A comment before it, "run: ..." or "not run: ...", or empty."""

    @property
    def commands(self) -> str:
        """Its commands, without the prompt, and without what they print."""
        found: list[str] = []
        is_open = False
        for line in self.text.splitlines():
            if is_open:
                found[-1] += f"\n{line}"
            elif line.startswith("$ "):
                found.append(line.removeprefix("$ "))
            else:
                continue
            is_open = line.endswith("\\") or found[-1].count("'") % 2 == 1  # or in the middle of an argument
        return "\n".join(found)


def blocks(text: str) -> list[Block]:
    """Return a page's blocks of commands and of Python."""
    found, note, lines = [], "", iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        if fence := re.fullmatch(r"```(\w+)", line):
            body = []
            for _, inner in lines:
                if inner == "```":
                    break
                body.append(inner)
            if fence[1] in {"console", "python"}:
                found.append(Block(fence[1], "\n".join(body) + "\n", number + 1, note))
        comment = _NOTE.fullmatch(line)
        note = comment[1] if comment else ""
    return found


class PageRunner:
    """A reader's shell and Python session, which keep their variables from block to block.

    `changed` replaces what differs in a test, such as addresses, in each block.
    """

    def __init__(self, name: str, folder: Path, patch: pytest.MonkeyPatch, changed: Callable[[str], str]) -> None:
        self._name, self._folder, self._patch, self._changed = name, folder, patch, changed
        self._namespace: dict[str, Any] = {"__name__": "__main__"}
        patch.chdir(folder)
        patch.setenv("PATH", f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}")

    def run(self, block: Block) -> str:
        """Run a block; return what its commands print."""
        where = f"{self._name}, line {block.line}"
        if block.language == "python":
            code = "\n" * (block.line - 1) + self._changed(block.text)
            exec(compile(code, self._name, "exec"), self._namespace)
            return ""
        exported = self._folder / ".exported"
        script = f"set -euo pipefail\n{self._changed(block.commands)}\nenv -0 > {exported}\n"
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert done.returncode == 0, f"{where}:\n{script}\n{done.stdout}\n{done.stderr}"
        for variable in exported.read_text().split("\0"):
            name, is_set, value = variable.partition("=")
            if is_set and os.environ.get(name) != value:
                self._patch.setenv(name, value)
        return done.stdout
