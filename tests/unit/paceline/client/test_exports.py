"""What `import paceline` exports, and what it loads."""

import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import paceline

ROOT = Path(__file__).parents[4]

EXPORTS = frozenset(
    [
        "Account",
        "Acknowledgement",
        "AdafactorParams",
        "Adam8bitParams",
        "AdamCpuParams",
        "AdamParams",
        "AdapterGroup",
        "ApolloMiniParams",
        "ApolloParams",
        "Checkpoint",
        "CheckpointKind",
        "Datum",
        "ForwardBackwardOutput",
        "FullParameters",
        "LogprobsResult",
        "LoraConfig",
        "Metrics",
        "MetricsRow",
        "MetricsStream",
        "ModelCertificate",
        "ModelInfo",
        "ModelInput",
        "ModelRef",
        "OptimStepOutput",
        "PacelineFuture",
        "PackingMode",
        "PublishResult",
        "Quota",
        "RetryPolicy",
        "Rollout",
        "RolloutRow",
        "RowSource",
        "Run",
        "RunState",
        "SampleResult",
        "SampleStream",
        "SampledSequence",
        "SamplingClient",
        "SamplingParams",
        "ServedModel",
        "ServerCapabilities",
        "ServiceClient",
        "StopReason",
        "StreamedTokens",
        "SupportedModel",
        "Timeouts",
        "TopkLogprobs",
        "VersionSpan",
        "TrainingClient",
        "WeightStorage",
        "__version__",
        "errors",
    ]
)

SERVICE_METHODS = frozenset(
    [
        "close",
        "create_full_training_client",
        "create_lora_training_client",
        "create_sampling_client",
        "create_training_client_from_state",
        "create_training_client_from_state_with_optimizer",
        "delete_checkpoint",
        "delete_run",
        "download_checkpoint",
        "get_run",
        "get_server_capabilities",
        "get_training_client",
        "list_checkpoints",
        "list_runs",
        "metrics",
        "render_conversations",
        "rollouts",
        "set_checkpoint_ttl",
        "update_run",
        "upload_checkpoint",
        "watch_metrics",
        "whoami",
    ]
)

TRAINING_METHODS = frozenset(
    [
        "create_sampling_client",
        "discard_gradient",
        "forward",
        "forward_backward",
        "forward_backward_custom",
        "get_info",
        "get_tokenizer",
        "load_state",
        "load_state_with_optimizer",
        "log",
        "log_rollouts",
        "metrics",
        "optim_step",
        "publish_weights",
        "save_state",
        "save_weights_and_get_sampling_client",
        "save_weights_for_sampler",
    ]
)

SAMPLING_METHODS = ["compute_logprobs", "get_base_model", "get_tokenizer", "sample", "sample_stream"]

NOT_FOR_CLIENTS = {
    "blake3",
    "torch",
    "vllm",
    "transformers",
    "peft",
    "safetensors",
    "msgspec",
    "opentelemetry",
    "structlog",
    "pydantic",
    "pydantic_settings",
    "prometheus_client",
    "uvloop",
    "rich",
    "typer",
    "trainer_service",
    "sampler_service",
    "gateway",
}

SEND_NOTHING = {"create_sampling_client", "sample_stream", "watch_metrics"}
"""Methods that send nothing themselves."""


def public_methods(cls):
    return {name for name in dir(cls) if not name.startswith("_") and callable(getattr(cls, name))}


def with_twins(cls, names):
    return set(names) | {f"{name}_async" for name in names if name not in SEND_NOTHING and not gives_future(cls, name)}


def gives_future(cls, name):
    return str(inspect.signature(getattr(cls, name)).return_annotation).startswith("PacelineFuture[")


def test_the_package_exports_these_names():
    assert sorted(paceline.__all__) == sorted(EXPORTS)
    assert all(hasattr(paceline, name) for name in EXPORTS)


def test_what_can_be_awaited_has_no_twin_and_every_other_call_has_one():
    assert public_methods(paceline.ServiceClient) == with_twins(paceline.ServiceClient, SERVICE_METHODS)
    assert public_methods(paceline.TrainingClient) == with_twins(paceline.TrainingClient, TRAINING_METHODS)
    assert public_methods(paceline.SamplingClient) == with_twins(paceline.SamplingClient, SAMPLING_METHODS)


def test_every_exported_method_is_documented():
    for cls in (paceline.ServiceClient, paceline.TrainingClient, paceline.SamplingClient):
        assert [name for name in public_methods(cls) if not getattr(cls, name).__doc__] == []


def test_the_version_is_that_of_the_distribution():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert paceline.__version__ == project["version"]


def test_importing_the_client_needs_the_base_dependencies_alone():
    program = "import sys, paceline; print(*{name.partition('.')[0] for name in sys.modules})"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    assert {"paceline", "grpc", "numpy"} <= loaded
    assert loaded & NOT_FOR_CLIENTS == set()
