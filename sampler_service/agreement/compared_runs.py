"""Which runs' versions agree with the trainer. One that does not is refused, and no other run."""

from __future__ import annotations

from dataclasses import dataclass

from paceline import errors
from paceline.types import ModelRef
from paceline.weights.v1 import weight_service_pb2 as pb
from sampler_service.transports.base import is_for


@dataclass(slots=True)
class _Run:
    """What is known of a run. Versions from `refused_from` up to `agreed_at` did not agree, or were not compared."""

    owner: str = ""
    agreement: pb.Agreement | None = None
    """Of the version that was compared last."""
    error: errors.PacelineError | None = None
    """Why versions are refused; it names the one that was compared."""
    refused_from: int = 0
    agreed_at: int | None = None
    """The version that agreed; None before one does, and again after a later one did not."""

    @property
    def is_refused(self) -> bool:
        return self.error is not None and self.agreed_at is None

    def refuses(self, version: int | None) -> bool:
        """Whether a version, None for the newest, is refused."""
        if self.error is None or self.agreed_at is None:
            return self.is_refused
        return version is not None and self.refused_from <= version < self.agreed_at

    def disagreed(self, version: int, error: errors.PacelineError) -> None:
        self.refused_from = min(self.refused_from, version) if self.is_refused else version
        self.error = error
        if self.agreed_at is not None and version > self.agreed_at:  # else its answer comes late
            self.agreed_at = None


class ComparedRuns:
    """The verdict on each run of which a version was compared, until the run is deleted."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}

    def num_refused(self) -> int:
        """Return how many runs are refused."""
        return sum(run.is_refused for run in self._runs.values())

    def agreements(self, tenant: str) -> list[pb.Agreement]:
        """Return what was measured last, of each run that the tenant may know of."""
        runs = [run for _, run in sorted(self._runs.items()) if is_for(run.owner, tenant)]
        return [run.agreement for run in runs if run.agreement is not None]

    def is_refused(self, run_id: str) -> bool:
        """Whether no version of a run is served before a later one agrees."""
        run = self._runs.get(run_id)
        return run is not None and run.is_refused

    def check(self, ref: ModelRef, tenant: str) -> None:
        """Raise NonFinite or BaseMismatch where a version of the tenant's own is refused.

        Of another tenant's run nothing is said: who asks for that finds no such run.
        """
        run = self._runs.get(ref.run_id)
        if run is not None and run.error is not None and is_for(run.owner, tenant) and run.refuses(ref.version):
            raise type(run.error)(run.error.message, field=run.error.field, metadata=run.error.metadata)

    def begin(self, run_id: str) -> None:
        """Note that a run exists of which a version is being compared."""
        self._runs.setdefault(run_id, _Run())

    def note(self, agreement: pb.Agreement, owner: str, *, has_diverged: bool) -> bool:
        """Note what came of comparing a version; False where the run was deleted since that began."""
        run = self._runs.get(agreement.model.run_id)
        if run is None:
            return False
        run.owner, run.agreement = owner, agreement
        if agreement.refusal:
            run.disagreed(agreement.model.version, _error(agreement, has_diverged=has_diverged))
        else:
            run.agreed_at = agreement.model.version
        return True

    def forget(self, run_id: str) -> None:
        """Forget a run that was deleted."""
        self._runs.pop(run_id, None)


def _error(agreement: pb.Agreement, *, has_diverged: bool) -> errors.PacelineError:
    model = agreement.model
    metadata = {"run_id": model.run_id, "version": str(model.version)}
    if agreement.tokens:
        metadata |= {"mean_difference": f"{agreement.mean_difference:.6g}", "bound": f"{agreement.bound:.6g}"}
    kind = errors.NonFinite if has_diverged else errors.BaseMismatch
    return kind(
        f"version {model.version} of {model.run_id} is not served, nor another before a later one agrees with the "
        f"trainer: {agreement.refusal}",
        field="model",
        metadata=metadata,
    )
