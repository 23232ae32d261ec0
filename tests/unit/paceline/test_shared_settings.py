"""Settings that a shared copy of the base weights does not allow are refused at startup, with a reason."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from gateway.settings import GatewaySettings
from paceline.up.plan import UpOptions, make_plans
from sampler_service.engine.factory import create_service_engine
from sampler_service.settings import SamplerSettings
from trainer_service.settings import TrainerSettings


@pytest.mark.parametrize("settings", [TrainerSettings, SamplerSettings, GatewaySettings])
def test_help_says_what_every_setting_means(settings):
    assert [name for name, field in settings.model_fields.items() if not field.description] == []


def test_ranks_take_no_lent_weights(tmp_path):
    with pytest.raises(ValidationError, match="ranks=1"):
        TrainerSettings(model="tiny", insecure=True, base_dir=tmp_path, ranks=2)


def test_weights_are_written_in_place_by_the_bridge_shared_alone():
    with pytest.raises(ValidationError, match="bridge=shared"):
        SamplerSettings(model="tiny", insecure=True, in_place="paused")
    with pytest.raises(ValidationError, match="in_place"):
        SamplerSettings(model="tiny", insecure=True, bridge="shared", serves="models")


@pytest.mark.parametrize("in_place", ["off", "paused"])
def test_the_engine_hf_lends_no_weights(in_place):
    settings = SamplerSettings(model="tiny", insecure=True, bridge="shared", engine="hf", in_place=in_place)
    with pytest.raises(ValueError, match="engine=vllm"):
        create_service_engine(settings.mode, settings.engine_options)


def test_a_model_in_parts_is_not_lent():
    settings = SamplerSettings(model="tiny", insecure=True, bridge="shared", tensor_parallel_size=2)
    with pytest.raises(ValueError, match="parallel sizes"):
        _ = settings.engine_options


def test_up_gives_both_services_one_directory_and_one_dtype(tmp_path):
    trainer, sampler, _ = make_plans(UpOptions("tiny", bridge="shared"), tmp_path)
    directory = trainer.environment["PACELINE_TRAINER_BASE_DIR"]
    assert sampler.environment["PACELINE_SAMPLER_BASE_DIR"] == directory
    assert trainer.environment["PACELINE_TRAINER_DTYPE"] == sampler.environment["PACELINE_SAMPLER_DTYPE"] != "auto"
    other, _, _ = make_plans(UpOptions("tiny", bridge="shared"), tmp_path / "other")
    assert other.environment["PACELINE_TRAINER_BASE_DIR"] != directory
