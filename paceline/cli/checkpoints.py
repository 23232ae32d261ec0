"""`paceline checkpoints`: list, search, save, keep, delete, download, upload and convert checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from paceline import ServiceClient, errors
from paceline.cli.connect import Address, KeyFile, connected, find_run
from paceline.cli.output import AsJson, CommandFailed, bytes_in_words, say, show_json, show_table, until
from paceline.cli.runs import RunName, Yes, confirm, report_deleted
from paceline.cli.times import duration
from paceline.extras import needing
from paceline.layout import CheckpointPath
from paceline.types import Checkpoint, CheckpointKind

app = typer.Typer(
    help="List, search, save, keep, delete, download, upload and convert checkpoints.", no_args_is_help=True
)

Kind = Literal["state", "sampler"]
PathOf = Annotated[str, typer.Argument(metavar="PATH", help="paceline://<run_id>/state|sampler/<name>.")]
Ttl = Annotated[str | None, typer.Option(help="Delete it automatically after so long, such as 7d.")]


@app.command("list")
def list_checkpoints(
    run: Annotated[str, typer.Argument(metavar="[RUN]", help="Only those of this run, by id or name.")] = "",
    kind: Annotated[Kind | None, typer.Option(help="Only this kind.")] = None,
    address: Address = None,
    api_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """List checkpoints, newest first."""
    with connected(address, api_key_file) as service:
        run_id = find_run(service, run).run_id if run else ""
        found = service.list_checkpoints(run_id, _kind(kind) if kind else None)
    _show(found, as_json=as_json)


@app.command("search")
def search_checkpoints(
    text: Annotated[str, typer.Argument(help="Part of a path, or of the name of a run.")],
    address: Address = None,
    api_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """List the checkpoints with a text in their path or the name of their run."""
    wanted = text.casefold()
    with connected(address, api_key_file) as service:
        names = {run.run_id: run.user_metadata.get("name", "") for run in service.list_runs()}
        found = [
            one
            for one in service.list_checkpoints()
            if wanted in one.path.casefold() or wanted in names.get(one.run_id, "").casefold()
        ]
    _show(found, as_json=as_json)


@app.command("save")
def save_checkpoint(
    run: RunName,
    name: Annotated[str, typer.Argument(help="Name of the checkpoint.")],
    kind: Annotated[
        Kind, typer.Option(help="state: to go on training; sampler: to sample, in PEFT's layout.")
    ] = "state",
    ttl: Ttl = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace one of this name.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also if another client's commands have not ended; they execute first.")
    ] = False,
    address: Address = None,
    api_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Save a run's present state. The client that trains it must attach again afterwards."""
    with connected(address, api_key_file) as service:
        found = find_run(service, run)
        waiting = found.last_seq_id - found.executed_seq_id
        if waiting and not force:
            message = f"{waiting} command(s) of another client have not ended; wait, or save after them with --force"
            raise CommandFailed(f"{message}: the client must then attach again")
        training = service.get_training_client(found.run_id)
        save = training.save_state if kind == "state" else training.save_weights_for_sampler
        saved = save(name, ttl_seconds=duration(ttl) if ttl else None, overwrite=overwrite).result()
    _show_one(saved, as_json=as_json)


@app.command("ttl")
def set_ttl(
    path: PathOf,
    ttl: Annotated[str, typer.Argument(metavar="TTL", help="How long it is kept from now on, such as 7d, or never.")],
    address: Address = None,
    api_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Set when a checkpoint is deleted automatically."""
    seconds = None if ttl == "never" else duration(ttl)
    with connected(address, api_key_file) as service:
        _show_one(service.set_checkpoint_ttl(path, seconds), as_json=as_json)


@app.command("keep-last")
def keep_last(
    run: RunName,
    count: Annotated[int, typer.Argument(metavar="N", min=0, help="How many of each kind stay.")],
    kind: Annotated[Kind | None, typer.Option(help="Only this kind.")] = None,
    yes: Yes = False,
    address: Address = None,
    api_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Delete all but a run's newest checkpoints of each kind."""
    with connected(address, api_key_file) as service:
        found = service.list_checkpoints(find_run(service, run).run_id, _kind(kind) if kind else None)
        by_kind = [[one for one in found if one.kind is each] for each in CheckpointKind]
        _delete(service, [one.path for each in by_kind for one in each[count:]], yes=yes, as_json=as_json)


@app.command("delete")
def delete_checkpoints(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Paths of checkpoints.")],
    yes: Yes = False,
    address: Address = None,
    api_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Delete checkpoints."""
    with connected(address, api_key_file) as service:
        _delete(service, paths, yes=yes, as_json=as_json)


@app.command("download")
def download_checkpoint(
    path: PathOf,
    directory: Annotated[Path, typer.Argument(help="A new directory, or an empty one.")],
    address: Address = None,
    api_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Download a checkpoint's files; their checksums are verified before the directory appears."""
    with connected(address, api_key_file) as service:
        found = find_checkpoint(service, path)
        _download(service, found, directory)
    if as_json:
        show_json({"path": found.path, "directory": str(directory), "size_bytes": found.size_bytes})
    else:
        say(f"{found.path} is in {directory}")


@app.command("push")
def push_checkpoint(
    path: PathOf,
    target: Annotated[str, typer.Argument(help="hub:ORG/NAME, a repository of the Hugging Face hub, or a directory.")],
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public.")] = False,
    address: Address = None,
    api_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Copy a checkpoint to a repository of the Hugging Face hub ($HF_TOKEN), or to a directory."""
    repository = target.removeprefix("hub:")
    is_hub = repository != target
    with needing("hub", "`paceline checkpoints push`"), connected(address, api_key_file) as service:
        found = find_checkpoint(service, path)
        if is_hub:
            from huggingface_hub import HfApi  # noqa: PLC0415
            from huggingface_hub.errors import HfHubHTTPError, HFValidationError  # noqa: PLC0415

            with TemporaryDirectory() as scratch:
                _download(service, found, Path(scratch) / "files")
                try:
                    HfApi().create_repo(repository, private=not public, exist_ok=True)
                    HfApi().upload_folder(repo_id=repository, folder_path=Path(scratch) / "files")
                except (HfHubHTTPError, HFValidationError) as failure:
                    raise CommandFailed(f"the hub refuses {repository}: {str(failure).splitlines()[0]}") from failure
        else:
            _download(service, found, Path(target))
    if as_json:
        show_json({"path": found.path, "target": target})
    else:
        say(f"{found.path} is in {target}")


@app.command("merge")
def merge_checkpoint(
    path: PathOf,
    directory: Annotated[Path, typer.Argument(help="A new directory for the whole model.")],
    model: Annotated[str, typer.Option(help="The base model: a local directory or a Hugging Face id.")],
    gguf: Annotated[bool, typer.Option("--gguf", help="Write GGUF; says how.")] = False,
    address: Address = None,
    api_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Merge an adapter into its base model with PEFT: a whole model that any engine loads."""
    if gguf:
        raise CommandFailed(
            "transformers reads GGUF but writes none: merge without --gguf, then run llama.cpp's converter, "
            f"`python convert_hf_to_gguf.py {directory}`"
        )
    if directory.exists() and any(directory.iterdir()):
        raise FileExistsError(f"{directory} already exists; name a new directory, or an empty one")
    with needing("merge", "`paceline checkpoints merge`"):
        from paceline.cli.merging import merge  # noqa: PLC0415
    with connected(address, api_key_file) as service, TemporaryDirectory() as scratch:
        found = find_checkpoint(service, path)
        if found.kind is not CheckpointKind.SAMPLER:
            raise CommandFailed(f"{path} is a state; save the run's weights with --kind sampler and merge that")
        _download(service, found, Path(scratch) / "adapter")
        try:
            merge(Path(scratch) / "adapter", model, directory)
        except (RuntimeError, ValueError) as failure:
            reason = str(failure).splitlines()[0]
            raise CommandFailed(f"{path} cannot be merged into {model}: {reason}; give its own base model") from failure
    if as_json:
        show_json({"path": found.path, "directory": str(directory)})
    else:
        say(f"{found.path}, merged into {model}, is in {directory}")


@app.command("import")
def import_checkpoint(
    directory: Annotated[Path, typer.Argument(help="Has adapter_model.safetensors and adapter_config.json.")],
    run: Annotated[str, typer.Option(help="Run with the adapter's rank, alpha and modules, by id or name.")],
    name: Annotated[str, typer.Option(help="Name of the checkpoint.")],
    ttl: Ttl = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace one of this name.")] = False,
    address: Address = None,
    api_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Upload a PEFT adapter that was made elsewhere, as a sampler checkpoint of a run."""
    with connected(address, api_key_file) as service:
        seconds = duration(ttl) if ttl else None
        run_id = find_run(service, run).run_id
        made = service.upload_checkpoint(run_id, directory, name, ttl_seconds=seconds, overwrite=overwrite)
    _show_one(made, as_json=as_json)


def find_checkpoint(service: ServiceClient, path: str) -> Checkpoint:
    """Return the checkpoint at a path. Raises InvalidPath, CheckpointNotFound."""
    parsed = CheckpointPath.parse(path)
    for one in service.list_checkpoints(parsed.run_id, parsed.kind):
        if one.path == path:
            return one
    raise errors.CheckpointNotFound(f"no such checkpoint: {path}; `paceline checkpoints list` shows what there is")


def _download(service: ServiceClient, found: Checkpoint, directory: Path) -> None:
    with _bar(found) as bar:
        task = bar.add_task(found.name, total=found.size_bytes)
        service.download_checkpoint(found, directory, lambda size: bar.advance(task, size))


@contextmanager
def _bar(found: Checkpoint) -> Iterator[Progress]:
    """Yield a progress bar on standard error; it is drawn only on a terminal."""
    columns = (TextColumn(f"{found.run_id} {found.name}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield bar


def _delete(service: ServiceClient, paths: list[str], *, yes: bool, as_json: bool) -> None:
    if paths:
        confirm(f"delete {len(paths)} checkpoint(s): {', '.join(paths)}?", yes=yes)
    for path in paths:
        service.delete_checkpoint(path)
    report_deleted(paths, as_json=as_json)


def _kind(name: Kind) -> CheckpointKind:
    return CheckpointKind[name.upper()]


def _show_one(checkpoint: Checkpoint, *, as_json: bool) -> None:
    if as_json:
        show_json(checkpoint)
    else:
        _show([checkpoint], as_json=False)


def _show(checkpoints: list[Checkpoint], *, as_json: bool) -> None:
    if as_json:
        show_json(checkpoints)
        return
    rows = [
        (
            one.path,
            one.kind,
            "" if one.damage else one.step,
            bytes_in_words(one.size_bytes),
            one.create_time,
            until(one.expire_time),
            one.damage,
        )
        for one in checkpoints
    ]
    columns = ("path", "kind", ">step", ">size", "saved", "expires", "damage")
    show_table(columns if any(one.damage for one in checkpoints) else columns[:-1], rows, empty="no checkpoints")
