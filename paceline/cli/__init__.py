"""The command `paceline`: run the services, look after runs and checkpoints, sample.

`import paceline` does not import this package, which needs typer and rich.
"""

from paceline.cli.app import main

__all__ = ["main"]
