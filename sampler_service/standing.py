"""Whether this sampler computes what its trainer computes. One that does not answers no request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import numpy as np

from paceline import errors
from paceline.agreement import agreement_bound
from paceline.codec import model_ref_from_proto, served_model_to_proto, tensor_from_proto, token_ids_from_proto
from paceline.log import get_logger
from paceline.rpc.identity import PEER_TENANT, Identity
from paceline.types import ModelInfo, ModelRef, ServedModel
from paceline.types.training import Array
from paceline.weights.v1 import weight_service_pb2 as pb
from sampler_service.engine.base import SamplerEngine
from sampler_service.metrics import SamplerMetrics
from sampler_service.versions.base import Versions
from sampler_service.versions.keys import VersionKey

_TRAINER = "trainer"
_log = get_logger(__name__)


class Standing:
    """What was measured against the trainer, and why the service is not ready if it is not.

    A sampler that has not been measured, since its trainer is away or told nothing, answers.
    """

    def __init__(
        self,
        engine: SamplerEngine,
        versions: Versions,
        model: ModelInfo,
        obstruct: Callable[[str], Awaitable[None]],
        metrics: SamplerMetrics,
    ) -> None:
        """Take `obstruct` to say why the service is not ready, or by an empty sentence that it may be."""
        self._engine = engine
        self._versions = versions
        self._model = model
        self._obstruct = obstruct
        self._metrics = metrics
        self._refusals: dict[str, str] = {}
        """By what was looked at: the trainer's base weights, the base model's answers, a version's answers."""
        self._known: dict[str, tuple[pb.Agreement, str]] = {}
        """Of the base model and of the version that was compared last, with the tenant whose it is."""

    @property
    def refusal(self) -> str:
        """Why this sampler is not ready; empty if it may be."""
        return next(iter(self._refusals.values()), "")

    def agreements(self, identity: Identity) -> list[pb.Agreement]:
        """Return what was measured last, of the base model and, where it is the caller's, of a version."""
        known = [self._known[kind] for kind in sorted(self._known)]
        return [one for one, owner in known if not one.model.run_id or identity.is_peer or identity.tenant == owner]

    def check(self) -> None:
        """Raise BaseMismatch where this sampler does not compute what its trainer computes."""
        if self.refusal:
            raise errors.BaseMismatch(self.refusal)

    async def welcomed(self) -> None:
        """Note that the trainer has the same base weights."""
        await self._set(_TRAINER, "")

    async def turned_away(self, reason: str) -> None:
        """Note that the trainer has other base weights."""
        await self._set(_TRAINER, reason)

    async def measure(self, probe: pb.Probe) -> pb.Agreement | None:
        """Score a probe's tokens and compare; None where that cannot be done now."""
        ref = model_ref_from_proto(probe.model)
        tokens = token_ids_from_proto(probe.tokens, "tokens")
        theirs = tensor_from_proto(probe.logprobs, "logprobs", {"float32"})
        agreement = pb.Agreement(
            model=served_model_to_proto(ServedModel(self._model.name, ref.run_id, ref.version or 0)),
            bound=agreement_bound(probe.dtype, self._model.dtype),
            trainer_dtype=probe.dtype,
            sampler_dtype=self._model.dtype,
        )
        owner = ""
        try:
            ours, owner = await self._score(ref, tokens)
        except errors.InvalidArgument as error:
            agreement.refusal = f"the sampler cannot score what the trainer scores ({error}); give both the same model"
        except errors.PacelineError as error:
            _log.warning("not compared with the trainer", weights=str(ref), reason=error.reason, error=error.message)
            return None
        else:
            _compare(agreement, ours, theirs)
        kind = "base" if ref.is_base else "version"
        self._known[kind] = (agreement, owner)
        self._metrics.logprob_difference.labels(kind, "mean").set(agreement.mean_difference)
        self._metrics.logprob_difference.labels(kind, "max").set(agreement.max_difference)
        log = _log.error if agreement.refusal else _log.info
        log(
            "compared with the trainer",
            weights=str(ref),
            mean=agreement.mean_difference,
            max=agreement.max_difference,
            bound=agreement.bound,
            refusal=agreement.refusal,
        )
        await self._set(kind, agreement.refusal)
        return agreement

    async def _score(self, ref: ModelRef, tokens: Array) -> tuple[Array, str]:
        """Return the log-probability of each token but the first, and the tenant whose weights gave them."""
        if not self._versions.serves(ref):
            raise errors.EngineUnavailable("the engine has other weights now")
        async with self._versions.lease(ref, PEER_TENANT) as lease:
            logprobs = await self._engine.compute_logprobs(tokens.tolist(), lease.adapter, PEER_TENANT)
            if not lease.is_current():
                raise errors.EngineUnavailable("the weights changed meanwhile")
            entry = None if ref.is_base else self._versions.find(VersionKey.of(lease.served))
            return logprobs[1:], entry.tenant if entry is not None else ""

    async def _set(self, what: str, refusal: str) -> None:
        before = self.refusal
        self._refusals.pop(what, None)
        if refusal:
            self._refusals[what] = refusal
        if self.refusal != before:
            await self._obstruct(self.refusal)


def _compare(agreement: pb.Agreement, ours: Array, theirs: Array) -> None:
    difference = np.abs(ours.astype(np.float64) - theirs.astype(np.float64))
    finite = difference[np.isfinite(difference)]
    agreement.tokens = len(finite)
    if len(finite):
        agreement.mean_difference, agreement.max_difference = float(finite.mean()), float(finite.max())
    if len(finite) < len(difference):
        agreement.refusal = (
            f"{len(difference) - len(finite)} of {len(difference)} log-probabilities are no finite numbers at the "
            "trainer or the sampler: give both the same model, or one that both engines compute"
        )
    elif agreement.mean_difference > agreement.bound:
        agreement.refusal = (
            f"the log-probabilities of trainer and sampler differ by {agreement.mean_difference:.2g} in the mean over "
            f"{agreement.tokens} tokens, and {agreement.bound:.2g} is what {agreement.trainer_dtype} and "
            f"{agreement.sampler_dtype} explain: give both the same model, or one that both engines compute alike"
        )
