"""Map LoraConfig's groups to a model's modules, found by the architecture's own names for them.

A decoder layer has parts: those that mix tokens (attention, linear attention, a state-space mixer, a short convolution)
are `train_attn`, feed-forward parts `train_mlp`. All linear layers of a part get an adapter except routers, which only
select. If a weight of a part can have none, such as a mixture's experts in one tensor, the group is refused: the run
would train less than requested.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import peft
from peft.tuners.tuners_utils import _check_lora_target_modules_mamba
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn
from transformers import PreTrainedModel

from paceline.types import AdapterGroup
from trainer_service.engine.model.base_model import decoder_layers, output_head
from trainer_service.engine.model.lora_linear import AdaptedLinear

_ATTENTION, _MLP, _UNEMBED = "train_attn", "train_mlp", "train_unembed"
GROUPS = {_ATTENTION: "attention", _MLP: "MLP", _UNEMBED: "output head"}
"""Fields of LoraConfig, in order, and their names in messages."""

_MIXER_NAME = re.compile(r"(\w+_)?(attn|att|attention|mixer|mamba|conv|temporal_block|mlstm_layer)")
_MLP_NAME = re.compile(r"(\w+_)?(mlp|mlp_block|feed_forward|ffn|ff|moe|fc\d)")
_MLP_CLASS = re.compile(r"\w*(MLP|MoE|MoeBlock|FeedForward)")
"""Used where a name says mixer for both kinds, as in Nemotron-H: there the class tells."""
_ROUTERS = ("router", "gate", "shared_expert_gate", "indexer")
"""Names of modules that select experts or positions."""
_LINEAR_CLASSES = ("Linear", "FalconLinear")
"""Classes that compute what nn.Linear computes."""
_NO_MATRICES = re.compile(r"A_log|D|time_mix_\w+|\w*bias")
"""Parameters that are not matrices applied to features, whatever their number of dimensions."""


def groups_of(model: PreTrainedModel) -> tuple[AdapterGroup, ...]:
    """Describe LoraConfig's groups for a model."""
    groups = AdapterGroups(model)
    return tuple(AdapterGroup(name, groups.last_names(name), groups.refusal(name)) for name in GROUPS)


class AdapterGroups:
    """The groups of one model, which may already be adapted."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Read the groups from the model's structure."""
        self._members = list(_members(model))

    def modules(self, group: str, layers: Collection[int] = ()) -> list[str]:
        """Return the full names of a group's modules in `layers`, or in all layers if `layers` is empty."""
        return [one.name for one in self._of(group, layers) if not one.refusal]

    def last_names(self, group: str) -> tuple[str, ...]:
        """Return the last names of a group's modules, in order and without duplicates."""
        return tuple(dict.fromkeys(name.rpartition(".")[2] for name in self.modules(group)))

    def refusal(self, group: str, layers: Collection[int] = ()) -> str:
        """Say in a sentence why a run with this group in these layers would train less than asked; empty if not so."""
        members = self._of(group, layers)
        reasons = [f"{one.name} {one.refusal}" for one in members if one.refusal]
        if not members:
            reasons = [f"the model has no {GROUPS[group]} {'in these layers' if layers else 'that is known here'}"]
        advice = f"set {group}=False, or list the modules to adapt in target_modules"
        return f"{reasons[0]}; {advice}." if reasons else ""

    def _of(self, group: str, layers: Collection[int]) -> list[_Member]:
        return [
            one
            for one in self._members
            if one.group == group and (not layers or one.layer is None or one.layer in layers)
        ]


def adaptable_modules(model: PreTrainedModel) -> list[str]:
    """Return the full names, in order, of modules that can have an adapter: decoder linear layers and the head.

    The parts of an adapted layer, which are named after runs, are none of them.
    """
    refusal, adaptable = _Refusal(model), {id(output_head(model))}
    for layer in decoder_layers(model):
        adaptable |= {id(module) for path, module in layer.named_modules() if not _is_router(path)}
    for adapted in model.modules():
        if isinstance(adapted, AdaptedLinear):
            adaptable -= {id(part) for part in adapted.modules() if part is not adapted}
    return [name for name, module in model.named_modules() if id(module) in adaptable and not refusal(name, module)]


@dataclass(frozen=True, slots=True)
class _Member:
    """A module with weights, in a part that belongs to a group."""

    group: str
    layer: int | None
    """Index of its decoder layer; None outside them."""
    name: str
    refusal: str
    """Why it can have no adapter; empty if it can."""


def _members(model: PreTrainedModel) -> Iterator[_Member]:
    """Find the members of all groups, by their names in the model; a shared module counts once."""
    refusal, names = _Refusal(model), {id(module): name for name, module in model.named_modules()}
    for index, layer in enumerate(decoder_layers(model)):
        for group, part in _parts(layer):
            for path, module in _with_weights(part):
                name = "" if _is_router(path) else names.pop(id(module), "")
                if name:
                    yield _Member(group, index, name, refusal(name, module))
    head = output_head(model)
    if name := names.get(id(head), ""):
        yield _Member(_UNEMBED, None, name, refusal(name, head))


def _parts(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Find the parts of a decoder layer and their groups, also inside other modules except norms."""
    for name, module in layer.named_children():
        if _MLP_NAME.fullmatch(name) or _MLP_CLASS.fullmatch(type(module).__name__):
            yield _MLP, module
        elif _MIXER_NAME.fullmatch(name):
            yield _ATTENTION, module
        elif "norm" not in name:
            yield from _parts(module)


def _with_weights(part: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Find the modules that hold matrices themselves, except `nn.Conv1d`, which convolves single channels."""
    own = [name for name, weight in part.named_parameters(recurse=False) if weight.ndim > 1]
    is_matrix = any(not _NO_MATRICES.fullmatch(name) for name in own) and not isinstance(part, nn.Conv1d)
    if is_matrix or isinstance(part, AdaptedLinear):
        yield path, part
    if not isinstance(part, AdaptedLinear):
        for name, child in part.named_children():
            yield from _with_weights(child, f"{path}.{name}")


def _is_router(path: str) -> bool:
    return any(name in _ROUTERS for name in path.split("."))


class _Refusal:
    """Says why a module can have no adapter that PEFT would load into the model as it is; empty if it can have one."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._by_last_name: dict[str, str] = {}

    def __call__(self, name: str, module: nn.Module) -> str:
        kind, last = type(module).__name__, name.rpartition(".")[2]
        if not isinstance(module, AdaptedLinear) and (not isinstance(module, nn.Linear) or kind not in _LINEAR_CLASSES):
            return f"is a {kind}, which is not a linear layer"
        if "experts" in name.split("."):
            return "does not see every token"
        if last not in self._by_last_name:
            self._by_last_name[last] = self._in_peft(last)
        return self._by_last_name[last]

    def _in_peft(self, last: str) -> str:
        config = peft.LoraConfig(target_modules=[last])
        try:
            _check_lora_target_modules_mamba(config, self._model, last)
        except ValueError:
            return "has weights that kernels use without the layer, so that PEFT puts no adapter there"
        try:
            convert_peft_config_for_transformers(config, self._model, None)
        except ValueError:  # The name is one of several that transformers fuses into one tensor.
            config.target_modules = []
        return "" if last in (config.target_modules or ()) else "has a name that PEFT uses for the experts' weights"
