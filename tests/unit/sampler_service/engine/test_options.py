"""How a sampler works follows from its settings, and what does not exist is refused."""

from __future__ import annotations

import pytest

from sampler_service.engine.factory import create_engine, create_service_engine
from sampler_service.engine.options import EngineOptions, Mode, Weights

MODES = {
    ("stream", "adapters", "off"): (Weights.ADAPTERS, "adapters", False),
    ("collective", "adapters", "off"): (Weights.ADAPTERS, "adapters", False),
    ("volume", "adapters", "off"): (Weights.ADAPTERS, "adapters", True),
    ("shared", "adapters", "off"): (Weights.ADAPTERS, "adapters", False),
    ("stream", "models", "off"): (Weights.OVERWRITE, "models", False),
    ("volume", "models", "off"): (Weights.OVERWRITE, "models", True),
    ("restart", "adapters", "off"): (Weights.REBUILD, "models", True),
    ("restart", "models", "off"): (Weights.REBUILD, "models", True),
    ("shared", "adapters", "paused"): (Weights.WRITE, "models", True),
    ("shared", "adapters", "hogwild"): (Weights.WRITE, "models", True),
}


@pytest.mark.parametrize(("settings", "expected"), MODES.items(), ids=map(str, MODES))
def test_the_settings_say_how_a_sampler_works(settings, expected):
    mode = Mode.of("vllm", *settings)
    assert (mode.engine, mode.bridge) == ("vllm", settings[0])
    assert (mode.weights, mode.serves, mode.reads_volume) == expected


def test_the_engine_hf_overwrites_no_model(tmp_path):
    with pytest.raises(ValueError, match="bridge=restart"):
        create_service_engine(Mode("hf", "stream", Weights.OVERWRITE), EngineOptions(tmp_path, "m"))


def test_options_and_engine_names_are_checked(tmp_path):
    for wrong in ({"max_num_seqs": 0}, {"max_cpu_versions": 1, "max_active_versions": 2}):
        with pytest.raises(ValueError, match="give at least"):
            EngineOptions(tmp_path, "m", **wrong)
    with pytest.raises(ValueError, match="unknown engine"):
        create_engine("other", EngineOptions(tmp_path, "m"))
