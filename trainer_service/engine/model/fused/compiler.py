"""Check that torch.compile has the compiler that it needs."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

from paceline.errors import Unsupported


def check_compiler(device: str) -> None:
    """Raise Unsupported if torch.compile has no compiler for `device`: C++ on a CPU, Triton on a GPU."""
    if device.startswith("cuda"):
        found, needed = find_spec("triton") is not None, "Triton"
    else:
        compiler = os.environ.get("CXX") or "g++"  # As torch does.
        found, needed = shutil.which(compiler) is not None, f"a C++ compiler, {compiler} (CXX names another)"
    if not found:
        raise Unsupported(f"compile=true needs {needed}, which is not installed; install it, or set compile=false.")
