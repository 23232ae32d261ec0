"""A Hugging Face model's directory: whether it is whole, and has the weights that its configuration names.

A model that lacks a weight would be served with a random one, and a weight that nothing uses belongs to another model.
Nothing here reads weights or imports torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CONFIG, _ADAPTER = "config.json", "adapter_config.json"
_INDEX, _WEIGHTS = "model.safetensors.index.json", "model.safetensors"
_SHOWN = 3
"""Most names in a message."""
_LFS = b"version "
"""Start of a Git LFS pointer, the small file that stands for a large one until it is fetched."""
_BUFFERS = frozenset(["bias", "masked_bias", "inv_freq", "original_inv_freq", "position_ids", "num_batches_tracked"])
"""Last parts of buffers' names that old versions of transformers saved; later ones compute them."""
_OTHER_PART = re.compile(r"vision|visual|image|video|audio|speech|multi_modal|mm_|mtp|nextn|eagle")
"""In the name of a module: it belongs to a part of a multimodal model, or to a draft model, that is not used here."""
_LAYER = re.compile(r"\.(\d+)\.")
_EXTRA_LAYERS = re.compile(r"nextn|mtp")
"""In the name of a configuration's field: how many layers for multi-token prediction follow the decoder's."""

_INTEGERS = ("I", "U", "BOOL")
"""Starts of safetensors' names of dtypes that are no floating-point numbers."""

Shapes = Mapping[str, tuple[int, ...]]


class ModelDamagedError(ValueError):
    """A model's directory is not whole; the message is a sentence without its full stop, and says what to do."""


@dataclass(frozen=True, slots=True)
class Loading:
    """What transformers found when it matched a checkpoint with a model, after the exceptions that the model names."""

    missing: frozenset[str]
    """Names of weights that the model has and the files lack."""
    unexpected: frozenset[str]
    """Names of weights in the files that the model does not have."""
    mismatched: Mapping[str, tuple[Sequence[int], Sequence[int]]]
    """Name -> shape in the files, shape in the model."""

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Loading:
        """Take what `from_pretrained` returns with `output_loading_info`."""
        mismatched = {name: (theirs, ours) for name, theirs, ours in info["mismatched_keys"]}
        return cls(frozenset(info["missing_keys"]), frozenset(info["unexpected_keys"]), mismatched)


def check_fit(loading: Loading, config: Mapping[str, Any], modules: frozenset[str]) -> None:
    """Refuse a checkpoint that is not of the model which its configuration describes.

    `config` is that of the language model, `modules` names the model's modules. Weights that no part of the language
    model would use may be there: vision towers, heads of draft models, buffers that transformers once saved. Raises
    ModelDamagedError, which names the weights.
    """
    if loading.mismatched:
        name, (theirs, ours) = min(loading.mismatched.items())
        raise ModelDamagedError(
            f"{_some(loading.mismatched)} in the files with another shape than config.json gives: {name} is "
            f"{list(theirs)} in the files and {list(ours)} by config.json; give both as they were saved together"
        )
    if loading.missing:
        raise ModelDamagedError(
            f"{_some(loading.missing)} missing in the files, though config.json needs them; fetch or save the model "
            "again, or correct config.json"
        )
    unused = {name for name in loading.unexpected if not _is_optional(name, config, modules)}
    if unused:
        raise ModelDamagedError(
            f"{_some(unused)} in the files, though the model of config.json has no place for them; correct config.json "
            "(number of layers, biases), or save the model again"
        )


def _some(names: Collection[str]) -> str:
    shown = sorted(names)[:_SHOWN]
    more = len(names) - len(shown)
    return f"{', '.join(shown)}{f' and {more} other weights' if more else ''} {'is' if len(names) == 1 else 'are'}"


def _is_optional(name: str, config: Mapping[str, Any], modules: frozenset[str]) -> bool:
    """Return whether the language model computes the same without this weight, of which it has none of this name."""
    parts = name.split(".")
    if parts[-1] in _BUFFERS - {"bias"} or (parts[-1] == "bias" and parts[-2:-1] in (["attn"], ["attention"])):
        return True
    known = next(end for end in range(len(parts) - 1, -1, -1) if not end or ".".join(parts[:end]) in modules)
    child, below = parts[known], len(parts) - known - 1
    if child.isdigit():  # a layer after the last one
        layers = int(config.get("num_hidden_layers") or 0)
        extra = sum(n for field, n in config.items() if _EXTRA_LAYERS.search(field) and type(n) is int and n > 0)
        return layers <= int(child) < layers + extra
    # A part of its own beside the decoder's layers, not a weight of one of them.
    beside = not _LAYER.search(".".join(parts[:known]) + ".")
    return beside and (below > 1 or (below > 0 and bool(_OTHER_PART.search(child))))


def check_directory(directory: Path) -> None:
    """Refuse a directory from which no model can be loaded. Raises ModelDamagedError, OSError."""
    if not directory.is_dir():
        raise ModelDamagedError("it is a file; give the directory of a Hugging Face model")
    names = {path.name for path in directory.iterdir()}
    config = _read_config(directory, names)
    if _ADAPTER in names:
        raise ModelDamagedError(
            f"it contains {_ADAPTER}, so transformers would load an adapter in place of the model; move it elsewhere"
        )
    if isinstance(config.get("transformers_weights"), str):
        _read_shapes(directory / config["transformers_weights"])
    elif _WEIGHTS in names:
        _read_shapes(directory / _WEIGHTS)
    elif _INDEX in names:
        _check_shards(directory)
    else:
        raise ModelDamagedError(_why_no_weights(names))
    if not any("quantization_config" in each for each in (config, config.get("text_config") or {})):
        _check_numbers(directory, config)


def check_tied(model: Any) -> None:
    """Refuse a loaded model with weights that its configuration ties and its files give different values.

    transformers keeps both, other engines one. Raises ModelDamagedError.
    """
    for target, source in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if model.get_parameter(target) is not model.get_parameter(source):
            raise ModelDamagedError(
                f"{target} differs from {source} in the files, though config.json ties them; set tie_word_embeddings "
                "to false there, or save the model again"
            )


def _check_numbers(directory: Path, config: Mapping[str, Any]) -> None:
    """Refuse weights that are integers, without the scales that a quantised model has."""
    whole = _single_file(config)
    files = [whole] if (directory / whole).is_file() else _indexed(directory)
    for file in files:
        for name, entry in _read_header(directory / file).items():
            if name.endswith(".weight") and str(entry["dtype"]).startswith(_INTEGERS):
                raise ModelDamagedError(
                    f"{name} holds integers ({entry['dtype']}) in {file}, and config.json has no quantization_config; "
                    "give the model unquantised"
                )


def check_vllm_reads(directory: Path) -> None:
    """Refuse weights that vLLM would read over those that transformers reads, which `check_directory` passes.

    vLLM reads every safetensors file, or those of the index if there is one; transformers reads model.safetensors or,
    without it, those of the index. Raises as `check_directory` does.
    """
    known = weights_in(directory)
    whole = _single_file(_read_json(directory / _CONFIG))
    has_index, has_whole = (directory / _INDEX).is_file(), (directory / whole).is_file()
    if has_index and not has_whole:
        return
    files = _indexed(directory) if has_index else sorted(path.name for path in directory.glob("*.safetensors"))
    for file in files:
        both = sorted(_read_shapes(directory / file).keys() & known.keys()) if file != whole else []
        if both:
            raise ModelDamagedError(
                f"{file} also holds {_list(both)}, and vLLM would not take them from {whole}; move {file} "
                f"{f'and {_INDEX} ' if has_index else ''}elsewhere"
            )


def weights_in(directory: Path) -> Shapes:
    """Return the shapes of the weights in a directory that `check_directory` passes, by name. Raises as it does."""
    config = _read_json(directory / _CONFIG)
    if isinstance(config.get("transformers_weights"), str):
        return _read_shapes(directory / config["transformers_weights"])
    if (directory / _WEIGHTS).is_file():
        return _read_shapes(directory / _WEIGHTS)
    return _check_shards(directory)


def why_not_loaded(error: Exception, directory: Path) -> str:
    """Say in a sentence, without its full stop, why transformers could not load a model, and what to do.

    `error` is what it raised; `directory` is the model's, if it is one.
    """
    if isinstance(error, ModelDamagedError):
        return str(error)
    if not directory.exists():
        return "there is no such directory, and no model of this id on this machine or its hub; correct the path or id"
    try:
        config = _read_json(directory / _CONFIG)
    except (OSError, ModelDamagedError):
        return first_line(error)
    return _why_refused(error, config)


def _why_refused(error: Exception, config: Mapping[str, Any]) -> str:
    # transformers' configurations check their fields in a wrapper, whose cause says what is wrong.
    cause = (
        error.__cause__ if isinstance(error.__cause__, Exception) and "Validation" in type(error).__name__ else error
    )
    said, kind, quantization = first_line(cause), config.get("model_type"), config.get("quantization_config")
    if "custom code" in said:
        return (
            f"its architecture ({kind}) is code of its own repository, which is never run; give a model whose "
            "architecture transformers knows"
        )
    if "does not recognize this architecture" in said:
        return f"the installed transformers knows no model_type {kind}; correct config.json, or give another model"
    if isinstance(quantization, dict):
        return (
            f"config.json has a quantization_config ({quantization.get('quant_method')}), and its weights cannot be "
            f"made whole here ({said}); give the model unquantised"
        )
    if isinstance(error, KeyError) and error.args:
        field = next((name for name, value in _fields(config) if value == error.args[0]), "")
        said = f"{f'{field} is' if field else 'there is'} {error.args[0]!r}, which transformers does not know"
    return f"config.json is wrong: {said}" if cause is not error or isinstance(error, KeyError) else said


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, without a full stop."""
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else type(error).__name__


def _fields(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", found) for inner, found in _fields(value))
        else:
            yield name, value


def _read_config(directory: Path, names: Collection[str]) -> Mapping[str, Any]:
    if _CONFIG not in names:
        if _ADAPTER in names:
            raise ModelDamagedError(
                "it is an adapter, not a model; give its base model, and load the adapter into a run"
            )
        if any(name.endswith(".gguf") for name in names):
            raise ModelDamagedError("it has a GGUF file and no config.json; give the model as safetensors")
        raise ModelDamagedError("it has no config.json; give the directory of a Hugging Face model")
    config = _read_json(directory / _CONFIG)
    if not isinstance(config.get("model_type"), str):
        raise ModelDamagedError("config.json names no model_type; fetch or save the model again")
    return config


def _single_file(config: Mapping[str, Any]) -> str:
    """Return the name of the file that holds all weights, if one does."""
    given = config.get("transformers_weights")
    return given if isinstance(given, str) else _WEIGHTS


def _indexed(directory: Path) -> list[str]:
    """Return the files that the index names."""
    return sorted(set(_read_index(directory).values()))


def _read_index(directory: Path) -> dict[str, str]:
    """Return the index: name of a weight -> its file."""
    read = _read_json(directory / _INDEX)
    index = read.get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
        raise ModelDamagedError(f"{_INDEX} has no weight_map; fetch or save the model again")
    if "metadata" not in read:  # transformers does not load it without
        raise ModelDamagedError(f"{_INDEX} has no metadata; fetch or save the model again")
    return index


def _check_shards(directory: Path) -> Shapes:
    """Return the shapes of the weights in the files that the index names, which must all be where it says."""
    index = _read_index(directory)
    files = sorted(set(index.values()))
    absent = [file for file in files if Path(file).name != file or not (directory / file).is_file()]
    if absent:
        raise ModelDamagedError(f"{_INDEX} names {_list(absent)}, which the directory lacks; fetch the model again")
    shapes_of = {file: _read_shapes(directory / file) for file in files}
    lost = sorted(name for name, file in index.items() if name not in shapes_of[file])
    if lost:
        raise ModelDamagedError(
            f"{index[lost[0]]} lacks {_list(lost)}, which {_INDEX} says it holds; fetch the model again"
        )
    _check_distinct(shapes_of)
    return {name: shape for shapes in shapes_of.values() for name, shape in shapes.items()}


def _check_distinct(shapes_of: Mapping[str, Shapes]) -> None:
    """Refuse a weight that several files hold: loaders take it from any of them."""
    first: dict[str, str] = {}
    for file, shapes in shapes_of.items():
        for name in shapes:
            if first.setdefault(name, file) != file:
                raise ModelDamagedError(f"{first[name]} and {file} both hold {name}; fetch or save the model again")


def _read_shapes(file: Path) -> Shapes:
    """Return the shapes in a safetensors file, whose size must be what its header says."""
    return {name: tuple(entry["shape"]) for name, entry in _read_header(file).items()}


def _read_header(file: Path) -> dict[str, Any]:
    """Return the header of a safetensors file, whose size must be what it says: name -> dtype, shape, offsets."""
    try:
        with file.open("rb") as source:
            start = source.read(8)
            size = int.from_bytes(start, "little")
            if start == _LFS:
                raise ModelDamagedError(f"{file.name} is a pointer of Git LFS; fetch the file itself (git lfs pull)")
            header: dict[str, Any] = json.loads(source.read(size) if size <= file.stat().st_size else b"")
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        for entry in header.values():  # so that a damaged header is told as one
            tuple(entry["shape"]), str(entry["dtype"])
    except FileNotFoundError:
        raise ModelDamagedError(f"{file.name} is missing; fetch the model again") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, ModelDamagedError):
            raise
        raise ModelDamagedError(f"{file.name} is no safetensors file or is damaged; fetch the model again") from error
    if 8 + size + end != file.stat().st_size:
        raise ModelDamagedError(
            f"{file.name} has {file.stat().st_size} bytes, and its header describes {8 + size + end}; "
            "fetch the model again"
        )
    return header


def _read_json(file: Path) -> dict[str, Any]:
    try:
        read = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelDamagedError(f"{file.name} is not JSON; fetch or save the model again") from error
    if not isinstance(read, dict):
        raise ModelDamagedError(f"{file.name} is no JSON object; fetch or save the model again")
    return read


def _why_no_weights(names: Iterable[str]) -> str:
    ends = {Path(name).suffix for name in names}
    if any(name.endswith(".safetensors") for name in names):
        return f"it has no {_WEIGHTS}, and no {_INDEX} that says which of its files to read; fetch the model again"
    if ".gguf" in ends:
        return "its weights are GGUF; give the model as safetensors"
    if ends & {".bin", ".pt", ".pth", ".ckpt"}:
        return (
            "its weights are pickled (.bin), which could run code when read; save it as safetensors with transformers' "
            "save_pretrained, or fetch a revision that has them"
        )
    return "it has no weights; fetch the model again"


def _list(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
