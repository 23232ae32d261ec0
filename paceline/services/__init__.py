"""The programs of the three services: `gateway`, `trainer_service`, `sampler_service`, and tools among their modules.

    python -m paceline.services gateway
    python -m paceline.services trainer_service.import_adapter --help

In a checkout their packages lie at its root. In a wheel they lie in this folder, because a user's environment gets no
top-level module from Paceline but `paceline`: they can be imported only in processes of the services, in which this
folder is first on the import path.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from paceline.extras import needing

EXTRAS = {"gateway": "gateway", "trainer_service": "trainer", "sampler_service": "sampler"}
"""The package of each service, and the extra that installs what it imports."""

_FOLDER = str(Path(__file__).parent)


def make_importable() -> None:
    """Let this process, and the Python processes that it starts, import the services' packages."""
    if _FOLDER in sys.path:
        return
    sys.path.insert(0, _FOLDER)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_FOLDER, os.environ.get("PYTHONPATH"))))


def import_service_module(name: str) -> ModuleType:
    """Import a module of a service. Raises MissingExtra if a package that it imports is not installed."""
    make_importable()
    service = name.partition(".")[0]
    with needing(EXTRAS.get(service, ""), f"`{name}`"):
        return import_module(name)


def program_of(module: str) -> Callable[[], None]:
    """Return the `main` of a module, or of a package's `__main__`. Raises LookupError if it has none, MissingExtra."""
    make_importable()
    spec = find_spec(module) if module.partition(".")[0] else None
    if spec is None:
        raise LookupError(f"there is no program {module}; the services are {', '.join(EXTRAS)}")
    name = module if spec.submodule_search_locations is None else f"{module}.__main__"
    main: Callable[[], None] | None = getattr(import_service_module(name), "main", None)
    if main is None:
        raise LookupError(f"{module} is not a program; the services are {', '.join(EXTRAS)}")
    return main
