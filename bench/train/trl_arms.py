"""TRL's arms of `python -m bench.train`: its own trainer classes, called on given batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

Batch = list[dict[str, Tensor]]
_LABELLED = -100
"""TRL's label of a position without a loss."""


def sft(model: nn.Module, device: str, *, padding_free: bool) -> Callable[[Batch], float]:
    """Return SFTTrainer's training step over the whole batch; its loss is cross-entropy, the mean over labelled tokens.

    bfloat16 by autocast over bfloat16 weights, the head in tiles of the vocabulary, no gradient checkpointing.
    """
    from trl import SFTConfig, SFTTrainer  # noqa: PLC0415

    args = SFTConfig(padding_free=padding_free, max_length=None, dataset_kwargs={"skip_prepare_dataset": True},
                     per_device_train_batch_size=2, **_settings(device))  # fmt: skip
    data = _rows(input_ids=[[0, 0]], labels=[[0, 0]])
    trainer = SFTTrainer(model, args, train_dataset=data, processing_class=_tokenizer())
    trainer.current_gradient_accumulation_steps = 1
    prepared = trainer.accelerator.prepare(trainer.model)

    def step(batch: Batch) -> float:
        examples = [_labelled(datum) for datum in batch]
        return float(trainer.training_step(prepared, trainer.data_collator(examples)))

    return step


def grpo(model: nn.Module, device: str) -> Callable[[Batch], float]:
    """Return a step of GRPOTrainer's loss and its backward pass.

    epsilon is too large for clipping, and the mean over labelled tokens is turned into a sum, so that the loss is
    importance_sampling's.
    """
    from trl import GRPOConfig, GRPOTrainer  # noqa: PLC0415

    args = GRPOConfig(loss_type="bnpo", beta=0.0, epsilon=1e6, num_generations=2, per_device_train_batch_size=2,
                      **_settings(device))  # fmt: skip
    trainer = GRPOTrainer(model, _no_reward, args, _rows(prompt=["x"]), processing_class=_tokenizer())
    trainer.current_gradient_accumulation_steps = 1
    prepared = trainer.accelerator.prepare(trainer.model).train()

    def step(batch: Batch) -> float:
        inputs = _scored(batch, device)
        loss = trainer.compute_loss(prepared, inputs) * inputs["completion_mask"].sum()
        trainer.accelerator.backward(loss)
        return float(loss.item())

    return step


def _settings(device: str) -> dict[str, Any]:
    return {
        "output_dir": mkdtemp(prefix="trl-"),
        "use_cpu": device == "cpu",
        "bf16": True,
        "gradient_checkpointing": False,
        "report_to": [],
    }


def _no_reward(completions: list[str], **_unused: Any) -> list[float]:
    return [0.0] * len(completions)


def _rows(**columns: list[Any]) -> Any:
    """Build the dataset that a trainer's constructor requires."""
    import pyarrow as pa  # noqa: PLC0415
    from datasets import Dataset  # noqa: PLC0415

    return Dataset(pa.table(columns), fingerprint="unread")  # Computing one needs pickle, which pyarrow 26 refuses.


def _tokenizer() -> Any:
    """Build a tokenizer that can pad; the batches are already tokens."""
    from tokenizers import Tokenizer, models  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    words = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>")  # type: ignore[no-untyped-call]


def _whole(datum: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Return a datum's tokens with its last target, and how many of them are prompt."""
    tokens = torch.cat([datum["model_input"], datum["target_tokens"][-1:]])
    return tokens, len(tokens) - int(datum["mask"].sum())


def _labelled(datum: dict[str, Tensor]) -> dict[str, list[int]]:
    tokens, prompt = _whole(datum)
    return {"input_ids": tokens.tolist(), "labels": [_LABELLED] * prompt + tokens[prompt:].tolist()}


def _scored(batch: Batch, device: str) -> dict[str, Tensor]:
    """Build what GRPOTrainer's generation returns: prompts padded on the left, completions on the right."""
    wholes = [_whole(datum) for datum in batch]
    prompts, completions = [t[:n] for t, n in wholes], [t[n:] for t, n in wholes]
    old = [datum["logprobs"][datum["mask"].bool()] for datum in batch]
    inputs = {
        "prompt_ids": pad_sequence(prompts, batch_first=True, padding_side="left"),
        "prompt_mask": pad_sequence([torch.ones_like(p) for p in prompts], batch_first=True, padding_side="left"),
        "completion_ids": pad_sequence(completions, batch_first=True),
        "completion_mask": pad_sequence([torch.ones_like(c) for c in completions], batch_first=True),
        "old_per_token_logps": pad_sequence(old, batch_first=True),
        "advantages": torch.stack([datum["advantages"][-1] for datum in batch]),
    }
    return {name: tensor.to(device) for name, tensor in inputs.items()}


# TRL warns about vLLM versions it does not know; vLLM is not used here.
warnings.filterwarnings("ignore", message="TRL currently supports vLLM", category=UserWarning)
