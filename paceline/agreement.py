"""How far apart a trainer's and a sampler's log-probabilities may be.

Measured with stock transformers against stock vLLM on a CPU (SmolLM2-135M, 30 layers of width 576, base model and
adapters): a mean difference of 6e-6 where both compute in float32, of 4e-2 where either computes in bfloat16, whichever
of the two. The bounds leave room for other models. Errors of layers are independent, so they grow by the root of their
number: twice for 120 layers. In float32, sums over the width are added in another order and their error grows by the
root of the width, by 5 up to 16,384; in bfloat16 sums are kept in float32 and results alone are rounded. Other kernels
on other hardware get a factor of 3 (float32) or 2 (bfloat16). Together 30, and 4. What is wrong differs by more:
another model by whole nats, a bias that is left out by tenths.
"""

from __future__ import annotations

_FLOAT32 = 6e-6 * 30
_HALF = 4e-2 * 4

PROBE_TOKENS = 256
"""Tokens that are scored, or as many as fit into the context."""


def agreement_bound(*dtypes: str) -> float:
    """Return what the mean absolute difference may be between services that compute in these dtypes."""
    return _FLOAT32 if set(dtypes) == {"float32"} else _HALF
