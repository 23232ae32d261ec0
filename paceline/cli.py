"""The command `paceline`: `paceline up` runs the three services on this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from paceline import __version__
from paceline.atropos.options import add_arguments, read_options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="paceline", description="Fine-tune language models on your own machines.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser(
        "up",
        help="run trainer, sampler and gateway on this machine until Ctrl-C",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    # Without a default, which the help would print.
    up.add_argument(
        "--model",
        required=True,
        default=argparse.SUPPRESS,
        help="required; base model: a local directory or a Hugging Face id",
    )
    up.add_argument("--model-name", default="", help="name that clients use; empty: the last part of --model")
    up.add_argument("--state", default=".paceline", help="directory of checkpoints, logs and the API key")
    up.add_argument("--address", default="127.0.0.1:50050", help="address of the gateway")
    up.add_argument("--engine", choices=("vllm", "hf"), default="vllm", help="engine of the sampler")
    up.add_argument(
        "--bridge",
        choices=("stream", "volume", "collective", "restart", "shared"),
        default="stream",
        help="how versions are sent to the sampler",
    )
    up.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="dtype of both services; auto: float32 on CPUs, bfloat16 on GPUs",
    )
    up.add_argument("--max-lora-rank", type=int, default=64, help="largest rank of an adapter")
    up.add_argument("--log-level", default="INFO", help="DEBUG, INFO, WARNING or ERROR")
    up.add_argument("--until-eof", action="store_true", help="also end when standard input ends")
    atropos = commands.add_parser(
        "atropos",
        help="train from an Atropos API server",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add_arguments(atropos)
    given = parser.parse_args(arguments)
    if given.command == "atropos":
        return _atropos(given)
    options = vars(given)
    del options["command"]
    return _up(until_eof=options.pop("until_eof"), **options)


def _atropos(given: argparse.Namespace) -> int:
    from paceline.atropos.trainer import AtroposTrainer, say  # noqa: PLC0415
    from paceline.client import ServiceClient  # noqa: PLC0415
    from paceline.errors import PacelineError  # noqa: PLC0415

    try:
        with ServiceClient() as service:
            AtroposTrainer(read_options(given), service, say).run()
    except (PacelineError, ConnectionError, ValueError, FileExistsError) as failure:
        say(f"paceline atropos: {failure}")
        return 1
    return 0


def _up(*, until_eof: bool, **options: str) -> int:
    # Needs the server extra, which clients do not install.
    from paceline.up import up  # noqa: PLC0415
    from paceline.up.plan import CannotStart, UpOptions  # noqa: PLC0415

    try:
        up(UpOptions(**options), until_eof=until_eof)  # type: ignore[arg-type] # argparse gives max_lora_rank as int
    except CannotStart as failure:
        print(failure, file=sys.stderr)  # noqa: T201 # the last line, for people and for paceline.up.local
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
