"""Whether a sampler can serve what a run trains, by the limits that it reports when it joins."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from paceline.types import AdapterGroup, LoraConfig, RunParameters

UNEMBED = "train_unembed"
_OTHER_GROUP = "train an adapter without these modules: set {group}=False, or list the others in target_modules"


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """What a sampler serves."""

    serves: str = ""
    """"adapters" or "models"; empty if it did not say."""
    max_lora_rank: int = 0
    """0 if it did not say."""
    unserved_modules: frozenset[str] = frozenset()
    """Full names of the base model's modules on which it serves no adapter."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why samplers cannot serve a run."""

    field: str
    """The field of CreateRun that decides it."""
    message: str
    """What a sampler does not serve, and what to do."""


def obstacle(
    sampler_id: str,
    limits: ServingLimits,
    parameters: RunParameters,
    modules: Collection[str],
    groups: Sequence[AdapterGroup],
) -> Obstacle | None:
    """Return what keeps a sampler from serving a run that adapts `modules`; None if nothing is known to.

    `groups` are those of the base model.
    """
    sampler = f"sampler {sampler_id}"
    if not isinstance(parameters, LoraConfig):
        if limits.serves != "adapters":
            return None
        remedy = "train an adapter, or start a sampler with PACELINE_SAMPLER_SERVES=models"
        return Obstacle("full", f"{sampler} serves adapters and no whole models: {remedy}")
    if limits.serves == "models":
        remedy = "train all parameters, or start a sampler without PACELINE_SAMPLER_SERVES=models"
        return Obstacle("lora", f"{sampler} serves whole models and no adapters: {remedy}")
    if 0 < limits.max_lora_rank < parameters.rank:
        remedy = f"set rank to at most {limits.max_lora_rank}, or have PACELINE_SAMPLER_MAX_LORA_RANK raised"
        return Obstacle("lora.rank", f"{sampler} serves no adapter of rank {parameters.rank}: {remedy}")
    if left_out := [name for name in modules if name in limits.unserved_modules]:
        more = f" and {len(left_out) - 1} other modules" if len(left_out) > 1 else ""
        field, remedy = _remedy(parameters, left_out[0], groups)
        return Obstacle(field, f"{sampler} serves no adapter on {left_out[0]}{more}: {remedy}")
    return None


def without_head(modules: Collection[str], groups: Sequence[AdapterGroup]) -> list[str]:
    """Return the modules that do not belong to the group `train_unembed`."""
    return [name for name in modules if _group_of(name, groups) != UNEMBED]


def _remedy(parameters: LoraConfig, module: str, groups: Sequence[AdapterGroup]) -> tuple[str, str]:
    """Return the field that selects a module, and what to do about it."""
    if parameters.target_modules:
        return "lora.target_modules", "leave it out of target_modules"
    group = _group_of(module, groups)
    if group == UNEMBED:
        return f"lora.{UNEMBED}", f"set {UNEMBED}=False"
    return f"lora.{group}", _OTHER_GROUP.format(group=group)


def _group_of(module: str, groups: Sequence[AdapterGroup]) -> str:
    last = module.rpartition(".")[2]
    return next((group.name for group in groups if last in group.modules), "")
