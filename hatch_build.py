"""Build hook: generate the stubs, so that wheels and editable installs carry them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class StubsBuildHook(BuildHookInterface[Any]):
    """Runs `scripts/gen_protos.py` before the files are collected."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        sys.path.insert(0, str(root / "scripts"))
        try:
            from gen_protos import generate  # noqa: PLC0415
        finally:
            sys.path.pop(0)
        generate(root)
