"""An engine that is built again when it dies, also where it dies while that happens."""

from __future__ import annotations

import asyncio

import pytest

from paceline.errors import EngineUnavailable
from sampler_service.engine import liveness
from sampler_service.engine.options import EngineOptions
from sampler_service.engine.protocol import Adapter, LoadTimes
from sampler_service.engine.restartable import RestartableEngine


class Engine:
    """Answers nothing once it is dead, as vLLM does to calls in progress."""

    name = version = "toy"

    def __init__(self, options):
        self.model_path = options.model_path
        self.is_dead = False
        self.dies_at = ""
        self.loaded = []

    async def start(self):
        pass

    async def stop(self):
        self.is_dead = True

    async def check_health(self):
        if self.is_dead:
            raise EngineUnavailable("the engine died")

    async def add_adapter(self, adapter):
        await self._call("add_adapter")
        self.loaded.append(adapter)
        return LoadTimes(0, 0, True)

    async def remove_adapter(self, adapter):
        await self._call("remove_adapter")
        self.loaded.remove(adapter)

    async def change_model(self, model_path, contents=None):
        await self._call("change_model")
        self.model_path = model_path

    def unused(self, *_):
        raise AssertionError("no test calls it")

    describe = slots = num_running = check_constraint = generate = compute_logprobs = complete_text = unused

    async def _call(self, name):
        if self.dies_at == name:
            self.is_dead = True
        if self.is_dead:
            await asyncio.Event().wait()


@pytest.fixture
def made():
    return []


@pytest.fixture
def engine(made, tmp_path, monkeypatch):
    def make(options):
        made.append(Engine(options))
        return made[-1]

    monkeypatch.setattr(liveness, "HEALTH_SECONDS", 0.01)
    return RestartableEngine(make, EngineOptions(tmp_path, "tiny"))


async def test_one_that_dies_while_its_adapters_are_loaded_again_is_built_again(engine, made, monkeypatch):
    await engine.start()
    adapter = Adapter(1, "one", engine.model_path, in_memory=False)
    await engine.add_adapter(adapter)
    make = engine._make

    def make_mortal(options):
        again = make(options)
        again.dies_at = "add_adapter"
        return again

    monkeypatch.setattr(engine, "_make", make_mortal)
    with pytest.raises(EngineUnavailable):
        await asyncio.wait_for(engine.revive(), 10)
    monkeypatch.setattr(engine, "_make", make)
    assert await engine.revive() == []
    assert made[-1].loaded == [adapter]
    await engine.check_health()


async def test_one_that_dies_while_its_model_is_changed_is_found_dead(engine, made, tmp_path):
    await engine.start()
    made[0].dies_at = "change_model"
    with pytest.raises(EngineUnavailable):
        await asyncio.wait_for(engine.change_model(tmp_path / "other"), 10)
    with pytest.raises(EngineUnavailable):
        await engine.check_health()
    assert await engine.revive() == []
    await engine.check_health()
