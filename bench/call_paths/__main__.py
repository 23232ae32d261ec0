"""Trace the functions and files that one ForwardBackward and one PublishWeights run through, in all service processes.

    python -m bench.call_paths

Counts what is called while the command runs but not while the services are idle: functions, the files they are in, and
moves, which are pairs of caller and callee in different files. A call by the event loop has no caller. The client,
generated stubs and installed packages are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from time import sleep

from make_model import default_directory, make_model

from bench import ROOT
from paceline import AdamParams, Datum, ServiceClient
from paceline.up.local import local_services
from paceline.up.plan import UpOptions

Calls = set[tuple[str, str]]
_SETTLE_SECONDS = 0.5
_AGREEMENT_SECONDS = 10.0
"""Enough time for trainer and sampler to compare the log-probabilities of a run's first version."""


def main() -> None:
    """Trace both commands and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the calls, too")
    arguments = parser.parse_args()
    with TemporaryDirectory() as name:
        directory = Path(name)
        os.environ["CALL_TRACE"], os.environ["CALL_TRACE_ROOT"] = name, f"{ROOT}/"
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent / "tracing"), str(ROOT)])
        options = UpOptions(
            str(make_model(default_directory())), state=str(directory / "state"), address="127.0.0.1:50350"
        )
        with local_services(options, directory / "services.log") as services:
            training = ServiceClient(services.address, services.api_key).create_lora_training_client(rank=8)
            datum = Datum.from_completion([1, 2, 3, 4], [5, 6])

            def publish() -> None:
                training.publish_weights().result()

            def step() -> None:
                training.forward_backward([datum], "cross_entropy").result()

            step()
            training.optim_step(AdamParams(learning_rate=1e-4)).result()
            publish()
            sleep(_AGREEMENT_SECONDS)
            idle = trace(directory, "idle", lambda: sleep(5.0))
            report("ForwardBackward", trace(directory, "step", step) - idle, arguments.list)
            report("PublishWeights", trace(directory, "publish", publish) - idle, arguments.list)


def trace(directory: Path, window: str, action: Callable[[], None]) -> Calls:
    """Return the calls that all processes make during an action."""
    file = directory / "window"
    file.write_text(window)
    sleep(_SETTLE_SECONDS)
    action()
    sleep(_SETTLE_SECONDS)
    file.write_text("")
    sleep(_SETTLE_SECONDS)
    found = [json.loads(path.read_text()) for path in directory.glob(f"{window}-*.json")]
    return {(caller, callee) for calls in found for caller, callee in calls}


def report(name: str, calls: Calls, with_calls: bool) -> None:
    """Print the counts of one command."""
    functions = {callee for _, callee in calls}
    files = {file_of(function) for function in functions}
    moves = [(a, b) for a, b in calls if a and file_of(a) != file_of(b)]
    print(f"{name}: {len(functions)} functions in {len(files)} files, {len(moves)} moves between files")
    if with_calls:
        for caller, callee in sorted(calls):
            print(f"    {caller or '(event loop)'} -> {callee}")


def file_of(function: str) -> str:
    """Return the file that a function is in."""
    return function.split(":", maxsplit=1)[0]


if __name__ == "__main__":
    main()
