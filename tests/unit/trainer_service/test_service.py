"""What the trainer service does itself: its metrics of the certificate, and the engine that it restarts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from paceline.errors import EngineUnavailable
from paceline.rpc.server import Readiness
from paceline.types import ModelCertificate, ModelInfo, PackingMode
from trainer_service.service import TrainerService
from trainer_service.service_metrics import add_certificate_metrics
from trainer_service.settings import TrainerSettings

CERTIFICATE = ModelCertificate(
    packing=PackingMode.ONE_SEQUENCE,
    attention="sdpa",
    reason="model.layers.0.mamba (BambaMixer) gives different results where sequences share a pass.",
    tokens=126,
    logprob_difference=1e-6,
    logprob_bound=1e-4,
    gradient_difference=2e-6,
    gradient_bound=2e-4,
    seconds=1.5,
)


def test_there_is_nothing_until_a_model_is_loaded_and_then_what_was_measured():
    loaded: list[ModelInfo] = []

    def describe() -> ModelInfo:
        if not loaded:
            raise EngineUnavailable("the engine has not started.")
        return loaded[-1]

    registry = CollectorRegistry()
    add_certificate_metrics(describe, registry)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"paceline_trainer_certificate_{name}", labels)

    assert (value("seconds"), value("packs", attention="sdpa")) == (None, None)
    loaded.append(ModelInfo("tiny", 64, 100, "float32", 8, 2, certificate=CERTIFICATE))
    assert (value("difference", of="logprobs"), value("bound", of="logprobs")) == (1e-6, 1e-4)
    assert (value("difference", of="gradients"), value("bound", of="gradients")) == (2e-6, 2e-4)
    assert (value("seconds"), value("packs", attention="sdpa")) == (1.5, 0)


async def test_an_engine_that_dies_while_the_service_stops_is_not_replaced(tmp_path, monkeypatch):
    settings = TrainerSettings(model="tiny", checkpoint_dir=tmp_path, staging_dir=tmp_path, insecure=True)
    service, replaced = TrainerService(settings, CollectorRegistry()), []
    service._readiness = Readiness(service.service_names)

    async def save():
        service._engine_exited(-9)
        await service._background.finish()

    async def replace():
        replaced.append(True)

    monkeypatch.setattr(service._registry, "save", save)
    monkeypatch.setattr(service, "_retry_restart", replace)
    monkeypatch.setattr(service, "_log_ready", lambda _: None)
    await service.stop()
    assert not replaced
