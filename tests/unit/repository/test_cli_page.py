"""docs/cli.md matches the command line: every command, argument and option, and no absent one."""

from __future__ import annotations

import re

import pytest
from support.doc_pages import page, rows
from typer.main import get_command

from paceline.cli.app import make_app

COMMON = {"--address", "--api-key-file", "--json"}


def walk(command, name=""):
    """Yield each command with its full name."""
    for each, inner in getattr(command, "commands", {}).items():
        yield from walk(inner, f"{name} {each}".strip())
    if not hasattr(command, "commands"):
        yield name, command


COMMANDS = dict(walk(get_command(make_app())))


def listed():
    """Return the cells of each row by the command's name, without its arguments."""
    words = {row: row.split() for row in rows(page("cli.md"))}
    found = {row: " ".join(words[row][: 2 if words[row][0] in {"runs", "checkpoints", "keys"} else 1]) for row in words}
    return {found[row]: (row, *cells) for row, cells in rows(page("cli.md")).items()}


def test_every_command_is_listed_and_no_absent_one():
    assert listed().keys() == COMMANDS.keys()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_listed_with_its_arguments_and_options(name):
    command, (usage, options, said) = COMMANDS[name], listed()[name]
    parameters = [each for each in command.params if not getattr(each, "hidden", False)]
    arguments = [each.metavar or each.name.upper() for each in parameters if each.param_type_name == "argument"]
    assert [word.strip("[]") for word in usage.removeprefix(name).split()] == [word.strip("[]") for word in arguments]
    calls = any(each.name == "api_key_file" for each in parameters)
    own = {name for each in parameters if each.param_type_name == "option" for name in each.opts}
    assert set(re.findall(r"-[\w-]+", options)) == own - (COMMON if calls else {"--json"}) - {"--help", "-h"}
    assert said == command.help.splitlines()[0].strip()


@pytest.mark.parametrize(
    "name", COMMANDS.keys() - {"up", "doctor", "logs", "chat", "trace", "sft", "dpo", "rl", "atropos"}
)
def test_a_command_that_prints_data_has_the_options_that_all_have(name):
    needed = {"--file", "--json"} if name.startswith("keys ") else COMMON
    assert {option for each in COMMANDS[name].params for option in each.opts} >= needed
