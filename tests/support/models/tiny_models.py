"""Small random models with a real tokenizer, built on the fly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 260
"""256 bytes and 4 special tokens."""
SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>")
EOS_ID = VOCAB_SIZE - 1
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    # Heads of 32, the smallest that vLLM's CPU attention supports.
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "pad_token_id": 256,
    "bos_token_id": 257,
    "eos_token_id": EOS_ID,
    # Wide enough for distinct logits, so that wrong attention or wrong positions show.
    "initializer_range": 0.2,
}

_SCALED_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",
    "num_key_value_heads": 2,
}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 32,
}
_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "glm4": {"head_dim": 32},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "phi": {"num_key_value_heads": 2},
    "falcon": {"new_decoder_architecture": False, "alibi": False},
    "lfm2": {
        "layer_types": ["conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
        "conv_dim": 64,
        "block_dim": 64,
    },
    "qwen3_5_text": _LINEAR,
    "qwen2_moe": {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4, "head_dim": 32},
    "deepseek_v3": {**_EXPERTS, **_LATENT},
    "mixtral": {"num_local_experts": 4},
}
"""Settings that a tiny model needs besides _SHAPE, by model type."""


def make_tiny_llama(
    directory: Path, *, tied: bool = False, seed: int = 0, scaled_rope: bool = False, context: int = 512
) -> Path:
    """Save a random Llama with grouped-query attention and its tokenizer; return `directory`."""
    shape = _SHAPE | {"max_position_embeddings": context}
    rope = {"rope_parameters": _SCALED_ROPE} if scaled_rope else {}
    return _save(LlamaForCausalLM, LlamaConfig(**shape, **rope, tie_word_embeddings=tied), directory, seed)


def make_tiny_qwen2(directory: Path, *, tied: bool = True, seed: int = 0) -> Path:
    """Save a random Qwen2 (biases on q, k and v) and its tokenizer; return `directory`."""
    return _save(Qwen2ForCausalLM, Qwen2Config(**_SHAPE, tie_word_embeddings=tied), directory, seed)


def make_tiny_qwen3(directory: Path, *, tied: bool = True, seed: int = 0) -> Path:
    """Save a random Qwen3 (norms on q and k) and its tokenizer; return `directory`."""
    return _save(Qwen3ForCausalLM, Qwen3Config(**_SHAPE, head_dim=32, tie_word_embeddings=tied), directory, seed)


def make_tiny(kind: str, directory: Path, *, seed: int = 0, **settings: Any) -> Path:
    """Save a random model of a `model_type` and its tokenizer; return `directory`."""
    own = _ARCHITECTURES.get(kind, {})
    config = AutoConfig.for_model(kind, **{**_SHAPE, "tie_word_embeddings": False, **own, **settings})
    return _save(AutoModelForCausalLM.from_config, config, directory, seed)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a byte-level tokenizer: one token for each byte, no merges, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    pad, bos, _, eos = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos, chat_template=CHAT_TEMPLATE
    )


def _save(kind: Callable[[Any], PreTrainedModel], config: object, directory: Path, seed: int) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory
