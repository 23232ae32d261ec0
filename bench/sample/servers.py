"""The arms of `python -m bench.sample`, each in its own process on given cores until its block ends."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from support.ports import free_port

from bench.device import MAX_BATCHED_TOKENS, Device, as_flags, as_variables, vllm_variables
from bench.sample.load import BLOCK_SIZE, KV_CACHE_GIB, MAX_MODEL_LEN, MAX_NUM_SEQS, RANK, Load, Timing, run_load
from paceline.codec import tensor_to_proto
from paceline.rpc.channel import open_channel
from paceline.rpc.health import wait_until_serving
from paceline.sampler.v1 import sampler_service_pb2 as pb
from paceline.sampler.v1.sampler_service_pb2_grpc import SamplerServiceStub
from paceline.types.v1 import model_pb2, sampling_pb2

_SERVICE = "paceline.sampler.v1.SamplerService"
TOKENS_AND_LOGPROBS = {"return_token_ids": True, "logprobs": 0}
"""Makes vLLM's server send what ours always sends."""


@dataclass(frozen=True)
class Place:
    """An arm's model, dtype and device."""

    model: Path
    dtype: str
    device: Device

    @property
    def engine_settings(self) -> dict[str, object]:
        """The settings of vLLM that the device requires."""
        return self.device.engine_settings(self.model)

    @asynccontextmanager
    async def process(
        self, *command: str, settings: Mapping[str, str] | None = None, stdout: int = DEVNULL, stderr: int | None = None
    ) -> AsyncIterator[Process]:
        """Run a Python command on the device until the block ends; None means this process's standard error."""
        environment = {
            **os.environ,
            **vllm_variables(len(self.device.cores)),
            "VLLM_LOGGING_LEVEL": "ERROR",
            "PYTHONWARNINGS": "ignore",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            **(settings or {}),
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, env=environment, stdin=PIPE, stdout=stdout, stderr=stderr
        )
        if self.device.cores:
            os.sched_setaffinity(process.pid, self.device.cores)
        try:
            yield process
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


class RpcArm:
    """The sampler service, over gRPC."""

    def __init__(self, pid: int, stub: Any) -> None:
        self.pid, self.stub = pid, stub

    async def run(self, load: Load) -> Timing:
        params = sampling_pb2.SamplingParams(max_tokens=load.tokens, ignore_eos=True)
        base = model_pb2.ModelRef(base=model_pb2.BaseModel())

        async def open_stream(prompt: list[int]) -> AsyncIterator[int]:
            tokens = tensor_to_proto(np.array(prompt, np.int32))
            async for message in self.stub.SampleStream(
                pb.SampleStreamRequest(model=base, prompt=tokens, params=params)
            ):
                yield len(message.tokens)

        return await run_load(load, open_stream)


class SseArm:
    """vLLM's own OpenAI server, over server-sent events. Only the last event is decoded, the others are counted."""

    def __init__(self, pid: int, session: aiohttp.ClientSession, url: str, more: Mapping[str, Any]) -> None:
        self.pid, self._session, self._url, self._more = pid, session, url, more

    async def run(self, load: Load) -> Timing:
        body = {"model": "bench", "max_tokens": load.tokens, "ignore_eos": True, "temperature": 1.0, "stream": True,
                "stream_options": {"include_usage": True}, **self._more}  # fmt: skip

        async def open_stream(prompt: list[int]) -> AsyncIterator[int]:
            async with self._session.post(self._url, json={**body, "prompt": prompt}) as reply:
                reply.raise_for_status()
                async for line in reply.content:
                    if b'"usage":{' in line:
                        yield json.loads(line.removeprefix(b"data: "))["usage"]["completion_tokens"]
                    elif line.startswith(b"data: {"):
                        yield 0

        return await run_load(load, open_stream)


class EngineArm:
    """vLLM called in process, in a process that receives the loads."""

    def __init__(self, process: Process) -> None:
        self.pid, self._process = process.pid, process

    async def run(self, load: Load) -> Timing:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(load)).encode() + b"\n")
        return Timing(**await self.answer())

    async def answer(self) -> dict[str, Any]:
        """Read a line. Raises RuntimeError if the process ended."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"an arm ended with status {await self._process.wait()}")
        fields: dict[str, Any] = json.loads(line)
        return fields


@asynccontextmanager
async def serve_rpc(place: Place, stderr: int | None = None, **more: str) -> AsyncIterator[RpcArm]:
    """Run the sampler service with `more` settings. No trainer runs, so it serves the base model."""
    listen, health, trainer = (f"127.0.0.1:{free_port()}" for _ in range(3))
    settings = {
        "model": place.model, "model_name": "bench", "dtype": place.dtype, "listen": listen, "health_listen": health,
        "trainer": trainer, "insecure": True, "log_level": "ERROR", "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_NUM_SEQS, "max_lora_rank": RANK, "kv_cache_gib": KV_CACHE_GIB, **place.engine_settings,
        **more,
    }  # fmt: skip
    variables = as_variables("PACELINE_SAMPLER", settings)
    async with place.process(
        "-m", "paceline.services", "sampler_service", settings=variables, stderr=stderr
    ) as process:
        if not await asyncio.to_thread(wait_until_serving, health, _SERVICE, lambda: process.returncode is not None):
            raise RuntimeError("the sampler did not start")
        async with open_channel(listen) as channel:
            yield RpcArm(process.pid, SamplerServiceStub(channel))


@asynccontextmanager
async def serve_sse(place: Place) -> AsyncIterator[tuple[SseArm, SseArm]]:
    """Run vLLM's server with the service's engine settings; yield an arm for text alone and one for what ours sends."""
    port = free_port()
    if place.device.is_gpu:
        more = {**place.engine_settings, "max_num_batched_tokens": MAX_BATCHED_TOKENS}
    else:
        more = {
            "enforce_eager": True, "block_size": BLOCK_SIZE, "kv_cache_memory_bytes": KV_CACHE_GIB * 2**30,
            "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
        }  # fmt: skip
    settings = {
        "model": place.model, "served_model_name": "bench", "dtype": place.dtype, "host": "127.0.0.1", "port": port,
        "max_model_len": MAX_MODEL_LEN, "max_num_seqs": MAX_NUM_SEQS, "logprobs_mode": "processed_logprobs",
        "uvicorn_log_level": "warning", "disable_uvicorn_access_log": True, "disable_log_stats": True, **more,
    }  # fmt: skip
    async with (
        place.process("-m", "vllm.entrypoints.openai.api_server", *as_flags(settings)) as process,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout()) as session,
    ):
        url = f"http://127.0.0.1:{port}"
        while not await _is_up(session, f"{url}/health"):
            if process.returncode is not None:
                raise RuntimeError("vLLM's server did not start")
            await asyncio.sleep(0.5)
        completions = f"{url}/v1/completions"
        yield (
            SseArm(process.pid, session, completions, {}),
            SseArm(process.pid, session, completions, TOKENS_AND_LOGPROBS),
        )


@asynccontextmanager
async def start_engine(place: Place, kind: str, adapter: Path | None = None) -> AsyncIterator[EngineArm]:
    """Run vLLM in process, as one of the kinds of engine_arms.py."""
    settings = json.dumps(place.engine_settings)
    command = ("-m", "bench.sample.engine_arms", kind, str(place.model), place.dtype, str(adapter or ""), settings)
    async with place.process(*command, stdout=PIPE) as process:
        assert process.stdin is not None
        arm = EngineArm(process)
        await arm.answer()
        try:
            yield arm
        finally:
            # The engine's child processes end with its main process only if that one exits by itself.
            process.stdin.close()
            await process.wait()


async def _is_up(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as reply:
            return reply.ok
    except aiohttp.ClientConnectionError:
        return False
