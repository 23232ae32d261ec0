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
from support.patience import PATIENCE

from paceline.errors import DiskFull
from paceline.types import AdamParams, Datum, ForwardBackwardSpec, LoraConfig
from trainer_service.engine.peft_engine import PeftEngine
from trainer_service.engine.runs.preallocated_file import PreallocatedFile
from trainer_service.engine_link.options import EngineOptions
from trainer_service.engine_link.protocol import PublishedAs

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def memory():
    with TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    model = make_tiny_llama(tmp_path_factory.mktemp("model"))
    return PeftEngine(EngineOptions(str(model), "tiny"))


@pytest.fixture
def run(engine):
    engine.create_run("run", LoraConfig(rank=4))
    yield "run"
    engine.delete_run("run")


def train(engine, run):
    tokens = np.arange(9) % VOCAB_SIZE
    datum = Datum(tokens.astype(np.int32), {"target_tokens": tokens, "weights": np.ones(9, np.float32)})
    engine.forward_backward(run, [datum], ForwardBackwardSpec("cross_entropy"))
    engine.optim_step(run, AdamParams(learning_rate=1e-2))


def publish(engine, run, directory):
    """Publish into a new directory; return the inode number of the file, once the next one is allocated."""
    directory.mkdir()
    engine.capture_adapter(run, PublishedAs(run, 1, "team")).write(directory)
    wait_until_made()
    return (directory / WEIGHTS).stat().st_ino


def wait_until_made():
    """Wait until no file is being made."""
    for thread in threading.enumerate():
        if thread.name == "preallocated file":
            thread.join(PATIENCE)
            assert not thread.is_alive()


def saved(engine, run, directory):
    directory.mkdir()
    engine.save_adapter(run, directory)
    return files(directory)


def files(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def allocated():
    """Return inode numbers and sizes of the preallocated files."""
    open_files = [entry for entry in Path("/proc/self/fd").iterdir() if is_unnamed(entry)]
    return {file.stat().st_ino: file.stat().st_size for file in open_files}


def is_unnamed(entry):
    try:
        target = str(entry.readlink())
    except FileNotFoundError:  # the descriptor of the listing itself
        return False
    return target.startswith("/dev/shm/") and target.endswith("(deleted)")


@contextmanager
def limit(size):
    """Let files grow to `size` bytes and no further."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_each_publish_uses_the_file_allocated_after_the_previous_one_and_writes_what_a_save_writes(
    engine, run, memory, tmp_path
):
    publish(engine, run, memory / "1")
    for version in ("2", "3"):
        (file,) = allocated()
        train(engine, run)
        assert publish(engine, run, memory / version) == file
        assert files(memory / version) == saved(engine, run, tmp_path / version)
    assert files(memory / "2") == files(tmp_path / "2") != files(tmp_path / "3"), "no file is used twice"
    assert sorted(path.name for path in memory.iterdir()) == ["1", "2", "3"]


def test_a_save_uses_no_preallocated_file(engine, run, memory, tmp_path):
    publish(engine, run, memory / "1")
    before = allocated()
    saved(engine, run, tmp_path / "save")
    assert allocated() == before != {}


def test_an_adapter_of_another_size_gets_a_new_file_and_the_next_one_is_of_that_size(engine, run, memory):
    publish(engine, run, memory / "1")
    (file,) = allocated()
    engine.create_run("larger", LoraConfig(rank=8))
    assert publish(engine, "larger", memory / "2") != file
    assert list(allocated().values()) == [(memory / "2" / WEIGHTS).stat().st_size]
    engine.delete_run("larger")


def test_a_directory_elsewhere_gets_a_new_file(engine, run, memory, tmp_path):
    publish(engine, run, memory / "1")
    publish(engine, run, tmp_path / "2")
    assert files(tmp_path / "2") == files(memory / "1")


def test_deleting_a_run_frees_the_file(engine, run, memory):
    publish(engine, run, memory / "1")
    assert allocated()
    engine.delete_run(run)
    assert not allocated()
    engine.create_run(run, LoraConfig(rank=4))


def test_deleting_another_run_leaves_the_file(engine, run, memory):
    publish(engine, run, memory / "1")
    before = allocated()
    engine.create_run("comparison", LoraConfig(rank=4))
    engine.delete_run("comparison")
    assert allocated() == before != {}


def test_a_file_that_was_being_made_when_its_run_was_deleted_is_not_kept(memory, monkeypatch):
    file, allocate = PreallocatedFile(), os.posix_fallocate
    is_being_made, goes_on = threading.Event(), threading.Event()

    def late(*arguments):
        is_being_made.set()
        goes_on.wait(PATIENCE)
        allocate(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", late)
    file.prepare(memory, 1 << 20)
    assert is_being_made.wait(PATIENCE)
    file.drop()
    goes_on.set()
    wait_until_made()
    assert not allocated()
    file.prepare(memory, 1 << 20)
    wait_until_made()
    assert list(allocated().values()) == [1 << 20]


def test_none_is_allocated_where_it_would_take_much_of_the_space_or_its_directory_is_gone(memory):
    file, free = PreallocatedFile(), os.statvfs(memory)
    for directory, size in ((memory, free.f_bavail * free.f_frsize // 3), (memory / "gone", 1 << 20)):
        file.prepare(directory, size)
        wait_until_made()
        assert not allocated()


def test_a_publish_to_a_full_disk_says_so_and_the_next_one_with_space_succeeds(engine, run, memory):
    publish(engine, run, memory / "1")
    (file,) = allocated()
    with limit((memory / "1" / WEIGHTS).stat().st_size - 1):
        assert file == publish(engine, run, memory / "2"), "the space for this one was taken before"
        assert not allocated()
        with pytest.raises(DiskFull):
            publish(engine, run, memory / "3")
    publish(engine, run, memory / "4")
    assert files(memory / "4") == files(memory / "2") == files(memory / "1")
