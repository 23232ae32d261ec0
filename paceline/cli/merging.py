"""Merge an adapter into its base model, with PEFT."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer


def merge(adapter: Path, model: str, directory: Path) -> None:
    """Write a whole model, in the base model's dtype, with its tokenizer, to a new directory.

    Raises OSError if the base model cannot be loaded, and ValueError or RuntimeError if the adapter is not for it.
    """
    base = AutoModelForCausalLM.from_pretrained(model, dtype="auto", low_cpu_mem_usage=True)
    with torch.no_grad():
        merged = PeftModel.from_pretrained(base, str(adapter)).merge_and_unload()
    merged.save_pretrained(directory)
    AutoTokenizer.from_pretrained(model).save_pretrained(directory)
