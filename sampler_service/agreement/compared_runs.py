"""Which runs' versions agree with the trainer. A run that does not agree is refused; other runs are not affected."""

from __future__ import annotations

from dataclasses import dataclass

from paceline import errors
from paceline.types import ModelRef
from paceline.weights.v1 import weight_service_pb2 as pb
from sampler_service.transports.base import is_for


@dataclass(slots=True)
class _Run:
    """Result for one run. Versions from `refused_from` up to `agreed_at` (exclusive) disagreed or were not compared."""

    owner: str = ""
    agreement: pb.Agreement | None = None
    """Agreement of the version that was compared last."""
    error: errors.PacelineError | None = None
    """Error with which versions are refused; it names the version that was compared."""
    refused_from: int = 0
    agreed_at: int | None = None
    """The version that agreed; None until one does, and None again once a later one disagrees."""

    @property
    def is_refused(self) -> bool:
        return self.error is not None and self.agreed_at is None

    def refuses(self, version: int | None) -> bool:
        """Return whether a version is refused; None means the newest."""
        if self.error is None or self.agreed_at is None:
            return self.is_refused
        return version is not None and self.refused_from <= version < self.agreed_at

    def disagreed(self, version: int, error: errors.PacelineError) -> None:
        self.refused_from = min(self.refused_from, version) if self.is_refused else version
        self.error = error
        # The result for a version older than `agreed_at` arrived late and does not revoke the agreement.
        if self.agreed_at is not None and version > self.agreed_at:
            self.agreed_at = None


class ComparedRuns:
    """Results for every run that had a version compared; a result is kept until its run is deleted."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}

    def num_refused(self) -> int:
        """Return the number of refused runs."""
        return sum(run.is_refused for run in self._runs.values())

    def agreements(self, tenant: str) -> list[pb.Agreement]:
        """Return the latest agreement of each run that the tenant may see."""
        runs = [run for _, run in sorted(self._runs.items()) if is_for(run.owner, tenant)]
        return [run.agreement for run in runs if run.agreement is not None]

    def is_refused(self, run_id: str) -> bool:
        """Return whether the run's versions are refused until a later one agrees."""
        run = self._runs.get(run_id)
        return run is not None and run.is_refused

    def check(self, ref: ModelRef, tenant: str) -> None:
        """Raise NonFinite or BaseMismatch if the version is refused and the run belongs to the tenant.

        Another tenant's run passes: the lookup that follows reports it as not found, which reveals nothing about it.
        """
        run = self._runs.get(ref.run_id)
        if run is not None and run.error is not None and is_for(run.owner, tenant) and run.refuses(ref.version):
            raise type(run.error)(run.error.message, field=run.error.field, metadata=run.error.metadata)

    def begin(self, run_id: str) -> None:
        """Register a run before a version of it is compared, so that `note` can tell whether it was deleted since."""
        self._runs.setdefault(run_id, _Run())

    def note(self, agreement: pb.Agreement, owner: str, *, has_diverged: bool) -> bool:
        """Record the result for a version. Return False if the run was deleted since the comparison started."""
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
