"""The object that a request names is missing, taken, or in the wrong state."""

from __future__ import annotations

from paceline.errors.base import Code, PacelineError


class NotFound(PacelineError):
    """No such object, or it belongs to another tenant."""

    code = Code.NOT_FOUND


class ModelNotFound(NotFound):
    """No such base model."""

    reason = "MODEL_NOT_FOUND"


class RunNotFound(NotFound):
    """No such run, or it belongs to another tenant."""

    reason = "RUN_NOT_FOUND"


class VersionNotFound(NotFound):
    """No such version, or it is no longer kept."""

    reason = "VERSION_NOT_FOUND"


class CheckpointNotFound(NotFound):
    """No such checkpoint, or it belongs to another tenant."""

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
    """A checkpoint with this name exists."""

    reason = "CHECKPOINT_EXISTS"


class VersionExists(Conflict):
    """The version exists with different content."""

    reason = "VERSION_EXISTS"


class SamplerExists(Conflict):
    """Another sampler watches the trainer under this name, or this sampler opened a newer watch."""

    reason = "SAMPLER_EXISTS"


class FailedPrecondition(PacelineError):
    """The run's state does not allow this."""

    code = Code.FAILED_PRECONDITION


class SeqIdExpired(FailedPrecondition):
    """The command was executed, but its answer is no longer kept."""

    reason = "SEQ_ID_EXPIRED"


class ClientSuperseded(FailedPrecondition):
    """Another client attached to the run later; only its commands are accepted."""

    reason = "CLIENT_SUPERSEDED"


class Forked(FailedPrecondition):
    """The process was forked from one that had used a client, so gRPC does not work in it. Raised by the client."""

    reason = "CLIENT_FORKED"


class RunStateLost(FailedPrecondition):
    """The run's state was lost with the engine, and its journal cannot be replayed.

    `metadata["checkpoint"]` is the path of the newest state checkpoint; empty if there is none.
    """

    reason = "RUN_STATE_LOST"


class PoisonedCommand(FailedPrecondition):
    """The engine died each time it executed the command; `metadata["attempts"]` is the number of attempts."""

    reason = "POISONED_COMMAND"


class NoGradient(FailedPrecondition):
    """OptimStep was called without a gradient."""

    reason = "NO_GRADIENT"


class NonFiniteGradient(FailedPrecondition):
    """The gradient holds NaN or infinity; it was dropped and no step was taken."""

    reason = "NON_FINITE_GRADIENT"


class NonFiniteLoss(FailedPrecondition):
    """The loss or its gradient holds NaN or infinity; as requested, the call was refused and added no gradient.

    `metadata["positions"]` is the number of positions with a non-finite loss, `metadata["gradient_elements"]` the
    number of non-finite elements of the gradient.
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
    """The sampler's engine cannot load these weights; it keeps serving the previous ones."""

    reason = "MODEL_NOT_LOADABLE"


class SeqIdGap(PacelineError):
    """Earlier commands of the run did not arrive in time."""

    code = Code.ABORTED
    reason = "SEQ_ID_GAP"


class BaseMismatch(FailedPrecondition):
    """Base weights differ: between trainer and sampler, or from those that a run, checkpoint or version was made on.

    `metadata["ours"]` and `metadata["theirs"]` are their identities (`ModelInfo.weights_sha256`) if those differ. If a
    sampler's results for a run's version differ from the trainer's, `metadata` has `run_id`, `version`,
    `mean_difference` and `bound`.
    """

    reason = "BASE_MISMATCH"
