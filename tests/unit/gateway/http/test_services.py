"""Calls for HTTP callers whose numbers do not fit the contract."""

from __future__ import annotations

import numpy as np
import pytest

from gateway.http.services import Services
from gateway.tenants import Tenants
from paceline import errors
from paceline.types import ModelRef, SamplingParams


@pytest.mark.parametrize(
    ("params", "options", "field"),
    [
        (SamplingParams(), {"num_samples": 2**40}, "num_samples"),
        (SamplingParams(top_k=2**40), {}, "params.top_k"),
        (SamplingParams(max_tokens=-1), {}, "params.max_tokens"),
    ],
)
async def test_a_number_that_its_field_cannot_hold_is_refused_before_the_call(params, options, field):
    services = Services(None, Tenants(), None, None)
    with pytest.raises(errors.OutOfRange) as caught:
        await services.sample("tenant", ModelRef(), np.array([1], np.int32), params, seconds=1, **options)
    assert caught.value.field == field
