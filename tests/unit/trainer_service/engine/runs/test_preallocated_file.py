"""Adapters are published into a preallocated file and are the same as without it."""

import os
import resource
import threading
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from support.models.tiny_models import VOCAB_SIZE, make_tiny_llama

from paceline.errors import DiskFull
from paceline.types import AdamParams, Datum, ForwardBackwardSpec, LoraConfig
from trainer_service.engine.options import EngineOptions
from trainer_service.engine.peft_engine import PeftEngine
from trainer_service.engine.protocol import PublishedAs
from trainer_service.engine.runs.preallocated_file import SpareFile

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture
def memory():
    with TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(tmp_path_factory, request):
    model = make_tiny_llama(tmp_path_factory.mktemp("model"))
    return PeftEngine(EngineOptions(str(model), "tiny", adapter_dtype=request.param))


@pytest.fixture
def run(engine):
    engine.create_run("run", LoraConfig(rank=4))
    yield "run"
    engine.delete_run("run")
    made()


def train(engine, run):
    tokens = np.arange(9) % VOCAB_SIZE
    datum = Datum(tokens.astype(np.int32), {"target_tokens": tokens, "weights": np.ones(9, np.float32)})
    engine.forward_backward(run, [datum], ForwardBackwardSpec("cross_entropy"))
    engine.optim_step(run, AdamParams(learning_rate=1e-2))


def capture(engine, run):
    return engine.capture_adapter(run, PublishedAs(run, 1, "team"))


def publish(engine, run, directory):
    """Publish into a new directory; return the inode number of the file."""
    directory.mkdir()
    capture(engine, run).write(directory)
    return (directory / WEIGHTS).stat().st_ino


def saved(engine, run, directory):
    directory.mkdir()
    engine.save_adapter(run, directory)
    return files(directory)


def files(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def made():
    """Return inode numbers and sizes of the preallocated files, once none is being made."""
    for thread in threading.enumerate():
        if thread.name == "spare file":
            thread.join(30)
            assert not thread.is_alive()
    open_files = [entry for entry in Path("/proc/self/fd").iterdir() if is_spare(entry)]
    return {file.stat().st_ino: file.stat().st_size for file in open_files}


def is_spare(entry):
    try:
        target = str(entry.readlink())
    except FileNotFoundError:  # the descriptor of the listing itself
        return False
    return target.startswith("/dev/shm/") and target.endswith("(deleted)")


@contextmanager
def room(size):
    """Let files grow to `size` bytes and no further."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_each_publish_uses_the_file_that_was_made_after_the_one_before_and_writes_what_a_save_writes(
    engine, run, memory, tmp_path
):
    publish(engine, run, memory / "1")
    for version in ("2", "3"):
        (spare,) = made()
        train(engine, run)
        assert publish(engine, run, memory / version) == spare
        assert files(memory / version) == saved(engine, run, tmp_path / version)
    assert files(memory / "2") == files(tmp_path / "2") != files(tmp_path / "3"), "no file is used twice"
    assert sorted(path.name for path in memory.iterdir()) == ["1", "2", "3"]


def test_what_changes_after_a_capture_is_not_in_the_file(engine, run, memory, tmp_path):
    publish(engine, run, memory / "1")
    (spare,) = made()
    expected = saved(engine, run, tmp_path / "at once")
    captured = capture(engine, run)
    train(engine, run)
    captured.write(memory)
    assert (memory / WEIGHTS).stat().st_ino == spare
    assert (memory / WEIGHTS).read_bytes() == expected[WEIGHTS] != saved(engine, run, tmp_path / "later")[WEIGHTS]


def test_captures_at_the_same_time_have_files_of_their_own(engine, run, memory, tmp_path):
    publish(engine, run, memory / "1")
    made()
    first = capture(engine, run)
    expected = [saved(engine, run, tmp_path / "first")]
    train(engine, run)
    second = capture(engine, run)
    expected.append(saved(engine, run, tmp_path / "second"))
    train(engine, run)
    for captured, name in ((second, "second"), (first, "first")):
        (memory / name).mkdir()
        captured.write(memory / name)
    assert [files(memory / "first"), files(memory / "second")] == expected
    assert len(made()) == 1


def test_an_adapter_of_another_size_is_written_without_it_and_the_next_file_is_of_that_size(engine, run, memory):
    publish(engine, run, memory / "1")
    (spare,) = made()
    engine.create_run("larger", LoraConfig(rank=8))
    assert publish(engine, "larger", memory / "2") != spare
    assert list(made().values()) == [(memory / "2" / WEIGHTS).stat().st_size]
    engine.delete_run("larger")


def test_the_file_goes_with_a_run(engine, run, memory):
    publish(engine, run, memory / "1")
    assert made()
    engine.delete_run(run)
    assert not made()
    engine.create_run(run, LoraConfig(rank=4))


def test_one_that_is_dropped_while_it_is_made_does_not_stay(memory):
    spare = SpareFile()
    spare.prepare(memory, 1 << 23)
    spare.drop()
    assert not made()
    assert spare.take(1 << 23) is None


def test_none_is_made_where_it_would_take_much_of_the_room_or_its_directory_is_gone(memory):
    spare, free = SpareFile(), os.statvfs(memory)
    spare.prepare(memory, free.f_bavail * free.f_frsize // 3)
    spare.prepare(memory / "gone", 1 << 20)
    assert not made()


def test_a_full_directory_takes_what_was_made_ahead_and_then_names_what_is_missing(engine, run, memory, tmp_path):
    publish(engine, run, memory / "1")
    (spare,) = made()
    expected = saved(engine, run, tmp_path / "expected")
    with room(len(expected[CONFIG])):
        assert publish(engine, run, memory / "2") == spare
        assert not made()
        with pytest.raises(DiskFull):
            publish(engine, run, memory / "3")
    assert files(memory / "2") == expected
    publish(engine, run, memory / "4")
    assert files(memory / "4") == expected


def test_a_directory_elsewhere_gets_a_file_of_its_own(engine, run, memory, tmp_path):
    publish(engine, run, memory / "1")
    made()
    publish(engine, run, tmp_path / "2")
    assert files(tmp_path / "2") == files(memory / "1")
