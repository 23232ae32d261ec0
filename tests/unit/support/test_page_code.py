"""The blocks of a page, and a session that runs them."""

from __future__ import annotations

import pytest
from support.page_code import PageRunner, blocks

PAGE = """# Title

```console
$ export NAME=value
printed
$ echo one \\
    two
$ echo 'over
lines'
```

<!-- not run: needs a GPU -->
```python
first = 1
```

```json
{}
```
"""


@pytest.fixture
def runner(tmp_path, monkeypatch):
    return PageRunner("page", tmp_path, monkeypatch, lambda text: text.replace("value", "changed"))


def test_blocks_have_their_language_line_and_note():
    first, second = blocks(PAGE)
    assert (first.language, first.line, first.note) == ("console", 4, "")
    assert (second.language, second.text, second.note) == ("python", "first = 1\n", "not run: needs a GPU")


def test_commands_are_run_without_what_they_print(runner):
    (block, _) = blocks(PAGE)
    assert block.commands == "export NAME=value\necho one \\\n    two\necho 'over\nlines'"
    assert runner.run(block) == "one two\nover\nlines\n"


def test_variables_stay_from_block_to_block(runner):
    for block in blocks(PAGE + "```console\n$ echo $NAME\n```\n```python\nassert first == 1\nsecond = first\n```\n"):
        said = runner.run(block)
    assert said == ""
    (block,) = blocks("```console\n$ echo $NAME\n```\n")
    assert runner.run(block) == "changed\n"


def test_a_command_or_a_line_that_fails_is_an_error(runner):
    (command, line) = blocks("```console\n$ false\n$ echo after\n```\n```python\nabsent\n```\n")
    with pytest.raises(AssertionError, match="line 2"):
        runner.run(command)
    with pytest.raises(NameError):
        runner.run(line)
