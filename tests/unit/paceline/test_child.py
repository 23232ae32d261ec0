"""Child processes end with a status that is told once, when they are asked to, killed, or without their parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import psutil
import pytest

from paceline.child import Child, fork, reason_of_status

PATIENCE = 60.0
LONG = "import time; print('runs', flush=True); time.sleep(300)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {LONG}"
ECHO = "import socket; link = socket.socket(fileno=0)\nwhile data := link.recv(99): link.sendall(data.upper())"


def started(program, **options):
    """Start a child, and return it with the end of its output to read from."""
    reader, writer = os.pipe()
    child = Child.start(["-c", program], output=writer, **options)
    os.close(writer)
    return child, os.fdopen(reader, "rb")


def is_alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def left_of(parent):
    """Start a process that itself starts a child by `parent`, kill it, and return the child's process id."""
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE)
    pid = int(process.stdout.readline())
    assert is_alive(pid)
    process.kill()
    process.communicate()
    return pid


async def gone(pid, within=PATIENCE):
    async with asyncio.timeout(within):
        while is_alive(pid):  # noqa: ASYNC110 - it is another process's child
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("program", "status", "reason"),
    [
        ("", 0, "exit status 0"),
        ("raise SystemExit(3)", 3, "exit status 3"),
        ("import os; os.abort()", -signal.SIGABRT, "SIGABRT"),
        (
            "import os; os.kill(os.getpid(), 9)",
            -signal.SIGKILL,
            "SIGKILL, usually from the kernel because memory ran out",
        ),
    ],
)
async def test_everybody_who_waits_is_told_how_a_child_ended_and_it_is_reaped(program, status, reason):
    child = Child.start(["-c", program])
    assert await asyncio.gather(child.wait(), child.wait()) == [status] * 2
    assert not psutil.pid_exists(child.pid)
    assert reason_of_status(status) == reason


async def test_a_child_that_is_asked_to_end_may_take_its_time_and_is_killed_after_it():
    polite, output = started(LONG)
    assert output.readline() == b"runs\n"
    assert not await polite.ends_within(0.0)
    polite.terminate()
    assert await polite.ends_within(PATIENCE)
    assert await polite.wait() == -signal.SIGTERM

    stubborn, output = started(STUBBORN)
    assert output.readline() == b"runs\n"
    hurry = asyncio.Event()
    stubborn.terminate()
    asyncio.get_running_loop().call_later(0.1, hurry.set)
    assert not await stubborn.ends_within(1e6, unless=hurry)
    stubborn.kill()
    assert await stubborn.wait() == -signal.SIGKILL
    stubborn.terminate()
    stubborn.kill()


async def test_a_caller_that_stops_waiting_takes_the_status_from_nobody():
    child, output = started(LONG)
    assert output.readline() == b"runs\n"
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(child.wait(), 0.01)
    child.kill()
    assert await child.wait() == -signal.SIGKILL


async def test_a_child_has_ended_though_another_process_holds_its_output_open():
    script = "import subprocess, time; print(subprocess.Popen(['sleep', '300']).pid, flush=True); time.sleep(300)"
    child, output = started(script)
    holder = int(output.readline())
    try:
        child.kill()
        async with asyncio.timeout(PATIENCE):
            assert await child.wait() == -signal.SIGKILL
        assert is_alive(holder), "its end was waited for"
    finally:
        os.kill(holder, signal.SIGKILL)


async def test_a_child_with_a_session_of_its_own_is_killed_with_its_group():
    script = "import subprocess, time; print(subprocess.Popen(['sleep', '300']).pid, flush=True); time.sleep(300)"
    child, output = started(script, own_session=True)
    member = int(output.readline())
    child.kill()
    assert await child.wait() == -signal.SIGKILL
    await gone(member)


async def test_the_number_of_a_child_that_has_ended_is_not_signalled():
    script = "import subprocess; print(subprocess.Popen(['sleep', '300']).pid, flush=True)"
    child, output = started(script, own_session=True)
    member = int(output.readline())
    assert await child.wait() == 0
    child.kill()
    child.terminate()
    try:
        with pytest.raises(TimeoutError):  # the group that has the child's number lives on
            await gone(member, within=0.5)
    finally:
        os.kill(member, signal.SIGKILL)


async def test_a_linked_child_talks_to_its_parent_and_ends_when_the_link_is_closed():
    child, reader, writer = await Child.start_linked(["-c", ECHO])
    writer.write(b"hello\n")
    assert await reader.readline() == b"HELLO\n"
    writer.close()
    assert await child.wait() == 0


async def test_the_end_of_a_linked_child_is_the_end_of_what_its_parent_reads():
    child, reader, writer = await Child.start_linked(["-c", "import os; os.write(0, b'last'); os.abort()"])
    assert await reader.read() == b"last"
    assert await child.wait() == -signal.SIGABRT
    writer.close()


async def test_a_linked_child_outlives_no_parent():
    await gone(
        left_of(
            "import asyncio\nfrom paceline.child import Child\n"
            "async def main():\n"
            f"    child, reader, writer = await Child.start_linked(['-c', {ECHO!r}])\n"
            "    print(child.pid, flush=True)\n"
            "    await child.wait()\n"
            "asyncio.run(main())\n"
        )
    )


async def test_a_fork_that_ends_with_its_parent_outlives_none():
    await gone(
        left_of(
            "import os, signal\nfrom paceline.child import end_with_parent, fork\n"
            "def work():\n"
            "    end_with_parent()\n"
            "    print(os.getpid(), flush=True)\n"
            "    signal.pause()\n"
            "fork(work)\nsignal.pause()\n"
        )
    )


@pytest.mark.parametrize(("work", "status"), [(lambda: None, 0), (lambda: 1 / 0, 1)])
def test_a_fork_does_its_work_and_nothing_after_it(work, status):
    pid = fork(work)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == status
