"""Generate the typed gRPC stubs from `proto/` into the tree, beside the code that imports them.

This is the project's only generator: `make proto`, the build hook and the tests all call `generate`. A contract's path
below `proto/` is the import path of its stubs, so nothing is rewritten afterwards. As a script it leaves stubs alone
that are those of these contracts and generators.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from hashlib import sha256
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent

# 1.81.1 is the last generator whose stubs load on protobuf 6.33.5+ and on 7.x; later ones need 7.x.
GENERATOR = "1.81.1"


def generate(root: Path = ROOT) -> list[Path]:
    """Write `*_pb2.py`, `*_pb2_grpc.py` and their type stubs below `root`; return the contracts."""
    found = version("grpcio-tools")
    if found != GENERATOR:
        raise SystemExit(f"grpcio-tools is {found}; install {GENERATOR}, whose stubs load on protobuf 6.33.5+ and 7.x")
    source = root / "proto"
    contracts = sorted(source.rglob("*.proto"))
    _remove_old(root, source, contracts)
    _run_protoc(root, source, contracts)
    _stamp(root).write_text(_digest(root))
    return contracts


def is_current(root: Path = ROOT) -> bool:
    """Return whether `generate` would write what is there."""
    stamp = _stamp(root)
    return stamp.exists() and stamp.read_text() == _digest(root)


def _stamp(root: Path) -> Path:
    return root / "paceline" / "types" / "v1" / ".digest"


def _digest(root: Path) -> str:
    """Hash the contracts, their stubs, this file and the versions of the generators."""
    digest = sha256(f"{version('grpcio-tools')} {version('mypy-protobuf')}".encode())
    contracts = sorted((root / "proto").rglob("*.proto"))
    stubs = sorted(path for path in (root / "paceline").glob("*/v1/*.py*") if path.suffix in {".py", ".pyi"})
    digest.update(Path(__file__).read_bytes())
    for path in (*contracts, *stubs):
        digest.update(f"{path.relative_to(root)} {sha256(path.read_bytes()).hexdigest()}".encode())
    return digest.hexdigest()


def _remove_old(root: Path, source: Path, contracts: Sequence[Path]) -> None:
    for folder in {contract.parent.relative_to(source) for contract in contracts}:
        shutil.rmtree(root / folder, ignore_errors=True)


def _run_protoc(root: Path, source: Path, contracts: Sequence[Path]) -> None:
    plugins = [f"--plugin={name}={_script(name)}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    include = ["protoc", f"-I{source}", f"-I{files('grpc_tools').joinpath('_proto')}", *plugins]
    services = [contract for contract in contracts if contract.stem.endswith("_service")]
    messages_out = [f"--python_out={root}", f"--mypy_out=quiet:{root}"]
    services_out = [f"--grpc_python_out={root}", f"--mypy_grpc_out=quiet:{root}"]
    for outputs, sources in ((messages_out, contracts), (services_out, services)):
        if code := protoc.main([*include, *outputs, *map(str, sources)]):
            raise SystemExit(f"protoc failed with exit code {code}")


def _script(name: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise SystemExit(f"{name} is not installed; install mypy-protobuf")
    return found


if __name__ == "__main__":
    if not is_current():
        print(f"generated the stubs of {len(generate())} contracts")
