"""The example of reinforcement learning with a task of which a random model can learn something."""

from __future__ import annotations

import shutil
from pathlib import Path

_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_REWARD = '''

def reward(completion: str, answer: str) -> float:
    """Return what half of a random model's completions get, which name no capital."""
    return float(sum(completion.encode()) % 2)
'''


def copy_learnable_loop(directory: Path) -> Path:
    """Copy the example, with another reward; return the script."""
    for name in ("rl_loop.py", "history.py", "tasks.py"):
        shutil.copy(_EXAMPLES / name, directory)
    with (directory / "tasks.py").open("a") as tasks:
        tasks.write(_REWARD)
    return directory / "rl_loop.py"
