"""The base model's certificate in Prometheus metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from paceline.errors import EngineUnavailable
from paceline.types import ModelCertificate, ModelInfo, PackingMode
from trainer_service.service import CertificateMetrics

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
    CertificateMetrics(describe, registry)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"paceline_trainer_certificate_{name}", labels)

    assert (value("seconds"), value("packs", attention="sdpa")) == (None, None)
    loaded.append(ModelInfo("tiny", 64, 100, "float32", 8, 2, certificate=CERTIFICATE))
    assert (value("difference", of="logprobs"), value("bound", of="logprobs")) == (1e-6, 1e-4)
    assert (value("difference", of="gradients"), value("bound", of="gradients")) == (2e-6, 2e-4)
    assert (value("seconds"), value("packs", attention="sdpa")) == (1.5, 0)
