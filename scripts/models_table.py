"""Write the table of docs/models.md: the engine's certificate for tiny models of every architecture."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tiny_architectures import ARCHITECTURES, make_architecture
from transformers.utils import logging as transformers_logging

from paceline.errors import Unsupported
from paceline.types import AdapterGroup, ModelCertificate, PackingMode
from trainer_service.engine.peft_engine import PeftEngine
from trainer_service.engine_link.options import EngineOptions

DOCUMENT = Path(__file__).parents[1] / "docs" / "models.md"
_HEAD = "| architecture | sequences | attention | `train_attn` | `train_mlp` | why |\n|---|---|---|---|---|---|\n"
_ROW = re.compile(r"^\| `(?P<kind>[^`]+)` \|.*\n", re.MULTILINE)
_SEQUENCES = {PackingMode.PACKED: "packed", PackingMode.ONE_SEQUENCE: "one a pass"}


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table for one architecture; `certificate` is None if it is refused."""

    kind: str
    certificate: ModelCertificate | None
    refusal: str = ""

    def __str__(self) -> str:
        found = self.certificate
        if found is None:
            cells = ["refused", "", "", "", self.refusal]
        else:
            attn, mlp, _ = found.groups
            cells = [_SEQUENCES[found.packing], f"`{found.attention}`", _modules(attn), _modules(mlp), found.reason]
        return f"| `{self.kind}` | " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def row_of(kind: str) -> Row | None:
    """Load an architecture in the engine; return None if transformers cannot make a model of its configuration."""
    with TemporaryDirectory() as directory:
        try:
            make_architecture(kind, Path(directory))
        except Exception:  # Any failure here is transformers', not the engine's.
            return None
        try:
            return Row(kind, PeftEngine(EngineOptions(directory, kind)).describe().certificate)
        except Unsupported as error:
            return Row(kind, None, error.message.removeprefix(f"{kind} cannot be served: "))


def rows_in(document: str) -> dict[str, str]:
    """Return the table's lines by architecture."""
    return {match["kind"]: match[0] for match in _ROW.finditer(document)}


def written(document: str, rows: Sequence[Row]) -> str:
    """Return the document with its table replaced by these rows."""
    start = document.index(_HEAD) + len(_HEAD)
    end = document.find("\n\n", start - 1)
    return document[:start] + "".join(map(str, rows)).rstrip("\n") + (document[end:] if end >= 0 else "\n")


def _modules(group: AdapterGroup) -> str:
    return "refused" if group.refusal else ", ".join(group.modules)


def main() -> None:
    """Write the table."""
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    rows = [row for kind in ARCHITECTURES if (row := row_of(kind)) is not None]
    DOCUMENT.write_text(written(DOCUMENT.read_text(), rows))
    print(f"{len(rows)} architectures, {sum(row.certificate is None for row in rows)} refused", file=sys.stderr)


if __name__ == "__main__":
    main()
