"""The engine in its own process: the same answers as in this one, typed errors, and a crash that is only an error."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio
from support.memory_limits import short_of_memory
from support.models.tiny_models import VOCAB_SIZE, make_tiny_llama
from support.stacks.warm_processes import behind

from paceline.errors import (
    CheckpointMismatch,
    DiskFull,
    EngineUnavailable,
    Internal,
    ModelNotFound,
    NoGradient,
    OutOfMemory,
    OutOfRange,
    RunNotFound,
)
from paceline.files.own_directory import OwnDirectory
from paceline.types import AdamParams, Datum, ForwardBackwardOutput, ForwardBackwardSpec, LoraConfig
from trainer_service.engine.peft_engine import PeftEngine
from trainer_service.engine_link.client import EngineProcess
from trainer_service.engine_link.messages import SaveState
from trainer_service.engine_link.options import EngineOptions
from trainer_service.engine_link.protocol import AccumulatedOutput, EngineDiedError
from trainer_service.engine_link.watchdog import Patience

pytestmark = pytest.mark.usefixtures("forked_engines")

LORA = LoraConfig(rank=4, dropout=0.1, layers=(0, 1))
ADAM = AdamParams(learning_rate=1e-2)


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    return EngineOptions(str(make_tiny_llama(tmp_path_factory.mktemp("model"))), "tiny", pack_tokens=64)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def process(options):
    async with EngineProcess(options) as process:
        yield process


@pytest_asyncio.fixture(loop_scope="module")
async def engine(process):
    await process.create_run("run", LORA)
    yield process
    await process.delete_run("run")


def make_data(lengths=(5, 70, 30), seed=0):
    rng = np.random.default_rng(seed)
    return [
        Datum(
            rng.integers(0, VOCAB_SIZE, n).astype(np.int32),
            {
                "target_tokens": rng.integers(0, VOCAB_SIZE, n),
                "logprobs": -rng.uniform(4, 6, n).astype(np.float32),
                "advantages": rng.normal(0, 1, n).astype(np.float32),
                "mask": (np.arange(n) % 3 > 0).astype(np.uint8),
            },
        )
        for n in lengths
    ]


def new(directory):
    directory.mkdir()
    return directory


def files(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.asyncio(loop_scope="module")
async def test_every_command_answers_as_in_this_process(options, engine, tmp_path):
    local, remote = PeftEngine(options), engine
    mine, theirs = (replace(each.describe().certificate, seconds=0.0) for each in (local, remote))
    assert theirs == mine
    assert replace(remote.describe(), certificate=None) == replace(local.describe(), certificate=None)
    local.create_run("run", LORA)
    assert await remote.create_run("own", LORA) == local.create_run("own", LORA)
    await remote.delete_run("own")
    for seed in range(2):
        for forward_only in (False, True):
            spec = ForwardBackwardSpec("ppo", {"clip_high_threshold": 1.3}, forward_only=forward_only)
            theirs = await remote.forward_backward("run", make_data(seed=seed), spec)
            ours = local.forward_backward("run", make_data(seed=seed), spec)
            assert theirs.metrics == ours.metrics
            for their_output, our_output in zip(theirs.loss_fn_outputs, ours.loss_fn_outputs, strict=True):
                np.testing.assert_array_equal(their_output["logprobs"], our_output["logprobs"])
                assert their_output["logprobs"].dtype == np.float32
        their_step, our_step = await remote.optim_step("run", ADAM), local.optim_step("run", ADAM)
        assert (their_step.step, their_step.grad_norm, their_step.tokens, their_step.learning_rate) == (
            our_step.step,
            our_step.grad_norm,
            our_step.tokens,
            our_step.learning_rate,
        )
    for name in ("save_state", "save_adapter"):
        theirs, ours = new(tmp_path / f"their_{name}"), new(tmp_path / f"our_{name}")
        await getattr(remote, name)("run", theirs)
        getattr(local, name)("run", ours)
        assert files(theirs) == files(ours)
    checkpoint = tmp_path / "our_save_state"
    for with_optimizer in (True, False):
        loaded = await remote.load_state("run", checkpoint, with_optimizer=with_optimizer)
        assert loaded == local.load_state("run", checkpoint, with_optimizer=with_optimizer)
    await remote.delete_run("run")
    with pytest.raises(RunNotFound):
        await remote.optim_step("run", ADAM)


@pytest.mark.asyncio(loop_scope="module")
async def test_queued_commands_are_executed_in_order(engine):
    calls = [
        engine.forward_backward("run", make_data(), ForwardBackwardSpec("ppo")),
        engine.optim_step("run", ADAM),
        engine.forward_backward("run", make_data(), ForwardBackwardSpec("ppo")),
        engine.optim_step("run", ADAM),
    ]
    _, first, _, second = await asyncio.gather(*calls)
    assert (first.step, second.step) == (1, 2)


@pytest.mark.asyncio(loop_scope="module")
async def test_commands_go_on_while_what_was_captured_is_written(engine, tmp_path):
    await engine.forward_backward("run", make_data(), ForwardBackwardSpec("ppo"))
    await engine.optim_step("run", ADAM)
    await engine.save_state("run", new(tmp_path / "at once"))
    order = []
    pipe = new(tmp_path / "later") / "adapter_model.safetensors"
    os.mkfifo(pipe)  # a writer blocks until there is a reader
    saving = asyncio.ensure_future(engine.save_state("run", pipe.parent, lambda: order.append("captured")))
    await asyncio.sleep(0)
    await engine.forward_backward("run", make_data(seed=3), ForwardBackwardSpec("ppo"))
    order.append((await engine.optim_step("run", ADAM)).step)
    assert order == ["captured", 2]
    assert not saving.done()
    written = await asyncio.to_thread(pipe.read_bytes)
    await saving
    expected = files(tmp_path / "at once")
    assert written == expected.pop(pipe.name)
    pipe.unlink()
    assert files(pipe.parent) == expected


@pytest.mark.asyncio(loop_scope="module")
async def test_a_full_disk_is_the_answer_of_what_was_written_and_the_engine_goes_on(engine, tmp_path):
    (tmp_path / "adapter_model.safetensors").symlink_to("/dev/full")
    with pytest.raises(DiskFull):
        await engine.save_state("run", tmp_path)
    await engine.forward_backward("run", make_data(), ForwardBackwardSpec("ppo"))
    assert (await engine.optim_step("run", ADAM)).step == 1


@pytest.mark.asyncio(loop_scope="module")
async def test_a_death_while_one_command_executes_and_another_is_written_is_charged_to_none_until_it_is_certain(
    options, tmp_path
):
    pipe = tmp_path / "adapter_model.safetensors"
    os.mkfifo(pipe)  # a writer blocks until there is a reader
    async with EngineProcess(replace(options, failpoints="engine_OptimStep:1")) as engine:

        async def begin():
            await engine.create_run("run", LORA)
            await engine.forward_backward("run", make_data(), ForwardBackwardSpec("ppo"))
            saving = asyncio.ensure_future(engine.save_state("run", tmp_path))
            await asyncio.sleep(0)
            return saving, asyncio.ensure_future(engine.optim_step("run", ADAM))

        assert await outcomes(await begin()) == [EngineUnavailable, EngineUnavailable]
        await engine.restart()
        saving, step = await begin()
        assert not (await asyncio.wait({step}, timeout=0.5))[0], "what was suspected is written before the next begins"
        await asyncio.to_thread(pipe.read_bytes)
        await asyncio.gather(saving, step)
        captured = asyncio.Event()
        saving = asyncio.ensure_future(engine.save_state("run", tmp_path, captured.set))
        await captured.wait()
        os.kill(behind(engine.pid), signal.SIGKILL)
        assert await outcomes([saving]) == [EngineDiedError], "it did nothing else"


@pytest.mark.asyncio(loop_scope="module")
async def test_typed_errors_cross_the_pipe(engine, tmp_path):
    with pytest.raises(NoGradient) as no_gradient:
        await engine.optim_step("run", ADAM)
    assert "forward_backward" in no_gradient.value.message
    with pytest.raises(OutOfRange) as out_of_range:
        await engine.create_run("other", LoraConfig(layers=(99,)))
    assert out_of_range.value.field == "lora.layers"
    with pytest.raises(CheckpointMismatch):
        await engine.load_state("run", tmp_path, with_optimizer=True)


@pytest.mark.asyncio(loop_scope="module")
async def test_unforeseen_errors_are_internal_and_their_text_stays_in_the_log(options, capfd):
    outside = np.full(4, VOCAB_SIZE + 5, np.int32)
    async with EngineProcess(options) as engine:
        await engine.create_run("run", LORA)
        data = [Datum(outside, make_data((4,))[0].loss_fn_inputs)]
        with pytest.raises(Internal) as internal:
            await engine.forward_backward("run", data, ForwardBackwardSpec("ppo"))
        assert (await engine.create_run("next", LORA)).trainable_parameters > 0, "the engine lives on"
    log = capfd.readouterr().err
    assert internal.value.metadata["error_id"] in log
    assert "IndexError" in log
    assert "IndexError" not in str(internal.value)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_killed_engine_is_an_error_and_restarts(options):
    exits = []
    async with EngineProcess(options, on_exit=exits.append) as engine:
        await engine.create_run("run", LORA)
        first = engine.pid
        os.kill(behind(first), signal.SIGKILL)  # the engine, not its stand-in, which would end first
        with pytest.raises(EngineUnavailable):
            await engine.create_run("later", LORA)
        assert (await engine.restart()).name == "tiny"
        assert engine.pid != first
        assert exits == [-signal.SIGKILL]
        await engine.create_run("run", LORA)
        output = await engine.forward_backward("run", make_data(), ForwardBackwardSpec("ppo"))
        assert output.metrics["tokens:sum"] > 0
    assert len(exits) == 1, "closing is no death"
    with pytest.raises(EngineUnavailable):
        await engine.create_run("run", LORA)


@pytest.mark.asyncio(loop_scope="module")
async def test_an_engine_that_dies_while_it_loads_its_model_says_so_and_with_which_status(options):
    engine = EngineProcess(options)
    starting = asyncio.ensure_future(engine.start())
    while not starting.done():
        await asyncio.sleep(0)
        with suppress(EngineUnavailable):  # it has not begun to start
            if behind(engine.pid) != engine.pid:
                os.kill(behind(engine.pid), signal.SIGKILL)
                break
    with pytest.raises(EngineUnavailable, match=r"while it loaded the model \(SIGKILL, .*memory"):
        await starting


@pytest.mark.asyncio(loop_scope="module")
async def test_an_engine_that_is_stopped_is_killed_and_its_calls_fail_as_of_a_death(options):
    exits = []
    async with EngineProcess(options, on_exit=exits.append, patience=Patience(5.0, 900.0)) as engine:
        await engine.create_run("run", LORA)
        os.kill(behind(engine.pid), signal.SIGSTOP)
        with pytest.raises(EngineUnavailable):
            await engine.forward_backward("run", make_data(), ForwardBackwardSpec("ppo"))
        await engine.restart()
        assert exits == [-signal.SIGKILL]
        await engine.create_run("run", LORA)


@pytest.mark.asyncio(loop_scope="module")
async def test_an_engine_whose_loop_hangs_is_killed_and_the_command_is_charged(options, tmp_path):
    os.mkfifo(tmp_path / "adapter_model.safetensors")  # a writer blocks until there is a reader
    async with EngineProcess(options) as engine:
        await engine.create_run("run", LORA)
        engine._connection._watchdog._patience = Patience(60.0, 5.0)  # only from here on: the start may take longer
        engine._suspects.add([SaveState("run", "")])  # makes the engine's loop itself write the state
        with pytest.raises(EngineDiedError):
            await engine.save_state("run", tmp_path)


async def outcomes(calls):
    return [type(result) for result in await asyncio.gather(*calls, return_exceptions=True)]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("point", ["engine_pass_run:1", "engine_ForwardBackward:1"])
async def test_a_death_is_charged_to_the_command_that_was_executing_alone(options, point):
    async with EngineProcess(replace(options, failpoints=point)) as engine:
        await engine.create_run("run", LORA)
        await engine.create_run("idle", LORA)
        calls = (
            engine.forward_backward("run", make_data(), ForwardBackwardSpec("ppo")),
            engine.optim_step("run", ADAM),
        )
        assert await outcomes(calls) == [EngineDiedError, EngineUnavailable]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_command_that_kills_the_engine_in_a_joint_pass_is_found_and_no_other_is_charged(options):
    # The first takes many passes, so that the others arrive meanwhile and join.
    data = {"a": make_data((60,) * 100), "b": make_data((10,), 1), "c": make_data((10,), 2)}
    options = replace(options, failpoints="engine_pass_b:1+", pack_tokens=128, joint_passes=True)
    async with EngineProcess(options) as engine:

        async def call(*run_ids):
            return await outcomes(
                engine.forward_backward(run_id, data[run_id], ForwardBackwardSpec("ppo")) for run_id in run_ids
            )

        for run_id in data:
            await engine.create_run(run_id, LORA)
        assert await call(*data) == [EngineUnavailable] * 3
        await engine.restart()
        for run_id in data:
            await engine.create_run(run_id, LORA)
        assert await call("a", "c") == [AccumulatedOutput] * 2
        assert await call("b") == [EngineDiedError]


@pytest.mark.asyncio
async def test_a_sequence_that_the_process_has_no_memory_for_is_refused_with_what_fits(options):
    ready, long = make_data(seed=1), make_data((20_000,))
    async with EngineProcess(replace(options, pack_tokens=32_768)) as engine:
        for name in ("long", "other"):
            await engine.create_run(name, LORA)
            await engine.forward_backward(name, ready, ForwardBackwardSpec("ppo"))
        with short_of_memory(behind(engine.pid), 48 << 20):
            refused, other = await asyncio.gather(
                engine.forward_backward("long", long, ForwardBackwardSpec("ppo")),
                engine.forward_backward("other", ready, ForwardBackwardSpec("ppo")),
                return_exceptions=True,
            )
            assert isinstance(refused, OutOfMemory)
            assert refused.field == "data[0]"
            assert isinstance(other, ForwardBackwardOutput)
            with pytest.raises(OutOfMemory) as alone:  # the other run may have taken what was free at the first refusal
                await engine.forward_backward("long", long, ForwardBackwardSpec("ppo"))
            refusals = [alone.value]
            while len(refusals) < 4:  # what the process can still map changes a little from pass to pass
                fitting = int(refusals[-1].metadata["fitting_tokens"])
                assert 0 < fitting < 20_000
                try:
                    await engine.forward_backward("long", make_data((fitting,)), ForwardBackwardSpec("ppo"))
                    break
                except OutOfMemory as error:
                    refusals.append(error)
            else:
                pytest.fail(f"nothing that was said to fit did: {refusals}")
        for name in ("long", "other"):
            assert (await engine.optim_step(name, ADAM)).step == 1


@pytest.mark.asyncio(loop_scope="module")
async def test_a_model_that_does_not_load_is_an_error_of_start(options, tmp_path):
    with pytest.raises(ModelNotFound):
        await EngineProcess(EngineOptions(str(tmp_path / "absent"), "absent")).start()


@pytest.mark.asyncio(loop_scope="module")
async def test_the_engine_ignores_the_interrupt_of_its_group(engine):
    os.kill(behind(engine.pid), signal.SIGINT)
    assert (await engine.create_run("after", LORA)).trainable_parameters > 0


def test_the_engine_ends_when_its_parent_dies_and_its_files_when_the_next_is_made(options, tmp_path):
    script = (
        "import asyncio, os, signal, sys\n"
        "from trainer_service.engine_link.options import EngineOptions\n"
        "from trainer_service.engine_link.client import EngineProcess\n"
        "async def main():\n"
        "    engine = EngineProcess(EngineOptions(sys.argv[1], 'tiny'))\n"
        "    await engine.start()\n"
        "    print(engine.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    # The engine inherits the stdout pipe, so reading it ends only when both processes have ended.
    parent = subprocess.run(
        [sys.executable, "-c", script, options.model_path],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert parent.returncode == -signal.SIGKILL
    assert int(parent.stdout) > 0
    (left,) = tmp_path.glob("paceline-engine-*")
    OwnDirectory(tmp_path, "paceline-engine").close()
    assert not left.exists()


def test_the_service_side_imports_no_torch():
    script = (
        "import sys, trainer_service.engine_link.client, trainer_service.engine_link.loss_specs\n"
        "print([name for name in ('torch', 'transformers', 'peft') if name in sys.modules])\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
