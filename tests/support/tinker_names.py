"""docs/tinker.md: the public names of Tinker's client beside those of ours, taken from both packages."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import tinker

import paceline

CLIENTS = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "APIFuture")
TYPES = (
    "Datum",
    "ModelInput",
    "SamplingParams",
    "AdamParams",
    "LoraConfig",
    "ForwardBackwardOutput",
    "OptimStepResponse",
    "SampleResponse",
    "SampledSequence",
    "Checkpoint",
    "TrainingRun",
    "GetServerCapabilitiesResponse",
    "SupportedModel",
)
OURS = {
    "RestClient": "ServiceClient",
    "APIFuture": "PacelineFuture",
    "OptimStepResponse": "OptimStepOutput",
    "SampleResponse": "SampleResult",
    "TrainingRun": "Run",
    "GetServerCapabilitiesResponse": "ServerCapabilities",
}
"""Classes of ours with another name."""

_HUB = "a service of Tinker's own site"
INSTEAD = {
    "ServiceClient.copy_weights": "`ServiceClient.create_training_client_from_state`",
    "ServiceClient.create_custom_loss": "`TrainingClient.forward_backward_custom`, on the client",
    "ServiceClient.create_rest_client": "absent: `ServiceClient` has these calls itself",
    "ServiceClient.get_console_url": f"absent: {_HUB}",
    "ServiceClient.get_telemetry": "absent: nothing is reported to anybody",
    "ServiceClient.holder": "absent: an internal of Tinker's",
    "TrainingClient.get_console_url": f"absent: {_HUB}",
    "TrainingClient.get_telemetry": "absent: nothing is reported to anybody",
    "TrainingClient.save_weights_external": "`ServiceClient.download_checkpoint`",
    "SamplingClient.create": "`ServiceClient.create_sampling_client`",
    "SamplingClient.from_sampler_handle": "absent: a client can be pickled",
    "SamplingClient.get_sampler_handle": "absent: a client can be pickled",
    "SamplingClient.get_telemetry": "absent: nothing is reported to anybody",
    "SamplingClient.on_queue_state_change": "absent: the log says what a call waits for",
    "RestClient.assign_session_project": "absent: there are no sessions",
    "RestClient.copy_weights": "`ServiceClient.create_training_client_from_state`",
    "RestClient.delete_checkpoint": "`ServiceClient.delete_checkpoint`, by its path",
    "RestClient.list_checkpoints": "same; `run_id` is the run's",
    "RestClient.delete_checkpoint_from_tinker_path": "`ServiceClient.delete_checkpoint`",
    "RestClient.export_session_trace": "absent: there are no sessions",
    "RestClient.get_audit_log": "absent: the gateway's log has every call",
    "RestClient.get_billing_usage": "absent: there are no bills; `ServiceClient.whoami` has the quotas",
    "RestClient.get_current_checkpoint_storage_usage": "`ServiceClient.whoami`, whose quotas have it",
    "RestClient.get_external_weights_urls": "`ServiceClient.download_checkpoint`",
    "RestClient.get_sampler": "absent: there are no sampling sessions",
    "RestClient.get_session": "absent: there are no sessions",
    "RestClient.get_telemetry": "absent: nothing is reported to anybody",
    "RestClient.get_training_run": "`ServiceClient.get_run`",
    "RestClient.get_training_run_by_tinker_path": "`ServiceClient.get_run` with the path's run",
    "RestClient.get_weights_info_by_tinker_path": "`ServiceClient.list_checkpoints`",
    "RestClient.list_sessions": "absent: there are no sessions",
    "RestClient.list_training_runs": "`ServiceClient.list_runs`",
    "RestClient.list_user_checkpoints": "`ServiceClient.list_checkpoints`",
    "RestClient.publish_checkpoint_from_tinker_path": f"absent: {_HUB}",
    "RestClient.search_sessions": "absent: there are no sessions",
    "RestClient.set_checkpoint_ttl_from_tinker_path": "`ServiceClient.set_checkpoint_ttl`",
    "RestClient.unpublish_checkpoint_from_tinker_path": f"absent: {_HUB}",
    "APIFuture.coroutine": "absent: a future can be awaited",
    "APIFuture.future": "absent: a future can be awaited, from any thread",
    "Datum.model_input_spans": "absent: provenance is not recorded",
    "Datum.loss_fn_input_spans": "absent: provenance is not recorded",
    "Datum.with_provenance": "absent: provenance is not recorded",
    "ModelInput.append": "absent: add lists, then `ModelInput.from_ints`",
    "ModelInput.append_int": "absent: add lists, then `ModelInput.from_ints`",
    "ModelInput.chunks": "`ModelInput.tokens`: there are no images",
    "ModelInput.empty": "absent: `ModelInput.from_ints([])`",
    "ForwardBackwardOutput.loss_fn_output_type": "absent: `loss_fn_outputs` are dicts of arrays",
    "OptimStepResponse.metrics": "`OptimStepOutput.grad_norm`, `OptimStepOutput.learning_rate` and others",
    "SampleResponse.prompt_alt_tokens": "absent: there are no images",
    "SampleResponse.prompt_logprobs_np": "`SampleResult.prompt_logprobs`, an array",
    "SampleResponse.target_prompt_logprobs": "`SamplingClient.compute_logprobs`",
    "SampleResponse.topk_prompt_logprobs_np": "`SampleResult.topk_prompt_logprobs`, arrays",
    "SampledSequence.logprobs_np": "`SampledSequence.logprobs`, an array",
    "SampledSequence.sequence_id": "absent: StableReinforce's records are not kept",
    "SampledSequence.tokens_np": "`SampledSequence.tokens`, an array",
    "SampledSequence.topk_logprobs_np": "`SampledSequence.topk_logprobs`, arrays",
    "Checkpoint.checkpoint_id": "`Checkpoint.name`",
    "Checkpoint.checkpoint_type": "`Checkpoint.kind`",
    "Checkpoint.expires_at": "`Checkpoint.expire_time`",
    "Checkpoint.public": f"absent: {_HUB}",
    "Checkpoint.time": "`Checkpoint.create_time`",
    "Checkpoint.tinker_path": "`Checkpoint.path`",
    "Checkpoint.user_metadata": "absent: a run has `Run.user_metadata`",
    "TrainingRun.corrupted": "`Run.state` and `Run.damage`",
    "TrainingRun.is_lora": "`Run.parameters`, a `LoraConfig` or `FullParameters`",
    "TrainingRun.last_checkpoint": "`Run.latest_state_checkpoint`",
    "TrainingRun.last_request_time": "absent",
    "TrainingRun.last_sampler_checkpoint": "`ServiceClient.list_checkpoints`",
    "TrainingRun.lora_rank": "`Run.parameters`",
    "TrainingRun.model_owner": "absent: a tenant sees its own runs alone",
    "TrainingRun.training_run_id": "`Run.run_id`",
    "SupportedModel.max_context_length": "`ModelInfo.max_context_length` of `SupportedModel.model`",
}
"""What to write where Paceline has not the same name."""


def names(cls: type) -> list[str]:
    """Return the public names that a class of Tinker's defines, except the `_async` twins, which it deprecates."""
    own = {name for base in cls.__mro__ if base.__module__.startswith("tinker") for name in vars(base)}
    if hasattr(cls, "model_fields"):
        own |= set(cls.model_fields)
    if is_dataclass(cls):
        own |= {each.name for each in fields(cls)}
    hidden = {"model_config", "set_holder"}
    twins = {f"{name}_async" for name in own if name != "result"}
    return sorted(name for name in own - twins - hidden if not name.startswith("_"))


def missing_arguments(theirs: object, ours: object) -> list[str]:
    """Return the arguments of a method that ours does not have."""
    if not (callable(theirs) and callable(ours)):
        return []
    known = inspect.signature(ours).parameters
    return [name for name in inspect.signature(theirs).parameters if name not in known and name not in {"self", "cls"}]


def told() -> Iterator[tuple[str, str]]:
    """Yield each name of Tinker's, and what it is with Paceline."""
    for class_name in (*CLIENTS, *TYPES):
        theirs = getattr(tinker, class_name, None) or getattr(tinker.types, class_name)
        ours = getattr(paceline, OURS.get(class_name, class_name))
        for name in names(theirs):
            key = f"{class_name}.{name}"
            if key in INSTEAD:
                yield key, INSTEAD[key]
            elif has(ours, name):
                without = missing_arguments(getattr(theirs, name, None), getattr(ours, name, None))
                yield key, f"same, without {', '.join(f'`{each}`' for each in without)}" if without else "same"
            else:
                yield key, "?"


def has(cls: type, name: str) -> bool:
    """Return whether a class of ours has a public name: a method, a property or a field."""
    return hasattr(cls, name) or (is_dataclass(cls) and name in {each.name for each in fields(cls)})


def table() -> str:
    """Return the page's table."""
    rows = [f"| `{name}` | {ours} |" for name, ours in told()]
    return "\n".join((f"| Tinker's SDK {tinker.__version__} | Paceline |", "|---|---|", *rows, ""))
