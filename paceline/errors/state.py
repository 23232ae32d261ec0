"""What the request names is absent, taken, or not in a state for it."""

from __future__ import annotations

from paceline.errors.base import Code, PacelineError


class NotFound(PacelineError):
    """No such object, or another tenant's."""

    code = Code.NOT_FOUND


class ModelNotFound(NotFound):
    """No such base model."""

    reason = "MODEL_NOT_FOUND"


class RunNotFound(NotFound):
    """No such run, or another tenant's."""

    reason = "RUN_NOT_FOUND"


class VersionNotFound(NotFound):
    """No such version, or no longer kept."""

    reason = "VERSION_NOT_FOUND"


class CheckpointNotFound(NotFound):
    """No such checkpoint, or another tenant's."""

    reason = "CHECKPOINT_NOT_FOUND"


class Conflict(PacelineError):
    """A key or a name is taken."""

    code = Code.ALREADY_EXISTS


class SeqIdReused(Conflict):
    """The seq_id was used with another payload."""

    reason = "SEQ_ID_REUSED"


class RequestIdReused(Conflict):
    """The request_id was used with another payload."""

    reason = "REQUEST_ID_REUSED"


class CheckpointExists(Conflict):
    """A checkpoint of this name exists."""

    reason = "CHECKPOINT_EXISTS"


class VersionExists(Conflict):
    """The version exists with other content."""

    reason = "VERSION_EXISTS"


class SamplerExists(Conflict):
    """Another sampler watches the trainer under this name, or this one does by a newer watch."""

    reason = "SAMPLER_EXISTS"


class FailedPrecondition(PacelineError):
    """The run is not in a state for this."""

    code = Code.FAILED_PRECONDITION


class SeqIdExpired(FailedPrecondition):
    """The command was executed, but its answer is no longer kept."""

    reason = "SEQ_ID_EXPIRED"


class ClientSuperseded(FailedPrecondition):
    """Another client attached to the run later; only that one's commands are taken."""

    reason = "CLIENT_SUPERSEDED"


class Forked(FailedPrecondition):
    """The process was forked from one that had used a client, and gRPC does not work in it. Raised by the client."""

    reason = "CLIENT_FORKED"


class RunStateLost(FailedPrecondition):
    """The run's state was lost with the engine and its journal cannot be replayed.

    `metadata["checkpoint"]` is the path of the newest state checkpoint, empty where there is none.
    """

    reason = "RUN_STATE_LOST"


class PoisonedCommand(FailedPrecondition):
    """The engine died each time that it executed the command; `metadata["attempts"]` says how often."""

    reason = "POISONED_COMMAND"


class NoGradient(FailedPrecondition):
    """OptimStep without a gradient."""

    reason = "NO_GRADIENT"


class NonFiniteGradient(FailedPrecondition):
    """The gradient holds NaN or infinity; it was dropped and no step was taken."""

    reason = "NON_FINITE_GRADIENT"


class NonFiniteLoss(FailedPrecondition):
    """The loss or its gradient holds NaN or infinity; asked to refuse that, the call added nothing to the gradient.

    `metadata["positions"]` is how many positions have such a loss, `metadata["gradient_elements"]` how many elements
    of the gradient are so.
    """

    reason = "NON_FINITE_LOSS"


class OptimizerChanged(FailedPrecondition):
    """The run has the state of another optimizer, or of this one with another rank or seed.

    `metadata["optimizer"]` is the name of the run's optimizer.
    """

    reason = "OPTIMIZER_CHANGED"


class CheckpointMismatch(FailedPrecondition):
    """The checkpoint does not fit the run."""

    reason = "CHECKPOINT_MISMATCH"


class ModelNotLoadable(FailedPrecondition):
    """The sampler's engine does not load these weights; what it served before it goes on serving."""

    reason = "MODEL_NOT_LOADABLE"


class SeqIdGap(PacelineError):
    """Commands before this one did not arrive in time."""

    code = Code.ABORTED
    reason = "SEQ_ID_GAP"


class BaseMismatch(FailedPrecondition):
    """Base weights that meet are not the same: of trainer and sampler, or of what was made on others.

    `metadata["ours"]` and `metadata["theirs"]` are their identities (`ModelInfo.weights_sha256`) where those differ. Of
    a run whose version a sampler computes otherwise than the trainer it has `run_id`, `version`, `mean_difference` and
    `bound`.
    """

    reason = "BASE_MISMATCH"
