"""A service never starts open because its credential is empty."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from gateway.settings import GatewaySettings
from sampler_service.settings import SamplerSettings
from trainer_service.settings import TrainerSettings

_SERVICES = [
    (TrainerSettings, {"model": "m"}),
    (SamplerSettings, {"model": "m"}),
    (GatewaySettings, {"keys_file": "k"}),
]


@pytest.mark.parametrize(("settings", "other"), _SERVICES)
@pytest.mark.parametrize("credential", ["", " ", "short", "ä" * 32, "line\nline" * 4])
def test_a_credential_that_is_none_is_refused(settings, other, credential, tmp_path):
    with pytest.raises(ValidationError, match="credential"):
        settings(credential=credential, **other)
    file = tmp_path / "credential"
    file.write_text(credential)
    with pytest.raises(ValidationError, match="credential"):
        settings(credential_file=file, **other)


@pytest.mark.parametrize(("settings", "other"), _SERVICES)
def test_a_file_without_content_or_none_at_all_is_refused(settings, other, tmp_path):
    for path in ("/dev/null", tmp_path / "missing", tmp_path):
        with pytest.raises(ValidationError, match="credential"):
            settings(credential_file=path, **other)


@pytest.mark.parametrize("settings", [TrainerSettings, SamplerSettings])
def test_without_a_credential_only_this_machine_is_listened_to(settings):
    assert settings(model="m", insecure=True, listen="127.0.0.1:1").secret == ""
    for address in ("0.0.0.0:1", "[::]:1", "10.0.0.1:1"):
        with pytest.raises(ValidationError, match="insecure"):
            settings(model="m", insecure=True, listen=address)


@pytest.mark.parametrize(("settings", "other"), _SERVICES)
def test_a_credential_with_a_newline_at_its_end_is_taken(settings, other, tmp_path):
    file = tmp_path / "credential"
    file.write_text("c" * 32 + "\n")
    assert settings(credential_file=file, **other).secret == "c" * 32
