"""Runs of several tenants under kills and other faults, compared with the same runs without faults."""

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random

import grpc
import numpy as np
from safetensors.numpy import load_file

from paceline.files.api_keys import ApiKey, hash_token, update_keys
from support.chaos.chaos_clients import NOT_EXECUTED, Client
from support.chaos.chaos_faults import FullDisk, Killer, Services, TrainerKiller
from support.chaos.chaos_scores import Scorer
from support.unreliable_proxy import UnreliableProxy

TOLERANCE = 1e-5
"""Relative norm of the difference between runs that shared passes with others and runs that did not."""
LOGPROB_TOLERANCE = 1e-4
"""Between the log-probabilities of the sampler and of PEFT, both in float32."""
TENANTS = ("red", "green")
FAULTS = ("kills", "stops", "disk", "flips")
FEWEST_COMMANDS = 20
"""Minimum per run, however soon the kills end: a client that could not send a command until then still trains."""


@dataclass
class Outcome:
    """The result of a chaos run."""

    kills: Counter
    commands: int
    samples: int
    """Samples that were compared with their version's weights."""
    faults: int
    seconds: float
    differences: list[str]
    notes: Counter
    """Counts of other faults and of the refusals that they caused."""


class Chaos:
    """A trainer, a sampler and a gateway that are killed, their clients, and their reference.

    Settings are the defaults except for addresses, directories and `settings`. With `joint_passes`, the load of other
    runs changes the rounding of a run's numbers, so weights and states are compared within TOLERANCE, and answers by
    type only.
    """

    def __init__(
        self,
        directory: Path,
        model: Path,
        seed: int,
        *,
        joint_passes: bool = False,
        settings: Mapping[str, str] | None = None,
        faults: frozenset[str] = frozenset({"kills"}),
    ) -> None:
        self.joint_passes = joint_passes
        self.directory, self.seed = directory, seed
        self.faults = faults
        self.disk = FullDisk(directory / "volume") if "disk" in faults else None
        self.volume = directory / "volume" / "checkpoints"
        self.volume.mkdir(parents=True)
        keys = [ApiKey(f"key-{tenant}", tenant, hash_token(f"pl-{tenant}")) for tenant in TENANTS]
        update_keys(directory / "keys.json", lambda _: keys)
        trainer = {"JOINT_PASSES": json.dumps(joint_passes), **(settings or {})}
        self.services = Services(directory, self.volume, model, trainer)
        self.scorer = Scorer(model)
        self.notes: Counter = Counter()
        self._killers: list[Killer] = []
        self._samples_compared = 0

    @property
    def kills(self) -> int:
        """Number of kills so far."""
        return sum(killer.kills.total() for killer in self._killers)

    @property
    def environment(self) -> dict[str, str]:
        return self.services.trainer.environment

    @property
    def port(self) -> int:
        return self.services.trainer.port

    def start(self, failpoints: str):
        """Start the trainer alone, with failpoints at which it or its engine dies."""
        return self.services.trainer.start(FAILPOINTS=failpoints)

    async def run(self, kills: int, clients: int = 3) -> Outcome:
        """Kill services `kills` times while clients train; then train the same without faults and compare."""
        start = time.perf_counter()
        proxy = UnreliableProxy(f"127.0.0.1:{self.services.gateway.port}", self.seed)
        stub_port = await proxy.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{stub_port}") as channel:
            self._killers = self._make_killers(kills)
            with ThreadPoolExecutor(len(self._killers)) as threads:
                loop = asyncio.get_running_loop()
                killing = asyncio.gather(*(loop.run_in_executor(threads, killer.run) for killer in self._killers))
                if self.disk is not None:
                    self.disk.begin(self.services, Random(self.seed), self.notes, killing.done)
                faulty = [self._client(channel, index, samples=True, streams=True) for index in range(clients)]
                async with asyncio.TaskGroup() as tasks:  # ends the clients if a killer fails
                    tasks.create_task(_wait_for(killing))
                    for client in faulty:
                        tasks.create_task(self._train(client, killing))
                    falling = tasks.create_task(self._fall(channel, killing))
            seconds = time.perf_counter() - start
            if self.disk is not None:
                await self.disk.end()
            total = sum((killer.kills for killer in self._killers), Counter())
            proxy.faulty = False
            found = [line for client in faulty for line in await self._compare(client, channel)]
            for client in falling.result():
                found += await self._compare(client, channel, to_the_end=False)
        await asyncio.to_thread(self.services.stop)
        await proxy.stop()
        found += self.services.unexpected()
        commands = sum(client.seq_id for client in faulty)
        return Outcome(total, commands, self._samples_compared, proxy.faults, seconds, found, self.notes)

    def close(self) -> None:
        self.services.close()
        if self.disk is not None:
            self.disk.close()

    def _make_killers(self, kills: int) -> list[Killer]:
        stops = "stops" in self.faults
        quota = {"trainer": kills // 2, "sampler": kills // 4, "gateway": kills - kills // 2 - kills // 4}
        self._trainer_killer = TrainerKiller(self.services, quota["trainer"], self.seed, stops=stops)
        others = (self.services.sampler, self.services.gateway)
        killers = [
            self._trainer_killer,
            *(Killer(service, quota[service.name], self.seed, stops=stops) for service in others),
        ]
        for killer in killers:
            killer.notes = self.notes
        return killers

    def _client(self, channel: grpc.aio.Channel, index: int, **options) -> Client:
        return Client(channel, self.seed + index, f"pl-{TENANTS[index % len(TENANTS)]}", **options)

    async def _train(self, client: Client, killing: asyncio.Future) -> None:
        await client.create()
        await client.train(lambda client: killing.done() and client.seq_id >= FEWEST_COMMANDS)
        if client.lost:
            client.found.append(f"seed {client.seed}: the run is lost: {client.lost}")

    async def _fall(self, channel: grpc.aio.Channel, killing: asyncio.Future) -> list[Client]:
        """Train runs whose files get damaged, one after the other, each until it is refused."""
        fallen: list[Client] = []
        while "flips" in self.faults and not killing.done():
            client = Client(channel, 1_000 + self.seed + len(fallen), f"pl-{TENANTS[-1]}")
            await client.create()
            fallen.append(client)
            self.services.trainer.victim = self.volume / "runs" / client.run_id
            await client.train(lambda _: killing.done())
            self.services.trainer.victim = None
            if not client.lost:
                continue
            self.notes[f"damage told as {client.lost}"] += 1
            if client.run_id not in self._trainer_killer.damaged:
                client.found.append(f"seed {client.seed}: the run is lost and was not damaged: {client.lost}")
        return fallen

    async def _compare(self, disturbed: Client, channel: grpc.aio.Channel, *, to_the_end: bool = True) -> list[str]:
        """Train the same run without faults; return the differences."""
        refused = {seq_id for seq_id, answer in disturbed.answers.items() if answer in NOT_EXECUTED}
        self.notes.update(disturbed.answers[seq_id] for seq_id in refused)
        reference = Client(channel, disturbed.seed, disturbed.token, skipped=frozenset(refused))
        await reference.create()
        found = list(disturbed.found)

        async def published(_: Client, seq_id: int) -> None:
            found.extend(await self._check_samples(disturbed, reference, seq_id))

        last = disturbed.seq_id if to_the_end else disturbed.last_before_damage
        await reference.train(lambda client: client.seq_id >= last, published)
        for seq_id, answer in reference.answers.items():
            given = disturbed.answers.get(seq_id, "")
            if seq_id not in refused and not self._is_same_answer(given, answer, refused):
                found.append(f"seed {disturbed.seed} command {seq_id}: {given} and not {answer}")
        published_versions = {version for version, _ in disturbed.versions.values()}
        found += [
            f"seed {disturbed.seed}: a sample names version {completion.version}, which no command published"
            for completion in disturbed.completions
            if completion.version not in published_versions
        ]
        found += [
            f"seed {disturbed.seed} command {seq_id}: published other weights"
            for seq_id in disturbed.versions.keys() & reference.versions.keys()
            if not self.joint_passes and disturbed.versions[seq_id][1] != reference.versions[seq_id][1]
        ]
        if to_the_end and not disturbed.lost:
            one, other = await disturbed.finish(self.volume), await reference.finish(self.volume)
            found += [
                f"seed {disturbed.seed}: only one of the runs has {name}" for name in sorted(one.keys() ^ other.keys())
            ]
            found += [
                f"seed {disturbed.seed}: {name} differs"
                for name in sorted(one.keys() & other.keys())
                if not self._is_same(one[name], other[name])
            ]
        return found

    async def _check_samples(self, disturbed: Client, reference: Client, seq_id: int) -> list[str]:
        """Compare a version's samples with the scores of PEFT on a file with the same weights."""
        if seq_id not in disturbed.versions or self.joint_passes:
            return []
        version, blake3 = disturbed.versions[seq_id]
        completions = [completion for completion in disturbed.completions if completion.version == version]
        found = [
            f"seed {disturbed.seed}: a sample names version {version} and other bytes"
            for completion in completions
            if completion.blake3 != blake3
        ]
        directory = self.volume / "runs" / reference.run_id / "versions" / str(reference.versions[seq_id][0])
        while completions and not directory.exists():  # noqa: ASYNC110 - it is copied there without a notification
            await asyncio.sleep(0.01)
        self._samples_compared += len(completions)
        for completion in completions:
            scores = await asyncio.to_thread(self.scorer.score, directory, completion.prompt, completion.tokens)
            if not np.abs(scores - completion.logprobs).max() <= LOGPROB_TOLERANCE:  # so that NaN is found
                found.append(f"seed {disturbed.seed}: a sample that names version {version} is not from it")
        return found

    def _is_same_answer(self, one: str, other: str, refused: set[int]) -> bool:
        if self.joint_passes:
            return one.partition("(")[0] == other.partition("(")[0]
        if refused:  # a refused publish has used up its number
            one, other = (re.sub(r"\bversion=\d+", "", text) for text in (one, other))
        return one == other

    def _is_same(self, one: Path, other: Path) -> bool:
        if one.read_bytes() == other.read_bytes():
            return True
        return self.joint_passes and one.suffix == ".safetensors" and _distance(one, other) <= TOLERANCE


async def _wait_for(killing: asyncio.Future) -> None:
    await killing


def _distance(one: Path, other: Path) -> float:
    """Return the norm of the difference between two files' tensors, relative to the first's."""
    first, second = load_file(one), load_file(other)
    if first.keys() != second.keys():
        return float("inf")
    pairs = [(first[name].astype(np.float64), second[name].astype(np.float64)) for name in first]
    difference = sum(float(((a - b) ** 2).sum()) for a, b in pairs)
    return (difference / max(sum(float((a**2).sum()) for a, _ in pairs), 1e-300)) ** 0.5
