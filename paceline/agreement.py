"""Bounds on the difference between a trainer's and a sampler's log-probabilities.

The bounds start from measurements of stock implementations on a CPU with SmolLM2-135M (30 layers of width 576).
Transformers against vLLM in float32, on text: mean difference 6e-6. Float32 against bfloat16 in transformers, 256
random tokens: 8.3e-2 (4e-2 on text, whose tokens are likelier). Other models may differ by more. Errors of layers are
independent and grow with the square root of their number: a factor of 2 for 120 layers. In float32, sums over the width
are added in a different order and their error grows with the square root of the width, a factor of 5 up to 16,384;
other kernels and tokens get a factor of 3: together 30. In bfloat16, sums are kept in float32 and only results are
rounded; if both sides round, the two errors add in quadrature, a factor of 1.4: together 3. Real mismatches are larger:
whole nats for another model, tenths for a missing bias.
"""

from __future__ import annotations

from math import inf

from paceline.weights.v1 import weight_service_pb2 as pb

_FLOAT32 = 6e-6 * 30
_HALF = 8.3e-2 * 3

STATISTICS = ("mean", "max")
"""Statistics of the absolute differences that metrics expose."""

PROBE_TOKENS = 256
"""Number of tokens that are scored; fewer if the context is shorter."""


def agreement_bound(*dtypes: str) -> float:
    """Return the bound on the mean absolute difference between services that compute in these dtypes."""
    return _FLOAT32 if set(dtypes) == {"float32"} else _HALF


def shown_difference(agreement: pb.Agreement, statistic: str) -> float:
    """Return one of STATISTICS for the metrics: infinite if a value was not finite, or was not scored."""
    difference = agreement.mean_difference if statistic == "mean" else agreement.max_difference
    is_measured = not agreement.refusal or agreement.mean_difference > agreement.bound
    return difference if is_measured else inf
