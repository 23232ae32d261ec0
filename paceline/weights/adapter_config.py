"""Parse and check the adapter_config.json of a LoRA adapter before it is used."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import InvalidArgument

_FILE = "adapter_config"
_SAVE_AGAIN = "save the adapter with PEFT's save_pretrained"
_LARGEST = 3e38
"""Largest absolute value of a number, so that float32 holds it."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """An adapter's configuration, with the fields that every engine needs."""

    rank: int
    """`r`: the rank of modules without one of their own."""
    largest_rank: int
    """Largest rank of all modules, including those in rank_pattern."""
    settings: Mapping[str, Any]
    """All fields, named as in PEFT, among them `r`, `lora_alpha` and `target_modules`."""
    text: bytes
    """The content of the file."""


def read_adapter_config(path: Path) -> AdapterConfig:
    """Read an adapter_config.json. Raises as `parse_adapter_config`, and InvalidArgument if the file does not exist."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise InvalidArgument(f"is not there; {_SAVE_AGAIN}", field=_FILE) from None
    return parse_adapter_config(text)


def parse_adapter_config(text: bytes) -> AdapterConfig:
    """Parse adapter_config.json. Raises InvalidArgument that names the missing or invalid field."""
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"is not JSON; {_SAVE_AGAIN}", field=_FILE) from error
    if not isinstance(settings, dict):
        raise InvalidArgument(f"is not a JSON object; {_SAVE_AGAIN}", field=_FILE)
    for field, (is_right, wanted) in _REQUIRED.items():
        if field not in settings:
            raise InvalidArgument(f"is missing; {_SAVE_AGAIN}", field=f"{_FILE}.{field}")
        _check(field, settings[field], is_right, wanted)
    own = settings.get("rank_pattern") or {}
    _check("rank_pattern", own, _are_ranks, "an object of ranks by module")
    return AdapterConfig(settings["r"], max([settings["r"], *own.values()]), settings, text)


def _check(field: str, value: object, is_right: Callable[[Any], bool], wanted: str) -> None:
    if not is_right(value):
        raise InvalidArgument(f"is not {wanted}; {_SAVE_AGAIN}", field=f"{_FILE}.{field}")


def _is_rank(value: object) -> bool:
    return type(value) is int and 0 < value < 1 << 31  # not isinstance: JSON's true is an int too


def _is_number(value: Any) -> bool:
    return type(value) in {int, float} and abs(value) <= _LARGEST


def _are_ranks(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_rank, value.values()))


def _are_modules(value: object) -> bool:
    """Whether the value is a pattern or a list of names."""
    names = [value] if isinstance(value, str) else value
    return isinstance(names, list) and bool(names) and all(isinstance(name, str) and name for name in names)


_REQUIRED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "r": (_is_rank, "a whole number from 1 to 2^31 - 1"),
    "lora_alpha": (_is_number, "a finite float32"),
    "target_modules": (_are_modules, "a list of names or a pattern"),
}
"""Maps a field to its check and a description of valid values. vLLM has no default for any of the fields."""
