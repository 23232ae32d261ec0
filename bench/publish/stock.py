"""The other arm of `python -m bench.publish`: PEFT saves to disk, vLLM's OpenAI server loads the adapter over HTTP.

    python -m bench.publish.stock MODEL DIRECTORY

runs the trainer: for each input line it takes an optimizer step, saves the adapter, and answers when that is done.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, Self

import aiohttp

from bench.publish.times import LEARNING_RATE, PROMPT, RANK, STREAM_TOKENS, Times, running

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
    async def start(cls, model: Path, scratch: Path, address: str, cores: Sequence[int]) -> AsyncIterator[Self]:
        """Run the server and the trainer, and load one version."""
        await asyncio.to_thread(scratch.mkdir)
        async with AsyncExitStack() as stack:
            log, environment = scratch / "server.log", server_environment()
            server = stack.enter_context(running(server_command(model, address), {cores[-1]}, environment, log))
            session = await stack.enter_async_context(aiohttp.ClientSession(f"http://{address}"))
            await wait_until_ready(session, server.poll, log)
            command = (sys.executable, "-m", "bench.publish.stock", str(model), str(scratch))
            trainer = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, env=environment)
            stack.callback(trainer.kill)
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
        await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(directory)})
        active = time.perf_counter()
        self._version = name
        await anext(self._sample(1))
        return Times(1e3 * (active - start), 1e3 * (time.perf_counter() - start))

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


def server_command(model: Path, address: str, dtype: str = "float32") -> list[str]:
    """Return the command that starts vLLM's server."""
    host, _, port = address.rpartition(":")
    options = {
        "model": str(model), "host": host, "port": port, "dtype": dtype, "max-loras": "4", "max-cpu-loras": "16",
        "max-lora-rank": str(RANK), "max-num-seqs": "64", "block-size": "32",
    }  # fmt: skip
    flags = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enable-lora", *flags]


def server_environment() -> dict[str, str]:
    """Return the server's environment."""
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # With adapters vLLM runs eagerly on a CPU but still compiles parts, which our arm does not compile either.
        "TORCH_COMPILE_DISABLE": "1",
    }


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
    raise SystemExit(f"vLLM's server did not start; see {log}")


def train(model_path: str) -> None:
    """Step and save for every line until the input ends."""
    import torch  # noqa: PLC0415
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS, task_type="CAUSAL_LM")
    model = get_peft_model(base, config, autocast_adapter_dtype=False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    ids = torch.tensor([PROMPT])
    for line in sys.stdin:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        start = time.perf_counter()
        model.save_pretrained(line.strip())
        print(json.dumps(start), flush=True)


if __name__ == "__main__":
    train(sys.argv[1])
