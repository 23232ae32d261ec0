"""Measurements: a folder a subject. `make help` lists them; `python -m bench.SUBJECT` takes each one's options."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# What they measure with: the embedded model's maker (scripts) and stacks of services (tests/support).
sys.path[1:1] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests")]
