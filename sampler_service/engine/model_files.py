"""What the files of adapters and base models say about them. Headers and configurations are read, but no weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from paceline.base_model.model_directory import (
    Loading,
    ModelDamagedError,
    check_directory,
    check_fit,
    check_vllm_reads,
    first_line,
    weights_in,
    why_not_loaded,
)
from paceline.errors import InvalidArgument, InvalidShape, RankTooLarge
from paceline.files.regular_files import read_file
from paceline.layout import CONFIG_FILE, WEIGHTS_FILE, entries
from paceline.weights import parse_adapter_config, read_header, read_tensor_entries
from sampler_service.engine.protocol import EngineUnfit

_PREFIX = "base_model.model."
_SIDES = (".lora_A.weight", ".lora_B.weight")
_UNSERVED = ("use_dora", "modules_to_save", "lora_bias", "layer_replication")
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
"""Files of a model on a hub that are read."""

LinearShapes = Mapping[str, tuple[int, int]]
"""Name of every linear module of a base model -> (out features, in features)."""


@dataclass(frozen=True, slots=True)
class AdapterShapes:
    """Shapes of an adapter in PEFT's layout."""

    modules: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    """Module name in the base model -> shapes of A ([r, in]) and B ([out, r])."""
    rank: int
    """Largest rank, of the tensors and of the configuration."""


def read_adapter(directory: Path) -> AdapterShapes:
    """Read an adapter's configuration and tensor names. All versions of a run share them, so they are parsed once.

    Raises InvalidArgument if it is not plain LoRA or its configuration is invalid, InvalidShape if a module lacks one
    of its two matrices, and as `read_tensor_entries` if the file does not match its header.
    """
    tensors = tuple((entry.name, tuple(entry.shape)) for entry in read_tensor_entries(directory / WEIGHTS_FILE))
    return _parse(tensors, read_file(directory / CONFIG_FILE))


@lru_cache(maxsize=16)
def _parse(tensors: tuple[tuple[str, tuple[int, ...]], ...], config_text: bytes) -> AdapterShapes:
    config = parse_adapter_config(config_text)
    _check_config(config.settings)
    halves: tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]] = ({}, {})
    for name, shape in tensors:
        side = next((i for i, suffix in enumerate(_SIDES) if name.endswith(suffix)), None)
        if side is None or not name.startswith(_PREFIX):
            raise InvalidShape(
                f"tensor {name} is not the lora_A or lora_B of a linear module; leave it out", field="adapter"
            )
        if len(shape) != 2:
            raise InvalidShape(f"tensor {name} is not a matrix; save the adapter again", field="adapter")
        halves[side][name.removeprefix(_PREFIX).removesuffix(_SIDES[side])] = shape
    if not halves[0] or halves[0].keys() != halves[1].keys():
        raise InvalidShape("the adapter needs modules, each with a lora_A and a lora_B", field="adapter")
    ranks = [shape[0] for shape in halves[0].values()]
    rank = max(*ranks, config.largest_rank)
    return AdapterShapes({module: (shape, halves[1][module]) for module, shape in halves[0].items()}, rank)


def _check_config(config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise InvalidArgument(f"peft_type is {config.get('peft_type')}; only LORA is served", field="adapter")
    unserved = [name for name in _UNSERVED if config.get(name)]
    # Loading one of these would change the base model.
    if str(config.get("init_lora_weights", True)).startswith(("pissa", "olora", "corda", "loftq")):
        unserved.append(f"init_lora_weights {config['init_lora_weights']}")
    if config.get("bias", "none") != "none":
        unserved.append("bias")
    if unserved:
        raise InvalidArgument(f"adapters with {', '.join(unserved)} are not served", field="adapter")


def check_adapter(adapter: AdapterShapes, linear: LinearShapes, max_rank: int) -> None:
    """Refuse an adapter that could not be applied in full.

    Raises RankTooLarge, or InvalidShape if a module does not exist in the base model or has a different shape there.
    """
    if adapter.rank > max_rank:
        raise RankTooLarge(f"rank {adapter.rank}; this sampler takes at most {max_rank}", field="adapter")
    unknown = sorted(adapter.modules.keys() - linear.keys())
    if unknown:
        raise InvalidShape(f"{len(unknown)} modules are not in the base model, such as {unknown[0]}", field="adapter")
    for module, (a, b) in adapter.modules.items():
        if (b[0], a[-1]) != linear[module] or a[0] != b[-1]:
            raise InvalidShape(
                f"{module} has shapes {list(a)} and {list(b)}; the base model's is {list(linear[module])}",
                field="adapter",
            )


def linear_shapes(model: PreTrainedModel) -> LinearShapes:
    """Return (out, in) of every linear module, by name."""
    layers = ((name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    return {name: (layer.out_features, layer.in_features) for name, layer in layers}


def check_model(model_path: Path) -> LinearShapes:
    """Check that a model's files are whole and hold each weight of its configuration; return its linear modules.

    Its modules are built on the meta device, and no weights are read: vLLM itself lets missing layers, weights and
    biases pass. Those of a quantised model have other names, which only vLLM knows. Raises EngineUnfit, whose message
    names what is wrong and says what to do.
    """
    with fit(model_path):
        directory = (
            model_path if model_path.exists() else Path(snapshot_download(str(model_path), allow_patterns=_FILES))
        )
        check_directory(directory)
        check_vllm_reads(directory)
        skeleton = _skeleton(directory)
        if getattr(skeleton.config, "quantization_config", None) is not None:
            return linear_shapes(skeleton)
        empty = {name: torch.empty(shape, device="meta") for name, shape in weights_in(directory).items()}
        loaded: Any = type(skeleton).from_pretrained(
            None,
            config=skeleton.config,
            state_dict=empty,
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # They are refused by name.
        )
        return linear_shapes(whole(loaded))


def check_tokenizer(model_path: Path) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer. Raises ModelDamagedError if it cannot be."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model_path, trust_remote_code=False)
    except Exception as error:  # whatever a file's parser raises
        raise ModelDamagedError(
            f"its tokenizer cannot be read ({first_line(error).rstrip(':')}); fetch or save it again (tokenizer.json, "
            "tokenizer_config.json)"
        ) from error
    return tokenizer


def whole(loaded: tuple[PreTrainedModel, Mapping[str, Any]]) -> PreTrainedModel:
    """Return a model that transformers loaded with its loading info. Raises ModelDamagedError if it is not whole."""
    model, info = loaded
    text = model.config.get_text_config(decoder=True)
    check_fit(Loading.of(info), text.to_dict(), frozenset(name for name, _ in model.named_modules()))
    _check_window(text)
    return model


def _check_window(config: PreTrainedConfig) -> None:
    """Refuse an empty sliding window: for vLLM it means none, but transformers and the trainer would see no token."""
    window, layers = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    is_used = hasattr(type(config)(), "sliding_window") and (layers is None or "sliding_attention" in layers)
    if is_used and isinstance(window, int) and window <= 0:
        raise ModelDamagedError(f"sliding_window is {window} in config.json; set null for no window")


@contextmanager
def fit(model_path: Path) -> Iterator[None]:
    """Raise what goes wrong in the block as EngineUnfit, in a sentence that says what to do."""
    try:
        yield
    except (EngineUnfit, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise EngineUnfit(f"{model_path} cannot be served: {why_not_loaded(error, model_path)}") from error


def parameter_shapes_of(model_path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's parameters by name, without parameters tied to another."""
    model = _skeleton(model_path)
    model.tie_weights()
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def stored_dtype(model_path: Path) -> torch.dtype | None:
    """Return the dtype that transformers uses for `auto`: the configuration's, or that of the first weight.

    None if neither specifies one.
    """
    config = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
    stored: torch.dtype | None = config.get_text_config(decoder=True).dtype or config.dtype
    if stored is not None:
        return stored
    headers = (json.loads(read_header(file.resolve())) for file in entries(model_path, "*.safetensors"))
    tensors = (tensor for header in headers for name, tensor in header.items() if name != "__metadata__")
    return next((_DTYPES[one["dtype"]] for one in tensors if one["dtype"] in _DTYPES), None)


def _skeleton(model_path: Path) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    return model
