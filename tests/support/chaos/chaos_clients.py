"""Clients of the chaos tests: each trains one run, publishes and samples, and keeps every answer."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

import grpc
import numpy as np

from paceline import codec, errors
from paceline.rpc.identity import API_KEY_KEY
from paceline.rpc.status import error_from_rpc
from paceline.sampler.v1 import sampler_service_pb2 as sampler_pb
from paceline.sampler.v1.sampler_service_pb2_grpc import SamplerServiceStub
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from paceline.types import Datum
from paceline.types.v1 import lora_pb2
from support.chaos.stable_answers import stable
from support.chaos.streamed_commands import execute_and_follow
from trainer_service.settings import TrainerSettings

KEPT_VERSIONS = TrainerSettings.model_fields["keep_versions"].default
WINDOW = 4
"""Commands that a client has in flight."""
NOT_EXECUTED = {errors.PoisonedCommand.reason, errors.DiskFull.reason}
"""Refusals caused by a fault: the command changed nothing. The run without faults sends another command instead that
changes nothing either."""
_LOST = {
    error.reason for error in (errors.RunStateLost, errors.RunNotFound, errors.ChecksumMismatch, errors.SeqIdExpired)
}
"""Refusals after which a client gives up its run."""
_SAMPLED_TOKENS = 8


def command(seed, run_id, seq_id):
    """Return the method and request of a run's command, which `seed` and `seq_id` determine."""
    rng = Random(seed * 1_000_003 + seq_id)
    kind = rng.choices(("forward", "step", "state", "sampler", "publish", "load", "bad"), (10, 8, 2, 1, 3, 1, 1))[0]
    common = {"run_id": run_id, "seq_id": seq_id}
    if kind == "forward":
        datum = Datum.from_completion([rng.randrange(250) for _ in range(6)], [rng.randrange(250) for _ in range(6)])
        data = [codec.datum_to_proto(datum)]
        only = rng.random() < 0.1
        return "ForwardBackward", pb.ForwardBackwardRequest(
            **common, data=data, loss_fn="cross_entropy", forward_only=only
        )
    if kind == "step":
        adamw = pb.AdamwParams(learning_rate=rng.uniform(1e-4, 1e-2))
        return "OptimStep", pb.OptimStepRequest(**common, adamw=adamw)
    if kind in {"state", "sampler"}:
        which = pb.CHECKPOINT_KIND_STATE if kind == "state" else pb.CHECKPOINT_KIND_SAMPLER
        name, overwrite = f"c{rng.randrange(4)}", rng.random() < 0.7
        return "SaveCheckpoint", pb.SaveCheckpointRequest(**common, name=name, kind=which, overwrite=overwrite)
    if kind == "publish":
        return "PublishWeights", pb.PublishWeightsRequest(**common, durable=rng.random() < 0.3)
    if kind == "load":
        path = f"paceline://{run_id}/state/c{rng.randrange(4)}"
        return "LoadCheckpoint", pb.LoadCheckpointRequest(**common, path=path, with_optimizer=rng.random() < 0.7)
    return refused(run_id, seq_id)


def refused(run_id, seq_id):
    """Return a command that is refused in every state of the run."""
    return "ForwardBackward", pb.ForwardBackwardRequest(run_id=run_id, seq_id=seq_id, loss_fn="none")


@dataclass
class Completion:
    """Tokens sampled from the version that the answer named."""

    version: int
    blake3: str
    prompt: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray


@dataclass
class Client:
    """Trains one run: repeats every request until it is answered, and keeps every answer."""

    channel: grpc.aio.Channel
    seed: int
    token: str = ""
    samples: bool = False
    """Whether it samples from the versions that it publishes."""
    streams: bool = False
    """Whether it sends half of its commands with Execute and Follow, and leaves their streams at random."""
    skipped: frozenset[int] = frozenset()
    """seq_ids for which it sends a command that is refused."""
    answers: dict[int, str] = field(default_factory=dict)
    versions: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Number and BLAKE3 of a version, by the seq_id of the command that published it."""
    completions: list[Completion] = field(default_factory=list)
    found: list[str] = field(default_factory=list)
    """Problems noticed during training."""
    run_id: str = ""
    seq_id: int = 0
    lost: str = ""
    """Reason why it cannot continue; empty while it can."""

    def __post_init__(self) -> None:
        self.trainer = TrainerServiceStub(self.channel)
        self.sampler = SamplerServiceStub(self.channel)
        self.metadata = ((API_KEY_KEY, f"Bearer {self.token}"),) if self.token else ()

    @property
    def last_before_damage(self) -> int:
        """The last command before the first one that was refused because of damage.

        Later commands were already in flight and found the run without the refused one.
        """
        told = [seq_id for seq_id, answer in self.answers.items() if answer in _LOST]
        return min(told, default=self.seq_id + 1) - 1

    async def create(self) -> None:
        lora = lora_pb2.LoraConfig(rank=4, seed=self.seed, dropout=0.1)
        request = pb.CreateRunRequest(request_id=uuid4().hex, lora=lora)
        while not self.run_id:
            try:
                self.run_id = (await self._call("CreateRun", request)).run.run_id
            except errors.DiskFull:
                await asyncio.sleep(0.1)

    async def forward_backward(self):
        datum = codec.datum_to_proto(Datum.from_completion([1, 2, 3], [4, 5, 6, 7, 8, 9]))
        return await self._next("ForwardBackward", pb.ForwardBackwardRequest, data=[datum], loss_fn="cross_entropy")

    async def optim_step(self):
        adamw = pb.AdamwParams(learning_rate=1e-3)
        return await self._next("OptimStep", pb.OptimStepRequest, adamw=adamw)

    async def train(self, is_over, published=None) -> None:
        """Send commands, several at a time, until `is_over` is true; call `published` for each version, in order."""
        under_way = set()
        while not (is_over(self) or self.lost):
            self.seq_id += 1
            under_way.add(asyncio.create_task(self._command(self.seq_id, published)))
            if len(under_way) >= WINDOW or published is not None:
                done, under_way = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                [task.result() for task in done]
        await asyncio.gather(*under_way)

    async def finish(self, volume: Path) -> dict[str, Path]:
        """Save the run's state; return the files of all its checkpoints that do not hold times, by name."""
        await self._next("SaveCheckpoint", pb.SaveCheckpointRequest, name="final", kind=pb.CHECKPOINT_KIND_STATE)
        run = volume / "runs" / self.run_id
        files = [path for kind in ("state", "sampler") for path in (run / kind).glob("*/*")]
        kept = [path for path in files if path.suffix == ".safetensors" or path.name == "trainer_state.json"]
        return {str(path.relative_to(run)): path for path in kept}

    async def _next(self, method, message, **fields):
        self.seq_id += 1
        return await self._call(method, message(run_id=self.run_id, seq_id=self.seq_id, **fields))

    async def _command(self, seq_id, published) -> None:
        method, request = command(self.seed, self.run_id, seq_id)
        if seq_id in self.skipped:
            method, request = refused(self.run_id, seq_id)
        try:
            random = Random(f"{self.seed} way {seq_id}")
            if self.streams and random.random() < 0.5:
                reply = await execute_and_follow(self.trainer, request, self.metadata, random)
            else:
                reply = await self._call(method, request)
        except errors.PacelineError as error:
            self.answers[seq_id] = error.reason
            if error.reason in _LOST:
                self.lost = error.reason
            return
        self.answers[seq_id] = stable(reply)
        if method == "PublishWeights":
            self.versions[seq_id] = (reply.model.version, reply.model.blake3)
            if published is not None:
                await published(self, seq_id)
            if self.samples:
                await self._sample(seq_id)

    async def _sample(self, seq_id) -> None:
        """Sample from the version that a command published, or from the newest."""
        random = Random(f"{self.seed} {seq_id}")
        version, _ = self.versions[seq_id]
        prompt = np.array([random.randrange(250) for _ in range(5)], np.int32)
        request = sampler_pb.SampleRequest(prompt=codec.tensor_to_proto(prompt), num_samples=1)
        request.model.version.run_id = self.run_id
        if random.random() < 0.7:
            request.model.version.version = version
        request.params.max_tokens = _SAMPLED_TOKENS
        request.params.ignore_eos = True
        try:
            reply = await until_answered(self.sampler, "Sample", request, self.metadata)
        except errors.PacelineError as error:
            newest = max(known for known, _ in self.versions.values())
            if isinstance(error, errors.VersionNotFound) and newest >= version + KEPT_VERSIONS:
                return  # the answer took so long that the version is no longer kept
            self.found.append(f"seed {self.seed}: version {version}, just published, cannot be sampled: {error}")
            return
        (sequence,) = reply.sequences
        served = reply.model.version
        if request.model.version.HasField("version") and served != version:
            self.found.append(f"seed {self.seed}: version {version} was asked for and {served} answered")
        tokens = codec.token_ids_from_proto(sequence.tokens, "tokens")
        logprobs = codec.tensor_from_proto(sequence.logprobs, "logprobs", {"float32"})
        self.completions.append(Completion(served, reply.model.blake3, prompt, tokens, logprobs))

    async def _call(self, method, request):
        return await until_answered(self.trainer, method, request, self.metadata)


async def until_answered(stub: Any, method: str, request: Any, metadata: Any = ()):
    """Repeat a request until it is answered; return the reply. Raises the error of a refusal."""
    while True:
        try:
            return await getattr(stub, method)(request, timeout=30, metadata=metadata)
        except grpc.aio.AioRpcError as failure:
            error = error_from_rpc(failure)
        may_repeat = isinstance(error, (errors.Unavailable, errors.SeqIdGap, errors.TimedOut))
        if not may_repeat and error.retry_after is None:
            raise error
        await asyncio.sleep(0.02)
