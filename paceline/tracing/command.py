"""Converts the spans that services wrote to files to a trace for Perfetto."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.tracing.chrome import NoSteps, chrome_trace, last_steps
from paceline.tracing.spans import FinishedSpan, read_spans


def trace(files: Sequence[Path], *, run: str = "", steps: int = 3, out: Path = Path("trace.json")) -> int:
    """Write the spans of a run's last steps as a trace; return the exit status, and say on stderr what went wrong.

    `files` are the services' `trace_file`, or directories that hold them as *.jsonl. An empty `run` means the one that
    stepped last.
    """
    try:
        found = last_steps(_spans(files), run, steps)
        out.write_text(json.dumps(chrome_trace(found)))
    except (NoSteps, ValueError, OSError) as failure:
        print(f"paceline trace: {failure}", file=sys.stderr)  # noqa: T201
        return 1
    print(f"{len(found)} spans in {out}; open it at ui.perfetto.dev")  # noqa: T201
    return 0


def _spans(files: Sequence[Path]) -> Iterator[FinishedSpan]:
    for path in files:
        for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
            yield from read_spans(file)
