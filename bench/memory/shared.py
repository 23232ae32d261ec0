"""Measure what sharing one copy of the base model saves and costs, and how fast versions are written in place.

    make bench-shared

On the embedded model, one thread per process. First two deployments, with bridge `stream` and bridge `shared`, take
turns: memory of trainer and sampler (proportional set size: shared pages count once), a training step, decoding of 8
streams, and scoring of 256 tokens. Then a deployment whose full-parameter run writes its versions into the sampler's
weights, paused, while 8 streams decode.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from make_model import default_directory, make_model
from safetensors import safe_open

import paceline
from bench.budgets import budget
from bench.publish.times import running
from paceline import AdamParams, Datum, SamplingParams
from paceline.base_model.weight_sharing import read_base
from paceline.rpc.health import wait_until_serving
from paceline.up.plan import UpOptions, make_plans, read_or_make_key

PROMPT = list(range(1000, 1032))
SCORED = [1000 + i % 500 for i in range(256)]
STREAMS = 8
SHARED_BUDGET = 1.05
"""Copies of the base weights that trainer and sampler hold in memory; activations and all else do not count."""
PAUSE_BUDGET_MS = 100.0


@dataclass
class Deployment:
    """Three services and a run."""

    name: str
    client: paceline.ServiceClient
    pids: dict[str, int]
    run: paceline.TrainingClient
    base_dir: Path | None = None
    times: dict[str, list[float]] = field(default_factory=dict)

    def measure(self, what: str, work: Callable[[], object]) -> None:
        """Time a piece of work, in milliseconds."""
        start = perf_counter()
        work()
        self.times.setdefault(what, []).append(1e3 * (perf_counter() - start))

    def train(self) -> None:
        """Take a step on 512 labelled tokens."""
        self.run.forward_backward([Datum.from_completion(PROMPT, SCORED, weight=1.0)] * 2)
        self.run.optim_step(AdamParams(learning_rate=1e-5)).result()

    def decode(self) -> None:
        """Sample 32 tokens on each stream from the base model."""
        params = SamplingParams(max_tokens=32, ignore_eos=True)
        self.client.create_sampling_client().sample(PROMPT, STREAMS, params).result()

    def score(self) -> None:
        """Compute the log-probabilities of a sequence."""
        self.client.create_sampling_client().compute_logprobs(SCORED).result()


@contextmanager
def deployed(
    model: Path, name: str, port: int, make_run: Callable[[paceline.ServiceClient], paceline.TrainingClient],
    **settings: str,
) -> Iterator[Deployment]:  # fmt: skip
    """Run the three services; `settings` are the bridge and settings of the sampler."""
    with ExitStack() as stack:
        state = Path(stack.enter_context(TemporaryDirectory()))
        bridge = settings.pop("bridge")
        options = UpOptions(str(model), address=f"127.0.0.1:{port}", bridge=bridge, dtype="bfloat16", max_lora_rank=16)
        key, plans = read_or_make_key(state).read_text(), make_plans(options, state)
        told = {f"PACELINE_SAMPLER_{setting.upper()}": value for setting, value in settings.items()}
        if base_dir := plans[0].environment.get("PACELINE_TRAINER_BASE_DIR"):
            stack.callback(shutil.rmtree, base_dir, ignore_errors=True)
        processes = {}
        for plan in plans:
            environment = {**plan.environment, **(told if plan.name == "sampler" else {}), "OMP_NUM_THREADS": "1"}
            command, log = [sys.executable, "-m", "paceline.services", plan.module], state / f"{plan.name}.log"
            process = stack.enter_context(running(command, os.sched_getaffinity(0), environment, log))
            processes[plan.name] = process
        for plan in plans:
            over = lambda process=processes[plan.name]: process.poll() is not None  # noqa: E731
            if not wait_until_serving(plan.health, plan.service, over):
                raise SystemExit((state / f"{plan.name}.log").read_text(errors="replace")[-4000:])
        pids = {name: process.pid for name, process in processes.items()}
        client = stack.enter_context(paceline.ServiceClient(options.address, key))
        yield Deployment(name, client, pids, make_run(client), Path(base_dir) if base_dir else None)


def family(pid: int) -> Iterator[int]:
    """Yield a process and its descendants."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from family(int(child))


def memory(pid: int, file: str = "") -> float:
    """Return the MB (proportional) of a process and its descendants, or of one file that they have mapped."""
    total = 0
    for each in family(pid):
        counted = not file
        for line in Path(f"/proc/{each}/smaps").read_text().splitlines():
            if "-" in line.partition(" ")[0]:
                counted = not file or line.endswith(file)
            elif counted and line.startswith("Pss:"):
                total += int(line.split()[1])
    return total * 1024 / 1e6


def base_megabytes(model: Path) -> float:
    """Return the size of the base weights in bfloat16; tied weights count once."""
    with safe_open(model / "model.safetensors", framework="pt") as file:
        names = [*file.keys()]
        return 2e-6 * float(sum(file.get_tensor(name).numel() for name in names))


def report_times(name: str, times: Sequence[float]) -> float:
    """Print the times and return their median."""
    ordered = sorted(times)
    median, last = statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    print(f"  {name:28} median {median:8.1f} ms, p99 {last:8.1f} ms ({len(ordered)} times)", flush=True)
    return median


def compare_copies(model: Path, rounds: int) -> None:
    """Compare memory and speed of one shared copy with two copies."""

    def lora(client: paceline.ServiceClient) -> paceline.TrainingClient:
        return client.create_lora_training_client(rank=16)

    base = base_megabytes(model)
    with (
        deployed(model, "stream", 50850, lora, bridge="stream", kv_cache_gib="1") as stream,
        deployed(model, "shared", 50860, lora, bridge="shared", kv_cache_gib="1") as shared,
    ):
        for each in (stream, shared):
            each.train()
            each.decode()
        for _ in range(rounds):
            for each in (stream, shared):
                for what in ("train", "decode", "score"):
                    each.measure(what, getattr(each, what))
        totals = {each.name: [memory(each.pids[name]) for name in ("trainer", "sampler")] for each in (stream, shared)}
        assert shared.base_dir is not None
        segment = read_base(shared.base_dir).storages[0].file
        lent = sum(memory(shared.pids[name], segment) for name in ("trainer", "sampler"))
    print(f"base weights: {base:.0f} MB in bfloat16")
    for name, (trainer, sampler) in totals.items():
        print(f"{name:8} trainer {trainer:7.0f} MB, sampler {sampler:7.0f} MB, both {trainer + sampler:7.0f} MB")
    for what in ("train", "decode", "score"):
        print(what)
        for each in (stream, shared):
            report_times(each.name, each.times[what])
    saved = sum(totals["stream"]) - sum(totals["shared"])
    print(f"saved: {saved:.0f} MB, {saved / base:.2f} times the base weights")
    budget("shared: copies of the base weights", lent / base, SHARED_BUDGET, at_most=True)


def time_writes(model: Path, rounds: int) -> None:
    """Time versions that are written in place under load."""

    def full(client: paceline.ServiceClient) -> paceline.TrainingClient:
        return client.create_full_training_client(storage=paceline.WeightStorage.BFLOAT16)

    settings = {"bridge": "shared", "in_place": "paused", "kv_cache_gib": "1"}
    with deployed(model, "in place", 50870, full, **settings) as one:
        run, waits, writes, replies = one.run, [], [], []
        newest = one.client.create_sampling_client(run_id=run.run_id)
        run.publish_weights(wait_for="all").result()
        for _ in range(rounds):
            streams = newest.sample(PROMPT, STREAMS, SamplingParams(max_tokens=160, ignore_eos=True))
            next(iter(newest.sample_stream(PROMPT, sampling_params=SamplingParams(max_tokens=1))))
            start = perf_counter()
            (ack,) = run.publish_weights(wait_for="all").result().acknowledgements
            replies.append(1e3 * (perf_counter() - start))
            waits.append(ack.step_wait_milliseconds)
            writes.append(ack.apply_milliseconds)
            streams.result()
    print("a full-parameter run's version, 8 streams decoding")
    report_times("wait for the pause", waits)
    pause = report_times("writing it, paused", writes)
    report_times("published, on the volume", replies)
    budget("shared: pause of a write in place (ms)", pause, PAUSE_BUDGET_MS, at_most=True)


def main() -> None:
    """Run both parts and print the budgets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory; default: the embedded model")
    options = parser.parse_args()
    model = options.model or make_model(default_directory())
    compare_copies(model, options.rounds)
    time_writes(model, options.rounds)


if __name__ == "__main__":
    main()
