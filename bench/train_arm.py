"""The arms that `bench/train.py` compares with: what a first trainer on transformers and PEFT does.

    python bench/train_arm.py ARM MODEL ADAPTER wall|cpu

Reads one JSON object a line: {"batch": path} to time a pass, with "compare": true to compare its gradient with
the one that waits in ADAPTER, a state checkpoint. Answers with one line each.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).resolve().parent))
from train_batches import load_batch

Batch = list[dict[str, Tensor]]
Losses = Callable[[nn.Module, Batch], Iterator[Tensor]]
PRODUCT, PRODUCTS = 2048, 5


def padded(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
    """One forward pass over the batch, padded to its longest; full-vocabulary log-softmax in float32."""
    rows = {name: nn.utils.rnn.pad_sequence([datum[name] for datum in batch], batch_first=True) for name in batch[0]}
    lengths = torch.tensor([len(datum["model_input"]) for datum in batch])
    attention_mask = (torch.arange(rows["model_input"].shape[1]) < lengths[:, None]).long()
    logits = model(input_ids=rows["model_input"], attention_mask=attention_mask, use_cache=False).logits
    logprobs = logits.float().log_softmax(-1).gather(2, rows["target_tokens"][..., None]).squeeze(2)
    yield importance_sampling(logprobs, rows)


def single(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
    """One pass for each datum; log-softmax in the dtype of the logits, as MetaClaw's server has it."""
    for datum in batch:
        logits = model(input_ids=datum["model_input"][None], use_cache=False).logits[0]
        yield importance_sampling(logits.log_softmax(-1).gather(1, datum["target_tokens"][:, None])[:, 0], datum)


def importance_sampling(logprobs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Sum -exp(lp - q) A over labelled positions."""
    return -((logprobs - inputs["logprobs"]).exp() * inputs["advantages"] * inputs["mask"]).sum()


ARMS: dict[str, tuple[torch.dtype, Losses, bool]] = {
    "padded float32": (torch.float32, padded, False),
    "padded bfloat16": (torch.bfloat16, padded, False),
    "one at a time": (torch.bfloat16, single, False),
    "one at a time, checkpointed": (torch.bfloat16, single, True),
}
"""Name -> dtype, how losses are computed, gradient checkpointing (which MetaClaw's server has on)."""


def load(path: str, adapter: str, dtype: torch.dtype, *, checkpointing: bool) -> nn.Module:
    """Load the model and continue an adapter, as PEFT's documentation does it."""
    from peft import PeftModel  # noqa: PLC0415

    base = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
    if checkpointing:
        base.gradient_checkpointing_enable()
        base.enable_input_require_grads()
    model: nn.Module = PeftModel.from_pretrained(base, adapter, is_trainable=True).train()
    return model


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def step(model: nn.Module, losses: Losses, batch: Batch, now: Callable[[], float]) -> tuple[float, float]:
    """Forward and backward; returns seconds and the loss."""
    model.zero_grad(set_to_none=True)
    start, total = now(), 0.0
    for loss in losses(model, batch):
        torch.autograd.backward(loss)
        total += loss.item()
    return now() - start, total


def gradient_cosine(model: nn.Module, adapter: str) -> float:
    """Cosine between this arm's gradient and the checkpoint's."""
    state = load_file(Path(adapter) / "optimizer.safetensors")
    mine = {name.replace(".default", ""): p.grad for name, p in model.named_parameters() if p.grad is not None}
    pairs = [(mine[name].double().flatten(), state[f"grad.{name}"].double().flatten()) for name in mine]
    dot, ours, theirs = (sum(float(value) for value in values) for values in zip(
        *((a @ b, a @ a, b @ b) for a, b in pairs), strict=True))  # fmt: skip
    return dot / (ours * theirs) ** 0.5


def product_rate(now: Callable[[], float]) -> float:
    """FLOP/s of a square matrix product in bfloat16."""
    a, b = (torch.randn(PRODUCT, PRODUCT).bfloat16() for _ in range(2))
    torch.mm(a, b)
    start = now()
    for _ in range(PRODUCTS):
        torch.mm(a, b)
    return PRODUCTS * 2 * PRODUCT**3 / (now() - start)


def as_tensor(array: NDArray[Any]) -> Tensor:
    """Token ids and masks become int64."""
    tensor = torch.from_numpy(array)
    return tensor if tensor.is_floating_point() else tensor.long()


def answer(
    model: nn.Module, losses: Losses, adapter: str, now: Callable[[], float], request: dict[str, Any]
) -> dict[str, float]:
    """Do what a line asks for."""
    batch = [{name: as_tensor(a) for name, a in datum.items()} for datum in load_batch(Path(request["batch"]))]
    rate = product_rate(now)
    seconds, loss = step(model, losses, batch, now)
    reply = {"seconds": seconds, "loss": loss, "product_rate": rate}
    if request.get("compare"):
        reply["cosine"] = gradient_cosine(model, adapter)
    return reply | {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def main(arm: str, path: str, adapter: str, clock: str) -> None:
    """Answer requests until the input ends."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    dtype, losses, checkpointing = ARMS[arm]
    model = load(path, adapter, dtype, checkpointing=checkpointing)
    for line in sys.stdin:
        print(json.dumps(answer(model, losses, adapter, CLOCKS[clock], json.loads(line))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
