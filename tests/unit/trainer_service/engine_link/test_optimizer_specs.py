"""What each optimizer accepts, and what is refused by name."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest

from paceline.errors import OutOfRange
from paceline.rpc.bounds import check_message
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types.optimizers import OPTIMIZERS
from trainer_service.engine_link.optimizer_specs import OPTIMIZER_SPECS, Range, make_params, settings_of, spec_of

BAD = {
    "learning_rate": (-1e-9, math.nan, math.inf),
    "beta1": (-0.1, 1.0, math.nan),
    "beta2": (-0.1, 1.0, math.nan),
    "eps": (0.0, -1e-8, 1e-31, math.inf),
    "weight_decay": (-0.1, math.inf),
    "grad_clip_norm": (-1.0, math.nan),
    "decay_exponent": (-0.1, 1.1, math.nan),
    "eps1": (0.0, -1e-30, math.inf),
    "eps2": (-1e-3, math.nan),
    "clip_threshold": (-1.0, math.inf),
    "rank": (0,),
    "scale": (-1.0, math.inf),
    "update_interval": (0,),
    "norm_growth_limit": (0.99, -1.0, math.inf),
    "seed": (-1, 1 << 64),
}
GOOD = {
    "learning_rate": 0.0,
    "beta1": 0.0,
    "beta2": 0.0,
    "eps": 1e-30,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
    "decay_exponent": 0.0,
    "eps1": 1e-30,
    "eps2": 0.0,
    "clip_threshold": 0.0,
    "rank": 1,
    "scale": 0.0,
    "update_interval": 1,
    "norm_growth_limit": 0.0,
}
SETTINGS = [
    (name, setting.name) for name, kind in OPTIMIZERS.items() for setting in fields(kind) if setting.type != "bool"
]


@pytest.mark.parametrize(("name", "setting"), SETTINGS)
def test_a_setting_outside_its_range_is_refused_by_name(name, setting):
    for value in BAD[setting]:
        with pytest.raises(OutOfRange) as caught:
            OPTIMIZER_SPECS[name].check(replace(OPTIMIZERS[name](), **{setting: value}))
        assert caught.value.field == f"{name}.{setting}"


@pytest.mark.parametrize(
    ("name", "setting"), [pair for pair in SETTINGS if OPTIMIZER_SPECS[pair[0]].ranges[pair[1]] == Range()]
)
@pytest.mark.parametrize("value", [-1e-9, 1e10])
def test_negative_and_large_numbers_are_told_the_same_range(name, setting, value):
    with pytest.raises(OutOfRange, match=r"must be from 0 to 1e\+06$") as caught:
        check_message(pb.OptimStepRequest(**{name: {setting: value}}))
    assert caught.value.field == f"{name}.{setting}"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_defaults_and_the_ends_of_the_ranges_are_taken(name):
    kind = OPTIMIZERS[name]
    OPTIMIZER_SPECS[name].check(kind())
    OPTIMIZER_SPECS[name].check(kind(**{s.name: GOOD[s.name] for s in fields(kind) if s.name in GOOD}))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_settings_as_plain_numbers_make_the_same_settings(name):
    params = OPTIMIZERS[name](learning_rate=0.125)
    assert spec_of(params).name == name
    assert make_params(name, settings_of(params)) == params


def test_every_optimizer_of_the_contract_is_specified():
    assert OPTIMIZER_SPECS.keys() == OPTIMIZERS.keys()
