"""Runs beyond the memory limit: offloaded to disk and back to the last bit, least recently used first."""

from __future__ import annotations

import errno
from dataclasses import replace
from threading import Thread

import pytest
import torch
from support.models.engine_cases import ADAM, make_data, saved, train
from support.models.optimizer_cases import PARAMS
from support.models.tiny_models import make_tiny_llama

from paceline import layout
from paceline.errors import DiskFull, OutOfMemory, RunNotFound
from paceline.types import AdafactorParams, FullParameters, LoraConfig, WeightStorage
from trainer_service.engine.peft_engine import PeftEngine
from trainer_service.engine_link.options import EngineOptions

LORA = LoraConfig(rank=4, dropout=0.2, train_mlp=False, layers=(1,))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_llama(tmp_path_factory.mktemp("model"), tied=True))


@pytest.fixture
def adapter_bytes(model):
    """Return the bytes that one adapter of LORA holds: weights, gradient and two moments in float32."""
    engine = PeftEngine(EngineOptions(model, "tiny"))
    return 16 * engine.create_run("run", LORA).trainable_parameters


@pytest.fixture
def make_engine(model, tmp_path):
    def make(limit=None, **options):
        scratch = str(tmp_path / "scratch")
        return PeftEngine(EngineOptions(model, "tiny", run_memory_bytes=limit, scratch_dir=scratch, **options))

    return make


def test_20_runs_in_the_memory_of_4_come_out_as_if_all_had_stayed(make_engine, adapter_bytes, tmp_path):
    paged, whole = make_engine(4 * adapter_bytes), make_engine()
    names, peak = [f"run{number}" for number in range(20)], 0
    optimizers = list(PARAMS.values())
    for number, name in enumerate(names):
        for engine in (paged, whole):
            engine.create_run(name, replace(LORA, seed=number))
        peak = max(peak, paged.held_bytes)
    for turn in range(3):
        for number, name in enumerate(names):
            for engine in (paged, whole):
                train(engine, name, data=make_data((5, 9), seed=turn))
                if turn % 2:  # Every other turn leaves a pending gradient on disk.
                    engine.optim_step(name, optimizers[number % len(optimizers)])
                elif number % 3 == 0 and turn:
                    assert engine.discard_gradient(name) > 0
            peak = max(peak, paged.held_bytes)
    assert whole.held_bytes > len(names) // 2 * adapter_bytes
    assert 3 * adapter_bytes < peak <= 4 * adapter_bytes
    for name in names:
        assert saved(paged, tmp_path / f"paged-{name}", name) == saved(whole, tmp_path / f"whole-{name}", name)
    assert paged.held_bytes <= 4 * adapter_bytes


@pytest.mark.parametrize("storage", WeightStorage)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_full_parameter_runs_are_paged_too(make_engine, tmp_path, dtype, storage):
    whole = make_engine(dtype=dtype)
    parameters = FullParameters(storage, 3)
    count = whole.create_run("run", parameters).trainable_parameters
    paged = make_engine(int(1.2 * 18 * count), dtype=dtype)
    for engine in (paged, whole):
        for name in ("run", "other"):
            if name not in engine.runs:
                engine.create_run(name, parameters)
        for turn in range(2):
            for name in ("run", "other"):
                train(engine, name, data=make_data(seed=turn))
                engine.optim_step(name, ADAM)
    assert sum(run.held_bytes > 1000 for run in paged.runs.values()) == 1
    assert sum(run.held_bytes > 1000 for run in whole.runs.values()) == 2
    for name in ("run", "other"):
        assert saved(paged, tmp_path / f"paged-{name}", name) == saved(whole, tmp_path / f"whole-{name}", name)


def test_the_run_used_longest_ago_goes_first(make_engine, adapter_bytes):
    engine = make_engine(2 * adapter_bytes)
    for name in ("a", "b"):
        engine.create_run(name, LORA)
    train(engine, "a")
    engine.create_run("c", LORA)
    assert [name for name, run in engine.runs.items() if run.held_bytes > 1000] == ["a", "c"]
    train(engine, "b")
    assert [name for name, run in engine.runs.items() if run.held_bytes > 1000] == ["b", "c"]


def test_every_command_finds_a_run_that_is_paged_out(make_engine, adapter_bytes, tmp_path):
    engine = make_engine(adapter_bytes)
    engine.create_run("run", LORA)
    train(engine)
    before = saved(engine, tmp_path / "before")

    def page_out():
        engine.create_run("other", LORA)
        engine.delete_run("other")
        assert engine.runs["run"].held_bytes < 1000

    page_out()
    assert saved(engine, tmp_path / "after") == before
    page_out()
    assert engine.optim_step("run", ADAM).step == 1
    page_out()
    (tmp_path / "adapter").mkdir()
    engine.save_adapter("run", tmp_path / "adapter")
    page_out()
    assert engine.load_state("run", tmp_path / "before", with_optimizer=True).step == 0
    assert saved(engine, tmp_path / "loaded") == before
    page_out()
    engine.delete_run("run")
    assert not list((tmp_path / "scratch").iterdir())
    with pytest.raises(RunNotFound):
        train(engine)


def test_a_small_optimizer_leaves_room_for_more_runs(make_engine, adapter_bytes):
    engine = make_engine(3 * adapter_bytes)
    for number in range(4):
        engine.create_run(f"run{number}", LORA)
        train(engine, f"run{number}")
        engine.optim_step(f"run{number}", AdafactorParams())
    assert all(run.held_bytes > 1000 for run in engine.runs.values())


def test_a_run_that_never_fits_is_refused_and_pages_nothing_out(make_engine, adapter_bytes):
    engine = make_engine(2 * adapter_bytes)
    engine.create_run("run", LORA)
    for parameters in (LoraConfig(rank=64), FullParameters()):
        with pytest.raises(OutOfMemory) as caught:
            engine.create_run("large", parameters)
        assert int(caught.value.metadata["bytes"]) > int(caught.value.metadata["limit_bytes"]) == 2 * adapter_bytes
    assert engine.runs.keys() == {"run"}
    assert engine.runs["run"].held_bytes > 1000


def test_a_full_scratch_directory_refuses_the_command_and_harms_no_run(
    make_engine, adapter_bytes, tmp_path, monkeypatch
):
    engine = make_engine(adapter_bytes)
    engine.create_run("run", LORA)
    train(engine)
    before = saved(engine, tmp_path / "before")
    with monkeypatch.context() as patch:

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(layout, "write_all", full)
        with pytest.raises(DiskFull, match="scratch_dir"):
            engine.create_run("other", LORA)
    assert saved(engine, tmp_path / "after") == before
    engine.create_run("other", LORA)


@pytest.mark.parametrize("staging_bytes", [0, 1 << 20])
def test_a_run_is_paged_out_when_what_was_captured_of_it_is_safe(make_engine, adapter_bytes, tmp_path, staging_bytes):
    engine = make_engine(adapter_bytes, staging_bytes=staging_bytes)
    engine.create_run("run", LORA)
    train(engine)
    before = saved(engine, tmp_path / "before")
    capture = engine.capture_state("run")
    paging = Thread(target=engine.create_run, args=("other", LORA))
    paging.start()
    if staging_bytes:
        paging.join(60)
        assert not paging.is_alive()
    (tmp_path / "captured").mkdir()
    capture.write(tmp_path / "captured")
    paging.join(60)
    written = {file.name: file.read_bytes() for file in (tmp_path / "captured").iterdir()}
    assert written == before == saved(engine, tmp_path / "after")


def test_a_page_that_cannot_be_read_ends_the_engine_which_comes_back_from_the_journal(
    make_engine, adapter_bytes, tmp_path
):
    engine = make_engine(adapter_bytes)
    engine.create_run("run", LORA)
    engine.create_run("other", LORA)
    (tmp_path / "scratch" / "run" / "optimizer.safetensors").write_bytes(b"damaged")
    with pytest.raises(SystemExit):
        train(engine)


def test_running_out_of_memory_while_a_run_comes_back_leaves_it_on_disk(make_engine, adapter_bytes, monkeypatch):
    engine = make_engine(adapter_bytes)
    for name in ("run", "other"):
        engine.create_run(name, LORA)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", lambda *_, **__: torch.empty(1 << 60))  # The allocator refuses.
        with pytest.raises(OutOfMemory):
            train(engine)
    assert train(engine).metrics["tokens:sum"] > 0


def test_what_an_engine_left_behind_is_removed_when_the_next_one_starts(make_engine, adapter_bytes, tmp_path):
    first = make_engine(adapter_bytes)
    for name in ("run", "other"):
        first.create_run(name, LORA)
    assert list((tmp_path / "scratch").iterdir())
    make_engine(adapter_bytes)
    assert not list((tmp_path / "scratch").iterdir())
