"""Engine processes are forks of one that has imported everything."""

from __future__ import annotations

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
