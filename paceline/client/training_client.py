"""The client for training one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Literal, NoReturn, SupportsFloat

from paceline import codec, errors
from paceline.client.batching import make_batch
from paceline.client.choices import chosen, text_of
from paceline.client.commands import CommandSender, command
from paceline.client.connection import checked_seconds
from paceline.client.futures import PacelineFuture
from paceline.client.metrics import MetricsLog, read_metrics
from paceline.client.results import PublishResult, path_of, publish_result_from_proto
from paceline.client.sampling_client import SamplingClient
from paceline.client.step_condition import Passes, passes_of, put_condition, step_in
from paceline.client.tokenizer import get_tokenizer
from paceline.client.transport import Connected, Transport, blocking
from paceline.extras import needing
from paceline.layout import CheckpointPath
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import (
    AdamParams,
    Checkpoint,
    CheckpointKind,
    Datum,
    ForwardBackwardOutput,
    ForwardBackwardSpec,
    ModelRef,
    OptimizerParams,
    OptimStepOutput,
    Reduction,
    Run,
)
from paceline.types.hints import hinted
from paceline.types.metrics import Metrics, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from paceline.client.custom_loss import LossFn

WaitFor = Literal["all", "any", "none"]
LossName = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "grpo"]
ReductionName = Literal["sum", "token_mean", "sequence_mean"]

_ACK_POLICIES: dict[str, pb.AckPolicy.ValueType] = {
    "all": pb.ACK_POLICY_ALL,
    "any": pb.ACK_POLICY_ANY,
    "none": pb.ACK_POLICY_NONE,
}
_pass_hints = hinted(
    loss="loss_fn=...",
    loss_config="loss_fn_config=...",
    config="loss_fn_config=...",
    datums="data=...",
    batch="data=...",
)
_MAX_ACK_SECONDS = 86400.0
"""The contract's bound of PublishWeightsRequest.ack_timeout_ms."""
_REDUCTIONS: dict[str, Reduction] = {reduction.name.lower(): reduction for reduction in Reduction}


class TrainingClient(Connected):
    """Issues the commands of one run; created by ServiceClient.

    Commands immediately return a future and execute in the order in which they were issued, from any thread: issue
    forward_backward and optim_step together, then wait, with `result()` or `await`. Methods that return no future block
    until they have their answer; each has a twin `x_async` to await. Arguments are copied when a command is issued and
    may be modified afterwards.

    The `fate` of an error (`errors.Fate`) says what became of the command. ANSWERED: the trainer refused it.
    TURNED_AWAY: the trainer does not have it (InvalidApiKey, Overloaded once the RetryPolicy's budget is spent, an
    argument that the client refuses). Later commands continue after both. UNKNOWN: it may have executed; a later
    command is sent if it turns out to have arrived, and ends in SeqIdGap otherwise: attach to the run again with
    `ServiceClient.get_training_client`. Errors of all commands: RunNotFound, RunStateLost, ClientSuperseded (another
    client attached later and trains the run), SeqIdExpired, SeqIdGap.
    """

    def __init__(self, transport: Transport, run: Run, attachment: int) -> None:
        super().__init__(transport)
        self.run_id = run.run_id
        self._base_model = run.base_model
        self._log = MetricsLog(transport, run.run_id)
        self._sender = CommandSender(transport, run.run_id, run.last_seq_id, attachment)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.run_id}>"

    def __reduce__(self) -> NoReturn:
        raise errors.Unsupported(
            "a training client cannot be sent to another process, since one client at a time trains a run; call "
            f"ServiceClient().get_training_client({self.run_id!r}) there"
        )

    @command
    @_pass_hints
    def forward(
        self,
        data: Sequence[Datum],
        loss_fn: LossName = "cross_entropy",
        loss_fn_config: Mapping[str, float] | None = None,
        reduction: ReductionName = "sum",
    ) -> PacelineFuture[ForwardBackwardOutput]:
        """Compute a loss and log-probabilities without a gradient. Arguments and errors as in `forward_backward`.

        data: list of Datum.
        loss_fn, loss_fn_config, reduction: as in `forward_backward`.
        """
        return self._pass(data, _spec(loss_fn, loss_fn_config, reduction, forward_only=True))

    @command
    @_pass_hints
    def forward_backward(
        self,
        data: Sequence[Datum],
        loss_fn: LossName = "cross_entropy",
        loss_fn_config: Mapping[str, float] | None = None,
        reduction: ReductionName = "sum",
        *,
        refuse_non_finite: bool = False,
    ) -> PacelineFuture[ForwardBackwardOutput]:
        """Compute a loss and add its gradient to the run's gradient.

        The loss is the sum over tokens and datums. With `reduction` "token_mean" it is divided by the number of counted
        positions in `data`; with "sequence_mean" it is the mean over datums of each datum's mean over its counted
        positions. Both are means over this call alone: gradients of several calls add up.

        NaN and infinity are counted in the metrics `nonfinite:sum` (positions) and `nonfinite_gradient:sum` (elements),
        and the next optim_step is refused. With `refuse_non_finite`, this call is refused instead and adds nothing.

        A batch above 1024 datums or 4 MiB is sent in parts and the results are merged; if a part fails, its error is
        raised and the gradient of the other parts stays in the run. Errors: EmptyBatch, UnknownLoss, UnknownField,
        MissingField, InvalidArgument, InvalidDtype, InvalidShape, TokenOutOfRange, NonFinite, PositiveLogprob,
        OutOfRange, SequenceTooLong, NonFiniteLoss, OutOfMemory.

        loss_fn: name of a loss: cross_entropy, importance_sampling, ppo, cispo, dro, gspo or grpo; docs/losses.md has
            the formulas and inputs.
        loss_fn_config: settings of the loss by name.
        """
        spec = _spec(loss_fn, loss_fn_config, reduction, refuse_non_finite=refuse_non_finite)
        return self._pass(data, spec)

    @command
    def forward_backward_custom(self, data: Sequence[Datum], loss_fn: LossFn) -> PacelineFuture[ForwardBackwardOutput]:
        """Differentiate a custom loss with respect to log-probabilities, and back-propagate it through the model.

        `loss_fn(data, logprobs)` gets one float32 tensor of shape [N] per datum (0 where the mask is 0) and returns a
        scalar tensor and metrics. It runs on its own thread and may read any loss input. The answer's metrics hold its
        value as `loss:sum`. Later commands are sent once it has returned, so in it a wait for one of them raises
        Unsupported. If it raises, nothing is accumulated, the future raises the error, and the run continues. Raises
        MissingExtra without torch.
        """
        with needing("custom-loss", "forward_backward_custom"):
            from paceline.client.custom_loss import put_custom_loss  # noqa: PLC0415 - only this call needs torch

        return put_custom_loss(self._sender, data, loss_fn)

    @command
    @hinted(
        **{each.name: f"AdamParams({each.name}=...)" for each in fields(AdamParams)},
        lr="AdamParams(learning_rate=...)",
        params="optim_params=...",
        adam_params="optim_params=...",
        optimizer="optim_params=...",
    )
    def optim_step(
        self, optim_params: OptimizerParams | None = None, *, only_if_succeeded: Passes | None = None
    ) -> PacelineFuture[OptimStepOutput]:
        """Apply the accumulated gradient with an optimizer, AdamW by default, and clear the gradient.

        only_if_succeeded: the future of a forward_backward, or several. The step is refused with PrecedingRefused
            unless all parts of these passes, and the passes issued between them and the step, succeeded. The gradient
            of the others then waits: drop it with `discard_gradient`, or step without the condition. Without it, a step
            that is issued before its passes are answered also applies what is left of a batch whose part is refused.

        A run keeps the optimizer of its first step. Errors: OutOfRange, NoGradient, NonFiniteGradient,
        OptimizerChanged, OutOfMemory, PrecedingRefused, InvalidArgument.

        optim_params: settings of an optimizer, such as AdamParams(learning_rate=1e-4).
        """
        request = codec.optimizer_to_proto(AdamParams() if optim_params is None else optim_params)
        passes = [] if only_if_succeeded is None else passes_of(only_if_succeeded, self._sender.order)

        def complete() -> None:
            if passes:
                put_condition(request, passes, self._sender.newest_partial_pass)

        return self._sender.put([request], lambda outcomes: _step_from_proto(step_in(outcomes)), complete=complete)

    @command
    def discard_gradient(self) -> PacelineFuture[int]:
        """Drop the gradient that waits, such as what a killed script left of a step; the weights stay.

        Answers with its counted positions (`Run.gradient_tokens`), 0 if none waits.
        """
        request = pb.OptimStepRequest(discard_gradient=pb.DiscardGradient())
        return self._sender.put_one(request, lambda reply: reply.tokens)

    @command
    def save_state(
        self, name: str, ttl_seconds: int | None = None, *, overwrite: bool = False
    ) -> PacelineFuture[Checkpoint]:
        """Save weights, optimizer, RNG, step and pending gradient durably; training resumes from it bit for bit.

        The checkpoint expires after `ttl_seconds`; None means never. Errors: InvalidName, CheckpointExists, OutOfRange,
        DiskFull.

        name: name of the checkpoint, the last part of its path.
        ttl_seconds: seconds after which it is deleted; None means never.
        overwrite: replace a checkpoint of this name.
        """
        return self._save(name, CheckpointKind.STATE, ttl_seconds, overwrite=overwrite)

    @command
    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None, *, overwrite: bool = False
    ) -> PacelineFuture[Checkpoint]:
        """Save the weights durably, for sampling and for other tools. Arguments as in `save_state`.

        The checkpoint has PEFT's layout, or is a whole Hugging Face model for a full-parameter run.

        name: name of the checkpoint, the last part of its path.
        ttl_seconds: seconds after which it is deleted; None means never.
        overwrite: replace a checkpoint of this name.
        """
        return self._save(name, CheckpointKind.SAMPLER, ttl_seconds, overwrite=overwrite)

    @command
    def load_state(self, path: str | Checkpoint) -> PacelineFuture[Run]:
        """Load a checkpoint's weights, with a fresh optimizer. Later commands are sent once it is answered.

        Errors: InvalidPath, CheckpointNotFound, CheckpointMismatch, ChecksumMismatch.

        path: path of the checkpoint, paceline://<run_id>/<kind>/<name>, or the Checkpoint itself.
        """
        return self._load(path, with_optimizer=False)

    @command
    def load_state_with_optimizer(self, path: str | Checkpoint) -> PacelineFuture[Run]:
        """Like `load_state` from a state checkpoint, but also restore optimizer, step, RNG and pending gradient.

        Restores a run after RunStateLost; `error.metadata["checkpoint"]` is the path of the newest state checkpoint.

        path: path of the checkpoint, paceline://<run_id>/<kind>/<name>, or the Checkpoint itself.
        """
        return self._load(path, with_optimizer=True)

    @command
    def publish_weights(
        self, *, durable: bool = False, wait_for: WaitFor = "all", ack_timeout: float = 60.0
    ) -> PacelineFuture[PublishResult]:
        """Publish the weights as a new version and send it to the samplers.

        With `durable` the answer arrives once the version is synced to the checkpoint volume. `wait_for` selects which
        acknowledgements to wait for: those of all watching samplers (at least one), of any, or none. After
        `ack_timeout` seconds (at most 86400) the call raises AckTimeout, but the version exists. Samplers with bridge
        `restart` accept versions of full-parameter runs. Errors: InvalidArgument, NonFinite, OutOfRange, AckTimeout,
        DiskFull, NotServable, the error with which a sampler refused the version.
        """
        policy = chosen(wait_for, _ACK_POLICIES, "wait_for")
        milliseconds = max(1, round(1e3 * checked_seconds(ack_timeout, "ack_timeout", maximum=_MAX_ACK_SECONDS)))
        request = codec.make(
            pb.PublishWeightsRequest,
            durable=durable,
            wait_for=policy,
            ack_timeout_ms=milliseconds,
        )
        return self._sender.put_one(request, publish_result_from_proto)

    async def save_weights_and_get_sampling_client_async(self, name: str | None = None) -> SamplingClient:
        """Publish the weights and return a client that samples from exactly this version.

        Does not wait for samplers: a sampler that lacks the version fetches it before it answers. Versions are kept
        while they are among the newest; with a `name`, the client samples from a checkpoint of that name instead, which
        stays until it is deleted (see `save_weights_for_sampler`). Errors: DiskFull, and with a name InvalidName and
        CheckpointExists.
        """
        if name is not None:
            return self.create_sampling_client(await self.save_weights_for_sampler(name))
        published = await self.publish_weights(wait_for="none")
        return SamplingClient(self.transport, ModelRef(run_id=self.run_id, version=published.model.version))

    save_weights_and_get_sampling_client = blocking(save_weights_and_get_sampling_client_async)

    def create_sampling_client(self, model_path: str | Checkpoint) -> SamplingClient:
        """Return a client that samples from a sampler checkpoint. Makes no call itself. Errors: InvalidPath.

        model_path: path of a sampler checkpoint, or the Checkpoint itself.
        """
        path = CheckpointPath.parse(text_of(path_of(model_path), "model_path"), "model_path")
        return SamplingClient(self.transport, ModelRef(checkpoint=str(path)))

    def log(self, values: Mapping[str, SupportsFloat], step: int | None = None) -> PacelineFuture[int]:
        """Add a row of values to the run's metrics; the answer is its number.

        Not a command: it waits only for what was logged before, and `step` None means the steps that the run has taken
        when the call arrives. Closing the client waits for it.
        Names have 1 to 128 characters of letters, digits, spaces and _./:@-; NaN and infinity are values too. A row has
        at most 256. Errors: RunNotFound, InvalidArgument, InvalidName, OutOfRange, MissingField, DiskFull,
        QuotaExceeded.
        """
        return self._log.put_values(values, step)

    def log_rollouts(self, rollouts: Sequence[Rollout], step: int | None = None) -> PacelineFuture[int]:
        """Add rollouts to the run's; the answer is the number of the last. `step` as in `log`.

        The service keeps the newest that fit its setting `rollouts_max_bytes_per_run`. Errors: RunNotFound, EmptyBatch,
        InvalidArgument, OutOfRange, DiskFull, QuotaExceeded.
        """
        return self._log.put_rollouts(rollouts, step)

    async def metrics_async(self, names: Sequence[str] = (), *, at_most_points: int | None = None) -> Metrics:
        """Return what was measured of the run, as `ServiceClient.metrics` does. Errors: RunNotFound, OutOfRange.

        names, at_most_points: as there.
        """
        return await self.transport.submit(read_metrics(self.transport, self.run_id, names, at_most_points))

    metrics = blocking(metrics_async)

    async def get_info_async(self) -> Run:
        """Return the run's current record. Errors: RunNotFound."""
        reply = await self.transport.query(self.transport.trainer.GetRun, pb.GetRunRequest(run_id=self.run_id))
        return codec.run_from_proto(reply.run)

    get_info = blocking(get_info_async)

    async def get_tokenizer_async(self) -> PreTrainedTokenizerBase:
        """Return the base model's tokenizer. Needs the package transformers."""
        return await get_tokenizer(self.transport, self._base_model)

    get_tokenizer = blocking(get_tokenizer_async)

    def _pass(self, data: Sequence[Datum], spec: ForwardBackwardSpec) -> PacelineFuture[ForwardBackwardOutput]:
        batch = make_batch(data, spec)
        return self._sender.put(batch.requests, batch.merge)

    def _save(
        self, name: str, kind: CheckpointKind, ttl_seconds: int | None, *, overwrite: bool
    ) -> PacelineFuture[Checkpoint]:
        request = codec.make(
            pb.SaveCheckpointRequest,
            name=name,
            kind=pb.CheckpointKind.ValueType(kind.value),
            ttl_seconds=ttl_seconds,
            overwrite=overwrite,
        )
        return self._sender.put_one(request, lambda reply: codec.checkpoint_from_proto(reply.checkpoint))

    def _load(self, path: str | Checkpoint, *, with_optimizer: bool) -> PacelineFuture[Run]:
        request = codec.make(pb.LoadCheckpointRequest, path=path_of(path), with_optimizer=with_optimizer)
        return self._sender.put_one(
            request,
            lambda reply: codec.run_from_proto(reply.run),
            barrier=True,
        )


def _spec(
    loss_fn: str, config: Mapping[str, float] | None, reduction: ReductionName, **options: bool
) -> ForwardBackwardSpec:
    divided = chosen(reduction, _REDUCTIONS, "reduction")
    return ForwardBackwardSpec(loss_fn, {} if config is None else config, divided, **options)


def _step_from_proto(message: pb.OptimStepResponse) -> OptimStepOutput:
    return OptimStepOutput(
        step=message.step,
        grad_norm=message.grad_norm,
        learning_rate=message.learning_rate,
        tokens=message.tokens,
        milliseconds=message.milliseconds,
    )
