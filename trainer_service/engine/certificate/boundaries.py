"""Lengths at which a model's mathematics change: found in its configuration, and lowered to lie within a short probe.

Sliding windows, chunks of attention, blocks, contexts from which rotary frequencies are scaled: beyond such a length a
model computes something else, and no probe is as long as a window of 8,192 tokens. No list of names says which fields
these are. Every whole number above the probe's length is one, unless the weights' shapes depend on it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

LOWERED = 8
"""Value of a lowered field: a power of two, because chunks may have to divide each other, and so small that most tokens
of the probe lie beyond it."""

_SIZES = re.compile(
    r"(^|_)(hidden|intermediate|vocab|embedding|embed|ffn_hidden)_size|_(dim|rank|heads|experts|layers|id|ids|theta)$|"
    r"^(d_model|d_ff|dff|n_embd|n_layer|n_head|ffn_dim|rope_theta|seed)$"
)
"""Names that are known to be sizes or ids. They only save time: what is not named here is tried."""

_DATA = (int, float, str, tuple, list, dict, type(None))

Path = tuple[str, ...]
"""A field of a configuration, by the names of the dictionaries that it is in."""


@dataclass(frozen=True, slots=True)
class Lowering:
    """How to lower a model's boundaries, in place and for a while. It fits every form in which a model is loaded."""

    fields: tuple[Path, ...]
    _plain: nn.Module
    """The model as it is, without weights."""
    _lowered: nn.Module
    """The model with lowered boundaries, without weights."""

    @property
    def names(self) -> str:
        """The fields, as they are called in config.json."""
        return ", ".join(".".join(field) for field in self.fields)

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Give a model's modules and configurations what distinguishes the lowered model, until the block ends.

        A module gets what its counterpart of the same name has: plain attributes and buffers. Weights stay.
        """
        plain, lowered = dict(self._plain.named_modules()), dict(self._lowered.named_modules())
        before: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for path, module in model.named_modules():
                name = path.replace(".base_layer", "")
                if name in plain and name in lowered:
                    device = _device_of(module, model)
                    for owner, key, value in _differences(module, plain[name], lowered[name], device):
                        before.append((owner, key, owner[key]))
                        owner[key] = value
            yield
        finally:
            for owner, key, value in reversed(before):
                owner[key] = value


def find_boundaries(model: PreTrainedModel, longest: int, limits: Collection[str]) -> Lowering | None:
    """Find the boundaries beyond `longest` tokens; return None if there are none.

    `limits` names fields that are the length of the longest sequence: none gets beyond it.
    """
    text = model.config.get_text_config(decoder=True)
    fields = [
        field for field, value in _fields(text.to_dict()) if _is_beyond(value, longest) and field[0] not in limits
    ]
    if not fields:
        return None
    plain = _skeleton(model, ())
    shapes = _shapes(plain)

    def try_lowering(some: Sequence[Path]) -> Lowering | None:
        try:
            lowered = _skeleton(model, some)
        except Exception:  # whatever a constructor raises: the size does not fit another one
            return None
        return Lowering(tuple(some), plain, lowered) if _shapes(lowered) == shapes else None

    if (whole := try_lowering(fields)) is not None:
        return whole
    kept: list[Path] = []
    for field in fields:
        if try_lowering([*kept, field]) is not None:
            kept.append(field)
    return try_lowering(kept) if kept else None


def _fields(values: Mapping[str, Any], parents: Path = ()) -> Iterator[tuple[Path, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _fields(value, (*parents, str(name)))
        elif not _SIZES.search(str(name)):
            yield (*parents, str(name)), value


def _is_beyond(value: object, longest: int) -> bool:
    if isinstance(value, list):  # one value for each layer
        return bool(value) and all(type(each) is int for each in value) and max(value) >= longest
    return type(value) is int and value >= longest


def _skeleton(model: PreTrainedModel, lowered: Sequence[Path]) -> PreTrainedModel:
    """Build the model again from its configuration, with some fields lowered, without weights but with buffers."""
    config = copy.deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    for field in lowered:
        first, *rest = field
        setattr(text, first, _with_lowered(getattr(text, first), rest))
    with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
        return type(model)(config)


def _with_lowered(value: Any, names: Sequence[str]) -> Any:
    if names:
        return {**value, names[0]: _with_lowered(value[names[0]], names[1:])}
    return [min(each, LOWERED) for each in value] if isinstance(value, list) else LOWERED


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def _differences(
    module: nn.Module, plain: nn.Module, lowered: nn.Module, device: torch.device
) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield what to change in a module: a dictionary, a key in it and its new value."""
    for key, value in vars(lowered).items():
        mine, was = vars(module).get(key), vars(plain).get(key)
        if (
            isinstance(value, PretrainedConfig)
            and isinstance(mine, PretrainedConfig)
            and isinstance(was, PretrainedConfig)
        ):
            yield from (
                (vars(mine), field, new)
                for field, new in vars(value).items()
                if field in vars(mine) and isinstance(new, _DATA) and new != vars(was).get(field)
            )
        elif not key.startswith("_") and key in vars(module) and isinstance(value, _DATA) and value != was:
            yield vars(module), key, value
    for key, buffer in lowered._buffers.items():  # noqa: SLF001 - PyTorch's own dictionary
        old = plain._buffers.get(key)  # noqa: SLF001
        if key in module._buffers and buffer is not None and not _equal(buffer, old):  # noqa: SLF001
            mine = module._buffers[key]  # noqa: SLF001
            yield module._buffers, key, buffer.to(device, None if mine is None else mine.dtype)  # noqa: SLF001


def _equal(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.shape == other.shape and torch.equal(one, other)


def _device_of(module: nn.Module, model: nn.Module) -> torch.device:
    own = next(iter(module.buffers()), None)
    return own.device if own is not None else next(model.parameters()).device
