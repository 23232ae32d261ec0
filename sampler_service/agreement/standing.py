"""Tracks whether this sampler's results agree with its trainer's.

If the base model disagrees, the sampler answers no requests. If a run's version disagrees, only that run is refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import numpy as np

from paceline import errors
from paceline.agreement import STATISTICS, agreement_bound, shown_difference
from paceline.codec import model_ref_from_proto, served_model_to_proto, tensor_from_proto, token_ids_from_proto
from paceline.log import get_logger
from paceline.rpc.identity import PEER_TENANT, Identity
from paceline.types import ModelInfo, ModelRef, ServedModel
from paceline.types.training import Array
from paceline.weights.v1 import weight_service_pb2 as pb
from sampler_service.agreement.compared_runs import ComparedRuns
from sampler_service.agreement.comparison import compare, is_diverged
from sampler_service.engine.protocol import SamplerEngine
from sampler_service.metrics import SamplerMetrics
from sampler_service.stores.base import Versions
from sampler_service.transports.version_keys import VersionKey

_TRAINER, _BASE = "trainer", "base"
_log = get_logger(__name__)


class Standing:
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
        self._runs = ComparedRuns()
        metrics.runs_refused.set_function(self._runs.num_refused)

    @property
    def refusal(self) -> str:
        """Why this sampler is not ready; empty if nothing prevents it."""
        return next(iter(self._refusals.values()), "")

    def agreements(self, identity: Identity) -> list[pb.Agreement]:
        """Return the latest agreements of the base model and of each run that the caller may see."""
        base = [self._base] if self._base is not None else []
        return base + self._runs.agreements(PEER_TENANT if identity.is_peer else identity.tenant)

    def check(self, ref: ModelRef, tenant: str) -> None:
        """Refuse a request for weights whose results disagree with the trainer's.

        Raises BaseMismatch, for all weights if the base model disagrees; NonFinite if the run has diverged.
        """
        if self.refusal:
            raise errors.BaseMismatch(self.refusal)
        self._runs.check(ref, tenant)

    def refuses_run(self, run_id: str) -> bool:
        """Return whether the run's versions are refused until a later one agrees."""
        return self._runs.is_refused(run_id)

    def forget_run(self, run_id: str) -> None:
        """Forget a run that was deleted."""
        self._runs.forget(run_id)

    async def welcomed(self) -> None:
        """Record that the trainer has the same base weights."""
        await self._set(_TRAINER, "")

    async def turned_away(self, reason: str) -> None:
        """Record that the trainer has different base weights."""
        await self._set(_TRAINER, reason)

    async def measure(self, probe: pb.Probe) -> pb.Agreement | None:
        """Score a probe's tokens and compare. Return None if that is not possible now or the run was deleted."""
        ref = model_ref_from_proto(probe.model)
        tokens = token_ids_from_proto(probe.tokens, "tokens")
        theirs = tensor_from_proto(probe.logprobs, "logprobs", {"float32"})
        agreement = pb.Agreement(
            model=served_model_to_proto(ServedModel(self._model.name, ref.run_id, ref.version or 0)),
            bound=agreement_bound(probe.dtype, self._model.dtype),
            trainer_dtype=probe.dtype,
            sampler_dtype=self._model.dtype,
        )
        if not ref.is_base:
            self._runs.begin(ref.run_id)
        try:
            owner = await self._compare(agreement, ref, tokens, theirs)
        except errors.PacelineError as error:
            _log.warning("not compared with the trainer", weights=str(ref), reason=error.reason, error=error.message)
            return None
        if ref.is_base:
            self._base = agreement
            await self._set(_BASE, agreement.refusal)
        elif not self._runs.note(agreement, owner, has_diverged=not np.isfinite(theirs).all()):
            return None
        self._show(agreement, ref, owner)
        return agreement

    async def _compare(self, agreement: pb.Agreement, ref: ModelRef, tokens: Array, theirs: Array) -> str:
        """Score and compare; return the owner of the weights, "" for the base model. A diverged run is not scored."""
        if not self._versions.serves(ref):
            raise errors.EngineUnavailable("the engine has other weights now")
        async with self._versions.lease(ref, PEER_TENANT) as lease:
            entry = None if ref.is_base else self._versions.find(VersionKey.of(lease.served))
            if not is_diverged(agreement, theirs):
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
