"""Make a small checkpoint volume of the current format, to be kept as `tests/volumes/format-<n>`.

    PYTHONPATH=.:tests python tests/volumes/make_volume.py tests/volumes/format-1

The volume is that of a trainer that was killed. It has a run with a snapshot, a journal after it, a state checkpoint, a
sampler checkpoint and a version, and the remains of a deleted run whose checkpoint was kept. `expected.json` beside the
volume states what a trainer must find there. The base model is `make_tiny_llama(seed=0)` and is not kept.

Made once with the code of each format, before the format changed; `test_volume_formats` starts the current trainer on
copies of all of them. format-1 was made with commit 80ecb22.
"""

import json
import sys
import tempfile
from pathlib import Path

from support.stacks.warm_trainer import WarmRun, WarmTrainer

from paceline.trainer.v1 import trainer_service_pb2 as pb


def train(stub) -> dict:
    """Fill the volume; return what a trainer must find on it."""
    deleted = WarmRun(stub, "format-deleted")
    deleted.step()
    kept = deleted.save("kept")
    deleted.delete()
    run = WarmRun(stub, "format-run")
    run.step()
    run.step()
    state = run.save("one")  # the snapshot is taken here
    sampler = run.save("two", pb.CHECKPOINT_KIND_SAMPLER)
    version = run.publish(durable=True)
    step = run.step()
    found = run.get()
    return {
        "run_id": run.run_id,
        "step": found.step,
        "last_seq_id": found.last_seq_id,
        "last_answer": step.SerializeToString(deterministic=True).hex(),
        "state": {"path": state.path, "sha256": state.sha256},
        "sampler": {"path": sampler.path, "sha256": sampler.sha256},
        "version": {"number": version.version, "sha256": version.sha256},
        "deleted": {"run_id": deleted.run_id, "request_id": "format-deleted", "kept": kept.path},
    }


def main(target: Path) -> None:
    """Make the volume."""
    target.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = WarmTrainer(Path(scratch), target / "volume")
        assert trainer.start(snapshot_commands=5), trainer.text()
        with trainer.connect() as stub:
            expected = train(stub)
        trainer.kill()
        trainer.close()
    (target / "volume" / ".lock").unlink()
    (target / "expected.json").write_text(json.dumps(expected, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
