"""Benchmarks, one folder per subject. `python -m bench.SUBJECT` takes each one's options; `make help` lists most."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# The benchmarks import make_model from scripts/ and stacks of services from tests/support.
sys.path[1:1] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests")]
