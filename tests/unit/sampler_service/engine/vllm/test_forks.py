"""Engine processes are forks of one that has imported everything."""

from __future__ import annotations

import subprocess

from vllm.model_executor.models import registry
from vllm.v1.engine import utils

_COUNT = "import gc; gc.unfreeze(); count.send(gc.get_freeze_count())"


def test_what_an_engine_process_was_forked_with_is_never_searched_for_garbage(vllm_here):
    processes = utils.get_mp_context()
    reader, count = processes.Pipe(duplex=False)
    process = processes.Process(target=exec, args=(_COUNT, {"count": count}))
    process.start()
    count.close()
    assert reader.recv() > 100_000, "the objects of the modules"
    process.join()


def test_a_model_class_that_this_machine_has_not_seen_needs_no_new_interpreter(vllm_here, monkeypatch, tmp_path):
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an interpreter was started, which imports everything again")

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", refuse)
    assert registry.ModelRegistry.models["OlmoForCausalLM"].inspect_model_cls().is_text_generation_model
