"""Import a PEFT adapter made elsewhere as a checkpoint: see its `--help`."""

from __future__ import annotations

import argparse
import asyncio
import os
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline import errors, layout, weights
from paceline.files.regular_files import copy_file, read_file
from paceline.types import Checkpoint, CheckpointKind, LoraConfig, RunParameters
from paceline.weights.adapter_config import BASE_LAYER, check_adapter_config
from trainer_service.checkpoints.store import CheckpointStore
from trainer_service.runs.record import RunOrigin

ADAPTER_FILES = (layout.WEIGHTS_FILE, layout.CONFIG_FILE)


async def import_adapter(
    source: Path, volume: layout.Volume, run_id: str, name: str, *, overwrite: bool = False
) -> Checkpoint:
    """Copy the adapter of a PEFT directory to a sampler checkpoint of a run, durably and atomically.

    The checkpoint belongs to the run's tenant. The trainer may be running. Only the weights and their configuration
    are copied, without the base model's own weights that PEFT saves beside an adapter on the output head. Raises
    RunNotFound, InvalidName, CheckpointExists, InvalidDtype, InvalidShape, NonFinite, ChecksumMismatch, DiskFull,
    InvalidArgument if the configuration is invalid, and CheckpointMismatch if a file is missing or the rank or scaling
    differs from the run's. LoadCheckpoint checks that the modules are the run's.
    """
    run = _read_run(volume, run_id)
    check_adapter(source, run.parameters)

    names = [entry.name for entry in weights.read_tensor_entries(source / layout.WEIGHTS_FILE)]
    own = [name for name in names if BASE_LAYER not in name]

    async def copy(directory: Path) -> None:
        for file in ADAPTER_FILES:
            if file == layout.WEIGHTS_FILE and own != names:
                await asyncio.to_thread(weights.copy_tensors, source / file, directory / file, own)
            else:
                await asyncio.to_thread(copy_file, source / file, directory / file)

    return await CheckpointStore(volume).save(
        layout.CheckpointPath(run_id, CheckpointKind.SAMPLER, layout.check_name(name)),
        copy,
        base_model=run.base_model,
        tenant=run.tenant,
        step=0,
        ttl_seconds=None,
        overwrite=overwrite,
    )


def _read_run(volume: layout.Volume, run_id: str) -> RunOrigin:
    try:
        return RunOrigin.from_json(read_file(volume.run(run_id) / layout.RUN_FILE))
    except FileNotFoundError:
        raise errors.RunNotFound("no such run on this volume; create one with the adapter's configuration") from None


def check_adapter(source: Path, parameters: RunParameters) -> None:
    """Check the adapter of a directory for a run with these parameters.

    Raises InvalidDtype, InvalidShape, NonFinite, ChecksumMismatch, InvalidArgument and CheckpointMismatch, as
    `import_adapter` does.
    """
    for file in ADAPTER_FILES:
        path = source / file
        if path.is_symlink():
            raise errors.CheckpointMismatch(f"{path} is a link, which is not followed; copy the directory with cp -rL")
        if not path.is_file():
            raise errors.CheckpointMismatch(f"{source} has no {file}; {_remedy(source)}")
    try:
        weights.check_finite(source / layout.WEIGHTS_FILE)
    except (ValueError, struct.error) as error:
        raise errors.CheckpointMismatch(f"{source} has no readable adapter: {error}") from error
    if not isinstance(parameters, LoraConfig):
        raise errors.CheckpointMismatch("the run trains all parameters; create one with an adapter")
    check_adapter_config(parameters, weights.read_adapter_config(source / layout.CONFIG_FILE).settings)


def _remedy(source: Path) -> str:
    names = {path.name for path in source.iterdir()} if source.is_dir() else set()
    if "adapter_model.bin" in names:
        return "its adapter_model.bin is pickled; load it with PEFT and save it again with save_pretrained"
    if names & {"config.json", "model.safetensors", "model.safetensors.index.json"}:
        return "it is a whole model; give it to the trainer as its base model"
    return "save the adapter with PEFT's save_pretrained, as safetensors"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m paceline.services trainer_service.import_adapter",
        description="Import a PEFT directory as a sampler checkpoint.",
    )
    parser.add_argument("directory", type=Path, help="has adapter_model.safetensors and adapter_config.json")
    parser.add_argument("--checkpoint-dir", type=Path, required=True, help="the trainer's checkpoint volume")
    parser.add_argument("--run", required=True, help="run_id of a run with the adapter's rank, alpha and modules")
    parser.add_argument("--name", required=True, help="name of the checkpoint")
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint of this name")
    given = parser.parse_args(arguments)
    volume = layout.Volume(given.checkpoint_dir)
    os.umask(0o077)  # like the trainer's own files, whatever the shell's umask is
    try:
        made = asyncio.run(import_adapter(given.directory, volume, given.run, given.name, overwrite=given.overwrite))
    except errors.PacelineError as error:
        raise SystemExit(str(error)) from error
    sys.stdout.write(made.path + "\n")


if __name__ == "__main__":
    main()
