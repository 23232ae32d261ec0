"""Create the missing secrets of a deployment in `deploy/secrets`; existing ones stay unchanged.

    python scripts/make_secrets.py [DIRECTORY]

credential       shared by the gateway and the services
keys/keys.json   the gateway's API keys, as hashes, in a separate folder that is mounted into the gateway
api_key          the first key in keys.json, for the client

To add keys: `python -m gateway.keys add`.
"""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

from gateway.keys import add_key

DIRECTORY = Path(__file__).resolve().parent.parent / "deploy" / "secrets"


def make_secrets(directory: Path) -> list[Path]:
    """Write the missing files and return them."""
    # Containers mount the files and read them as another user. On this machine the folder's mode keeps others out.
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)
    made = []
    if not (directory / "credential").exists():
        made += [_write(directory / "credential", secrets.token_urlsafe(32))]
    keys = directory / "keys" / "keys.json"
    if not keys.exists():
        keys.parent.mkdir(exist_ok=True)
        keys.parent.chmod(0o755)
        api_key = _write(directory / "api_key", add_key(keys, "default", "default"))
        made += [api_key, _share(keys)]
    return made


def _write(path: Path, content: str) -> Path:
    path.write_text(content + "\n")
    return _share(path)


def _share(path: Path) -> Path:
    path.chmod(0o644)
    return path


if __name__ == "__main__":
    for path in make_secrets(Path(sys.argv[1]) if len(sys.argv) > 1 else DIRECTORY):
        print(f"created {path}")
