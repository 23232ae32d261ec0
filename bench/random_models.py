"""Models of known shapes with random weights, for benches.

    python -m bench.random_models NAME DIRECTORY

writes one in bfloat16, with a tokenizer that knows as many words. The weights are drawn on the GPU where there is one:
8 billion take minutes on a CPU.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LLAMA_3 = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": False,
    },
    "llama-3b": {
        **_LLAMA_3,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "tie_word_embeddings": True,
    },
    "llama-8b": {
        **_LLAMA_3,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}
"""Each model's configuration: the shapes of Qwen2.5 0.5B and 7B, Llama 3.2 3B and Llama 3.1 8B."""


def make_random_model(name: str, directory: Path) -> Path:
    """Write a model in a process of its own, so that this one holds no GPU memory afterwards."""
    subprocess.run([sys.executable, "-m", "bench.random_models", name, str(directory)], check=True)
    return directory


def find_model(model: str, scratch: Path) -> Path:
    """Return the directory of a model: one that exists, or a new one of a shape's name or "embedded"."""
    if model == "embedded":
        from make_model import default_directory, make_model  # noqa: PLC0415

        return make_model(default_directory())
    return make_random_model(model, scratch / model) if model in SHAPES else Path(model)


def _write(name: str, directory: Path) -> None:
    import torch  # noqa: PLC0415
    from tokenizers import Tokenizer, models  # noqa: PLC0415
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast  # noqa: PLC0415

    config = AutoConfig.for_model(**SHAPES[name])
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)
    words = {f"<{number}>": number for number in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<0>"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<2>")  # type: ignore[no-untyped-call]
    fast.save_pretrained(directory)


if __name__ == "__main__":
    _write(sys.argv[1], Path(sys.argv[2]))
