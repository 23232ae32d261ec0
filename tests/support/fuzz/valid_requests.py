"""A valid, tiny request for each method that a tenant may call."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from paceline import codec
from paceline.codec.commands import execute_request
from paceline.types import AdamParams, Datum, ModelRef

ABOUT_NOTHING = frozenset(
    {"GetServerInfo", "GetTokenizer", "RenderConversations", "GetCapabilities", "GetUsage", "WhoAmI"}
)
"""Methods whose requests name nothing that a tenant owns."""
WITHOUT_VALID = frozenset({"WatchVersions", "UpdateWeights", "UploadCheckpoint"})
"""Methods without one valid request: only samplers watch, only a trainer pushes a version, and an upload has parts."""
COMMANDS = frozenset({"ForwardBackward", "OptimStep", "SaveCheckpoint", "LoadCheckpoint", "PublishWeights"})
"""Methods whose requests are a run's commands, which Execute sends too."""
TOKENS = np.arange(1, 5, dtype=np.int32)
CONVERSATION = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'


@dataclass
class Owned:
    """A tenant's run, a checkpoint of its state and one for sampling, and where the run is."""

    run_id: str
    state: str
    sampler: str
    version: int = 1
    """The newest version."""
    last_seq_id: int = 0

    @property
    def names(self) -> list[str]:
        return [self.run_id, self.state, self.sampler]


def valid_request(method: MethodDescriptor, owned: Owned, seq_id: int = 1) -> Message:
    """Return a valid request about what is owned. A new method fails here until it has an entry."""
    version = codec.model_ref_to_proto(ModelRef(run_id=owned.run_id, version=owned.version))
    tokens = codec.tensor_to_proto(TOKENS)
    run = {"run_id": owned.run_id}
    command = {**run, "seq_id": seq_id}
    inputs = {"target_tokens": TOKENS.astype(np.int64), "weights": np.ones(len(TOKENS), np.float32)}
    data = [codec.datum_to_proto(Datum(TOKENS, inputs))]
    fields = {
        "CreateRun": {"request_id": "hostile", "like_checkpoint": owned.state},
        "GetRun": run,
        "AttachRun": {**run, "request_id": "hostile"},
        "UpdateRun": {**run, "set": {"name": "hostile"}},
        "DeleteRun": run,
        "ForwardBackward": {**command, "data": data, "loss_fn": "cross_entropy"},
        "OptimStep": {**command, "adamw": codec.optimizer_to_proto(AdamParams()).adamw},
        "Execute": {**command, "forward_backward": {"data": data, "loss_fn": "cross_entropy"}},
        "Follow": {**run, "max_seconds": 0},
        "SaveCheckpoint": {**command, "name": "b", "kind": 1, "overwrite": True},
        "LoadCheckpoint": {**command, "path": owned.state},
        "PublishWeights": command,
        "ListRuns": {},
        "ListCheckpoints": run,
        "ListVersions": run,
        "DeleteCheckpoint": {"path": owned.state},
        "DownloadCheckpoint": {"path": owned.state},
        "UploadCheckpoint": {"header": {**run, "name": "b"}},  # the first of its messages
        "SetCheckpointTtl": {"path": owned.sampler, "ttl_seconds": 3600},
        "Sample": {"model": version, "prompt": tokens, "params": {"max_tokens": 1}},
        "SampleStream": {"model": version, "prompt": tokens, "params": {"max_tokens": 1}},
        "ComputeLogprobs": {"model": version, "tokens": tokens},
        "CompleteText": {"model": version, "endpoint": 2, "body": b'{"prompt": [1], "max_tokens": 1}'},
        "LoadVersion": {"model": version},
        "UnloadVersion": {"model": version},
        "FetchVersion": {"model": version},
        "LogMetrics": {**run, "values": {"reward": 1.0}, "rollouts": [{"completion": "b"}], "request_id": "hostile"},
        "GetMetrics": run,
        "WatchMetrics": {**run, "max_seconds": 0},
        "GetRollouts": run,
        **{name: {} for name in ABOUT_NOTHING},
        "RenderConversations": {"conversations": [CONVERSATION]},
        "GetUsage": {"trained_since": "2026-01-31"} if method.input_type.fields else {},  # the sampler's has none
    }[method.name]
    return GetMessageClass(method.input_type)(**fields)


def put_command(execute: Message, method: MethodDescriptor, owned: Owned) -> None:
    """Have an Execute send the command of another method."""
    asked = valid_request(method, owned)
    sent = execute_request(asked, execute.run_id, execute.seq_id, execute.attachment)
    if not execute.HasField("max_seconds"):
        sent.ClearField("max_seconds")
    execute.CopyFrom(sent)
