"""How far apart a trainer's and a sampler's log-probabilities may be.

Measured with stock implementations on a CPU, on SmolLM2-135M, 30 layers of width 576: transformers against vLLM in
float32, on text, a mean difference of 6e-6; float32 against bfloat16 in transformers, 256 random tokens, 8.3e-2 (4e-2
on text, whose tokens are likelier). The bounds leave room for other models. Errors of layers are independent, and
grow by the root of their number: twice for 120 layers. In float32, sums over the width are added in another order and
their error grows by the root of the width, by 5 up to 16,384; other kernels and tokens get a factor of 3: together 30.
In bfloat16 sums are kept in float32 and results alone are rounded; where both sides round, the two errors add by their
squares, 1.4: together 3. What is wrong differs by more: another model by whole nats, a bias that is left out by tenths.
"""

from __future__ import annotations

from math import inf

from paceline.weights.v1 import weight_service_pb2 as pb

_FLOAT32 = 6e-6 * 30
_HALF = 8.3e-2 * 3

STATISTICS = ("mean", "max")
"""What metrics show of the absolute differences."""

PROBE_TOKENS = 256
"""Tokens that are scored, or as many as fit into the context."""


def agreement_bound(*dtypes: str) -> float:
    """Return what the mean absolute difference may be between services that compute in these dtypes."""
    return _FLOAT32 if set(dtypes) == {"float32"} else _HALF


def shown_difference(agreement: pb.Agreement, statistic: str) -> float:
    """Return one of STATISTICS as metrics show it: infinite where something was no finite number, or not scored."""
    difference = agreement.mean_difference if statistic == "mean" else agreement.max_difference
    is_measured = not agreement.refusal or agreement.mean_difference > agreement.bound
    return difference if is_measured else inf
