"""`paceline sample` and `paceline chat`: text from the base model, a run or a checkpoint."""

from __future__ import annotations

import sys
from contextlib import closing, suppress
from typing import Annotated, Any

import typer

from paceline import ServiceClient, errors
from paceline.cli.connect import Address, KeyFile, connected
from paceline.cli.output import AsJson, CommandFailed, say, show_json_line
from paceline.cli.text import BASE, Piece, answer, called, complete, find_weights
from paceline.types import ModelRef

Model = Annotated[
    str, typer.Option(help="base; a run by id or name (its newest version), or RUN@3; or a sampler checkpoint's path.")
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Longest completion in tokens.")]
Temperature = Annotated[float | None, typer.Option(min=0.0, max=2.0, help="0 is greedy; 1 if not given.")]


def add_to(app: typer.Typer, panel: str) -> None:
    """Add the commands."""
    app.command("sample", rich_help_panel=panel)(sample)
    app.command("chat", rich_help_panel=panel)(chat)


def sample(
    prompt: Annotated[str, typer.Argument(help="Text to complete; - reads standard input.")],
    model: Model = BASE,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = None,
    count: Annotated[int, typer.Option("-n", min=1, max=256, help="Number of completions.")] = 1,
    seed: Annotated[int | None, typer.Option(min=0, help="Makes the completions repeatable.")] = None,
    address: Address = None,
    api_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Complete a prompt and print it as it is sampled, then which weights answered."""
    text = sys.stdin.read() if prompt == "-" else prompt
    given = {"max_tokens": max_tokens, "temperature": temperature, "n": count, "seed": seed}
    settings = {name: value for name, value in given.items() if value is not None}
    with connected(address, api_key_file) as service:
        weights = find_weights(service, model)
        with closing(complete(service, weights, text, settings)) as pieces:
            if as_json:
                for piece in pieces:
                    show_json_line(piece)
            elif count == 1:
                _write_as_it_comes(pieces)
            else:
                _write_one_by_one(pieces)


def chat(
    model: Model = BASE,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = None,
    system: Annotated[str, typer.Option(help="A system message to begin with.")] = "",
    address: Address = None,
    api_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Talk to a model: its chat template is applied, and only this process knows what was said.

    /reset begins again, /model NAME goes on with other weights, /exit ends.
    """
    settings: dict[str, Any] = {"max_tokens": max_tokens}
    if temperature is not None:
        settings["temperature"] = temperature
    with connected(address, api_key_file) as service:
        talk = _Talk(service, find_weights(service, model), system, settings, as_json=as_json)
        while (line := _ask()) is not None:
            if line and not talk.hear(line):
                return


class _Talk:
    """A conversation."""

    def __init__(
        self, service: ServiceClient, model: ModelRef, system: str, settings: dict[str, Any], *, as_json: bool
    ) -> None:
        self._service, self._model, self._settings, self._as_json = service, model, settings, as_json
        self._start = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._start)

    def hear(self, line: str) -> bool:
        """Do what a line says, or answer it; return whether to go on."""
        command, _, rest = line.partition(" ")
        if command == "/exit":
            return False
        if command == "/reset":
            self._messages = list(self._start)
            say("begun again")
        elif command == "/model":
            with _reported():
                self._model = find_weights(self._service, rest.strip())
                say(f"going on with {self._model}")
        elif line.startswith("/"):
            say("commands: /reset, /model NAME, /exit")
        else:
            self._answer(line)
        return True

    def _answer(self, line: str) -> None:
        asked = [*self._messages, {"role": "user", "content": line}]
        pieces = list[Piece]()
        with _reported():
            stream = answer(self._service, self._model, asked, self._settings)
            with closing(stream), suppress(KeyboardInterrupt):  # Ctrl-C ends the answer, not the conversation
                for piece in stream:
                    pieces.append(piece)
                    if not self._as_json:
                        _write(piece.text)
            text = "".join(piece.text for piece in pieces)
            if self._as_json:
                show_json_line({"content": text, "model": pieces[-1].model if pieces else None})
            else:
                _end(pieces)
            self._messages = [*asked, {"role": "assistant", "content": text}]


class _reported(suppress):  # noqa: N801 - used as a function
    """Says an error of a call, so that the conversation goes on."""

    def __init__(self) -> None:
        super().__init__(errors.PacelineError, CommandFailed)

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> bool:
        is_known = bool(super().__exit__(kind, value, traceback))
        if is_known and value is not None:
            say(str(value))
        return is_known


def _ask() -> str | None:
    """Return the next line without surrounding whitespace; None at the end of the input."""
    sys.stderr.write("> ")
    sys.stderr.flush()
    line = sys.stdin.readline()
    return line.strip() if line else None


def _write_as_it_comes(pieces: Any) -> None:
    seen = list[Piece]()
    for piece in pieces:
        _write(piece.text)
        seen.append(piece)
    _end(seen)


def _write_one_by_one(pieces: Any) -> None:
    """Write each completion once it has ended: several at a time cannot be told apart."""
    texts, last = dict[int, str](), list[Piece]()
    for piece in pieces:
        texts[piece.index] = texts.get(piece.index, "") + piece.text
        last = [piece]
        if piece.finish_reason:
            _write(f"[{piece.index}] {texts[piece.index]}\n")
    _end(last)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _end(pieces: list[Piece]) -> None:
    _write("\n")
    if pieces:
        say(f"from {called(pieces[-1].model)}")
