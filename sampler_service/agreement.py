"""Compares this sampler's log-probabilities with its trainer's, and refuses what does not agree.

If the base model disagrees, the sampler answers no requests. If a run's version disagrees, only that run is refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np

from paceline import errors
from paceline.agreement import STATISTICS, agreement_bound, shown_difference
from paceline.codec import model_ref_from_proto, served_model_to_proto, tensor_from_proto, token_ids_from_proto
from paceline.log import get_logger
from paceline.rpc.identity import PEER_TENANT, Identity
from paceline.types import ModelInfo, ModelRef, ServedModel
from paceline.types.training import Array
from paceline.weights.v1 import weight_service_pb2 as pb
from sampler_service.engine.protocol import SamplerEngine
from sampler_service.metrics import SamplerMetrics
from sampler_service.stores.base import Versions
from sampler_service.transports.base import VersionKey, is_for

_TRAINER, _BASE = "trainer", "base"
_LARGEST = 1e30
"""Largest value that an Agreement's fields accept."""
_SAME_MODEL = "give both the same model, or one that both engines compute"
_TRAIN_AGAIN = "load an earlier checkpoint or make a new run, lower the learning rate, and publish again"
_OTHERS = "if other runs are refused too, the fault is the sampler's: tell its operator"

_log = get_logger(__name__)


class AgreementStatus:
    """Results of comparisons with the trainer: why the service is not ready, and which runs are refused.

    A sampler that has not been compared, because its trainer is away or sent no probe, answers requests.
    """

    def __init__(
        self,
        engine: SamplerEngine,
        versions: Versions,
        model: ModelInfo,
        obstruct: Callable[[str], Awaitable[None]],
        metrics: SamplerMetrics,
    ) -> None:
        """`obstruct` is called with the reason why the service is not ready, or with "" once nothing prevents it."""
        self._engine = engine
        self._versions = versions
        self._model = model
        self._obstruct = obstruct
        self._metrics = metrics
        self._refusals: dict[str, str] = {}
        """Reasons by what was compared: the identity of the base weights, or the base model's log-probabilities."""
        self._base: pb.Agreement | None = None
        self._runs: dict[str, _Run] = {}
        """Every run that had a version compared, until it is deleted."""
        metrics.runs_refused.set_function(lambda: sum(run.is_refused for run in self._runs.values()))

    @property
    def refusal(self) -> str:
        """Why this sampler is not ready; empty if nothing prevents it."""
        return next(iter(self._refusals.values()), "")

    def agreements(self, identity: Identity) -> list[pb.Agreement]:
        """Return the latest agreements of the base model and of each run that the caller may see."""
        tenant = PEER_TENANT if identity.is_peer else identity.tenant
        runs = [run.agreement for _, run in sorted(self._runs.items()) if is_for(run.owner, tenant)]
        return [agreement for agreement in (self._base, *runs) if agreement is not None]

    def check(self, ref: ModelRef, tenant: str) -> None:
        """Refuse a request for weights whose results disagree with the trainer's.

        Raises BaseMismatch, for all weights if the base model disagrees; NonFinite if the run has diverged. Another
        tenant's run passes: the lookup that follows reports it as not found, which reveals nothing about it.
        """
        if self.refusal:
            raise errors.BaseMismatch(self.refusal)
        run = self._runs.get(ref.run_id)
        error = run.refusal(ref.version) if run is not None and is_for(run.owner, tenant) else None
        if error is not None:
            raise type(error)(error.message, field=error.field, metadata=error.metadata)

    def refuses_run(self, run_id: str) -> bool:
        """Return whether the run's versions are refused until a later one agrees."""
        run = self._runs.get(run_id)
        return run is not None and run.is_refused

    def forget_run(self, run_id: str) -> None:
        """Forget a run that was deleted."""
        self._runs.pop(run_id, None)

    async def note_hello(self, refusal: str = "") -> None:
        """Record that the trainer has the same base weights, or with which message it refused this sampler's."""
        await self._set(_TRAINER, refusal)

    async def measure(self, probe: pb.Probe) -> pb.Agreement | None:
        """Score a probe's tokens, as many as fit in the context, and compare.

        Return None if that is not possible now or the run was deleted.
        """
        ref, length = model_ref_from_proto(probe.model), self._model.max_context_length
        tokens = token_ids_from_proto(probe.tokens, "tokens")[:length]
        theirs = tensor_from_proto(probe.logprobs, "logprobs", {"float32"})[: length - 1]
        agreement = pb.Agreement(
            model=served_model_to_proto(ServedModel(self._model.name, ref.run_id, ref.version or 0)),
            bound=agreement_bound(probe.dtype, self._model.dtype),
            trainer_dtype=probe.dtype,
            sampler_dtype=self._model.dtype,
        )
        if not ref.is_base:
            self._runs.setdefault(ref.run_id, _Run())
        try:
            owner = await self._compare(agreement, ref, tokens, theirs)
        except errors.PacelineError as error:
            # A run may be deleted while its version is compared.
            log = _log.info if isinstance(error, errors.RunNotFound) else _log.warning
            log("not compared with the trainer", weights=str(ref), reason=error.reason, error=error.message)
            return None
        if ref.is_base:
            self._base = agreement
            await self._set(_BASE, agreement.refusal)
        elif (run := self._runs.get(ref.run_id)) is not None:
            run.note(agreement, owner, has_diverged=not np.isfinite(theirs).all())
        else:  # deleted meanwhile
            return None
        self._show(agreement, ref, owner)
        return agreement

    async def _compare(self, agreement: pb.Agreement, ref: ModelRef, tokens: Array, theirs: Array) -> str:
        """Score and compare; return the owner of the weights, "" for the base model. A diverged run is not scored."""
        if not self._versions.serves(ref):
            raise errors.EngineUnavailable("the engine has other weights now")
        async with self._versions.lease(ref, PEER_TENANT) as lease:
            entry = None if ref.is_base else self._versions.find(VersionKey.of(lease.served))
            if not _is_diverged(agreement, theirs):
                try:
                    ours = await self._engine.compute_logprobs(tokens.tolist(), lease.adapter, PEER_TENANT)
                except errors.InvalidArgument as error:
                    agreement.refusal = (
                        f"the sampler cannot score what the trainer scores ({error}); give both the same model"
                    )
                else:
                    compare(agreement, ours[1:], theirs)
            # Weights written in place can change during the scoring; then the scores are not of the leased version.
            if not lease.is_current():
                raise errors.EngineUnavailable("the weights changed meanwhile")
            return entry.tenant if entry is not None else ""

    def _show(self, agreement: pb.Agreement, ref: ModelRef, owner: str) -> None:
        kind = "base" if ref.is_base else "version"
        for statistic in STATISTICS:
            self._metrics.logprob_difference.labels(kind, statistic).set(shown_difference(agreement, statistic))
        log = _log.error if agreement.refusal else _log.info
        log(
            "compared with the trainer",
            weights=str(ref),
            tenant=owner,
            mean=agreement.mean_difference,
            max=agreement.max_difference,
            bound=agreement.bound,
            refusal=agreement.refusal,
        )

    async def _set(self, what: str, refusal: str) -> None:
        before = self.refusal
        self._refusals.pop(what, None)
        if refusal:
            self._refusals[what] = refusal
        if self.refusal != before:
            await self._obstruct(self.refusal)


@dataclass(slots=True)
class _Run:
    """Results for one run. A version that was not compared takes the result of the last compared one before it."""

    owner: str = ""
    agreement: pb.Agreement | None = None
    """Agreement of the version that was compared last."""
    results: dict[int, errors.PacelineError | None] = field(default_factory=dict)
    """For each version that was compared, the error with which it is refused. Results may arrive in any order."""

    @property
    def is_refused(self) -> bool:
        """Whether all versions are refused, since the newest of those that were compared disagreed."""
        return self.refusal(None) is not None

    def refusal(self, version: int | None) -> errors.PacelineError | None:
        """Return the error with which a version is refused; None as a version means the newest."""
        if not self.results:
            return None
        newest = self.results[max(self.results)]
        if version is None:
            return newest
        compared = max((number for number in self.results if number <= version), default=min(self.results))
        return self.results[compared] or newest

    def note(self, agreement: pb.Agreement, owner: str, *, has_diverged: bool) -> None:
        """Record the result for a version."""
        self.owner, self.agreement = owner, agreement
        self.results[agreement.model.version] = (
            _error(agreement, has_diverged=has_diverged) if agreement.refusal else None
        )


def _error(agreement: pb.Agreement, *, has_diverged: bool) -> errors.PacelineError:
    model = agreement.model
    metadata = {"run_id": model.run_id, "version": str(model.version)}
    if agreement.tokens:
        metadata |= {"mean_difference": f"{agreement.mean_difference:.6g}", "bound": f"{agreement.bound:.6g}"}
    kind = errors.NonFinite if has_diverged else errors.BaseMismatch
    return kind(
        f"version {model.version} of {model.run_id} is refused, as are others until a later one agrees with the "
        f"trainer, some seconds after it was published: {agreement.refusal}",
        field="model",
        metadata=metadata,
    )


def compare(agreement: pb.Agreement, ours: Array, theirs: Array) -> None:
    """Record in `agreement` how far the sampler's and the trainer's log-probabilities differ, and any refusal.

    Both arrays have shape [N]. They agree if all are finite and the mean difference is within `agreement.bound`.
    """
    of_run = bool(agreement.model.run_id)
    with np.errstate(invalid="ignore"):  # inf - inf is NaN
        difference = np.abs(ours.astype(np.float64) - theirs.astype(np.float64))
    finite = difference[np.isfinite(difference)]
    agreement.tokens = len(finite)
    if len(finite):
        agreement.mean_difference = min(float(finite.mean()), _LARGEST)
        agreement.max_difference = min(float(finite.max()), _LARGEST)
    if not len(finite) or len(finite) < len(difference):
        where, remedy = ("sampler", f"{_TRAIN_AGAIN}; {_OTHERS}") if of_run else ("trainer or the sampler", _SAME_MODEL)
        agreement.refusal = (
            f"{len(difference) - len(finite)} of {len(difference)} log-probabilities are not finite at the "
            f"{where}: {remedy}"
        )
    elif not agreement.mean_difference <= agreement.bound:
        agreement.refusal = (
            f"the log-probabilities of trainer and sampler differ by {agreement.mean_difference:.2g} on average over "
            f"{agreement.tokens} tokens, more than the {agreement.bound:.2g} that {agreement.trainer_dtype} and "
            f"{agreement.sampler_dtype} explain: "
            + (f"{_TRAIN_AGAIN}; {_OTHERS}" if of_run else f"{_SAME_MODEL} alike")
        )


def _is_diverged(agreement: pb.Agreement, theirs: Array) -> bool:
    """Return whether the trainer's own log-probabilities of a run are not all finite; if so, record a refusal."""
    finite = int(np.isfinite(theirs).sum())
    if not agreement.model.run_id or finite == len(theirs):
        return False
    agreement.refusal = (
        f"the run has diverged: its weights give no finite log-probabilities ({len(theirs) - finite} of {len(theirs)} "
        f"are NaN or infinite on the trainer); {_TRAIN_AGAIN}"
    )
    return True
