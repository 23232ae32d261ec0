"""Grammars of constraints are built in a process of their own, which a constraint cannot exhaust or crash."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest
import pytest_asyncio
from support.descendants import descendants
from support.models.tiny_models import make_tiny_llama
from support.patience import PATIENCE
from vllm.sampling_params import StructuredOutputsParams

from paceline.errors import EngineUnavailable
from sampler_service.engine.options import EngineOptions
from sampler_service.engine.vllm import grammar_process
from sampler_service.engine.vllm.engine import engine_args
from sampler_service.engine.vllm.grammar_process import TOO_MUCH, GrammarProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

FINE = StructuredOutputsParams(regex="[0-9]{12}")


def counted(properties: int) -> StructuredOutputsParams:
    """Return a schema for which xgrammar takes gigabytes and minutes if it has a thousand properties."""
    schema = {"type": "object", "properties": {f"p{number}": {} for number in range(properties)}, "minProperties": 9}
    return StructuredOutputsParams(json=json.dumps(schema))


def crashing(depth: int) -> StructuredOutputsParams:
    """Return a pattern of so many groups in one another; thousands exhaust xgrammar's stack."""
    pattern = "(" * depth + "a" + ")" * depth
    return StructuredOutputsParams(json=json.dumps({"type": "string", "pattern": pattern}))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def config(tmp_path_factory, vllm_here):
    model = make_tiny_llama(tmp_path_factory.mktemp("model"))
    return await asyncio.to_thread(engine_args(EngineOptions(model, "tiny")).create_engine_config)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def grammars(config):
    grammars = GrammarProcess(config)
    yield grammars
    grammars.close()


@pytest.fixture(scope="module")
def of_others(vllm_here):
    """Processes of engines that other tests of this process keep."""
    return set(descendants("Grammars"))


async def test_a_constraint_that_takes_too_much_is_refused_and_later_ones_are_built(of_others, grammars):
    assert await grammars.refusal(counted(1000)) == TOO_MUCH
    assert await grammars.refusal(FINE) == ""
    assert "not closed" in await grammars.refusal(StructuredOutputsParams(regex="(ab"))


async def test_a_constraint_that_crashes_xgrammar_is_refused_and_later_ones_are_built(grammars):
    assert await grammars.refusal(crashing(32_000)) == TOO_MUCH
    assert await grammars.refusal(StructuredOutputsParams(choice=["yes", "no"])) == ""


async def test_a_caller_that_leaves_takes_no_answer_of_others(grammars):
    left = [asyncio.create_task(grammars.refusal(crashing(depth))) for depth in (32_001, 32_002)]
    for _ in range(5):
        await asyncio.sleep(0)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    assert await grammars.refusal(StructuredOutputsParams(regex="[a-f]{7}")) == ""


async def test_a_process_that_ended_is_replaced_and_what_it_answered_is_known(grammars, of_others):
    await grammars.refusal(FINE)
    (process,) = set(descendants("Grammars")) - of_others
    process.kill()
    process.wait()
    assert await grammars.refusal(FINE) == ""
    other = StructuredOutputsParams(regex="[0-9]{13}")
    with pytest.raises(EngineUnavailable, match="again"):
        await grammars.refusal(other)
    assert await grammars.refusal(other) == ""


class Starts:
    """Notes which processes are started, and does something right after each start."""

    def __init__(self, monkeypatch, then=lambda: None):
        self.context, self.then = grammar_process.utils.get_mp_context(), then
        self.processes = []
        parts = SimpleNamespace(Pipe=self.context.Pipe, Process=self.process)
        monkeypatch.setattr(grammar_process.utils, "get_mp_context", lambda: parts)

    def process(self, **options):
        process = self.context.Process(**options)

        def start():
            process.start()
            self.processes.append(process)
            self.then()

        return SimpleNamespace(start=start, kill=process.kill, join=process.join, pid=None)


async def test_a_closed_one_starts_no_process_for_those_who_wait(config, grammars, monkeypatch):
    closed, starts = GrammarProcess(config), Starts(monkeypatch)
    waiting = [asyncio.create_task(closed.refusal(counted(1010 + number))) for number in range(3)]
    async with asyncio.timeout(PATIENCE):
        while not starts.processes:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)
    closed.close()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {EngineUnavailable}
    (process,) = starts.processes
    assert not process.is_alive()


async def test_one_that_is_closed_while_its_process_starts_ends_it(config, grammars, monkeypatch):
    closed = GrammarProcess(config)
    starts = Starts(monkeypatch, then=closed.close)
    with pytest.raises(EngineUnavailable):
        await closed.refusal(FINE)
    (process,) = starts.processes
    assert not process.is_alive()
