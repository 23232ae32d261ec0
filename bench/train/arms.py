"""The arms that `python -m bench.train` compares with: what a simple trainer on transformers and PEFT does.

    python -m bench.train.arms ARM MODEL ADAPTER wall|cpu

Reads one JSON object per line: {"batch": path} to time a pass, with "compare": true to also compare its gradient with
the pending one in ADAPTER, a state checkpoint. Answers with one line each.
"""

from __future__ import annotations

import ctypes
import json
import math
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers import logging as transformers_logging

from bench.train import trl_arms
from bench.train.batches import load_batch

Batch = list[dict[str, Tensor]]
Loss = Callable[[nn.Module, Batch], Tensor]
Step = Callable[[Batch], float]
"""Forward and backward over a batch; returns the loss."""
PRODUCTS = {"cpu": (2048, 5), "cuda": (8192, 20)}
"""Width of the square matrix products that are timed, and how many."""


def padded(model: nn.Module, batch: Batch) -> Tensor:
    """Run one forward pass over the batch, padded to its longest; full-vocabulary log-softmax in float32."""
    rows = {name: nn.utils.rnn.pad_sequence([datum[name] for datum in batch], batch_first=True) for name in batch[0]}
    lengths = torch.tensor([len(datum["model_input"]) for datum in batch])
    attention_mask = (torch.arange(rows["model_input"].shape[1]) < lengths[:, None]).long()
    logits = model(input_ids=rows["model_input"], attention_mask=attention_mask, use_cache=False).logits
    logprobs = logits.float().log_softmax(-1).gather(2, rows["target_tokens"][..., None]).squeeze(2)
    return importance_sampling(logprobs, rows)


def single(model: nn.Module, batch: Batch) -> Tensor:
    """Run a pass over one datum; log-softmax in the dtype of the logits, as in MetaClaw's server."""
    (datum,) = batch
    logits = model(input_ids=datum["model_input"][None], use_cache=False).logits[0]
    return importance_sampling(logits.log_softmax(-1).gather(1, datum["target_tokens"][:, None])[:, 0], datum)


def importance_sampling(logprobs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Sum -exp(lp - q) A over labelled positions."""
    return -((logprobs - inputs["logprobs"]).exp() * inputs["advantages"] * inputs["mask"]).sum()


def plainly(loss_of: Loss) -> Callable[[nn.Module, str], Step]:
    """Return a maker of a plain loop's step."""

    def make(model: nn.Module, device: str) -> Step:
        def step(batch: Batch) -> float:
            loss = loss_of(model, [{name: x.to(device) for name, x in datum.items()} for datum in batch])
            torch.autograd.backward(loss)
            return loss.item()

        return step

    return make


@dataclass(frozen=True)
class Arm:
    """What one of the other arms does."""

    make_step: Callable[[nn.Module, str], Step]
    dtype: torch.dtype = torch.bfloat16
    checkpointing: bool = False
    """Gradient checkpointing, which MetaClaw's server enables."""
    rows: int | None = None
    """Datums in one pass, of similar lengths; None: all."""

    def passes(self, batch: Batch) -> Iterator[Batch]:
        """Split a batch into passes."""
        if self.rows is not None:
            batch = sorted(batch, key=lambda datum: len(datum["model_input"]))
        rows = self.rows or len(batch)
        for start in range(0, len(batch), rows):
            yield batch[start : start + rows]


ARMS = {
    "padded float32": Arm(plainly(padded), torch.float32),
    "padded bfloat16": Arm(plainly(padded)),
    "padded bfloat16, 8 rows": Arm(plainly(padded), rows=8),
    "one at a time": Arm(plainly(single), rows=1),
    "one at a time, checkpointed": Arm(plainly(single), checkpointing=True, rows=1),
    "TRL SFT, padding-free": Arm(partial(trl_arms.sft, padding_free=True)),
    "TRL SFT, padded": Arm(partial(trl_arms.sft, padding_free=False)),
    "TRL SFT, padded, 8 rows": Arm(partial(trl_arms.sft, padding_free=False), rows=8),
    "TRL GRPO, padded": Arm(trl_arms.grpo),
    "TRL GRPO, padded, 8 rows": Arm(trl_arms.grpo, rows=8),
    "TRL GRPO, one at a time": Arm(trl_arms.grpo, rows=1),
}


def load(path: str, adapter: str, arm: Arm, device: str) -> nn.Module:
    """Load the model and continue an adapter, as PEFT's documentation does it."""
    from peft import PeftModel  # noqa: PLC0415

    base: Any = AutoModelForCausalLM.from_pretrained(path, dtype=arm.dtype, attn_implementation="sdpa")
    base.to(device)
    if arm.checkpointing:
        base.gradient_checkpointing_enable()
        base.enable_input_require_grads()
    model: nn.Module = PeftModel.from_pretrained(base, adapter, is_trainable=True).train()
    return model


_PIECE = 16 << 20

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def timed(step: Step, passes: Iterable[Batch], now: Callable[[], float], device: str) -> tuple[float, float]:
    """Return the seconds of the passes over a batch, and the sum of their losses."""
    settle(device)
    start = now()
    loss = sum(step(batch) for batch in passes)
    settle(device)
    return now() - start, loss


def settle(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def gradient_cosine(model: nn.Module, adapter: str) -> float:
    """Return the cosine between this arm's gradient and the checkpoint's."""
    state = load_file(Path(adapter) / "optimizer.safetensors")
    mine = {name.replace(".default", ""): p.grad for name, p in model.named_parameters() if p.grad is not None}
    pairs = [(mine[name].double().flatten(), state[f"grad.{name}"].double().flatten()) for name in mine]
    dot, ours, theirs = (sum(float(value) for value in values) for values in zip(
        *((a @ b, a @ a, b @ b) for a, b in pairs), strict=True))  # fmt: skip
    return dot / math.sqrt(ours * theirs)


def product_rate(now: Callable[[], float], device: str) -> float:
    """Return the FLOP/s of a square matrix product in bfloat16."""
    width, count = PRODUCTS[device]
    a, b = (torch.randn(width, width, device=device).bfloat16() for _ in range(2))
    torch.mm(a, b)
    settle(device)
    start = now()
    for _ in range(count):
        torch.mm(a, b)
    settle(device)
    return count * 2 * width**3 / (now() - start)


def peak(device: str) -> int:
    """Return the peak memory of this process in bytes: resident on a CPU, reserved by torch on a GPU."""
    if device == "cuda":
        return torch.cuda.max_memory_reserved()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def give_back() -> int:
    """Return free memory to the system, because the arms do not all fit at once; return the number of bytes."""
    before = resident()
    ctypes.CDLL(None).malloc_trim(0)
    return before - resident()


def take_again(size: int) -> None:
    """Make the allocator hold `size` bytes again, as if they had not been returned, in pieces that it keeps."""
    [torch.zeros(_PIECE, dtype=torch.uint8) for _ in range(size // _PIECE)]


def resident() -> int:
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def as_tensor(array: NDArray[Any]) -> Tensor:
    """Convert an array to a tensor; token ids and masks become int64."""
    tensor = torch.from_numpy(array)
    return tensor if tensor.is_floating_point() else tensor.long()


def answer(
    arm: Arm, model: nn.Module, step: Step, adapter: str, clock: str, device: str, request: dict[str, Any]
) -> dict[str, float]:
    """Execute one request."""
    now = CLOCKS[clock]
    batch = [{name: as_tensor(a) for name, a in datum.items()} for datum in load_batch(Path(request["batch"]))]
    rate = product_rate(now, device)
    model.zero_grad(set_to_none=True)
    seconds, loss = timed(step, arm.passes(batch), now, device)
    reply = {"seconds": seconds, "loss": loss, "product_rate": rate}
    if request.get("compare"):
        reply["cosine"] = gradient_cosine(model, adapter)
    return reply | {"peak": peak(device)}


def main(name: str, path: str, adapter: str, clock: str, device: str = "cpu") -> None:
    """Answer requests until the input ends."""
    replies, sys.stdout = sys.stdout, sys.stderr  # Libraries may print.
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    arm = ARMS[name]
    model = load(path, adapter, arm, device)
    step = arm.make_step(model, device)
    given = 0
    for line in sys.stdin:
        take_again(given)
        reply = answer(arm, model, step, adapter, clock, device, json.loads(line))
        given = give_back()
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
