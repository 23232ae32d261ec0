"""Check that a CPU installation can serve: torch and vLLM import, with vLLM's kernels for this processor.

    python scripts/check_install.py

Exits with status 1 and a one-line reason otherwise.
"""

from __future__ import annotations

import os
from importlib import import_module

# vLLM only warns about kernels that it cannot load, and continues without them.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def main() -> None:
    """Import torch and vLLM, load vLLM's kernels, and print torch's version."""
    for name in ("torch", "vllm", "vllm.platforms"):
        try:
            import_module(name)
        except Exception as error:
            raise SystemExit(f"{name} cannot be imported: {type(error).__name__}: {error}") from None

    import torch  # noqa: PLC0415
    from vllm.platforms import current_platform  # noqa: PLC0415

    if not current_platform.is_cpu():
        raise SystemExit(f"vLLM's CPU build is required, but the installed build is for {current_platform.device_type}")
    current_platform.import_kernels()
    if not hasattr(torch.ops._C, "rms_norm"):  # noqa: SLF001
        raise SystemExit(f"vLLM's kernels do not load on this processor with torch {torch.__version__}; see above")
    print(f"torch {torch.__version__} and vLLM's CPU build can be imported")


if __name__ == "__main__":
    main()
