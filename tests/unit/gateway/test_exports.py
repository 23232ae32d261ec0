"""`import gateway` exports the client and starts nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gateway
import paceline

_ROOT = Path(__file__).resolve().parents[3]


def test_the_gateway_exports_the_client():
    assert gateway.__all__ == ["SamplingClient", "ServiceClient", "TrainingClient"]
    assert all(getattr(gateway, name) is getattr(paceline, name) for name in gateway.__all__)


def test_importing_it_imports_no_server():
    code = "import gateway, sys; print(*sorted(m for m in sys.modules if m.startswith(('gateway', 'torch', 'vllm'))))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=_ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["gateway"]
