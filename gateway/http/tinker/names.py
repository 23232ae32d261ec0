"""Map Tinker's names to Paceline's: tinker://<model>/weights/<name> is paceline://<run>/state/<name>."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gateway.http.tinker.store import Model, Store
from paceline import errors
from paceline.layout import SCHEME, CheckpointPath, check_run_id
from paceline.types import CheckpointKind, LoraConfig, Run

TINKER = "tinker://"
WEIGHTS, SAMPLER_WEIGHTS, EXTERNAL_WEIGHTS = "weights", "sampler_weights", "external_weights"
TYPES = {WEIGHTS: "training", SAMPLER_WEIGHTS: "sampler", EXTERNAL_WEIGHTS: "external"}
_EXTERNAL = "external."
"""Name prefix of the sampler checkpoints that Tinker calls external."""


@dataclass(frozen=True, slots=True)
class Names:
    """Maps models and checkpoints between Tinker's names and Paceline's."""

    store: Store

    def run_of(self, tenant: str, model_id: str) -> str:
        """Return the run of a model; the run's own id is accepted too. Raises RunNotFound."""
        return check_run_id(model_id) if model_id.startswith("run-") else self.model(tenant, model_id).run_id

    def model(self, tenant: str, model_id: str) -> Model:
        """Return a model of the tenant. Raises RunNotFound."""
        model = self.store.model(model_id)
        if model is None or model.tenant != tenant:
            raise errors.RunNotFound(
                f"no such model: {model_id[:80]}; it ends with its session: create one, or load saved weights",
                field="model_id",
            )
        return model

    def checkpoint(self, tenant: str, path: str, field: str = "path") -> CheckpointPath:
        """Return the checkpoint that a path of Tinker's or Paceline's names. Raises InvalidPath, RunNotFound."""
        if path.startswith(SCHEME):
            return CheckpointPath.parse(path, field)
        parts = path.removeprefix(TINKER).split("/")
        if not path.startswith(TINKER) or len(parts) != 3:
            form = "tinker://<model>/weights|sampler_weights|external_weights/<name>"
            raise errors.InvalidPath(f"is not of the form {form}", field=field)
        model_id, folder, name = parts
        return self.named(tenant, model_id, folder, name, field)

    def named(self, tenant: str, model_id: str, folder: str, name: str, field: str = "path") -> CheckpointPath:
        """Return the checkpoint of a model by its folder and name. Raises InvalidPath, RunNotFound."""
        if folder not in TYPES:
            raise errors.InvalidPath(f"has {folder[:40]!r}; it is one of {', '.join(TYPES)}", field=field)
        kind = CheckpointKind.STATE if folder == WEIGHTS else CheckpointKind.SAMPLER
        stored = _EXTERNAL + name if folder == EXTERNAL_WEIGHTS else name
        run_id = self.run_of(tenant, model_id)
        return CheckpointPath.parse(f"{SCHEME}{run_id}/{kind.folder}/{stored}", field)

    def tinker_path(self, checkpoint: CheckpointPath) -> str:
        """Return Tinker's path of a checkpoint; the run's id is in it if the run was not created through this API."""
        folder, name = split(checkpoint)
        model = self.store.model_of_run(checkpoint.run_id)
        return f"{TINKER}{model.model_id if model else checkpoint.run_id}/{folder}/{name}"


def split(checkpoint: CheckpointPath) -> tuple[str, str]:
    """Return a checkpoint's folder and name in Tinker's paths."""
    if checkpoint.kind is CheckpointKind.STATE:
        return WEIGHTS, checkpoint.name
    if checkpoint.name.startswith(_EXTERNAL):
        return EXTERNAL_WEIGHTS, checkpoint.name.removeprefix(_EXTERNAL)
    return SAMPLER_WEIGHTS, checkpoint.name


def external_name(name: str) -> str:
    """Return the name under which external weights, for other machines, are saved."""
    return _EXTERNAL + name


@dataclass(frozen=True, slots=True)
class Aliases:
    """Additional names of the base model, for recipes that accept only the names in their tables."""

    names: tuple[str, ...]

    def served(self, name: str) -> str:
        """Return the name that the services know; empty for an alias, meaning the model that is served."""
        return "" if name in self.names else name


def model_of(run: Run) -> Model:
    """Return the model of a run that was not created through this API; both have the same id."""
    lora: dict[str, Any] = {}
    if isinstance(run.parameters, LoraConfig):
        given = run.parameters
        groups = {name: getattr(given, name) for name in ("train_attn", "train_mlp", "train_unembed")}
        lora = {"rank": given.rank, **groups}
    made = run.create_time.timestamp()
    return Model(run.run_id, "", "", run.run_id, run.base_model, 1, made, made, lora, run.user_metadata)
