"""What the command line does without services: usage, errors, statuses, output, and packages that are missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli import main
from paceline.cli.app import make_app
from paceline.cli.output import as_json, bytes_in_words, show_fields, show_table
from paceline.cli.times import duration

ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("PACELINE_API_KEY", raising=False)
    monkeypatch.setenv("PACELINE_ADDRESS", "127.0.0.1:1")  # nobody listens there


def test_the_help_fits_a_screen_and_groups_the_commands(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 45
    places = [shown.index(f"─ {group} ─") for group in ("Run it", "See it", "Keep it", "Train")]
    assert len(set(places)) == 4


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.count(".") == 2


@pytest.mark.parametrize(
    "given", [["nothing"], ["runs", "list", "--nothing"], ["runs", "show"], ["sample", "x", "-n", "0"]]
)
def test_wrong_usage_ends_with_2(given, capsys):
    assert main(given) == 2
    assert capsys.readouterr().err


def test_a_key_file_that_cannot_be_read_is_one_sentence(capsys):
    assert main(["runs", "list", "--api-key-file", "absent"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "absent cannot be read: No such file or directory; give another file as --api-key-file\n"


def test_no_option_takes_a_key(capsys):
    assert main(["runs", "list", "--api-key", "secret"]) == 2


def test_an_interrupted_command_ends_with_130(tmp_path):
    (tmp_path / ".paceline" / "logs").mkdir(parents=True)
    (tmp_path / ".paceline" / "logs" / "trainer.log").write_text("begun\n")
    # As a terminal starts it: what runs in a shell's background ignores Ctrl-C, and so do its children.
    heeding = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    command = [sys.executable, "-c", f"{heeding}from paceline.cli import main; sys.exit(main(['logs', '-f']))"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, env=_environment()) as process:
        assert process.stdout.readline() == b"trainer begun\n"
        process.send_signal(2)
        assert process.wait(30) == 130


def test_followed_logs_go_on_with_the_file_that_a_restart_begins(tmp_path):
    log = tmp_path / ".paceline" / "logs" / "gateway.log"
    log.parent.mkdir(parents=True)
    log.write_text("first\n")
    command = [sys.executable, "-m", "paceline.cli", "logs", "gateway", "-f"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, env=_environment()) as process:
        try:
            assert process.stdout.readline() == b"first\n"
            with log.open("a") as file:
                file.write("second\n")
            assert process.stdout.readline() == b"second\n"
            log.rename(log.with_suffix(".previous.log"))
            log.write_text("third\n")
            assert process.stdout.readline() == b"third\n"
        finally:
            process.kill()


def _environment():
    return {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}


def test_a_gateway_that_does_not_answer_is_one_sentence_for_the_status(capsys):
    assert main(["status"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("address: no gateway answers at 127.0.0.1:1 ")
    assert said.count("\n") == 1


def test_the_doctor_says_it_and_ends_with_1(capsys):
    assert main(["doctor", "--json"]) == 1
    checks = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert checks["gateway"]["verdict"] == "failed"
    assert checks["gateway"]["remedy"]
    assert checks["Python"]["verdict"] == "ok"


def test_only_the_base_dependencies_are_imported_before_a_command_runs():
    program = "import sys, paceline.cli; print(*{name.partition('.')[0] for name in sys.modules})"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    unwanted = {"torch", "transformers", "peft", "vllm", "structlog", "pydantic_settings", "prometheus_client"}
    assert set(run.stdout.split()) & unwanted == set()


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30), ("5m", 300), ("12h", 43200), ("7d", 604800)])
def test_durations(text, seconds):
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "-1d", "0d", "1.5h", "7 d", "1y"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(typer.BadParameter, match="not a duration"):
        duration(text)


def test_sizes_are_in_words():
    assert [bytes_in_words(size) for size in (0, 999, 1000, 1_500_000, 123_000_000, 5 * 10**12)] == [
        "0 B", "999 B", "1.0 kB", "1.5 MB", "123 MB", "5.0 TB",
    ]  # fmt: skip


class _Color(Enum):
    RED = 1


@dataclass
class _Thing:
    color: _Color
    when: datetime
    parts: tuple[float, ...]


def test_json_holds_dataclasses_enums_times_and_no_nan():
    made = as_json({"a": [_Thing(_Color.RED, datetime(2026, 1, 2, tzinfo=UTC), (1.5, float("nan")))], "p": Path("x")})
    assert made == {"a": [{"color": "red", "when": "2026-01-02T00:00:00Z", "parts": [1.5, None]}], "p": "x"}


def test_tables_without_a_terminal_are_not_folded_and_have_no_styles(capsys):
    show_table(("name", ">size"), [("x" * 300, 1), ("[bold]y", None)])
    assert capsys.readouterr().out.splitlines()[1:] == ["x" * 300 + "     1", "[bold]y"]
    show_table(("name",), [], empty="nothing there")
    assert capsys.readouterr().out == "nothing there\n"
    show_fields([("a", 1), ("left out", ""), ("flag", False)])
    assert capsys.readouterr().out == "a     1\nflag  no\n"


def test_a_tag_that_is_none_is_refused_before_anything_is_called():
    result = CliRunner().invoke(make_app(), ["runs", "tag", "run", "word"])
    assert result.exit_code == 2
