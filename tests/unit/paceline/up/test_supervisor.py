"""What the supervisor says of a service that ended: the reason, read from its log."""

from __future__ import annotations

import pytest

from paceline.up.supervisor import reason_of

TRACEBACK = """12:00:00 [info     ] starting
(EngineCore pid=12) ERROR 11-22 12:00:01 [core.py:842] Traceback (most recent call last):
(EngineCore pid=12) ERROR 11-22 12:00:01 [core.py:842]   File "core.py", line 1, in run
(EngineCore pid=12) ERROR 11-22 12:00:01 [core.py:842] ValueError: To serve at least one request, more is needed
Traceback (most recent call last):
  File "service.py", line 1, in start
RuntimeError: Engine core initialization failed. See root cause above.
/usr/lib/resource_tracker.py:254: UserWarning: There appear to be 1 leaked objects
  warnings.warn('There appear to be leaked objects')
"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (TRACEBACK, "ValueError: To serve at least one request, more is needed"),
        ("unknown variable PACELINE_X\n", "unknown variable PACELINE_X"),
        ("\x1b[31mlistening\x1b[0m\nlib.py:3: UserWarning: old\n  warn()\n", "listening"),
        (
            "lib.ValidationError: 1 error for C\n  Value error, 9 is odd\n    See\n",
            "lib.ValidationError: 1 error for C: Value error, 9 is odd",
        ),
        ("", "it wrote no output"),
    ],
)
def test_the_reason_is_the_first_error_or_the_last_word(tmp_path, text, reason):
    log = tmp_path / "log"
    log.write_text("ValueError: of the time before\n" + text)
    assert reason_of(1, log, len("ValueError: of the time before\n")) == reason


def test_the_reason_of_a_kill_is_the_signal(tmp_path):
    assert reason_of(-9, tmp_path / "none", 0).startswith("SIGKILL")
    assert reason_of(-15, tmp_path / "none", 0) == "SIGTERM"


def test_a_service_that_was_told_to_end_is_not_given_an_old_error_for_a_reason(tmp_path):
    log = tmp_path / "sampler.log"
    log.write_text("RuntimeError: of an hour ago\nstopped\n")
    assert reason_of(0, log, 0) == "it exited without an error, as after SIGTERM"
    assert reason_of(1, log, 0) == "RuntimeError: of an hour ago"
