"""Create the missing secrets of a deployment in `deploy/secrets`; existing ones stay, and are refused if empty.

    python scripts/make_secrets.py [DIRECTORY]

credential       shared by the gateway and the services
keys/keys.json   the gateway's API keys, as hashes, in a separate folder that is mounted into the gateway
api_key          the first key in keys.json, for the client

To add keys: `paceline keys add`.
"""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

from paceline.errors import InvalidArgument
from paceline.files.api_keys import made_now, new_token, read_keys, update_keys
from paceline.files.secret_files import lock, read_secret, write_secret

DIRECTORY = Path(__file__).resolve().parent.parent / "deploy" / "secrets"
_SHARED = 0o644


def make_secrets(directory: Path) -> list[Path]:
    """Write the missing files and return them. Raises ValueError, OSError or InvalidArgument, naming the file."""
    # Containers mount the files and read them as another user. On this machine the folder's mode keeps others out.
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)
    keys = directory / "keys" / "keys.json"
    keys.parent.mkdir(exist_ok=True)
    keys.parent.chmod(0o755)
    made = _make(directory / "credential", secrets.token_urlsafe(32))
    if keys.exists():
        read_keys(keys)
        return made
    # The key first: its hash can be made from it again, but not the reverse.
    api_key = directory / "api_key"
    made += _make(api_key, new_token())
    own = made_now("default", "default", read_secret(api_key))
    update_keys(keys, lambda others: others or (own,), _SHARED)
    return [*made, keys]


def _make(path: Path, secret: str) -> list[Path]:
    """Write a secret if its file is missing."""
    with lock(path):
        is_new = not path.exists()
        if is_new:
            write_secret(path, f"{secret}\n".encode(), mode=_SHARED)
    read_secret(path)
    return [path] if is_new else []


if __name__ == "__main__":
    try:
        for path in make_secrets(Path(sys.argv[1]) if len(sys.argv) > 1 else DIRECTORY):
            print(f"created {path}")
    except InvalidArgument as error:
        raise SystemExit(f"{error}; remove the file, and run this again") from error
    except OSError as error:
        raise SystemExit(f"{error.filename} cannot be written: {error.strerror}") from error
    except ValueError as error:
        raise SystemExit(f"{error}; remove it, and run this again to make a new one") from error
