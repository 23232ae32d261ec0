"""Record a trainer's file operations, then start the trainer on volumes that power cuts may have left.

The scripts use everything that writes to the volume: commands and their answers, snapshots, checkpoints that are
overwritten, expire and are deleted, versions, runs that are deleted, and a start after a kill. A cut is a number of
calls and what was kept of them. On the volume that a cut leaves, the trainer starts, must repeat every answer that it
gave before, and continues.
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from shutil import rmtree
from typing import Any

import grpc
import msgspec

from paceline import codec, errors, weights
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from paceline.types import Datum
from paceline.types.v1 import lora_pb2
from support.chaos import file_recorder
from support.chaos.chaos_clients import until_answered
from support.chaos.file_recorder import Call, Recording
from support.chaos.kept_volume import Kept, KeptVolume
from support.chaos.stable_answers import stable
from support.ports import free_port, is_free
from support.stacks.warm_processes import WarmProcesses

STATE, SAMPLER = pb.CHECKPOINT_KIND_STATE, pb.CHECKPOINT_KIND_SAMPLER
COMMANDS = {"ForwardBackward", "OptimStep", "SaveCheckpoint", "LoadCheckpoint", "PublishWeights"}
GONE = {"DeleteCheckpoint": errors.CheckpointNotFound, "DeleteRun": errors.RunNotFound}
"""The error of a deletion that was already done."""
KEEP_VERSIONS = 3
FINAL_FILES = ("adapter_model.safetensors", "optimizer.safetensors", "trainer_state.json")


@dataclass
class Item:
    """A call of a script, and its recorded outcome."""

    make: Callable[[str], Any]
    """Builds the request from the run's id."""
    refusal: str = ""
    """The reason for which the call must be refused; empty if it must succeed."""
    sent: int = 0
    answered: int = 0
    """time.monotonic_ns."""
    answer: Any = None
    """The reply, or the reason of the refusal."""

    @property
    def method(self) -> str:
        return type(self.make("")).__name__.removesuffix("Request")

    @property
    def stable_answer(self) -> str:
        return self.answer if isinstance(self.answer, str) else stable(self.answer)


@dataclass
class Script:
    """The calls of one client for one run, in sequence."""

    name: str
    items: list[Item] = field(default_factory=list)
    run_id: str = ""
    final: dict[str, bytes] = field(default_factory=dict)
    _seq_id: int = 0

    @classmethod
    def training(cls, name: str, seed: int, rounds: int) -> "Script":
        """Train, save, overwrite, publish, load, expire, delete."""
        script, random = cls(name), Random(seed)
        script._create(seed)
        for number in range(rounds):
            script._train(random)
            script._save("busy", STATE, overwrite=True)
            script._save(f"s{number % 2}", SAMPLER, overwrite=True, ttl_seconds=3600 if number % 2 else None)
            script._command(pb.PublishWeightsRequest, durable=number % 2 == 0)
            if number % 3 == 1:
                script._save("short", STATE, overwrite=True, ttl_seconds=1)
                script.items.append(
                    Item(lambda run: pb.SetCheckpointTtlRequest(path=f"{_path(run)}busy", ttl_seconds=9999))
                )
                script._train(random)
                script._command(pb.LoadCheckpointRequest, path="busy", with_optimizer=True)
                script._save("s1", SAMPLER, refusal=errors.CheckpointExists.reason)
            if number % 3 == 2:
                script.items.append(Item(lambda run: pb.DeleteCheckpointRequest(path=f"{_path(run)}busy")))
                script._command(pb.ForwardBackwardRequest, refusal=errors.UnknownLoss.reason, loss_fn="none")
        script._save("final", STATE)
        return script

    @classmethod
    def deleting(cls, name: str, seed: int, *, keep: bool) -> "Script":
        """Train a little, save, publish, and delete the run."""
        script = cls(name)
        script._create(seed)
        script._train(Random(seed))
        script._save("kept", STATE)
        script._command(pb.PublishWeightsRequest, durable=True)
        script.items.append(Item(lambda run: pb.DeleteRunRequest(run_id=run, delete_checkpoints=not keep)))
        return script

    def _create(self, seed: int) -> None:
        lora = lora_pb2.LoraConfig(rank=2, seed=seed)
        self.items.append(Item(lambda _: pb.CreateRunRequest(request_id=self.name, lora=lora)))

    def _train(self, random: Random) -> None:
        tokens = [random.randrange(250) for _ in range(8)]
        data = [codec.datum_to_proto(Datum.from_completion(tokens[:4], tokens[4:]))]
        self._command(pb.ForwardBackwardRequest, data=data, loss_fn="cross_entropy")
        self._command(pb.OptimStepRequest, adamw=pb.AdamwParams(learning_rate=1e-3))

    def _save(self, name: str, kind: Any, **fields: Any) -> None:
        self._command(pb.SaveCheckpointRequest, name=name, kind=kind, **fields)

    def _command(self, message: Any, *, refusal: str = "", **fields: Any) -> None:
        self._seq_id += 1
        seq_id = self._seq_id

        def make(run: str) -> Any:
            named = {"path": f"{_path(run)}{fields['path']}"} if "path" in fields else {}
            return message(run_id=run, seq_id=seq_id, **{**fields, **named})

        self.items.append(Item(make, refusal))

    async def record(self, stub: TrainerServiceStub, first: int, last: int) -> None:
        """Make the calls and record their outcomes, which must be what the script intends."""
        for item in self.items[first:last]:
            item.sent = time.monotonic_ns()
            item.answer = await self.call(stub, item)
            item.answered = time.monotonic_ns()
            reason = item.answer if isinstance(item.answer, str) else ""
            wanted = item.refusal or "OK"
            assert reason == item.refusal, f"{self.name}: {item.method} answers {item.answer}, not {wanted}"

    async def call(self, stub: TrainerServiceStub, item: Item) -> Any:
        """Make a call; return its reply, or the reason of its refusal."""
        try:
            reply = await until_answered(stub, item.method, item.make(self.run_id))
        except errors.PacelineError as error:
            return error.reason
        if item.method == "CreateRun":
            self.run_id = reply.run.run_id
        return reply


def _path(run: str) -> str:
    return f"paceline://{run}/state/"


@dataclass
class Cut:
    """A moment at which the power fails, and what is kept."""

    calls: int
    kept: Kept
    seed: int

    def __str__(self) -> str:
        return f"{self.calls} calls, kept {self.kept.name.lower()}, seed {self.seed}"


class PowerCuts:
    """A recording, and a trainer that starts on the volumes that cuts leave."""

    def __init__(self, directory: Path, model: Path, rounds: int) -> None:
        self.directory = directory
        self.calls: list[Call] = []
        self.scripts = [
            Script.training("first", 1, rounds),
            Script.training("second", 2, rounds),
            Script.deleting("third", 3, keep=True),
            Script.deleting("fourth", 4, keep=False),
        ]
        self._warm = WarmProcesses.at_hand(directory)
        self._environment = {
            "PATH": "/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
            "PACELINE_TRAINER_MODEL": str(model),
            "PACELINE_TRAINER_DTYPE": "float32",
            "PACELINE_TRAINER_DEVICE": "cpu",
            "PACELINE_TRAINER_INSECURE": "true",
            # With joint passes, the load of other runs changes a run's rounding.
            "PACELINE_TRAINER_JOINT_PASSES": "false",
            "PACELINE_TRAINER_SNAPSHOT_COMMANDS": "5",
            "PACELINE_TRAINER_KEEP_VERSIONS": str(KEEP_VERSIONS),
            "PACELINE_TRAINER_EXPIRY_CHECK_SECONDS": "0.5",
            "PACELINE_TRAINER_LOG_LEVEL": "WARNING",
        }

    def close(self) -> None:
        self._warm.close()

    async def record(self) -> None:
        """Run the scripts on a trainer that is killed in the middle; keep its calls and answers."""
        volume, socket, recording = (self.directory / name for name in ("recorded", "recorder.sock", "recording"))
        volume.mkdir()
        recorder = await asyncio.create_subprocess_exec(
            *(sys.executable, file_recorder.__file__, str(volume), str(socket), str(recording)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert await recorder.stdout.readline() == b"ready\n"
        halves = [(0, 9), (9, None)]
        for first, last in halves:
            async with self.trainer(volume, {file_recorder.VARIABLE: str(socket)}) as stub:
                await asyncio.gather(*(script.record(stub, first, last) for script in self.scripts))
        recorder.stdin.close()
        await recorder.wait()
        self.calls = msgspec.msgpack.decode(recording.read_bytes(), type=Recording).calls
        for script in self.scripts[:2]:
            folder = volume / "runs" / script.run_id / "state" / "final"
            script.final = {name: (folder / name).read_bytes() for name in FINAL_FILES}

    def cuts(self, count: int, seed: int) -> list[Cut]:
        """Sample cuts after any number of calls and of every kind, with 16 seeds of ANYTHING per number of calls."""
        random = Random(seed)
        every = [Cut(calls, kept, 0) for calls in range(len(self.calls) + 1) for kept in Kept]
        every += [Cut(calls, Kept.ANYTHING, again) for calls in range(len(self.calls) + 1) for again in range(1, 16)]
        return sorted(
            random.sample(every, min(count, len(every))), key=lambda cut: (cut.calls, cut.kept.name, cut.seed)
        )

    async def check(self, cut: Cut, *, to_the_end: bool) -> list[str]:
        """Start the trainer on the volume that a cut leaves; return what is wrong with its answers."""
        volume = self.directory / f"cut-{cut.calls}-{cut.kept.name}-{cut.seed}"
        await asyncio.to_thread(self.leave, volume, cut)
        scripts = [Script(script.name, script.items, script.run_id, script.final) for script in self.scripts]
        before = self.calls[cut.calls].start if cut.calls < len(self.calls) else time.monotonic_ns()
        begun = self.calls[cut.calls - 1].end if cut.calls else 0
        found: list[str] = []
        try:
            async with self.trainer(volume, {}) as stub:
                for script in scripts:
                    found += await self._check(stub, script, before, begun, volume, to_the_end=to_the_end)
        except TrainerEndedError as error:
            found.append(f"the trainer does not start: {error}")
        found += torn(volume)
        if not found:
            rmtree(volume)
        return [f"{cut}: {line}" for line in found]

    def leave(self, volume: Path, cut: Cut) -> None:
        """Write the volume that a cut leaves."""
        kept = KeptVolume()
        for call in self.calls[: cut.calls]:
            kept.apply(call)
        kept.write(volume, cut.kept, Random(f"{cut.calls} {cut.seed}"))

    async def _check(
        self, stub: TrainerServiceStub, script: Script, before: int, begun: int, volume: Path, *, to_the_end: bool
    ) -> list[str]:
        known = [item for item in script.items if 0 < item.answered < before]
        open_items = [item for item in script.items[len(known) :] if item.sent < begun]
        found = await self._check_checkpoints(stub, script, known, open_items) if known else []
        is_deleted = any(item.method == "DeleteRun" for item in known)
        if is_deleted:
            return found + await self._differs(
                stub, script, Item(lambda run: pb.GetRunRequest(run_id=run), answer="RUN_NOT_FOUND")
            )
        may_be_deleted = any(item.method == "DeleteRun" for item in open_items)
        for item in known:
            if item.method in COMMANDS and not may_be_deleted:
                found += await self._differs(stub, script, item)
        if not may_be_deleted:
            found += lost_versions(volume, script, known, open_items)
        rest = script.items[len(known) :] if to_the_end else open_items
        for item in rest:
            found += await self._differs(stub, script, item, was_begun=item in open_items)
        if not any(item.method == "DeleteRun" for item in rest):
            found += lost_versions(volume, script, known + rest, [])
        if to_the_end and script.final:
            folder = volume / "runs" / script.run_id / "state" / "final"
            found += [
                f"{script.name}: {name} differs"
                for name, content in script.final.items()
                if not (folder / name).exists() or (folder / name).read_bytes() != content
            ]
        return found

    async def _differs(
        self, stub: TrainerServiceStub, script: Script, item: Item, *, was_begun: bool = False
    ) -> list[str]:
        answer = await script.call(stub, item)
        if was_begun and item.method in GONE and answer == GONE[item.method].reason:
            return []
        if isinstance(answer, str) or isinstance(item.answer, str):
            same = answer == item.answer
        else:
            same = item.method not in COMMANDS or stable(answer) == item.stable_answer
        place = f"{item.method} {getattr(item.make(''), 'seq_id', '')}".strip()
        return [] if same else [f"{script.name}: {place} answers {answer} and not {item.stable_answer}"]

    async def _check_checkpoints(
        self, stub: TrainerServiceStub, script: Script, known: list[Item], open_items: list[Item]
    ) -> list[str]:
        """Compare the list of checkpoints with what was acknowledged."""
        expected: dict[str, str] = {}
        for item in known:
            request = item.make(script.run_id)
            if item.method == "SaveCheckpoint" and not isinstance(item.answer, str):
                expected[item.answer.checkpoint.path] = item.answer.checkpoint.sha256
            elif item.method == "DeleteCheckpoint":
                expected.pop(request.path, None)
            elif item.method == "DeleteRun" and request.delete_checkpoints:
                expected.clear()
        uncertain = {"DeleteRun"} & {item.method for item in open_items}
        open_paths = {_path_of(item.make(script.run_id)) for item in open_items}
        listed = await until_answered(stub, "ListCheckpoints", pb.ListCheckpointsRequest(run_id=script.run_id))
        there = {checkpoint.path: checkpoint for checkpoint in listed.checkpoints}
        found = [f"{path} is damaged: {checkpoint.damage}" for path, checkpoint in there.items() if checkpoint.damage]
        for path in expected.keys() | there.keys():
            if path in open_paths or path.endswith("/short") or uncertain:
                continue
            if path not in there:
                found.append(f"{path} was acknowledged and is missing")
            elif path not in expected:
                found.append(f"{path} is there and was never acknowledged, or was deleted")
            elif there[path].sha256 != expected[path]:
                found.append(f"{path} is not what was acknowledged last")
            if path.endswith("/s1") and path in there and not there[path].HasField("expire_time"):
                found.append(f"{path} has lost its time to live")
        return found

    def trainer(self, volume: Path, environment: dict[str, str]) -> "_Trainer":
        """Return a trainer on a volume, with more variables in its environment."""
        return _Trainer(self._warm, {**self._environment, **environment}, volume, self.directory)


class TrainerEndedError(Exception):
    """The trainer ended by itself."""


class _Trainer:
    """A trainer on a volume, killed at the end."""

    def __init__(self, warm: WarmProcesses, environment: dict[str, str], volume: Path, directory: Path) -> None:
        self._port, health = free_port(), free_port()
        self._log = directory / f"{volume.name}.log"
        self._process = warm.start(
            {
                **environment,
                "PACELINE_TRAINER_LISTEN": f"127.0.0.1:{self._port}",
                "PACELINE_TRAINER_HEALTH_LISTEN": f"127.0.0.1:{health}",
                "PACELINE_TRAINER_CHECKPOINT_DIR": str(volume),
                "PACELINE_TRAINER_STAGING_DIR": str(directory),
            },
            self._log,
        )

    async def __aenter__(self) -> TrainerServiceStub:
        while is_free(self._port):
            if self._process.wait(0.001):
                raise TrainerEndedError(self._log.read_text()[-2000:])
            await asyncio.sleep(0.01)
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{self._port}")
        return TrainerServiceStub(self._channel)

    async def __aexit__(self, *_: object) -> None:
        self._process.kill()
        await asyncio.to_thread(self._process.wait, 60)
        await self._channel.close()


def torn(volume: Path) -> list[str]:
    """Return what has its final name on a volume but is incomplete."""
    found = [f"{path} was given up" for path in volume.glob("runs/**/*.damaged-*")]
    for directory in volume.glob("runs/run-*/*/[!.]*"):
        if not (directory.parent.parent / "run.json").exists():
            continue  # A deleted run: only its checkpoints matter, and listing them checks those.
        kind = directory.parent.name
        try:
            if kind in {"state", "snapshots"} and (name := weights.find_damaged(directory)):
                found.append(f"{directory}/{name} is torn")
            if kind in {"sampler", "versions"}:
                weights.verify_adapter(directory, weights.read_manifest(directory))
        except (FileNotFoundError, errors.ChecksumMismatch) as error:
            found.append(f"{directory} is torn: {error}")
    return found


def lost_versions(volume: Path, script: Script, known: list[Item], open_items: list[Item]) -> list[str]:
    """Return which durable versions that `known` published are lost, or not what was acknowledged.

    Only the run's newest must be kept, and `open_items` may have published newer ones.
    """
    published = [item for item in known + open_items if item.method == "PublishWeights"]
    newest = max((item.answer.model.version for item in published), default=0)
    found = []
    for item in published:
        model = item.answer.model
        if item in open_items or not item.make("").durable or model.version <= newest - KEEP_VERSIONS:
            continue
        directory = volume / "runs" / script.run_id / "versions" / str(model.version)
        try:
            kept = weights.read_manifest(directory).model.blake3
        except (FileNotFoundError, errors.ChecksumMismatch) as error:
            found.append(f"{script.name}: durable version {model.version} was acknowledged and is lost: {error}")
        else:
            if kept != model.blake3:
                found.append(f"{script.name}: durable version {model.version} is not what was acknowledged")
    return found


def _path_of(request: Any) -> str:
    """Return the path of the checkpoint that a request is about."""
    if isinstance(request, pb.SaveCheckpointRequest):
        return f"paceline://{request.run_id}/{'state' if request.kind == STATE else 'sampler'}/{request.name}"
    return getattr(request, "path", "")
