"""Make tiny random models of the decoder architectures in the installed transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ARCHITECTURES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""Values of `model_type` that AutoModelForCausalLM knows."""


def _each(size: object, *fields: str) -> dict[str, object]:
    return dict.fromkeys(fields, size)


_SIZES: dict[str, object] = {
    **_each(64, "hidden_size", "d_model", "n_embd", "dim", "embed_dim", "word_embed_proj_dim", "embedding_size"),
    **_each(64, "lru_width", "attention_hidden_size", "emb_dim", "vocab_size", "vocab_size_per_layer_input"),
    **_each(64, "encoder_hash_byte_group_vocab"),
    **_each(96, "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "decoder_ffn_dim", "encoder_ffn_dim"),
    **_each(96, "shared_intermediate_size", "dense_intermediate_size", "intermediate_size_mlp", "dim_ff", "dff"),
    **_each(32, "moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"),
    **_each(2, "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"),
    **_each(2, "num_decoder_layers", "num_encoder_layers", "num_blocks"),
    **_each(4, "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"),
    **_each(4, "encoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads"),
    **_each(2, "num_key_value_heads", "num_kv_heads"),
    **_each(
        16,
        "head_dim",
        "dim_head",
        "linear_head_dim",
        "v_head_dim",
        "qk_nope_head_dim",
        "q_lora_rank",
        "kv_lora_rank",
        "swa_head_dim",
    ),
    **_each(8, "qk_rope_head_dim", "rotary_dim", "index_topk"),
    **_each(4, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    **_each(2, "num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "moe_top_k", "top_k_experts"),
    **_each(1, "n_shared_experts", "n_group", "topk_group", "num_expert_group"),
    **_each(256, "max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"),
    **_each(2, "linear_num_key_heads"),
    **_each(
        4,
        "linear_num_value_heads",
        "linear_num_heads",
        "mamba_n_heads",
        "mamba_num_heads",
        "mamba_dt_rank",
        "time_step_rank",
    ),
    **_each(16, "linear_key_head_dim", "linear_value_head_dim", "mamba_d_state", "ssm_state_size", "state_size"),
    **_each(32, "mamba_d_head", "mamba_head_dim", "chunk_size", "mamba_chunk_size"),
    **_each(1, "n_groups", "mamba_n_groups", "mamba_ngroups"),
    "mamba_d_ssm": 128,
    "hidden_size_per_layer_input": 16,
    "sliding_window": 48,
    "initializer_range": 0.2,
    "init_std": 0.2,
    "num_kv_shared_layers": 0,
    "is_decoder": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Field of a configuration -> its size. Weights have a wide enough range for errors to show."""
_NEEDED = ("num_key_value_heads", "head_dim", "num_experts_per_tok")
"""Fields that get a size even if their default is None."""
_LATENT = {"head_dim": 8, "num_key_value_heads": 4}
"""Sizes for multi-head latent attention, which rotates only a part of each head."""
_OVERRIDES: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 16},
    "mamba2": {"num_heads": 4, "head_dim": 32},
    "zaya": {"num_experts_per_tok": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "xmod": {"default_language": "en_XX"},
    "reformer": {"attn_layers": ["local", "local"], "axial_pos_embds": False},
    "xlm": {"emb_dim": 64, "n_words": 64, "causal": True, "is_encoder": False},
    "gemma3n_text": {"laurel_rank": 8, "activation_sparsity_pattern": [0.0, 0.0]},
    "roc_bert": {"pronunciation_vocab_size": 32, "shape_vocab_size": 32},
}
"""Further fields that some architectures need."""


def make_architecture(kind: str, directory: Path) -> Path:
    """Save a random model of an architecture; return `directory`. Raises what transformers raises."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_config(kind))  # type: ignore[no-untyped-call]
        model.save_pretrained(directory)
    return directory


def tiny_config(kind: str) -> PretrainedConfig:
    """Return an architecture's configuration with every size reduced, including its sub-configurations."""
    made: PretrainedConfig = CONFIG_MAPPING[kind](**_shrunk(CONFIG_MAPPING[kind], kind))
    return made


def _shrunk(kind: Any, name: str) -> dict[str, Any]:
    default = kind()
    fields = default.to_dict()
    sizes: dict[str, Any] = {
        field: size
        for field, size in _SIZES.items()
        if field in fields
        and not isinstance(fields[field], list | dict)
        and (fields[field] is not None or field in _NEEDED)
    }
    if "qk_rope_head_dim" in fields:
        sizes |= _LATENT
    for part in getattr(kind, "sub_configs", None) or {}:
        if getattr(default, part, None) is not None:
            sizes[part] = _shrunk(type(getattr(default, part)), "")
    if isinstance(fields.get("layer_types"), list):
        sizes |= _layers(list(dict.fromkeys(fields["layer_types"])), sizes)
    return sizes | _OVERRIDES.get(name, {})


def _layers(kinds: list[str], sizes: dict[str, Any]) -> dict[str, Any]:
    """Return fields for one layer of each kind, and at least two layers."""
    types = kinds if len(kinds) > 1 else kinds * 2
    counts: dict[str, Any] = {field: len(types) for field in ("num_hidden_layers", "n_layer") if field in sizes}
    return {"layer_types": types, **counts}
