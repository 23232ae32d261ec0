"""An engine of two ranks, on gloo: the results and checkpoints of one rank; if any process dies, all end."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from safetensors.numpy import load_file
from support.descendants import descendants
from support.memory_limits import short_of_memory
from support.models.engine_cases import gradients, lora_gradients, make_data, weights
from support.models.tiny_models import VOCAB_SIZE, make_tiny, make_tiny_llama, make_tiny_qwen3
from support.stacks.warm_processes import behind
from tiny_architectures import make_architecture

from paceline.errors import EngineUnavailable, Internal, NonFiniteGradient, OutOfMemory, Unsupported
from paceline.types import AdamParams, Datum, ForwardBackwardSpec, FullParameters, LoraConfig, PackingMode, Reduction
from trainer_service.engine.peft_engine import PeftEngine
from trainer_service.engine_link.client import EngineProcess
from trainer_service.engine_link.options import EngineOptions
from trainer_service.engine_link.watchdog import Patience

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("forked_engines")]

LENGTHS = (5, 17, 9, 30, 50, 61, 12, 44)
"""Five packs of 64 tokens, so that one rank has no pack in the third round."""
LORAS = {
    "all": LoraConfig(rank=4, seed=3),
    "upper layer": LoraConfig(rank=2, seed=4, layers=(1,), train_attn=False),
    "dropout": LoraConfig(rank=4, seed=6, dropout=0.3),
    "head": LoraConfig(rank=4, seed=5, train_attn=False, train_mlp=False, train_unembed=True),
}
STEADY = AdamParams(learning_rate=1e-2, eps=0.1)
"""Its eps is as large as the gradient's elements. With a small eps, a rounding error's sign becomes a whole step."""
TOLERANCE = 1e-5
"""Tolerance of metrics, and of each tensor by norm. Two ranks add the same numbers in another order than one.

Both are this close to float64. A datum with a thousandth more weight moves a tensor by more than this."""


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    model = make_tiny_qwen3(tmp_path_factory.mktemp("tied"), tied=True)
    return EngineOptions(str(model), "tiny", pack_tokens=64, logprob_chunk=16, joint_passes=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def process(options):
    async with EngineProcess(replace(options, ranks=2)) as process:
        yield process


async def begin(process, run_id):
    """Create a run of LORAS["all"]; restart the ranks first if an earlier test left them dead."""
    try:
        await process.create_run(run_id, LORAS["all"])
    except EngineUnavailable:
        await process.restart()
        await process.create_run(run_id, LORAS["all"])


@pytest_asyncio.fixture(loop_scope="module")
async def pair(options, process):
    """An engine of two ranks and one of one rank, each with a run of LORAS["all"]."""
    one = PeftEngine(options)
    one.create_run("run", LORAS["all"])
    await begin(process, "run")
    yield process, one
    with suppress(EngineUnavailable):
        await process.delete_run("run")


@asynccontextmanager
async def both_have(pair, *names):
    """Create runs of these LORAS in both engines; the two ranks delete theirs when the block ends, even by an error."""
    two, one = pair
    async with AsyncExitStack() as stack:
        for name in names:
            one.create_run(name, LORAS[name])
            await two.create_run(name, LORAS[name])
            stack.push_async_callback(two.delete_run, name)
        yield


async def both(pair, command, *arguments, **settings):
    """Execute a command in both engines; return their answers."""
    two, one = pair
    return await getattr(two, command)(*arguments, **settings), getattr(one, command)(*arguments, **settings)


async def train_alike(pair, data, run_id="run", loss="cispo", **settings):
    """Compute a loss in both engines and compare all metrics and outputs."""
    spec = ForwardBackwardSpec(loss, **settings)
    theirs, ours = await both(pair, "forward_backward", run_id, data, spec)
    assert theirs.metrics.keys() == ours.metrics.keys()
    for name, value in ours.metrics.items():
        assert theirs.metrics[name] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), name
    for their_output, our_output in zip(theirs.loss_fn_outputs, ours.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(their_output["logprobs"], our_output["logprobs"], rtol=2e-5, atol=2e-6)


async def step_alike(pair, run_id="run"):
    theirs, ours = await both(pair, "optim_step", run_id, STEADY)
    assert (theirs.step, theirs.tokens) == (ours.step, ours.tokens)
    assert theirs.grad_norm == pytest.approx(ours.grad_norm, rel=TOLERANCE)


async def saved(pair, tmp_path, command="save_state", run_id="run"):
    """Save a run of both engines; return the two directories."""
    directories = []
    for name, engine in zip(("two", "one"), pair, strict=True):
        directory = tmp_path / f"{command} {run_id} {name}"
        directory.mkdir()
        directories.append(directory)
        answer = getattr(engine, command)(run_id, directory)
        if answer is not None:
            await answer
    return directories


def distance(found, expected):
    """Return the norm of the difference divided by the norm of the expected values."""
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    return np.linalg.norm(found - expected) / (np.linalg.norm(expected) or 1.0)


def assert_close(theirs: Path, ours: Path):
    for file in ours.glob("*.safetensors"):
        expected, found = load_file(file), load_file(theirs / file.name)
        assert expected.keys() == found.keys()
        for name, values in expected.items():
            assert distance(found[name], values) <= TOLERANCE, name
    assert (theirs / "adapter_config.json").read_bytes() == (ours / "adapter_config.json").read_bytes()


def contents(directory: Path):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


class Processes:
    """An engine's processes: the launcher and its ranks."""

    def __init__(self, engine: EngineProcess) -> None:
        self.launcher = behind(engine.pid)
        self.ranks = [behind(process.pid) for process in descendants(pid=self.launcher)]
        self._descriptors = [os.pidfd_open(pid) for pid in (self.launcher, *self.ranks)]

    def wait(self) -> None:
        """Wait until all have ended."""
        for descriptor in self._descriptors:
            select.select([descriptor], [], [])
            os.close(descriptor)


async def test_two_ranks_train_as_one(pair, tmp_path):
    for seed in range(5):
        for part in range(2):
            await train_alike(pair, make_data(LENGTHS, seed=2 * seed + part), reduction=Reduction.TOKEN_MEAN)
        await train_alike(pair, make_data(LENGTHS, seed=seed), "run", "cross_entropy", forward_only=True)
        if seed < 4:
            await step_alike(pair)
    for command in ("save_state", "save_adapter"):
        assert_close(*await saved(pair, tmp_path, command))


async def test_the_gradients_of_two_ranks_and_of_one_are_as_near_to_float64(pair, options, tmp_path):
    _, one = pair
    await train_alike(pair, make_data(LENGTHS))
    await step_alike(pair)  # After a step, A has a gradient too.
    one.load_state("run", (await saved(pair, tmp_path))[0], with_optimizer=True)
    data = make_data(LENGTHS, seed=1)
    await train_alike(pair, data, loss="cross_entropy")
    _, exact = lora_gradients(Path(options.model_path), weights(one), data)
    (tmp_path / "trained").mkdir()
    theirs, ours = (load_file(d / "optimizer.safetensors") for d in await saved(pair, tmp_path / "trained"))
    assert exact
    for name, gradient in exact.items():
        for found in (theirs, ours):
            assert distance(found[f"grad.{name}"], gradient.numpy()) <= TOLERANCE, name


@pytest.mark.parametrize("index", range(len(LENGTHS)))
async def test_what_the_tolerance_hides_is_less_than_a_thousandth_of_any_datum(options, index):
    """The effect of a datum that a rank lost or counted twice would be a thousand times larger."""
    results = []
    for weight in (1.0, 1.001):
        one = PeftEngine(options)
        one.create_run("run", LORAS["all"])
        data = make_data(LENGTHS)
        data[index].loss_fn_inputs["advantages"] *= np.float32(weight)
        one.forward_backward("run", data, ForwardBackwardSpec("cispo"))
        results.append({name: gradient.numpy() for name, gradient in gradients(one).items()})
    assert max(distance(results[1][name], gradient) for name, gradient in results[0].items()) > TOLERANCE


@pytest.mark.parametrize("name", [*LORAS][1:])
async def test_ranks_stay_together_whatever_a_run_trains(pair, tmp_path, name):
    async with both_have(pair, name):
        for lengths in (LENGTHS, (7,)):  # With a single datum, the second rank has none.
            await train_alike(pair, make_data(lengths), name)
            await step_alike(pair, name)
            await train_alike(pair, make_data(lengths))
        assert_close(*await saved(pair, tmp_path, run_id=name))


async def test_several_targets_and_packs_without_any_go_side_by_side(pair):
    data = make_data((20, 9))
    for datum in data[:1]:
        shape = (len(datum.model_input), 3)
        rng = np.random.default_rng(0)
        datum.loss_fn_inputs["target_tokens"] = rng.integers(0, VOCAB_SIZE, shape)
        datum.loss_fn_inputs["weights"] = rng.normal(1, 1, shape).astype(np.float32)
    await train_alike(pair, data, "run", "cross_entropy")
    await train_alike(
        pair, [replace(d, loss_fn_inputs=d.loss_fn_inputs | {"mask": d.loss_fn_inputs["mask"] * 0}) for d in data]
    )
    await step_alike(pair)


async def test_a_checkpoint_of_either_loads_in_the_other(pair, tmp_path):
    two, one = pair
    await train_alike(pair, make_data(LENGTHS))
    await step_alike(pair)
    await train_alike(pair, make_data(LENGTHS, seed=1))
    of_two, of_one = await saved(pair, tmp_path)
    assert one.load_state("run", of_two, with_optimizer=True).step == 1
    assert (await two.load_state("run", of_one, with_optimizer=True)).step == 1
    again = tmp_path / "again"
    again.mkdir()
    now_of_two, now_of_one = await saved(pair, again)
    assert contents(now_of_one) == contents(of_two)
    assert contents(now_of_two) == contents(of_one)
    one.load_state("run", of_one, with_optimizer=True)
    await step_alike(pair)
    await train_alike(pair, make_data(LENGTHS, seed=2))


async def test_runs_side_by_side_stay_their_own(pair):
    names = [*LORAS][1:]
    async with both_have(pair, *names):
        for _ in range(2):
            await asyncio.gather(
                *(train_alike(pair, make_data(LENGTHS, seed=seed), name) for seed, name in enumerate([*names, "run"]))
            )
            for name in names:
                await step_alike(pair, name)


async def test_what_fails_on_one_rank_fails_on_both_and_changes_nothing(pair, tmp_path):
    two, _ = pair
    await train_alike(pair, make_data(LENGTHS))
    of_two, _ = await saved(pair, tmp_path)
    before = contents(of_two)
    broken = make_data(LENGTHS)
    broken[0] = Datum(np.full(5, VOCAB_SIZE + 5, np.int32), broken[0].loss_fn_inputs)
    for forward_only in (False, True):
        with pytest.raises(Internal):
            await two.forward_backward("run", broken, ForwardBackwardSpec("cispo", forward_only=forward_only))
    await two.save_state("run", emptied(of_two))
    assert contents(of_two) == before
    await train_alike(pair, make_data(LENGTHS, seed=1))
    await step_alike(pair)


async def test_out_of_memory_on_one_rank_is_so_on_both(pair):
    two, _ = pair
    await train_alike(pair, make_data(LENGTHS))
    with short_of_memory(Processes(two).ranks[1], 16 << 20), pytest.raises(OutOfMemory):
        await two.forward_backward("run", make_data((6000, 6000)), ForwardBackwardSpec("ppo"))
    await train_alike(pair, make_data(LENGTHS, seed=1))
    await step_alike(pair)


async def test_a_gradient_that_is_not_finite_on_one_rank_is_dropped_on_both(pair):
    two, _ = pair
    data = make_data(LENGTHS)
    data[0].loss_fn_inputs["advantages"][:] = np.nan
    await two.forward_backward("run", data, ForwardBackwardSpec("ppo"))
    with pytest.raises(NonFiniteGradient):
        await two.optim_step("run", STEADY)
    await train_alike(pair, make_data(LENGTHS, seed=1))
    await step_alike(pair)


async def test_a_discarded_gradient_is_gone_on_both_ranks(pair):
    two, one = pair
    await train_alike(pair, make_data(LENGTHS))
    tokens = one.discard_gradient("run")
    assert await two.discard_gradient("run") == tokens > 0
    for seed in (1, 2):
        await train_alike(pair, make_data(LENGTHS, seed=seed))
        await step_alike(pair)


def emptied(directory: Path) -> Path:
    for path in directory.iterdir():
        path.unlink()
    return directory


@dataclass(frozen=True)
class Small:
    """Two ranks with memory for two runs."""

    options: EngineOptions
    """For an engine of one rank with the same model."""
    two: EngineProcess
    scratch: Path
    exits: list[object]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def small(tmp_path_factory):
    """Two ranks of a model whose embeddings and head are separate tensors."""
    folder, exits = tmp_path_factory.mktemp("small"), []
    options = EngineOptions(str(make_tiny_llama(folder / "untied")), "tiny", pack_tokens=64)
    run_bytes = 16 * PeftEngine(options).create_run("run", LORAS["all"]).trainable_parameters
    limits = {"run_memory_bytes": 2 * run_bytes, "scratch_dir": str(folder / "scratch")}
    async with EngineProcess(replace(options, ranks=2, **limits), on_exit=exits.append) as two:
        yield Small(options, two, folder / "scratch", exits)


async def test_runs_of_several_ranks_wait_on_disk_and_a_full_one_is_refused(small):
    two, names = small.two, [f"run{number}" for number in range(5)]
    for name in names:
        await begin(two, name)
    with pytest.raises(Unsupported) as caught:
        await two.create_run("whole", FullParameters())
    assert caught.value.field == "ranks"
    for _ in range(2):
        work = (two.forward_backward(name, make_data((9, 5)), ForwardBackwardSpec("ppo")) for name in names)
        outputs = await asyncio.gather(*work)
        losses = [output.metrics["loss:sum"] for output in outputs]
        np.testing.assert_allclose(losses, losses[0], rtol=1e-5)
        steps = [await two.optim_step(name, STEADY) for name in names]
    assert {step.step for step in steps} == {2}
    for rank in ("0", "1"):
        assert list((small.scratch / rank).iterdir())


async def test_the_death_of_any_process_is_that_of_the_engine(small):
    two, exits = small.two, small.exits
    await begin(two, "run")
    exits.clear()
    processes = Processes(two)
    work = two.forward_backward("run", make_data((400,) * 200), ForwardBackwardSpec("ppo"))
    call = asyncio.create_task(work)
    await asyncio.sleep(0)  # Let the call be sent.
    os.kill(processes.ranks[1], signal.SIGKILL)
    with pytest.raises(EngineUnavailable):
        await call
    await two.restart()
    processes.wait()
    assert len(exits) == 1
    one = PeftEngine(small.options)
    one.create_run("run", LORAS["all"])
    await two.create_run("run", LORAS["all"])
    await train_alike((two, one), make_data(LENGTHS))
    processes = Processes(two)
    os.kill(processes.launcher, signal.SIGKILL)
    processes.wait()


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_is_stopped_is_found_by_its_silence_and_ends_the_engine(small, rank):
    two = small.two
    await two.restart()
    link, processes = two._connection, Processes(two)
    link._watchdog._patience = Patience(3.0, 900.0)  # only from here on: the start may take longer
    os.kill(processes.ranks[rank], signal.SIGSTOP)
    await link._receiving  # no request is in flight
    processes.wait()
    with pytest.raises(EngineUnavailable):
        await two.create_run("run", LORAS["all"])


async def test_closing_leaves_no_process_and_no_file(pair):
    process, _ = pair
    processes, directory = Processes(process), process._connection._directory.path
    assert os.listdir(directory)  # noqa: PTH208
    await process.close()
    processes.wait()
    with pytest.raises(FileNotFoundError):
        os.listdir(directory)  # noqa: PTH208


async def test_a_model_whose_sequences_share_no_pass_trains_on_two_ranks_as_on_one(tmp_path):
    model = make_tiny("lfm2", tmp_path, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False)
    options = EngineOptions(str(model), "tiny", pack_tokens=64, joint_passes=True)
    one = PeftEngine(options)
    async with EngineProcess(replace(options, ranks=2)) as two:
        certificates = [engine.describe().certificate for engine in (one, two)]
        assert {found.packing for found in certificates} == {PackingMode.ONE_SEQUENCE}
        assert "model.layers.0.conv (Lfm2ShortConv) gives different results" in certificates[0].reason
        assert certificates[1].reason == certificates[0].reason
        assert certificates[1].logprob_difference <= certificates[1].logprob_bound
        for name in ("run", "beside"):
            one.create_run(name, LoraConfig(rank=4, train_mlp=False))
            await two.create_run(name, LoraConfig(rank=4, train_mlp=False))
        data = make_data(LENGTHS[:5])
        expected = one.forward_backward("run", data, ForwardBackwardSpec("cross_entropy"))
        got, _ = await asyncio.gather(
            *(two.forward_backward(n, data, ForwardBackwardSpec("cross_entropy")) for n in ("run", "beside"))
        )
        assert got.metrics == pytest.approx(expected.metrics, rel=TOLERANCE)
        norms = one.optim_step("run", STEADY).grad_norm, (await two.optim_step("run", STEADY)).grad_norm
        assert norms[1] == pytest.approx(norms[0], rel=TOLERANCE)


async def test_two_ranks_refuse_a_model_by_the_module_that_one_rank_names(tmp_path):
    make_architecture("zaya", tmp_path)
    options = EngineOptions(str(tmp_path), "tiny")
    with pytest.raises(Unsupported, match=r"self_attn.*\(Linear\): a layer of this model does not see") as one:
        PeftEngine(options)
    with pytest.raises(Unsupported) as two:
        await EngineProcess(replace(options, ranks=2)).start()
    assert two.value.message == one.value.message
