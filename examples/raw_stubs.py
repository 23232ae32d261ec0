"""Call the service without the client, with only grpcio and the generated stubs.

    python examples/raw_stubs.py

One training step, one publish, one stream of tokens, in the order in which any language would do it. Needs a running
gateway: `make up` in another terminal prints the two variables to export.
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
    with grpc.insecure_channel(os.environ.get("PACELINE_ADDRESS", "localhost:50050")) as channel:
        train_and_sample(channel, api_key)


def train_and_sample(channel: grpc.Channel, api_key: str) -> None:
    """Take one step, publish, and stream from the version."""
    key = (("authorization", f"Bearer {api_key}"),)
    training, sampling = TrainerServiceStub(channel), SamplerServiceStub(channel)

    # Create a run, the adapter that is trained. The request_id makes the call safe to repeat.
    made = training.CreateRun(
        trainer.CreateRunRequest(request_id=uuid.uuid4().hex, lora=lora_pb2.LoraConfig(rank=8)),
        metadata=key,
        timeout=60,
    )
    run_id = made.run.run_id
    print(f"run {run_id}: {made.run.trainable_parameters} parameters on {made.run.base_model}")

    # One datum: position i of model_input predicts target_tokens[i]. A run's commands carry seq_id 1, 2, 3, ...: they
    # execute in that order, and sending one twice does not execute it twice.
    datum = datum_pb2.Datum(
        model_input=int32(40, 41, 42),
        loss_inputs={"target_tokens": int32(41, 42, 43), "weights": float32(0.0, 1.0, 1.0)},
    )
    loss = training.ForwardBackward(
        trainer.ForwardBackwardRequest(run_id=run_id, seq_id=1, data=[datum], loss_fn="cross_entropy"),
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

    training.DeleteRun(trainer.DeleteRunRequest(run_id=run_id), metadata=key, timeout=60)


if __name__ == "__main__":
    main()
