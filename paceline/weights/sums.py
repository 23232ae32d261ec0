"""SHA256SUMS, for directories that are moved and copied as a whole. `sha256sum -c` can check it too."""

from __future__ import annotations

from pathlib import Path

from paceline import errors
from paceline.layout import MODEL_FILE
from paceline.weights.manifest import hash_file, weights_file
from paceline.weights.v1 import weight_service_pb2 as pb

SUMS_FILE = "SHA256SUMS"


def write_sums(directory: Path, manifest: pb.Manifest | None = None) -> None:
    """Write the SHA-256 of every file in `directory` to a file there; `manifest` may supply that of the weights."""
    known = {} if manifest is None else {weights_file(manifest): manifest.model.sha256}
    sums = {path.name: known.get(path.name) or hash_file(path) for path in sorted(directory.iterdir())}
    (directory / SUMS_FILE).write_text("".join(f"{digest}  {name}\n" for name, digest in sums.items()))


def find_damaged(directory: Path) -> str | None:
    """Return the name of a file that changed since the sums were written; None if none did.

    Raises FileNotFoundError if a file or the sums are missing.
    """
    for line in (directory / SUMS_FILE).read_text(errors="replace").splitlines():
        digest, _, name = line.partition("  ")
        if hash_file(directory / Path(name).name) != digest:
            return name
    return None


def verify_model(directory: Path, manifest: pb.Manifest) -> str:
    """Check that a directory holds exactly the whole model of a manifest, and return the weights' SHA-256.

    Raises ChecksumMismatch, FileNotFoundError.
    """
    lines = (directory / SUMS_FILE).read_text(errors="replace").splitlines()
    listed = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    if {path.name for path in directory.iterdir()} != {*listed, SUMS_FILE}:
        raise errors.ChecksumMismatch("the model's directory does not hold the files that were saved")
    if damaged := find_damaged(directory):
        raise errors.ChecksumMismatch(f"{damaged} is damaged; publish or save the model again")
    if listed.get(MODEL_FILE) != manifest.model.sha256:
        raise errors.ChecksumMismatch("the model differs from its manifest; publish or save it again")
    return manifest.model.sha256
