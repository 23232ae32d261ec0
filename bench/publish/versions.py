"""Measure how long a version takes to load again: 64 versions requested in turn, on an engine with 4 slots.

    make bench-versions        python -m bench.publish.versions [--rounds 5] [--versions 64] [--loaded 16]

One trainer publishes 64 versions of a run on the embedded model in bfloat16, rank 32 on every linear module: 20 MB
each. Two samplers follow it, with the bridges `stream` and `volume`, `max_active_versions` 4 and `max_loaded_versions`
16, so that no requested version is in memory: `stream` has them in `scratch_dir`, `volume` on the checkpoint volume.
The arms take turns, a round at a time; the first round does not count. Two figures each: until a version that is not
loaded is loaded (LoadVersion), and until its first token. Trainer and client run on the first core, the samplers on the
last.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import numpy as np
from make_model import default_directory, make_model
from support.ports import free_port
from support.stacks.cluster import Cluster, ServiceProcess

import paceline
from bench.budgets import budget, p99
from paceline import AdamParams, Datum
from paceline.codec import tensor_to_proto
from paceline.rpc.channel import open_channel
from paceline.rpc.identity import peer_metadata
from paceline.rpc.status import error_from_rpc
from paceline.sampler.v1 import sampler_service_pb2 as pb
from paceline.sampler.v1.sampler_service_pb2_grpc import SamplerServiceStub
from paceline.types.v1 import model_pb2, sampling_pb2

SLOTS, RANK, P99_MILLISECONDS = 4, 32, 60.0
PROMPT = np.arange(1000, 1016, dtype=np.int32)


class Sampler:
    """One sampler that is asked for versions."""

    def __init__(self, address: str, credential: str, run_id: str) -> None:
        self._stub = SamplerServiceStub(open_channel(address))
        self._metadata = peer_metadata(credential, "default")
        self._run_id = run_id
        self.loads: list[float] = []
        """Milliseconds of each load."""
        self.firsts: list[float] = []
        """Milliseconds until the first token of a version that was not loaded."""
        self.failures: list[str] = []

    async def ask_for_all(self, versions: Sequence[int], *, counts: bool) -> None:
        """Load each version and sample a token of it."""
        for version in versions:
            start = time.perf_counter()
            try:
                loaded = await self._stub.LoadVersion(
                    pb.LoadVersionRequest(model=self._ref(version)), metadata=self._metadata
                )
                load = time.perf_counter()
                await self._stub.Sample(self._request(version), metadata=self._metadata)
            except grpc.aio.AioRpcError as failure:
                self.failures.append(error_from_rpc(failure).reason)
                continue
            if not loaded.milliseconds:
                raise SystemExit(f"version {version} was loaded already: ask for more versions, or allow fewer")
            if counts:
                self.loads.append(1e3 * (load - start))
                self.firsts.append(1e3 * (time.perf_counter() - start))

    def _ref(self, version: int) -> model_pb2.ModelRef:
        return model_pb2.ModelRef(version=model_pb2.VersionRef(run_id=self._run_id, version=version))

    def _request(self, version: int) -> pb.SampleRequest:
        params = sampling_pb2.SamplingParams(max_tokens=1)
        return pb.SampleRequest(model=self._ref(version), prompt=tensor_to_proto(PROMPT), params=params)


Arms = Mapping[str, Sampler]


@contextmanager
def samplers(cluster: Cluster) -> Iterator[dict[str, str]]:
    """Yield the addresses of the cluster's own sampler, and of another one with the bridge `volume`."""
    plan, addresses = cluster.sampler.plan, [f"127.0.0.1:{free_port()}" for _ in range(2)]
    listen = {"LISTEN": addresses[0], "HEALTH_LISTEN": addresses[1], "BRIDGE": "volume"}
    environment = {**plan.environment, **{f"PACELINE_SAMPLER_{name}": value for name, value in listen.items()}}
    second = ServiceProcess(
        replace(plan, environment=environment, health=addresses[1]), cluster.state / "sampler-volume.log"
    )
    try:
        second.start()
        yield {"stream": plan.environment["PACELINE_SAMPLER_LISTEN"], "volume": addresses[0]}
    finally:
        second.stop()


def publish(cluster: Cluster, count: int) -> str:
    """Publish `count` versions of a run; return its id."""
    with paceline.ServiceClient(cluster.address, cluster.api_key) as service:
        training = service.create_lora_training_client(rank=RANK, seed=1)
        for _ in range(count):
            training.forward_backward([Datum.from_completion(PROMPT.tolist(), [1000, 1001], weight=1.0)])
            training.optim_step(AdamParams(learning_rate=1e-4))
            training.publish_weights(durable=True).result()
        return training.run_id


async def measure(addresses: Mapping[str, str], credential: str, run_id: str, count: int, rounds: int) -> Arms:
    """Alternate the arms; the first round is a warm-up and fills the samplers' caches."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    arms = {name: Sampler(address, credential, run_id) for name, address in addresses.items()}
    for number in range(rounds + 1):
        for arm in arms.values():
            await arm.ask_for_all(range(1, count + 1), counts=number > 0)
        print(f"round {number} of {rounds}, load {os.getloadavg()[0]:.1f}", flush=True)
    return arms


def report(arms: Arms, megabytes: float) -> None:
    """Print the table and the budgets."""
    print(f"\nadapter of {megabytes:.1f} MB, {SLOTS} slots; milliseconds until a version that was not loaded is usable")
    print(f"{'arm':10}{'loads':>8}{'load p50':>10}{'p99':>8}{'first token p50':>18}{'p99':>8}{'failed':>8}")
    for name, arm in arms.items():
        print(f"{name:10}{len(arm.loads):8}{np.median(arm.loads):10.1f}{p99(arm.loads):8.1f}"
              f"{np.median(arm.firsts):18.1f}{p99(arm.firsts):8.1f}{len(arm.failures):8}")  # fmt: skip
    for name, arm in arms.items():
        budget(f"{name} failures {sorted(set(arm.failures))}", len(arm.failures), 0, at_most=True)
        budget(f"{name} reload, p99 ms", p99(arm.loads), P99_MILLISECONDS, at_most=True)


def main() -> None:
    """Measure both bridges in one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--versions", type=int, default=64)
    parser.add_argument("--loaded", type=int, default=16, help="max_loaded_versions")
    parser.add_argument(
        "--disk", type=int, default=64, help="max_disk_versions; 0: all come from the trainer or the volume"
    )
    options = parser.parse_args()
    settings = {
        "PACELINE_TRAINER_DTYPE": "bfloat16", "PACELINE_TRAINER_MAX_LORA_RANK": str(RANK),
        "PACELINE_TRAINER_KEEP_VERSIONS": str(options.versions), "PACELINE_SAMPLER_DTYPE": "bfloat16",
        "PACELINE_SAMPLER_MAX_LORA_RANK": str(RANK), "PACELINE_SAMPLER_MAX_ACTIVE_VERSIONS": str(SLOTS),
        "PACELINE_SAMPLER_MAX_LOADED_VERSIONS": str(options.loaded), "PACELINE_SAMPLER_MAX_MODEL_LEN": "512",
        "PACELINE_SAMPLER_KV_CACHE_GIB": "1", "PACELINE_SAMPLER_MAX_DISK_VERSIONS": str(options.disk),
    }  # fmt: skip
    with TemporaryDirectory() as scratch:
        cluster = Cluster.make(Path(scratch), make_model(default_directory()), "vllm", **settings)
        try:
            cluster.start()
            run_id = publish(cluster, options.versions)
            file = Path(scratch) / "checkpoints/runs" / run_id / "versions/1/adapter_model.safetensors"
            credential = (cluster.state / "credential").read_text()
            with samplers(cluster) as addresses:
                measured = measure(addresses, credential, run_id, options.versions, options.rounds)
                report(asyncio.run(measured), file.stat().st_size / 1e6)
        finally:
            cluster.stop()


if __name__ == "__main__":
    main()
