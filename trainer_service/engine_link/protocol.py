"""The interface of a trainer engine. The service knows engines only by this protocol."""

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
    """A run's weights as the engine created them."""

    trainable_parameters: int
    modules: tuple[str, ...] = ()
    """Full names of the modules that have an adapter; empty for a full-parameter run."""


@dataclass(slots=True, eq=False)
class AccumulatedOutput(ForwardBackwardOutput):
    """The result of a forward_backward, and the gradient that waits after it."""

    gradient_tokens: int = 0
    """Counted positions of the run's gradient that waits for the optimizer; 0 if none waits."""
    waited_milliseconds: float = 0.0
    """Time until the first of its passes began; set by the service, which knows when it asked."""


@dataclass(frozen=True, slots=True)
class SteppedOutput(OptimStepOutput):
    """The result of an optimizer step, and the memory that the engine uses after it."""

    peak_bytes: int = 0
    """Most resident memory of the engine's process so far; of rank 0 if there are several."""
    gpu_bytes: int = 0
    """Memory allocated on its GPU at most so far; 0 without a GPU."""


@dataclass(frozen=True, slots=True)
class LoadedState:
    """What was restored from a checkpoint."""

    step: int
    """Optimizer steps taken; 0 when only weights were loaded."""
    gradient_tokens: int = 0
    """Counted positions of the gradient that waits; 0 when only weights were loaded."""


class EngineDiedError(EngineUnavailable):
    """The engine process died while it was executing this command."""


class ForwardBackwardHandle(Protocol):
    """A started forward_backward."""

    @property
    def run_id(self) -> str:
        """The run that it belongs to."""
        ...

    def output(self) -> AccumulatedOutput:
        """Return the result, once `TrainerEngine.advance` has returned this handle. Raises the job's error."""
        ...


class StateSave(Protocol):
    """A run's state at one moment. Safe to use from threads other than the engine's."""

    def write(self, directory: Path) -> None:
        """Write the state into an existing, empty directory. Call once. Raises DiskFull."""
        ...


@dataclass(frozen=True, slots=True)
class PublishedAs:
    """The version that published weights become."""

    run_id: str
    version: int
    tenant: str


class TrainerEngine(Protocol):
    """Executes commands of runs. Not thread-safe.

    A forward_backward is started and then advances in passes, alongside those of other runs; any other call is done
    when it returns. A run has one command at a time: until its job is returned, no other call may name the run. Every
    command is atomic: if it fails, it leaves the run unchanged, whatever other runs do meanwhile. The caller has
    validated inputs against `describe()`. Errors are those of `paceline.errors`: OutOfMemory, NoGradient,
    NonFiniteGradient, OptimizerChanged, CheckpointMismatch, ChecksumMismatch, RunNotFound, InvalidArgument,
    Unsupported, DiskFull.
    """

    def describe(self) -> ModelInfo:
        """Describe the loaded base model."""
        ...

    def create_run(self, run_id: str, parameters: RunParameters) -> AdapterInfo:
        """Create what a run trains: an adapter initialised from its seed, or a copy of the base model.

        The same seed gives the same weights everywhere.
        """
        ...

    def delete_run(self, run_id: str) -> None:
        """Forget a run and free its memory. Unknown runs are ignored."""
        ...

    def begin(
        self, run_id: str, data: Sequence[Datum], spec: ForwardBackwardSpec, *, alone: bool = False
    ) -> ForwardBackwardHandle:
        """Start computing a loss and, unless `forward_only`, its gradient for the run.

        With `refuse_non_finite` the job may fail with NonFiniteLoss. With `alone`, no other run shares its passes.
        """
        ...

    def advance(self, announce: Callable[[Sequence[str]], None]) -> Sequence[ForwardBackwardHandle]:
        """Run one pass over the started jobs; return the jobs that are done, including failed ones.

        Before a pass is computed, `announce` is called with the runs that take part in it. A pass of several runs that
        fails is repeated for each run separately, so that a job does not fail because of another run.
        """
        ...

    def optim_step(self, run_id: str, params: OptimizerParams) -> SteppedOutput:
        """Apply the accumulated gradient with the optimizer of `params` and clear it.

        Raises OptimizerChanged if the run has state of another optimizer.
        """
        ...

    def discard_gradient(self, run_id: str) -> int:
        """Drop the gradient that waits, whatever it holds; return its counted positions, 0 if none waits."""
        ...

    def capture_state(self, run_id: str) -> StateSave:
        """Capture what `save_state` writes, so that it can be written while later commands execute."""
        ...

    def capture_adapter(self, run_id: str, published: PublishedAs | None = None) -> StateSave:
        """Capture what `save_adapter` writes, so that it can be written while later commands execute.

        A whole model that is `published` is first written in place if a sampler lends its weights for that.
        """
        ...

    def save_state(self, run_id: str, directory: Path) -> None:
        """Write weights, optimizer, RNG, step and pending gradient into an existing, empty directory."""
        ...

    def save_adapter(self, run_id: str, directory: Path) -> None:
        """Write the weights into an existing, empty directory, as samplers and other tools load them.

        This is an adapter in PEFT's layout or, for a full-parameter run, a whole Hugging Face model.
        """
        ...

    def load_state(self, run_id: str, directory: Path, *, with_optimizer: bool) -> LoadedState:
        """Replace the run's weights with those in `directory`, or, `with_optimizer`, all that `save_state` wrote.

        Raises CheckpointMismatch if names or shapes differ from the run's.
        """
        ...
