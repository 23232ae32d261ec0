"""What a trainer engine does. The service knows engines by this protocol alone; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from paceline.errors import EngineUnavailable
from paceline.types import (
    Datum,
    ForwardBackwardOutput,
    ForwardBackwardSpec,
    ModelInfo,
    OptimizerParams,
    OptimStepOutput,
    RunParameters,
)


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A run's weights as the engine made them."""

    trainable_parameters: int
    modules: tuple[str, ...] = ()
    """Full names of the modules that have an adapter; empty for a model of the run's own."""


@dataclass(frozen=True, slots=True)
class LoadedState:
    """What a checkpoint put back."""

    step: int
    """Optimizer steps taken; 0 when only weights were loaded."""


class EngineDiedError(EngineUnavailable):
    """The engine's process died while it executed this very command."""


class ForwardBackwardHandle(Protocol):
    """A forward_backward that was begun."""

    @property
    def run_id(self) -> str:
        """Whose it is."""
        ...

    def output(self) -> ForwardBackwardOutput:
        """Return its result once `TrainerEngine.advance` has given it back. Raises what it failed of."""
        ...


class StateSave(Protocol):
    """A run's state at one moment. Safe to use from another thread than the engine's."""

    def write(self, directory: Path) -> None:
        """Write it into an existing, empty directory, once. Raises DiskFull."""
        ...


@dataclass(frozen=True, slots=True)
class PublishedAs:
    """The version that weights become."""

    run_id: str
    version: int
    tenant: str


class TrainerEngine(Protocol):
    """Executes commands of runs. Not thread-safe.

    A forward_backward is begun and then advances in passes, beside those of other runs; any other call is done when it
    returns. A run has one command at a time: until its job is given back no other call names it. Every command either
    happens wholly or, when it fails, leaves the run as it was, whatever other runs do meanwhile. Inputs have been
    validated by the caller against `describe()`. Errors are those of `paceline.errors`: OutOfMemory, NoGradient,
    NonFiniteGradient, OptimizerChanged, CheckpointMismatch, ChecksumMismatch, RunNotFound, InvalidArgument,
    Unsupported, DiskFull.
    """

    def describe(self) -> ModelInfo:
        """Say what base model is loaded."""
        ...

    def create_run(self, run_id: str, parameters: RunParameters) -> AdapterInfo:
        """Make what a run trains: an adapter with fresh weights from its seed, or a copy of the base model.

        The same seed gives the same weights everywhere.
        """
        ...

    def delete_run(self, run_id: str) -> None:
        """Forget a run and free its memory. Unknown runs are ignored."""
        ...

    def begin(
        self, run_id: str, data: Sequence[Datum], spec: ForwardBackwardSpec, *, alone: bool = False
    ) -> ForwardBackwardHandle:
        """Begin to compute a loss and, unless `forward_only`, its gradient for the run.

        Fails with NonFiniteLoss where the spec says so. With `alone` no other run shares its passes.
        """
        ...

    def advance(self, announce: Callable[[Sequence[str]], None]) -> Sequence[ForwardBackwardHandle]:
        """Do one pass over the jobs that were begun; return those that are done, be it that they failed.

        `announce` is called with the runs that have a part in a pass, before it is computed. A pass of several runs
        that fails is done again for each by itself, so that a job fails of nothing but its own.
        """
        ...

    def optim_step(self, run_id: str, params: OptimizerParams) -> OptimStepOutput:
        """Apply the accumulated gradient with the optimizer of `params` and clear it.

        Raises OptimizerChanged when the run has state of another one.
        """
        ...

    def capture_state(self, run_id: str) -> StateSave:
        """Take what `save_state` writes, to write it while later commands execute."""
        ...

    def capture_adapter(self, run_id: str, published: PublishedAs | None = None) -> StateSave:
        """Take what `save_adapter` writes, to write it while later commands execute.

        A whole model that is `published` is written in place first, where a sampler lends its weights for that.
        """
        ...

    def save_state(self, run_id: str, directory: Path) -> None:
        """Write weights, optimizer, RNG, step and pending gradient into an existing, empty directory."""
        ...

    def save_adapter(self, run_id: str, directory: Path) -> None:
        """Write the weights into an existing, empty directory, as samplers and other tools load them.

        An adapter in PEFT's layout, or of a full-parameter run a whole Hugging Face model.
        """
        ...

    def load_state(self, run_id: str, directory: Path, *, with_optimizer: bool) -> LoadedState:
        """Replace the run's weights by those in `directory`; with_optimizer everything that `save_state` wrote.

        Raises CheckpointMismatch when names or shapes differ from the run's.
        """
        ...
