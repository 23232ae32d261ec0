"""The other arm of `python -m bench.soak`: vLLM's own server, whose one adapter is reloaded under the same name."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from bench.publish.stock import server_command, server_environment, wait_until_ready
from bench.publish.times import PROMPT, STREAM_TOKENS, running
from bench.soak.score import Sampled

_NAME = "policy"


async def reload_under_load(
    model: Path, versions: Sequence[Path], scratch: Path, core: int, *, dtype: str, streams: int, seconds: float
) -> list[Sampled]:
    """Load one version after the other, five a second, under one name and from one path, while streams decode.

    Each sequence is stamped with the version that was loaded last when it started.
    """
    address, log, served = "127.0.0.1:50590", scratch / "server.log", scratch / _NAME
    current, found = 0, list[Sampled]()
    with running(server_command(model, address, dtype), {core}, server_environment(), log) as server:
        async with aiohttp.ClientSession(f"http://{address}") as session:
            await wait_until_ready(session, server.poll, log)

            async def load(number: int) -> None:
                nonlocal current
                await asyncio.to_thread(shutil.copytree, versions[number], served, dirs_exist_ok=True)
                body = {"lora_name": _NAME, "lora_path": str(served), "load_inplace": number > 0}
                async with session.post("/v1/load_lora_adapter", json=body) as answer:
                    answer.raise_for_status()
                current = number

            async def again() -> None:
                while time.perf_counter() < until:
                    found.append(await _sample(session, current))

            async def publish() -> None:
                for number in range(1, len(versions)):
                    if time.perf_counter() > until:
                        break
                    await load(number)
                    await asyncio.sleep(0.2)

            await load(0)
            until = time.perf_counter() + seconds
            await asyncio.gather(publish(), *(again() for _ in range(streams)))
    return found


async def _sample(session: aiohttp.ClientSession, version: int) -> Sampled:
    body = {"model": _NAME, "prompt": PROMPT, "max_tokens": STREAM_TOKENS, "ignore_eos": True, "temperature": 1.0,
            "return_token_ids": True, "logprobs": 0}  # fmt: skip
    async with session.post("/v1/completions", json=body) as answer:
        answer.raise_for_status()
        (choice,) = (await answer.json())["choices"]
    return Sampled("", version, choice["token_ids"], choice["logprobs"]["token_logprobs"])
