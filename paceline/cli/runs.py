"""`paceline runs`: list, describe, name, tag, delete and prune runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from paceline.cli.connect import Address, KeyFile, connected, find_run
from paceline.cli.output import AsJson, CommandFailed, ago, bytes_in_words, say, show_fields, show_json, show_table
from paceline.cli.times import duration
from paceline.types import LoraConfig, Run

app = typer.Typer(help="List, describe, name, tag, delete and prune runs.", no_args_is_help=True)

RunName = Annotated[str, typer.Argument(metavar="RUN", help="Id of a run, or its name if only one has it.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@app.command("list")
def list_runs(address: Address = None, api_key_file: KeyFile = None, as_json: AsJson = False) -> None:
    """List runs, newest first."""
    with connected(address, api_key_file) as service:
        runs = service.list_runs()
    if as_json:
        show_json(runs)
        return
    columns = ("name", "id", "model", ">step", ">version", ">gradient", ">disk", "last use", "state")
    show_table(columns, map(_row, runs), empty="no runs")


@app.command("show")
def show_run(run: RunName, address: Address = None, api_key_file: KeyFile = None, as_json: AsJson = False) -> None:
    """Describe a run."""
    with connected(address, api_key_file) as service:
        found = find_run(service, run)
    if as_json:
        show_json(found)
        return
    show_fields(_about(found))


@app.command("rename")
def rename_run(
    run: RunName,
    name: Annotated[str, typer.Argument(help="The new name.")],
    address: Address = None,
    api_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Name a run: its metadata's `name`, by which clients and commands find it."""
    _update(run, {"name": name}, (), address, api_key_file, as_json=as_json)


@app.command("tag")
def tag_run(
    run: RunName,
    tags: Annotated[list[str], typer.Argument(metavar="TAG...", help="KEY=VALUE sets an entry, KEY- removes one.")],
    address: Address = None,
    api_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Set and remove entries of a run's metadata."""
    entries, remove = _read_tags(tags)
    _update(run, entries, remove, address, api_key_file, as_json=as_json)


@app.command("delete")
def delete_run(
    run: RunName,
    checkpoints: Annotated[bool, typer.Option("--checkpoints", help="Delete its checkpoints too.")] = False,
    yes: Yes = False,
    address: Address = None,
    api_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Delete a run and its versions; its checkpoints stay unless told otherwise."""
    with connected(address, api_key_file) as service:
        found = find_run(service, run)
        confirm(f"delete the run {_called(found)}?", yes=yes)
        service.delete_run(found.run_id, delete_checkpoints=checkpoints)
    report_deleted([found.run_id], as_json=as_json)


@app.command("prune")
def prune_runs(
    older_than: Annotated[str, typer.Option(help="Only runs that were not used for so long, such as 7d.")] = "7d",
    unnamed: Annotated[bool, typer.Option("--unnamed", help="Only runs without a name.")] = False,
    checkpoints: Annotated[bool, typer.Option("--checkpoints", help="Delete their checkpoints too.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be deleted.")] = False,
    yes: Yes = False,
    address: Address = None,
    api_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Delete runs that nobody has used lately, after showing them and asking."""
    before = datetime.now(UTC) - timedelta(seconds=duration(older_than))
    with connected(address, api_key_file) as service:
        runs = [run for run in service.list_runs() if _is_idle(run, before) and not (unnamed and _name(run))]
        if not as_json:
            columns = ("name", "id", ">step", ">disk", "last use")
            rows = [
                (_name(run), run.run_id, run.step, bytes_in_words(run.volume_bytes), ago(used(run))) for run in runs
            ]
            show_table(columns, rows, empty="no such runs")
        if not dry_run and runs:
            confirm(f"delete {len(runs)} run(s)?", yes=yes)
            for run in runs:
                service.delete_run(run.run_id, delete_checkpoints=checkpoints)
    if as_json:
        show_json({"runs": [run.run_id for run in runs], "deleted": not dry_run})


def used(run: Run) -> datetime:
    """Return when a run was used last."""
    return run.last_use_time or run.create_time


def _update(
    named: str,
    entries: Mapping[str, str],
    remove: Sequence[str],
    address: str | None,
    key_file: KeyFile,
    *,
    as_json: bool,
) -> None:
    with connected(address, key_file) as service:
        found = service.update_run(find_run(service, named).run_id, entries, remove)
    if as_json:
        show_json(found)
    else:
        show_fields([("run", found.run_id), ("metadata", found.user_metadata)])


def _read_tags(tags: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    entries, remove = dict[str, str](), list[str]()
    for tag in tags:
        key, sets, value = tag.partition("=")
        if sets and key:
            entries[key] = value
        elif not sets and tag.endswith("-") and len(tag) > 1:
            remove.append(tag[:-1])
        else:
            raise typer.BadParameter(f"{tag!r} is neither KEY=VALUE, which sets an entry, nor KEY-, which removes one")
    return entries, remove


def confirm(question: str, *, yes: bool) -> None:
    """Ask a question on standard error; raise CommandFailed unless it is answered with yes."""
    if not yes and not typer.confirm(question, err=True):
        raise CommandFailed("nothing was deleted")


def report_deleted(deleted: Sequence[str], *, as_json: bool) -> None:
    """Say what was deleted."""
    if as_json:
        show_json({"deleted": deleted})
    else:
        say(f"deleted {', '.join(deleted) or 'nothing'}")


def _is_idle(run: Run, before: datetime) -> bool:
    return used(run) < before and run.executed_seq_id == run.last_seq_id


def _name(run: Run) -> str:
    return run.user_metadata.get("name", "")


def _called(run: Run) -> str:
    name = _name(run)
    return f"{name} ({run.run_id})" if name else run.run_id


def _row(run: Run) -> tuple[object, ...]:
    return (
        _name(run),
        run.run_id,
        run.base_model,
        run.step,
        run.latest_version or "",
        f"{run.gradient_tokens} tokens" if run.gradient_tokens else "",
        bytes_in_words(run.volume_bytes),
        ago(used(run)),
        _state(run),
    )


def _state(run: Run) -> str:
    waiting = run.last_seq_id - run.executed_seq_id
    words = [run.state.name.lower()]
    words += [f"{waiting} command(s) waiting"] if waiting else []
    words += ["damaged"] if run.damage else []
    return ", ".join(words)


def _about(run: Run) -> list[tuple[str, object]]:
    lora = run.parameters if isinstance(run.parameters, LoraConfig) else None
    return [
        ("name", _name(run)),
        ("id", run.run_id),
        ("model", run.base_model),
        ("trains", f"an adapter of rank {lora.rank}" if lora else "every parameter"),
        ("parameters", f"{run.trainable_parameters:,}"),
        ("step", run.step),
        ("newest version", run.latest_version or "none"),
        ("gradient waiting", f"{run.gradient_tokens} tokens" if run.gradient_tokens else ""),
        ("newest state", run.latest_state_checkpoint),
        ("on disk", bytes_in_words(run.volume_bytes)),
        ("created", run.create_time),
        ("last use", ago(used(run))),
        ("state", _state(run)),
        ("damage", run.damage),
        ("metadata", run.user_metadata),
    ]
