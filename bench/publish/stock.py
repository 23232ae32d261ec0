"""The other arm of `python -m bench.publish`: PEFT saves to disk, vLLM's OpenAI server loads the adapter over HTTP.

    python -m bench.publish.stock MODEL RANK cpu|cuda

runs the trainer: for each input line it takes an optimizer step, saves the adapter, and answers when that is done.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, Self

import aiohttp

from bench.device import as_flags, vllm_variables
from bench.publish.times import (
    CPU_SERVER_SETTINGS,
    LEARNING_RATE,
    PROMPT,
    RANK,
    STREAM_TOKENS,
    Place,
    Times,
    running,
)

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_START_SECONDS = 600.0
_DONE = b"data: [DONE]"


class Stock:
    """One PEFT model that is saved repeatedly for one server."""

    def __init__(self, trainer: asyncio.subprocess.Process, session: aiohttp.ClientSession, scratch: Path) -> None:
        self._trainer, self._session, self._scratch = trainer, session, scratch
        self._numbers, self._version = count(1), ""

    @classmethod
    @asynccontextmanager
    async def start(cls, place: Place, scratch: Path, address: str) -> AsyncIterator[Self]:
        """Run the server and the trainer, and load one version."""
        await asyncio.to_thread(scratch.mkdir)
        async with AsyncExitStack() as stack:
            cores, log = place.device.cores, scratch / "server.log"
            environment = server_environment(threads=1 if cores else 0)
            serve = server_command(place.model, address, place.dtype, place.rank, place.server_settings)
            server = stack.enter_context(running(serve, set(cores[-1:]), environment, log))
            session = await stack.enter_async_context(aiohttp.ClientSession(f"http://{address}"))
            await wait_until_ready(session, server.poll, log)
            arguments = (str(place.model), str(place.rank), place.device.kind)
            command = (sys.executable, "-m", "bench.publish.stock", *arguments)
            trainer = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, env=environment)
            stack.callback(trainer.kill)
            if cores:
                os.sched_setaffinity(trainer.pid, {cores[0]})
            stock = cls(trainer, session, scratch)
            await stock.publish()
            yield stock

    async def stream(self) -> AsyncIterator[int]:
        async for _ in self._sample(STREAM_TOKENS):
            yield 1

    async def publish(self) -> Times:
        name = f"version-{next(self._numbers)}"
        directory = self._scratch / name
        start = float(await self._step(directory))
        saved = time.perf_counter()
        await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(directory)})
        active = time.perf_counter()
        self._version = name
        await anext(self._sample(1))
        first = time.perf_counter()
        return Times(1e3 * (active - start), 1e3 * (first - start), apply=1e3 * (active - saved))

    async def _step(self, directory: Path) -> str:
        """Return the time when the optimizer step was done, on the clock that all processes share; the save follows."""
        assert self._trainer.stdin is not None
        assert self._trainer.stdout is not None
        self._trainer.stdin.write(f"{directory}\n".encode())
        line = await self._trainer.stdout.readline()
        if not line:
            raise SystemExit("the PEFT trainer ended")
        return line.decode()

    async def _sample(self, tokens: int) -> AsyncIterator[bytes]:
        body = {"model": self._version, "prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        async with self._session.post("/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if line.startswith(b"data: ") and not line.startswith(_DONE):
                    yield line

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        async with self._session.post(path, json=body) as answer:
            if answer.status != 200:
                raise SystemExit(f"{path}: {await answer.text()}")


def server_command(
    model: Path,
    address: str,
    dtype: str = "float32",
    rank: int = RANK,
    settings: Mapping[str, object] = CPU_SERVER_SETTINGS,
) -> list[str]:
    """Return the command that starts vLLM's server."""
    host, _, port = address.rpartition(":")
    options = {
        "model": model, "host": host, "port": port, "dtype": dtype, "enable_lora": True, "max_loras": 4,
        "max_cpu_loras": 16, "max_lora_rank": rank, "max_num_seqs": 64, **settings,
    }  # fmt: skip
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *as_flags(options)]


def server_environment(threads: int = 1) -> dict[str, str]:
    """Return the server's environment: with some threads on a CPU, or, with 0, on a GPU."""
    more = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    return {**os.environ, **vllm_variables(threads), **more}


async def wait_until_ready(session: aiohttp.ClientSession, poll: Any, log: Path) -> None:
    """Wait until the server answers."""
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and poll() is None:
        try:
            async with session.get("/health") as answer:
                if answer.status == 200:
                    return
        except aiohttp.ClientConnectionError:
            await asyncio.sleep(0.5)
    text = await asyncio.to_thread(log.read_text, errors="replace")
    raise SystemExit(f"vLLM's server did not start: {text[-20000:]}")


def train(model_path: str, rank: int, device: str) -> None:
    """Step and save for every line until the input ends."""
    import torch  # noqa: PLC0415
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    base: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype)
    base.to(device)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS, task_type="CAUSAL_LM")
    model = get_peft_model(base, config, autocast_adapter_dtype=False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    ids = torch.tensor([PROMPT], device=device)
    for line in sys.stdin:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        model.save_pretrained(line.strip())
        print(json.dumps(start), flush=True)


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), sys.argv[3])
