"""How a service reports settings that it cannot start with: the variable, the value, what to do."""

from __future__ import annotations

import pytest

from gateway.settings import GatewaySettings
from paceline.settings import load_settings
from sampler_service.settings import SamplerSettings

_SECRET = "PACELINE_SAMPLER_CREDENTIAL"


def said(monkeypatch, settings, **variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        load_settings(settings, [])
    return str(ended.value)


def test_what_is_not_set_is_named_as_it_is_set(monkeypatch):
    assert said(monkeypatch, SamplerSettings) == "PACELINE_SAMPLER_MODEL or --model: is not set"


def test_a_wrong_value_is_named_with_its_variable(monkeypatch):
    told = said(monkeypatch, GatewaySettings, PACELINE_GATEWAY_LISTEN="here", PACELINE_GATEWAY_INSECURE="true")
    assert told == "PACELINE_GATEWAY_LISTEN or --listen is 'here': here is not an address; write host:port"


def test_a_secret_is_not_shown(monkeypatch):
    told = said(monkeypatch, SamplerSettings, PACELINE_SAMPLER_MODEL="m", PACELINE_SAMPLER_CREDENTIAL="short-secret")
    assert "must be at least 16" in told
    assert "short-secret" not in told


@pytest.mark.parametrize(
    ("variable", "told"),
    [
        ("PACELINE_SAMPLER_MODLE", "did you mean PACELINE_SAMPLER_MODEL?"),
        ("PACELINE_SAMPLER_Q", "known are: PACELINE_SAMPLER_"),
    ],
)
def test_a_misspelt_variable_is_told_with_the_nearest(monkeypatch, variable, told):
    assert f"unknown variable {variable}; {told}" in said(monkeypatch, SamplerSettings, **{variable: "1"})
