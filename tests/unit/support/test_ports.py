"""Ports of tests and benches that run side by side."""

import subprocess
import sys

from support import ports

_ASK = f"import sys; sys.path[:0] = {sys.path!r}; from support import ports; print(ports.reserve(int(sys.argv[1])))"


def test_a_port_is_reserved_until_its_process_ends():
    port = ports.free_port()
    assert _another_process_reserves(port) == "False"
    unused = next(port for port in range(10_000, 32_768) if _another_process_reserves(port) == "True")
    assert _another_process_reserves(unused) == "True"  # the first one that reserved it has ended


def test_a_process_reserves_a_port_once():
    assert not ports.reserve(ports.free_port())


def test_the_ports_of_paceline_up_are_all_reserved():
    base = ports.free_service_ports()
    assert {_another_process_reserves(base + offset) for offset in (0, 1, 2, 3, 100, 101, 102)} == {"False"}


def _another_process_reserves(port):
    asked = subprocess.run([sys.executable, "-c", _ASK, str(port)], capture_output=True, text=True, check=True)
    return asked.stdout.strip()
