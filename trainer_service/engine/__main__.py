"""The engine process, `python -m trainer_service.engine --fd N`. `EngineProcess` starts it and holds the other end."""

from __future__ import annotations

import argparse
import logging
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

from transformers.utils import logging as transformers_logging

from trainer_service.engine.distributed.ranks import Ranks, exit_with
from trainer_service.engine.worker import EngineWorker, keep_freed_memory


def main() -> NoReturn:
    """Serve the engine on the inherited socket."""
    parser = argparse.ArgumentParser(prog="python -m trainer_service.engine")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the service")
    parser.add_argument("--store", type=Path, help="file by which several ranks find each other")
    arguments = parser.parse_args()
    if arguments.store is not None:
        exit_with(arguments.fd)
    # Ctrl-C reaches the whole process group; the service drains first and then closes the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    keep_freed_memory()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    ranks = Ranks.alone() if arguments.store is None else Ranks.join(arguments.store)
    EngineWorker(socket.socket(fileno=arguments.fd), ranks).serve()


if __name__ == "__main__":
    main()
