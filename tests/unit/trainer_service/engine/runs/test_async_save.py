"""A run's state is written as it was when captured, whatever the run does meanwhile."""

import threading

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.models.tiny_models import VOCAB_SIZE, make_tiny_llama

from paceline.errors import DiskFull
from paceline.types import Adam8bitParams, AdamParams, Datum, ForwardBackwardSpec, LoraConfig
from trainer_service.engine.peft_engine import PeftEngine
from trainer_service.engine.runs.async_save import AsyncSave, SaveContent, StagingMemory, TensorFile
from trainer_service.engine_link.options import EngineOptions
from trainer_service.engine_link.protocol import PublishedAs

MEMORY, NO_MEMORY = 1 << 30, 0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make_engine(model):
    def make(staging_bytes=MEMORY, params=None):
        engine = PeftEngine(EngineOptions(str(model), "tiny", staging_bytes=staging_bytes))
        engine.create_run("run", LoraConfig(rank=4, dropout=0.1))
        train(engine, params or AdamParams(learning_rate=1e-2))
        return engine

    return make


def forward_backward(engine):
    tokens = np.arange(9) % VOCAB_SIZE
    datum = Datum(tokens.astype(np.int32), {"target_tokens": tokens, "weights": np.ones(9, np.float32)})
    engine.forward_backward("run", [datum], ForwardBackwardSpec("cross_entropy"))


def train(engine, params):
    forward_backward(engine)
    engine.optim_step("run", params)
    forward_backward(engine)


def files(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def new(directory):
    directory.mkdir()
    return directory


CHANGES = {
    "a step": lambda engine, _: engine.optim_step("run", AdamParams(learning_rate=1e-2, grad_clip_norm=1e-3)),
    "more gradient": lambda engine, _: forward_backward(engine),
    "a discarded gradient": lambda engine, _: engine.discard_gradient("run"),
    "a load": lambda engine, other: engine.load_state("run", other, with_optimizer=True),
    "a load of weights": lambda engine, other: engine.load_state("run", other, with_optimizer=False),
    "the run's end": lambda engine, _: engine.delete_run("run"),
}


@pytest.fixture
def other(make_engine, tmp_path):
    engine = make_engine()
    engine.optim_step("run", AdamParams(learning_rate=0.3))
    engine.save_state("run", new(tmp_path / "other"))
    return tmp_path / "other"


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_after_a_capture_is_not_in_it(make_engine, other, tmp_path, change):
    engine = make_engine()
    engine.save_state("run", new(tmp_path / "at once"))
    capture, weights = engine.capture_state("run"), engine.capture_adapter("run")
    CHANGES[change](engine, other)
    capture.write(new(tmp_path / "later"))
    weights.write(new(tmp_path / "weights"))
    assert files(tmp_path / "later") == files(tmp_path / "at once")
    name = "adapter_model.safetensors"
    assert files(tmp_path / "weights")[name] == files(tmp_path / "at once")[name]


def test_captures_at_the_same_time_each_hold_the_state_of_their_own_moment(make_engine, tmp_path):
    engine, captures, expected = make_engine(), {}, {}
    for name in ("first", "second"):
        captures[name] = engine.capture_adapter("run", PublishedAs("run", 1, "team"))
        engine.save_adapter("run", new(tmp_path / f"{name} at once"))
        expected[name] = files(tmp_path / f"{name} at once")
        train(engine, AdamParams(learning_rate=1e-2))
    for name in ("second", "first"):
        captures[name].write(new(tmp_path / name))
    assert {name: files(tmp_path / name) for name in captures} == expected
    assert expected["first"] != expected["second"]


@pytest.mark.parametrize("change", ["a step", "more gradient", "a load"])
def test_without_room_for_a_copy_a_change_waits_until_the_state_is_written(make_engine, other, tmp_path, change):
    engine = make_engine(NO_MEMORY)
    engine.save_state("run", new(tmp_path / "at once"))
    capture = engine.capture_state("run")
    changing = threading.Thread(target=CHANGES[change], args=(engine, other))
    changing.start()
    changing.join(0.2)
    assert changing.is_alive()
    capture.write(new(tmp_path / "later"))
    changing.join(60)
    assert files(tmp_path / "later") == files(tmp_path / "at once")
    engine.save_state("run", new(tmp_path / "changed"))
    assert files(tmp_path / "changed") != files(tmp_path / "at once")


def test_the_files_are_those_that_safetensors_writes(tmp_path):
    large = torch.arange(100_000, dtype=torch.float32)
    tensors = {
        "b.half": torch.rand(3, 5).bfloat16(),
        "c.bytes": torch.arange(7, dtype=torch.uint8),
        "a.large": large,
        "ä.turned": torch.rand(40, 30).T,
        "d.turned and large": large.reshape(400, 250).T,
        "e.scalar": torch.tensor(3.0),
        "f.none": torch.zeros(0),
    }
    memory = StagingMemory(MEMORY)
    for dtype, metadata in ((None, {}), (torch.bfloat16, {"format": "pt"})):
        expected = {
            name: tensor.to(dtype if dtype and tensor.is_floating_point() else tensor.dtype).contiguous()
            for name, tensor in tensors.items()
        }
        save_file(expected, tmp_path / "theirs", metadata or None)
        for place in (memory, StagingMemory(NO_MEMORY)):
            AsyncSave(SaveContent([TensorFile("ours", tensors, dtype, metadata)], {}), place).write(tmp_path)
            assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_an_optimizer_with_states_of_several_dtypes_is_captured_whole(make_engine, tmp_path):
    engine = make_engine(params=Adam8bitParams(learning_rate=1e-2))
    capture = engine.capture_state("run")
    engine.optim_step("run", Adam8bitParams(learning_rate=1e-2))
    capture.write(new(tmp_path / "saved"))
    engine.load_state("run", tmp_path / "saved", with_optimizer=True)
    engine.save_state("run", new(tmp_path / "again"))
    assert files(tmp_path / "saved") == files(tmp_path / "again")


def test_memory_for_copies_is_used_again_and_bounded(tmp_path):
    memory = StagingMemory(1000)
    first = memory.take(600)
    assert memory.take(600) is None
    second = memory.take(400)
    memory.release(first)
    assert memory.take(500) is first
    memory.release(first)
    memory.release(second)
    assert memory.take(800).numel() == 800, "what is free is freed for what is larger"
    assert memory.take(300) is None


def test_a_full_disk_is_named_and_the_memory_comes_back(tmp_path):
    memory = StagingMemory(1000)
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(DiskFull):
        AsyncSave(SaveContent([TensorFile("full", {"a": torch.zeros(200)})], {}), memory).write(tmp_path)
    assert memory.take(1000) is not None
