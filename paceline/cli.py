"""The command `paceline`: `paceline up` runs the three services on this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from paceline import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="paceline", description="Fine-tune language models on your own machines.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="run trainer, sampler and gateway on this machine until Ctrl-C")
    up.add_argument("--model", required=True, help="base model: a local directory or a Hugging Face id")
    up.add_argument("--model-name", default="", help="name for clients (default: the last part of --model)")
    up.add_argument("--state", default=".paceline", help="directory of checkpoints, logs and the API key")
    up.add_argument("--address", default="127.0.0.1:50050", help="address of the gateway")
    up.add_argument("--engine", choices=("vllm", "hf"), default="vllm", help="engine of the sampler")
    up.add_argument(
        "--bridge",
        choices=("stream", "volume", "collective", "restart", "shared"),
        default="stream",
        help="how versions reach the sampler",
    )
    up.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="dtype of both services")
    up.add_argument("--max-lora-rank", type=int, default=32, help="largest rank of an adapter")
    up.add_argument("--log-level", default="INFO", help="DEBUG, INFO, WARNING or ERROR")
    options = parser.parse_args(arguments)

    # Needs the server extra, which clients lack.
    from paceline.up import up as run_up  # noqa: PLC0415
    from paceline.up_plan import UpOptions  # noqa: PLC0415

    fields = {name: value for name, value in vars(options).items() if name != "command"}
    return run_up(UpOptions(**fields))


if __name__ == "__main__":
    sys.exit(main())
