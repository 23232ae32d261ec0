"""Loggers that need no packages; those of other packages are in tests/clients/test_loggers.py."""

from __future__ import annotations

import json
import math
import sys

import pytest

from paceline.errors import InvalidArgument
from paceline.extras import MissingExtra
from paceline.loggers import JsonlLogger, TensorBoardLogger, TrackioLogger, WandbLogger, make_loggers


def test_jsonl_has_a_line_for_each_step_at_once_and_goes_on_with_a_file(tmp_path):
    path = tmp_path / "new" / "log.jsonl"
    logger = JsonlLogger(path)
    logger.log(1, {"loss": 0.5, "bad": math.nan})
    assert json.loads(path.read_text()) == {"step": 1, "loss": 0.5, "bad": None}
    logger.close()
    again = JsonlLogger(path)
    again.log(2, {"loss": 0.25})
    again.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_several_loggers_are_one(tmp_path):
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    loggers = make_loggers([f"jsonl:{path}" for path in paths], "name", "run-1", {})
    loggers.log(1, {"loss": 0.5})
    loggers.close()
    assert paths[0].read_text() == paths[1].read_text() != ""


@pytest.mark.parametrize("target", ["", "jsonl", "jsonl:", "csv:x", "log.jsonl"])
def test_a_target_of_no_kind_is_refused_before_a_file_is_made(tmp_path, target):
    with pytest.raises(InvalidArgument, match="jsonl:FILE"):
        make_loggers([f"jsonl:{tmp_path / 'log'}", target], "name", "run-1", {})
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(
    ("package", "make"), [("tensorboard", TensorBoardLogger), ("wandb", WandbLogger), ("trackio", TrackioLogger)]
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, tmp_path, package, make):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingExtra, match=rf"paceline\[{package}\]"):
        make(str(tmp_path / "x"))
    with pytest.raises(MissingExtra, match=rf"paceline\[{package}\]"):
        make_loggers([f"{package}:x"], "name", "run-1", {})
