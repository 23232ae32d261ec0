"""What is logged, and what never is."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
from paceline.log import configure_logging, get_logger

def fail(prompt):
    raise RuntimeError("disk full")

configure_logging("sampler", "info", "{log_format}")
try:
    fail("my " + "secret " + "prompt")
except RuntimeError:
    get_logger("test").exception("request failed")
"""


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_a_traceback_shows_no_local_variable(log_format):
    command = [sys.executable, "-c", PROGRAM.replace("{log_format}", log_format)]
    logged = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "RuntimeError" in logged
    assert "disk full" in logged
    assert "secret prompt" not in logged


BELOW_THE_LEVEL = """
import structlog
from paceline.log import configure_logging, get_logger

configure_logging("sampler", "warning", "json")
seen = []
first, *others = structlog.get_config()["processors"]
structlog.configure(processors=[first, lambda logger, name, event: seen.append(name) or event, *others])
get_logger("test").info("call")
get_logger("test").warning("call")
print(seen)
"""


def test_a_line_below_the_level_is_dropped_before_anything_is_made_of_it():
    command = [sys.executable, "-c", BELOW_THE_LEVEL]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "['warning']\n"
