"""Call the service without the client, with only grpcio and the generated stubs.

    python examples/raw_stubs.py

One training step, one publish, one stream of tokens, in the order in which any language would do it; then the same run
as its next client would go on: attach, have the trainer take commands, and follow them. Needs a running gateway:
`make up` in another terminal prints the two variables to export.
"""

from __future__ import annotations

import os
import struct
import sys
import uuid

import grpc

from paceline.sampler.v1 import sampler_service_pb2 as sampler
from paceline.sampler.v1.sampler_service_pb2_grpc import SamplerServiceStub
from paceline.trainer.v1 import trainer_service_pb2 as trainer
from paceline.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from paceline.types.v1 import datum_pb2, lora_pb2, model_pb2, sampling_pb2, tensor_pb2

Metadata = tuple[tuple[str, str], ...]


def int32(*values: int) -> tensor_pb2.Tensor:
    """Encode a vector of int32: little-endian bytes with dtype and shape."""
    return tensor_pb2.Tensor(
        dtype=tensor_pb2.DTYPE_INT32, shape=[len(values)], data=struct.pack(f"<{len(values)}i", *values)
    )


def float32(*values: float) -> tensor_pb2.Tensor:
    """Encode a vector of float32."""
    return tensor_pb2.Tensor(
        dtype=tensor_pb2.DTYPE_FLOAT32, shape=[len(values)], data=struct.pack(f"<{len(values)}f", *values)
    )


def main() -> None:
    """Call both services through the gateway."""
    api_key = os.environ.get("PACELINE_API_KEY", "").strip()
    if not api_key:
        sys.exit("PACELINE_API_KEY is not set; set it to the API key, as `make up` prints it")
    key = (("authorization", f"Bearer {api_key}"),)
    with grpc.insecure_channel(os.environ.get("PACELINE_ADDRESS", "localhost:50050")) as channel:
        training = TrainerServiceStub(channel)
        run_id = train_and_sample(training, SamplerServiceStub(channel), key)
        attach_and_follow(training, key, run_id)
        training.DeleteRun(trainer.DeleteRunRequest(run_id=run_id), metadata=key, timeout=60)


def make_datum() -> datum_pb2.Datum:
    """Make one datum: position i of model_input predicts target_tokens[i]."""
    return datum_pb2.Datum(
        model_input=int32(40, 41, 42),
        loss_inputs={"target_tokens": int32(41, 42, 43), "weights": float32(0.0, 1.0, 1.0)},
    )


def train_and_sample(training: TrainerServiceStub, sampling: SamplerServiceStub, key: Metadata) -> str:
    """Take one step, publish, and stream from the version; return the run's id."""
    # Create a run, the adapter that is trained. The request_id makes the call safe to repeat.
    made = training.CreateRun(
        trainer.CreateRunRequest(request_id=uuid.uuid4().hex, lora=lora_pb2.LoraConfig(rank=8)),
        metadata=key,
        timeout=60,
    )
    run_id = made.run.run_id
    print(f"run {run_id}: {made.run.trainable_parameters} parameters on {made.run.base_model}")

    # A run's commands carry seq_id 1, 2, 3, ...: they execute in that order, and sending one twice does not execute it
    # twice.
    loss = training.ForwardBackward(
        trainer.ForwardBackwardRequest(run_id=run_id, seq_id=1, data=[make_datum()], loss_fn="cross_entropy"),
        metadata=key,
        timeout=60,
    )
    print(f"loss {loss.metrics['loss:sum']:.3f}")
    step = training.OptimStep(
        trainer.OptimStepRequest(run_id=run_id, seq_id=2, adamw=trainer.AdamwParams(learning_rate=1e-3)),
        metadata=key,
        timeout=60,
    )
    print(f"step {step.step}: gradient norm {step.grad_norm:.3f}, {step.milliseconds:.1f} ms")

    # Publishing makes an immutable version and sends it to the samplers.
    published = training.PublishWeights(
        trainer.PublishWeightsRequest(run_id=run_id, seq_id=3, wait_for=trainer.ACK_POLICY_ANY),
        metadata=key,
        timeout=60,
    )
    version = published.model.version
    print(f"version {version} published in {published.total_milliseconds:.0f} ms")

    request = sampler.SampleStreamRequest(
        model=model_pb2.ModelRef(version=model_pb2.VersionRef(run_id=run_id, version=version)),
        prompt=int32(40, 41, 42),
        params=sampling_pb2.SamplingParams(max_tokens=8, temperature=0.0),
    )
    for part in sampling.SampleStream(request, metadata=key, timeout=60):
        print(f"tokens {list(part.tokens)} from version {part.model.version}")
    return run_id


def attach_and_follow(training: TrainerServiceStub, key: Metadata, run_id: str) -> None:
    """Attach to a run, send commands without waiting for their end, and follow them to it."""
    # From now on commands of clients that attached earlier are refused. One that never attaches sends 0 and is not
    # checked, so send the number with every command. What an earlier client sent and did not see the end of is in
    # `outstanding`; WAIT waits for it up to wait_seconds, and CANCEL refuses what has not started.
    attached = training.AttachRun(
        trainer.AttachRunRequest(
            run_id=run_id,
            request_id=uuid.uuid4().hex,
            outstanding=trainer.OUTSTANDING_POLICY_WAIT,
            wait_seconds=30.0,
        ),
        metadata=key,
        timeout=60,
    )
    print(f"attachment {attached.attachment}; commands left by an earlier client: {len(attached.outstanding)}")
    first = attached.run.last_seq_id + 1

    # The step depends on the pass. What waits of a gradient is dropped by a message, DiscardGradient(), not by a bool.
    loss = trainer.ForwardBackwardRequest(data=[make_datum()], loss_fn="cross_entropy")
    step = trainer.OptimStepRequest(adamw=trainer.AdamwParams(learning_rate=1e-3), only_if_succeeded_since=first)
    discard = trainer.OptimStepRequest(discard_gradient=trainer.DiscardGradient())
    for request in (
        trainer.ExecuteRequest(seq_id=first, forward_backward=loss),
        trainer.ExecuteRequest(seq_id=first + 1, optim_step=step),
        trainer.ExecuteRequest(seq_id=first + 2, optim_step=discard),
    ):
        request.run_id, request.attachment = run_id, attached.attachment
        request.max_seconds = 0  # so the stream ends after one status: the trainer has the command, and keeps it itself
        for executed in training.Execute(request, metadata=key, timeout=60):
            print(f"command {executed.status.seq_id}: {trainer.CommandState.Name(executed.status.state)}")

    # Follow tells each state until all have ended. If the stream breaks, open it again.
    follow = trainer.FollowRequest(run_id=run_id, seq_ids=[first, first + 1, first + 2])
    for told in training.Follow(follow, metadata=key, timeout=60):
        status = told.status
        if status.state == trainer.COMMAND_STATE_SUCCEEDED:
            print(f"command {status.seq_id} succeeded: {status.WhichOneof('answer')}")
        elif status.state == trainer.COMMAND_STATE_REFUSED:
            print(f"command {status.seq_id} was refused: {status.error.message}")


if __name__ == "__main__":
    main()
