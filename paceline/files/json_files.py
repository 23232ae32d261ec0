"""JSON files of the gateway that commands change while it reads them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from paceline import errors
from paceline.files.regular_files import NotRegularFile, read_file
from paceline.files.secret_files import lock, write_secret

T = TypeVar("T")


def read_json(path: Path, field: str, shape: str, parse: Callable[[Any], T]) -> T:
    """Return what `parse` makes of a file. It raises ValueError or TypeError for what has not the `shape`.

    Raises InvalidArgument of the setting `field` that names the problem.
    """
    try:
        # The gateway reads the file between calls, so a pipe must not block it. Kubernetes' secrets are links.
        return parse(json.loads(read_file(Path(os.path.realpath(path)))))
    except NotRegularFile as error:
        raise errors.InvalidArgument(f"{path} cannot be read: it is no regular file", field=field) from error
    except OSError as error:
        raise errors.InvalidArgument(f"{path} cannot be read: {error.strerror}", field=field) from error
    except (ValueError, TypeError, RecursionError) as error:
        raise errors.InvalidArgument(f"{path} cannot be read: not {shape}: {error}", field=field) from error


def update_json(
    path: Path,
    field: str,
    read: Callable[[Path], T],
    change: Callable[[T | None], T],
    to_json: Callable[[T], Any],
    mode: int = 0o600,
) -> None:
    """Replace a file's content by what `change` makes of it; processes that do so at the same time take turns.

    `change` gets None for a file that does not exist, which is made with `mode`; one that stays the same is not
    written. Raises InvalidArgument of the setting `field` if the file cannot be locked, read or written, and what
    `read` and `change` raise.
    """
    try:
        with lock(path):
            before = read(path) if path.exists() else None
            after = change(before)
            if after != before:
                write_secret(path, (json.dumps(to_json(after), indent=2) + "\n").encode(), mode)
    except FileNotFoundError as error:
        message = f"{path.parent} does not exist; make this folder, or name a file in another"
        raise errors.InvalidArgument(message, field=field) from error
    except OSError as error:
        raise errors.InvalidArgument(
            f"{error.filename} cannot be written: {error.strerror}; run this as the user who owns {path}, "
            "and see that its disk has free space",
            field=field,
        ) from error
