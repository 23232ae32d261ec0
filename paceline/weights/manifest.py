"""A directory of weights: its manifest, the configuration of its adapter, and the checksums of its files.

The manifest names the model, its tenant, its tensors, and the BLAKE3-256 of its weights; that of a saved checkpoint has
their SHA-256 too. A directory of several files also lists their checksums: a saved one in SHA256SUMS, which
`sha256sum -c` can check too, and a published model in BLAKE3SUMS (`b3sum -c`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from paceline import errors
from paceline.codec.models import served_model_to_proto
from paceline.files.regular_files import read_file
from paceline.layout import ADAPTER_FILES, CONFIG_FILE, MANIFEST_FILE, MODEL_FILE, WEIGHTS_FILE
from paceline.types import ServedModel
from paceline.weights.hashing import blake3_of, checksums_of, sha256_of
from paceline.weights.safetensors import read_tensor_entries
from paceline.weights.v1 import weight_service_pb2 as pb

_CONFIG = "adapter_config"
_SAVE_AGAIN = "save the adapter with PEFT's save_pretrained"
_LARGEST = 3e38
"""Largest absolute value of a number, so that float32 holds it."""


class Sums(Enum):
    """A file that lists the checksum of each file beside it, one a line: lower-case hex, two spaces, name."""

    SHA256 = "SHA256SUMS"
    """Of what was saved: checkpoints and snapshots."""
    BLAKE3 = "BLAKE3SUMS"
    """Of a published model, which is not published before its files are hashed."""

    @classmethod
    def of(cls, manifest: pb.Manifest) -> Sums:
        """Return the kind of sums beside a whole model."""
        return cls.SHA256 if manifest.sha256 else cls.BLAKE3

    def hash_file(self, path: Path) -> str:
        """Return the checksum of a file. Raises FileNotFoundError, NotRegularFile."""
        return sha256_of(path) if self is Sums.SHA256 else blake3_of(path)

    def weights_hash(self, manifest: pb.Manifest) -> str:
        """Return the checksum of the weights in a manifest."""
        return manifest.sha256 if self is Sums.SHA256 else manifest.model.blake3


def describe_weights(
    directory: Path,
    model: ServedModel,
    *,
    tenant: str,
    step: int,
    seq_id: int = 0,
    base_sha256: str = "",
    is_saved: bool = False,
) -> pb.Manifest:
    """Create the manifest of a directory that holds an adapter or a whole model. See `draft_manifest` and `seal`."""
    draft = draft_manifest(directory, model, tenant=tenant, step=step, seq_id=seq_id, base_sha256=base_sha256)
    return seal(directory, draft, is_saved=is_saved)


def draft_manifest(
    directory: Path, model: ServedModel, *, tenant: str, step: int, seq_id: int = 0, base_sha256: str = ""
) -> pb.Manifest:
    """Create a manifest as `describe_weights` does, but without the checksums, which take longest.

    `seq_id` is that of the command that created the weights. `base_sha256` is the identity of the base weights on which
    they were made; empty if unknown. Raises the errors of `read_tensor_entries` and `read_adapter_config`.
    """
    is_adapter = (directory / WEIGHTS_FILE).exists()
    weights = directory / (WEIGHTS_FILE if is_adapter else MODEL_FILE)
    manifest = pb.Manifest(
        model=served_model_to_proto(model),
        tenant=tenant,
        tensors=read_tensor_entries(weights),
        total_size=weights.stat().st_size,
        step=step,
        seq_id=seq_id,
        base_sha256=base_sha256,
    )
    manifest.create_time.GetCurrentTime()
    if is_adapter:
        config = read_adapter_config(directory / CONFIG_FILE)
        manifest.adapter_config, manifest.rank = config.text, config.rank
    return manifest


def seal(directory: Path, draft: pb.Manifest, *, is_saved: bool = False) -> pb.Manifest:
    """Return the draft with the checksums of the directory's weights; with their SHA-256 too if it `is_saved`."""
    manifest = pb.Manifest()
    manifest.CopyFrom(draft)
    checksums = checksums_of(directory / weights_file(draft), with_sha256=is_saved)
    manifest.model.blake3, manifest.crc32c, manifest.sha256 = checksums.blake3, checksums.crc32c, checksums.sha256
    return manifest


def is_model(manifest: pb.Manifest) -> bool:
    """Whether a manifest describes a whole model rather than an adapter."""
    return not manifest.adapter_config and manifest.rank == 0


def weights_file(manifest: pb.Manifest) -> str:
    """Return the name of the file whose checksums are in a manifest."""
    return MODEL_FILE if is_model(manifest) else WEIGHTS_FILE


def write_manifest(directory: Path, manifest: pb.Manifest) -> None:
    """Write the manifest beside the weights that it describes."""
    (directory / MANIFEST_FILE).write_text(json_format.MessageToJson(manifest))


def read_manifest(directory: Path) -> pb.Manifest:
    """Read a directory's manifest. Raises FileNotFoundError if there is none, ChecksumMismatch if it is damaged."""
    text = read_file(directory / MANIFEST_FILE)
    try:
        return json_format.Parse(text, pb.Manifest())
    except (json_format.ParseError, UnicodeDecodeError) as error:
        raise errors.ChecksumMismatch("the manifest is damaged; restore the directory from a backup") from error


def verify_adapter(directory: Path, manifest: pb.Manifest) -> str:
    """Check that a directory holds exactly the adapter of the manifest, and return the computed BLAKE3-256."""
    foreign = {path.name for path in directory.iterdir()} - ADAPTER_FILES
    if foreign:
        raise errors.ChecksumMismatch("the adapter's directory holds files that do not belong there")
    computed = blake3_of(directory / WEIGHTS_FILE)
    if computed != manifest.model.blake3 or read_file(directory / CONFIG_FILE) != manifest.adapter_config:
        raise errors.ChecksumMismatch("the adapter differs from its manifest; publish or save it again")
    return computed


def write_sums(directory: Path, manifest: pb.Manifest | None = None, sums: Sums = Sums.SHA256) -> None:
    """Write the checksum of every file in `directory` to a file there; `manifest` may supply that of the weights."""
    known = {} if manifest is None else {weights_file(manifest): sums.weights_hash(manifest)}
    files = {path.name: known.get(path.name) or sums.hash_file(path) for path in sorted(directory.iterdir())}
    (directory / sums.value).write_text("".join(f"{digest}  {name}\n" for name, digest in files.items()))


def read_sums(directory: Path, sums: Sums = Sums.SHA256) -> dict[str, str]:
    """Return the checksum of each file by name, as the directory's sums list them. Raises FileNotFoundError."""
    lines = read_file(directory / sums.value).decode(errors="replace").rstrip("\n").split("\n")
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines if line)}


def find_damaged(directory: Path, sums: Sums = Sums.SHA256) -> str | None:
    """Return the name of a file that changed since the sums were written; None if none did.

    Raises FileNotFoundError if a file or the sums are missing.
    """
    for name, digest in read_sums(directory, sums).items():
        if sums.hash_file(directory / Path(name).name) != digest:
            return name
    return None


def verify_model(directory: Path, manifest: pb.Manifest) -> str:
    """Check that a directory holds exactly the whole model of a manifest, and return the weights' BLAKE3-256.

    Raises ChecksumMismatch, FileNotFoundError.
    """
    sums = Sums.of(manifest)
    listed = read_sums(directory, sums)
    if {path.name for path in directory.iterdir()} != {*listed, sums.value}:
        raise errors.ChecksumMismatch("the model's directory does not hold the files that were saved")
    if damaged := find_damaged(directory, sums):
        raise errors.ChecksumMismatch(f"{damaged} is damaged; publish or save the model again")
    if listed.get(MODEL_FILE) != sums.weights_hash(manifest):
        raise errors.ChecksumMismatch("the model differs from its manifest; publish or save it again")
    return manifest.model.blake3


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """An adapter's configuration, with the fields that every engine needs."""

    rank: int
    """`r`: the rank of modules without one of their own."""
    largest_rank: int
    """Largest rank of all modules, including those in rank_pattern."""
    settings: Mapping[str, Any]
    """All fields, named as in PEFT, among them `r`, `lora_alpha` and `target_modules`."""
    text: bytes
    """The content of the file."""


def read_adapter_config(path: Path) -> AdapterConfig:
    """Read an adapter_config.json. Raises as `parse_adapter_config`, and InvalidArgument if the file does not exist."""
    try:
        text = read_file(path)
    except FileNotFoundError:
        raise errors.InvalidArgument(f"does not exist; {_SAVE_AGAIN}", field=_CONFIG) from None
    return parse_adapter_config(text)


def parse_adapter_config(text: bytes) -> AdapterConfig:
    """Parse adapter_config.json. Raises InvalidArgument that names the missing or invalid field."""
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise errors.InvalidArgument(f"is not JSON; {_SAVE_AGAIN}", field=_CONFIG) from error
    if not isinstance(settings, dict):
        raise errors.InvalidArgument(f"is not a JSON object; {_SAVE_AGAIN}", field=_CONFIG)
    for field, (is_right, wanted) in _REQUIRED.items():
        if field not in settings:
            raise errors.InvalidArgument(f"is missing; {_SAVE_AGAIN}", field=f"{_CONFIG}.{field}")
        _check(field, settings[field], is_right, wanted)
    own = settings.get("rank_pattern") or {}
    _check("rank_pattern", own, _are_ranks, "an object of ranks by module")
    return AdapterConfig(settings["r"], max([settings["r"], *own.values()]), settings, text)


def _check(field: str, value: object, is_right: Callable[[Any], bool], wanted: str) -> None:
    if not is_right(value):
        raise errors.InvalidArgument(f"is not {wanted}; {_SAVE_AGAIN}", field=f"{_CONFIG}.{field}")


def _is_rank(value: object) -> bool:
    return type(value) is int and 0 < value < 1 << 31  # not isinstance: JSON's true is an int too


def _is_number(value: Any) -> bool:
    return type(value) in {int, float} and abs(value) <= _LARGEST


def _are_ranks(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_rank, value.values()))


def _are_modules(value: object) -> bool:
    """Whether the value is a pattern or a list of names."""
    names = [value] if isinstance(value, str) else value
    return isinstance(names, list) and bool(names) and all(isinstance(name, str) and name for name in names)


_REQUIRED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "r": (_is_rank, "a whole number from 1 to 2^31 - 1"),
    "lora_alpha": (_is_number, "a finite float32"),
    "target_modules": (_are_modules, "a list of names or a pattern"),
}
"""Maps a field to its check and a description of valid values. vLLM has no default for any of the fields."""
