"""What the loggers write, read back by the packages that they write for. `make test-clients` runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.clients
ROOT = Path(__file__).resolve().parents[2]
WRITE = """
import sys
from paceline.loggers import make_loggers
for steps in ((1, 2), (2, 3)):  # the second is a killed loop that repeats a step
    logger = make_loggers([sys.argv[1]], "mine", "run-1", {"rank": 4})
    for step in steps:
        logger.log(step, {"loss": 1 / step, "eval/loss": 2 / step})
    logger.close()
"""
TENSORBOARD = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
read = EventAccumulator(sys.argv[1]).Reload()
print(json.dumps({tag: {event.step: event.value for event in read.Scalars(tag)} for tag in read.Tags()["scalars"]}))
"""
WANDB = """
import json, struct, sys, pathlib
from wandb.proto.wandb_internal_pb2 import Record
BLOCK, HEADER = 32768, 7
def records(content):  # LevelDB's log format, after seven bytes of W&B's own
    at, data = HEADER, b""
    while at + HEADER <= len(content):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        at += HEADER + length
        data += content[at - length : at]
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(data)
            data = b""
found = {}
for path in sorted(pathlib.Path(sys.argv[1]).glob("wandb/offline-run-*/*.wandb")):
    for record in records(path.read_bytes()):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
            for name in ("loss", "eval/loss"):
                found.setdefault(name, {})[values["step"]] = values[name]
print(json.dumps(found))
"""
TRACKIO = """
import json, sqlite3, sys, pathlib
(path,) = pathlib.Path(sys.argv[1]).glob("*.db")
found = {}
for step, text in sqlite3.connect(path).execute("select step, metrics from metrics order by id"):
    for name, value in json.loads(text).items():
        if name in ("loss", "eval/loss"):
            found.setdefault(name, {})[step] = value
print(json.dumps(found))
"""


@pytest.mark.parametrize(("kind", "read"), [("tensorboard", TENSORBOARD), ("wandb", WANDB), ("trackio", TRACKIO)])
def test_what_is_logged_is_read_back(client_packages, tmp_path, kind, read):
    packages = client_packages("loggers")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{packages}{os.pathsep}{ROOT}",
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(tmp_path),
        "HOME": str(tmp_path),
    }

    def run(program, argument):
        command = [sys.executable, "-c", program, argument]
        return subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True).stdout

    run(WRITE, f"{kind}:{tmp_path if kind == 'tensorboard' else 'project'}")
    found = json.loads(run(read, str(tmp_path)).splitlines()[-1])
    for name, first in (("loss", 1), ("eval/loss", 2)):
        assert {int(step): value for step, value in found[name].items()} == {
            step: pytest.approx(first / step) for step in (1, 2, 3)
        }
