"""Compares the trainer's and the sampler's log-probabilities of the same tokens, and describes what is wrong."""

from __future__ import annotations

import numpy as np

from paceline.types.training import Array
from paceline.weights.v1 import weight_service_pb2 as pb

_LARGEST = 1e30
"""Largest value that an Agreement's fields accept."""
_SAME_MODEL = "give both the same model, or one that both engines compute"
_TRAIN_AGAIN = "load an earlier checkpoint or make a new run, lower the learning rate, and publish again"
_OTHERS = "where other runs are refused, too, it is the sampler: tell its operator"


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
            f"the log-probabilities of trainer and sampler differ by {agreement.mean_difference:.2g} in the mean over "
            f"{agreement.tokens} tokens, and {agreement.bound:.2g} is what {agreement.trainer_dtype} and "
            f"{agreement.sampler_dtype} explain: "
            + (f"{_TRAIN_AGAIN}; {_OTHERS}" if of_run else f"{_SAME_MODEL} alike")
        )


def is_diverged(agreement: pb.Agreement, theirs: Array) -> bool:
    """Return whether the trainer's own log-probabilities of a run are not all finite; if so, record a refusal."""
    finite = int(np.isfinite(theirs).sum())
    if not agreement.model.run_id or finite == len(theirs):
        return False
    agreement.refusal = (
        f"the run has diverged: its weights give no finite log-probabilities ({len(theirs) - finite} of {len(theirs)} "
        f"are NaN or infinite on the trainer); {_TRAIN_AGAIN}"
    )
    return True
