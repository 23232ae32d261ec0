"""On a CPU, vLLM loads adapters while it computes a step."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
import pytest_asyncio
from support.patience import PATIENCE
from support.stacks.long_step import HOLD_VARIABLE, RUNNING
from support.stacks.sampler_contract import ask, one, options_for

from sampler_service.engine.factory import create_engine
from sampler_service.engine.vllm import engine as engine_module

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture(scope="module")
def hold(tmp_path_factory):
    """Return the path of the file that makes steps last as long as it exists."""
    return tmp_path_factory.mktemp("step") / "hold"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(model_path, vllm_here, hold):
    engine_args = engine_module.engine_args

    def with_long_steps(options):
        args = engine_args(options)
        args.worker_cls = "support.stacks.long_step.LongStepWorker"
        return args

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HOLD_VARIABLE, str(hold))
        patch.setattr(engine_module, "engine_args", with_long_steps)
        engine = create_engine("vllm", options_for(model_path))
        await engine.start()
    yield engine
    await engine.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def start_step(engine, hold):
    """Return a function that starts a request and returns it once its step runs, which lasts until `hold` is gone."""

    async def start(request):
        hold.touch()
        sampled = asyncio.create_task(one(engine, request))
        async with asyncio.timeout(PATIENCE):
            while hold.read_text() != RUNNING:  # noqa: ASYNC110 - another process writes it
                await asyncio.sleep(0.01)
        return sampled

    yield start
    hold.unlink(missing_ok=True)


async def test_an_adapter_is_loaded_before_the_step_ends_and_changes_nothing_in_it(
    engine, hold, start_step, make_adapter
):
    running, loaded = make_adapter(), make_adapter()
    await engine.add_adapter(running)
    request = {"max_tokens": 4, "seed": 1, "ignore_eos": True}
    alone = await one(engine, ask(adapter=running, **request))
    sampled = await start_step(ask(adapter=running, **request))
    async with asyncio.timeout(PATIENCE):
        assert (await engine.add_adapter(loaded)).in_slot
    assert not sampled.done()
    hold.unlink()
    assert await sampled == alone
    assert (await one(engine, ask(adapter=loaded, **request))).logprobs != alone.logprobs
    await engine.remove_adapter(running)
    await engine.remove_adapter(loaded)


async def test_an_adapter_that_cannot_be_loaded_ends_no_step(engine, hold, start_step, make_adapter):
    broken = make_adapter()
    (broken.path / "adapter_model.safetensors").write_bytes(b"no header")
    sampled = await start_step(ask(max_tokens=4, ignore_eos=True))
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(Exception, match="collective_rpc"):
            await engine._live().llm.collective_rpc(
                "load_adapter", args=(broken.adapter_id, "broken", str(broken.path), True)
            )
    hold.unlink()
    assert len((await sampled).tokens) == 4


async def test_it_overtakes_no_call_that_unloads_another(engine, hold, start_step, make_adapter):
    running, old, new = make_adapter(), make_adapter(), make_adapter()
    await engine.add_adapter(running)
    await engine.add_adapter(old)
    sampled = await start_step(ask(max_tokens=4, ignore_eos=True, adapter=running))
    removed = asyncio.create_task(engine.remove_adapter(old))
    await asyncio.sleep(0)
    added = asyncio.create_task(engine.add_adapter(new))
    with suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(added), 0.5)
    assert not added.done()
    assert not removed.done()
    hold.unlink()
    await removed
    assert (await added).in_slot
    assert len((await sampled).tokens) == 4
    await engine.remove_adapter(running)
    await engine.remove_adapter(new)
