"""Measure the sampler's speed, beside vLLM's own server and vLLM called in process, and what LoRA costs.

    make bench-sample        python -m bench.sample [--rounds 5] [--sections stream rpc lora] [--dtype auto]
                             [--device cuda] [--model llama-3b]

Each of the three sections has its own arms, which are processes on the same cores and work while the others wait. The
clients of servers run in this process, on another core. Each round draws new prompts, the same for every arm.

stream: streams at saturation on a tiny random model, whose steps cost less than sending their tokens: the service over
    gRPC beside vLLM's OpenAI server over server-sent events, which sends text alone, or tokens and log-probabilities
    too, as the service does. Both run the same engine, on a CPU eagerly, the server without LoRA.
rpc: the service on the embedded model beside the same engine in process: tokens a second, and the time to the first
    token of one request at a time.
lora: prefill of sixteen prompts and decoding of eight streams with an adapter, beside the same engine with vLLM's LoRA
    operators, without an adapter, and started without LoRA. On a GPU the operators are always vLLM's; 64 streams
    decode, and the prompts are longer. The limits are a CPU's.

On a GPU every arm may use all cores, the arms of a section share the GPU's memory, and the sections rpc and lora use a
random model of Llama 3.1 8B's shape.

On a machine that others use too, --clock cpu counts the processor time of an arm's processes; the time to the first
token is always wall-clock time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from support.models.tiny_models import VOCAB_SIZE, make_tiny_llama
from transformers import AutoConfig, AutoModelForCausalLM

from bench.budgets import budget
from bench.device import Device, add_device_options
from bench.random_models import SHAPES, find_model
from bench.sample.load import RANK, Arm, Load, Timing, processor_seconds
from bench.sample.servers import Place, serve_rpc, serve_sse, start_engine
from paceline.layout import WEIGHTS_FILE

RPC, SSE_TEXT, SSE_ALL = "service, gRPC", "vLLM's server, text alone", "vLLM's server, tokens and log-probabilities"
IN_PROCESS = "vLLM in process"
OURS, STOCK, BASE, PLAIN = "adapter", "adapter, vLLM's operators", "no adapter", "no adapter, started without LoRA"
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Figures = dict[str, list[Timing]]
Arms = Mapping[str, tuple[Arm, bool]]
"""Each arm, and whether it uses the adapter."""


@dataclass(frozen=True)
class Options:
    """The command line's options."""

    rounds: int
    streams: int
    tokens: int
    requests: int
    clock: str
    place: Place
    scratch: Path


async def measure(arms: Arms, load: Load, rounds: int, clock: str) -> Figures:
    """Run the arms in turn, each with or without the adapter; the first round does not count."""
    figures: Figures = {name: [] for name in arms}
    for number in range(rounds + 1):
        for name, (arm, adapter) in arms.items():
            before = processor_seconds(arm.pid)
            timing = await arm.run(replace(load, seed=load.seed + number, adapter=adapter))
            if clock == "cpu":
                timing = replace(timing, seconds=processor_seconds(arm.pid) - before)
            if number:
                figures[name].append(timing)
    return figures


def show(title: str, figures: Figures, unit: str, figure: Callable[[Timing], float]) -> dict[str, list[float]]:
    """Print median and p99 of a figure for every arm; return the figure by arm and round."""
    rows = {name: [figure(timing) for timing in timings] for name, timings in figures.items()}
    print(f"\n{title}, {len(next(iter(rows.values())))} rounds\n{'arm':48}{unit + ' median':>20}{'p99':>10}")
    for name, values in rows.items():
        print(f"{name:48}{np.median(values):20.2f}{np.percentile(values, 99):10.2f}", flush=True)
    return rows


def ratio(rows: Mapping[str, list[float]], over: str, under: str) -> float:
    """Return the median of the rounds' ratios."""
    return float(np.median(np.divide(rows[over], rows[under])))


async def stream(options: Options) -> None:
    """Compare how tokens travel from a fast engine to the client."""
    model = make_tiny_llama(options.scratch / "tiny")
    place = replace(options.place, model=model)
    if place.dtype == "auto":
        # Stored in float32, which "auto" means to the service on a CPU; vLLM would round it to bfloat16.
        place = replace(place, dtype="bfloat16" if place.device.is_gpu else "float32")
    load = Load(options.streams, 16, options.tokens, 0, VOCAB_SIZE)
    async with serve_rpc(place) as ours, serve_sse(place) as (text, everything):
        arms: Arms = {RPC: (ours, False), SSE_TEXT: (text, False), SSE_ALL: (everything, False)}
        figures = await measure(arms, load, options.rounds, options.clock)
    speeds = show(f"{load.streams} streams of {load.tokens} tokens, tiny model", figures, "tokens/s", _speed)
    show("until every stream has a token", figures, "ms", _last_first)
    print(f"against the server that sends text alone: {ratio(speeds, RPC, SSE_TEXT):.3g}x")
    budget("token stream at saturation against vLLM's server", ratio(speeds, RPC, SSE_ALL), 2.0)


async def rpc(options: Options) -> None:
    """Compare the service with the engine inside it."""
    load = Load(16, 32, options.tokens, 100, _vocab_size(options.place.model))
    async with serve_rpc(options.place) as ours, start_engine(options.place, "as served") as engine:
        arms: Arms = {RPC: (ours, False), IN_PROCESS: (engine, False)}
        figures = await measure(arms, load, options.rounds, options.clock)
        single = replace(load, streams=1, tokens=1, seed=200)
        firsts = await measure(arms, single, options.rounds * options.requests, "wall")
    speeds = show(
        f"{load.streams} streams of {load.tokens} tokens, {options.place.model.name}", figures, "tokens/s", _speed
    )
    budget("sampling through RPC against vLLM in process", ratio(speeds, RPC, IN_PROCESS), 0.97)
    waits = show("one request at a time: first token", firsts, "ms", _last_first)
    more = float(np.median(np.subtract(waits[RPC], waits[IN_PROCESS])))
    budget("first token through RPC, ms over vLLM in process", more, 1.0, at_most=True)


async def lora(options: Options) -> None:
    """Compare adapters with vLLM's own operators and with no adapter."""
    place, adapter = options.place, make_adapter(options.place.model, options.scratch / "adapter")
    gpu = place.device.is_gpu
    streams, prompt = (64, 256) if gpu else (8, 64)
    async with AsyncExitStack() as stack:
        ours = await stack.enter_async_context(start_engine(place, "as served", adapter))
        arms: dict[str, tuple[Arm, bool]] = {OURS: (ours, True)}
        if not gpu:
            arms[STOCK] = await stack.enter_async_context(start_engine(place, "stock operators", adapter)), True
        plain = await stack.enter_async_context(start_engine(place, "no adapters"))
        arms |= {BASE: (ours, False), PLAIN: (plain, False)}
        load = Load(16, prompt, 1, 1000, _vocab_size(place.model))
        prefills = await measure(arms, load, options.rounds, options.clock)
        load = Load(streams, 8, options.tokens, 2000, load.vocab_size)
        decodes = await measure(arms, load, options.rounds, options.clock)
    rows = show(f"prefill of 16 prompts of {prompt} tokens", prefills, "ms", _whole)
    if not gpu:
        budget("LoRA prefill against vLLM's operators", ratio(rows, STOCK, OURS), 10.0)
    _costs("LoRA prefill", rows, None if gpu else 1.2)
    title = f"decoding {streams} streams of {options.tokens} tokens"
    show(title, decodes, "tokens/s", _speed)
    rows = show(title, decodes, "ms", _whole)
    _costs(f"LoRA decode at batch {streams}", rows, None if gpu else 1.25)


def _costs(what: str, rows: Mapping[str, list[float]], limit: float | None) -> None:
    """Print what an adapter costs, and whether that is within a limit if there is one."""
    for name, under in (("the base model", BASE), ("an engine without LoRA", PLAIN)):
        if limit is None:
            print(f"{what} over {name}: {ratio(rows, OURS, under):.4g}")
        else:
            budget(f"{what} over {name}", ratio(rows, OURS, under), limit, at_most=True)


SECTIONS = {"stream": stream, "rpc": rpc, "lora": lora}


def make_adapter(model: Path, directory: Path) -> Path:
    """Write an adapter of every linear layer whose B is not zero, without loading the model."""
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS, inference_mode=True)
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))  # type: ignore[no-untyped-call]
        shapes = get_peft_model_state_dict(get_peft_model(base, config), save_embedding_layers=False)
    weights = {name: (0.02 * torch.randn(shape.shape)).bfloat16() for name, shape in shapes.items()}
    config.save_pretrained(str(directory))
    save_file(weights, directory / WEIGHTS_FILE)
    return directory


def _vocab_size(model: Path) -> int:
    size: int = AutoConfig.from_pretrained(model).vocab_size
    return size


def _speed(timing: Timing) -> float:
    return timing.speed


def _last_first(timing: Timing) -> float:
    return 1e3 * max(timing.firsts)


def _whole(timing: Timing) -> float:
    return 1e3 * timing.seconds


def main() -> None:
    """Run the chosen sections."""
    cores = sorted(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    model_help = f"of the sections rpc and lora: a directory, or a shape of random weights ({', '.join(SHAPES)})"
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--streams", type=int, default=64, help="of the section stream; more than 64 wait in the engine"
    )
    parser.add_argument("--tokens", type=int, default=128, help="of a stream")
    parser.add_argument("--requests", type=int, default=10, help="single requests for each round")
    parser.add_argument("--model", help=model_help)
    parser.add_argument("--dtype", default="auto", help="of the weights: auto, float32 or bfloat16")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--cores", nargs="+", type=int, default=cores[-1:], help="where every arm works")
    parser.add_argument("--client-core", type=int, default=cores[0], help="where the clients of servers work")
    add_device_options(parser)
    chosen = parser.parse_args()
    device = Device.chosen(chosen, chosen.cores)
    device.pin(chosen.client_core)
    with TemporaryDirectory() as directory:
        scratch = Path(directory)
        model = Path()
        if chosen.sections != ["stream"]:
            model = find_model(chosen.model or ("llama-8b" if device.is_gpu else "embedded"), scratch)
        place = Place(model, chosen.dtype, device)
        options = Options(chosen.rounds, chosen.streams, chosen.tokens, chosen.requests, chosen.clock, place, scratch)
        for section in chosen.sections:
            asyncio.run(SECTIONS[section](options))


if __name__ == "__main__":
    main()
