"""Say why a pass fails or gives other results than stock transformers, and in which module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from paceline.base_model.model_directory import first_line
from paceline.errors import PacelineError
from trainer_service.engine.model.base_model import (
    STOCK_ATTENTION,
    PassMode,
    hidden_states,
    output_head,
    use_attention,
)
from trainer_service.engine.model.lora_linear import AdaptedLinear

_LENGTHS = (40, 24)
"""Lengths of two sequences, of which the second is compared."""

Run = Callable[[Callable[[], object]], object]


def why_failed(error: Exception, model: PreTrainedModel) -> str:
    """Say in a sentence why a pass failed, and in which module."""
    module = _failing(error.__traceback__, model)
    if isinstance(error, PacelineError):
        return f"{module}: {first_line(error)}" if module else first_line(error)
    return f"{module or type(model).__name__} raises {type(error).__name__}: {first_line(error)}"


@torch.no_grad()
def why_different(model: PreTrainedModel, mode: PassMode, tokens: Tensor, run: Run, *, mixes: bool) -> str:
    """Say in a sentence which module's output a mode changes first; the model's layers are transformers' own.

    `tokens` are int64, [n], with n above 64. `run` runs a pass through the model. `mixes` says whether sequences depend
    on each other.
    """
    other, own = tokens[: _LENGTHS[0]], tokens[_LENGTHS[0] : sum(_LENGTHS)]
    use_attention(model, STOCK_ATTENTION)
    with _calls(model, len(own)) as stock:
        run(lambda: model(input_ids=own[None], use_cache=False))
    parts = [other, own] if mode.is_packed else [own]
    positions = torch.cat([torch.arange(len(part), device=part.device) for part in parts])
    lengths = tuple(len(part) for part in parts)
    use_attention(model, mode.attention)
    with _calls(model, sum(lengths)) as mine:
        run(lambda: hidden_states(model, mode, torch.cat(parts)[None], positions[None], lengths))
    changed = [name for name in stock if name in mine and _differ(mine[name].output, stock[name].output)]
    if changed:
        # A layer within attention may be the first to differ only because its input differs.
        name = changed[0]
        while "." in name and (name not in stock or _differ(mine[name].given, stock[name].given)):
            name = name.rpartition(".")[0]
        how = "where sequences share a pass" if mode.is_packed else f"with attention {mode.attention}"
        return f"{_named(name, model)} gives different results {how}"
    if mixes:
        return "sequences that share a pass depend on each other"
    head = next((name for name, module in model.named_modules() if module is output_head(model)), "")
    return f"{_named(head, model)} does not compute the final logits"


@dataclass(frozen=True, slots=True)
class _ModuleCall:
    """A module's input and output for the rows of the pass, [1, T, ...]; None if it is something else."""

    given: Tensor | None
    output: Tensor | None


def _differ(mine: Tensor | None, stock: Tensor | None) -> bool:
    """Return whether the last rows of a pass differ from the stock pass, which consists of the same rows."""
    if mine is None or stock is None or mine.shape[2:] != stock.shape[2:]:
        return False
    expected = stock.float()
    off = (mine[:, -stock.shape[1] :].float() - expected).norm()
    return not off <= torch.finfo(stock.dtype).eps ** 0.5 * expected.norm()


@contextmanager
def _calls(model: PreTrainedModel, length: int) -> Iterator[Mapping[str, _ModuleCall]]:
    """Record the first call of each module in a pass of `length` positions, in the order in which they return."""
    noted: dict[str, _ModuleCall] = {}

    def rows(values: Iterable[Any]) -> Tensor | None:
        tensors = (value for value in values if isinstance(value, Tensor) and value.is_floating_point())
        return next((each for each in tensors if each.ndim > 1 and each.shape[1] == length), None)

    def note(_module: nn.Module, inputs: Any, named: dict[str, Any], out: Any, *, name: str) -> None:
        noted.setdefault(
            name, _ModuleCall(rows([*inputs, *named.values()]), rows(out if type(out) is tuple else [out]))
        )

    handles = [
        module.register_forward_hook(partial(note, name=name), with_kwargs=True)
        for name, module in model.named_modules()
    ]
    try:
        yield noted
    finally:
        for handle in handles:
            handle.remove()


def _failing(traceback: TracebackType | None, model: PreTrainedModel) -> str:
    """Find the innermost module of the model in an error's traceback."""
    names, found = {id(module): name for name, module in model.named_modules()}, ""
    while traceback is not None:
        module = traceback.tb_frame.f_locals.get("self")
        if names.get(id(module)):
            found = _named(names[id(module)], model)
        traceback = traceback.tb_next
    return found


def _named(name: str, model: PreTrainedModel) -> str:
    module = model.get_submodule(name)
    kind = type(module.base_layer if isinstance(module, AdaptedLinear) else module)
    if issubclass(kind, FSDPModule):  # FSDP2 derives a class of its own from a layer's.
        kind = kind.__bases__[1]
    return f"{name} ({kind.__name__})"
