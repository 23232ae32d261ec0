"""Count what a reader of the code meets: lines, classes, functions, comments, attributes, and tests of insides.

    python -m bench.house [DIRECTORY]

Product is the Python of paceline and the three services, without generated stubs. A function's lines include its
docstring; an attribute is a name that a class's methods or body set on its instances.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench import ROOT

_PRODUCT = ("paceline", "trainer_service", "sampler_service", "gateway")
_GENERATED = ("_pb2.py", "_pb2_grpc.py")
_SLEEPS = ("time.sleep", "asyncio.sleep", "sleep")
_PATCHES = ("setattr", "getattr", "object", "patch")
_NOT_PRIVATE = ("_exit",)
"""Names of the standard library that begin with an underscore and are public."""


@dataclass(frozen=True, slots=True)
class Source:
    """A parsed file."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        """Its number of lines, empty ones too."""
        return self.text.count("\n")

    def all(self, *kinds: type[ast.AST]) -> list[ast.AST]:
        """Return the nodes of these kinds."""
        return [node for node in ast.walk(self.tree) if isinstance(node, kinds)]


def main() -> None:
    """Print the figures of a checkout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", default=ROOT)
    root = parser.parse_args().directory
    product = [source for name in _PRODUCT for source in read(root / name)]
    tests = list(read(root / "tests"))
    lines = sum(source.lines for source in product)
    test_lines = sum(source.lines for source in tests)
    files = [source.lines for source in product]
    functions = sorted(map(height, nodes(product, ast.FunctionDef, ast.AsyncFunctionDef)))
    classes = nodes(product, ast.ClassDef)
    print(f"lines of product {lines}, of tests {test_lines} ({test_lines / lines:.2f} a line of product)")
    print(f"files: {len(files)}, median {median(files):.0f}, longest {max(files)} lines")
    long = functions[int(0.9 * len(functions))]
    print(f"functions: median {median(functions):.0f}, p90 {long}, longest {functions[-1]} lines")
    print(f"a thousand lines: {1000 * len(classes) / lines:.1f} classes, {1000 * len(functions) / lines:.0f} functions")
    print(f"docstrings {percent(sum(map(docstring_lines, product)), lines)} of the lines", end=", ")
    print(f"comments {percent(sum(map(comment_lines, product)), lines)}")
    sizes = {node.name: len(attributes(node)) for node in classes if isinstance(node, ast.ClassDef)}
    print(
        "attributes:", ", ".join(f"{name} {sizes[name]}" for name in sorted(sizes, key=lambda name: -sizes[name])[:10])
    )
    touched = {source.path: touches(source) for source in tests}
    touching = [count for count in touched.values() if count]
    print(f"tests that touch private names: {len(touching)} of {len(tests)} files, {sum(touching)} places", end=", ")
    pauses = [ast.unparse(node.args[0]) for source in tests for node in sleeps(source)]
    print(f"sleeps {len(pauses)}, of which {pauses.count('0')} let other tasks run (sleep(0))")


def read(directory: Path) -> Iterator[Source]:
    """Yield the files below a directory that are written by hand."""
    for path in sorted(directory.rglob("*.py")):
        if not path.name.endswith(_GENERATED) and "node_modules" not in path.parts:
            text = path.read_text()
            yield Source(path, text, ast.parse(text))


def nodes(sources: list[Source], *kinds: type[ast.AST]) -> list[ast.AST]:
    """Return the nodes of these kinds in all files."""
    return [node for source in sources for node in source.all(*kinds)]


def height(node: ast.AST) -> int:
    """Return how many lines a definition takes."""
    assert isinstance(node, ast.stmt)
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def percent(part: int, whole: int) -> str:
    """Return a share with one decimal."""
    return f"{100 * part / whole:.1f} %"


def docstring_lines(source: Source) -> int:
    """Return how many lines texts that stand alone take: docstrings of definitions, and of attributes below them."""
    alone = (node for node in source.all(ast.Expr) if isinstance(node, ast.Expr))
    texts = (n for n in alone if isinstance(n.value, ast.Constant) and isinstance(n.value.value, str))
    return sum(map(height, texts))


def comment_lines(source: Source) -> int:
    """Return how many lines hold nothing but a comment; directives for tools do not count."""
    tokens = tokenize.generate_tokens(io.StringIO(source.text).readline)
    return sum(t.type == tokenize.COMMENT and t.line.strip() == t.string and "noqa" not in t.string for t in tokens)


def attributes(node: ast.ClassDef) -> set[str]:
    """Return the names that a class sets on its instances, or declares in its body."""
    declared = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    stored = (n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return declared | {n.attr for n in stored if isinstance(n.value, ast.Name) and n.value.id == "self"}


def touches(source: Source) -> int:
    """Return in how many places a test reads, sets or imports a private name that is not its own."""
    own = {n.name for n in source.all(ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef) if hasattr(n, "name")}
    own |= {n.attr for n in source.all(ast.Attribute) if isinstance(n, ast.Attribute) and is_own(n)}
    count = 0
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute):
            count += is_private(node.attr) and not is_own(node) and node.attr not in own
        elif isinstance(node, ast.ImportFrom):
            count += sum(is_private(alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rsplit(".", 1)[-1] in _PATCHES:
            texts = [a.value for a in node.args[:2] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            count += sum(is_private(text.rsplit(".", 1)[-1]) for text in texts)
    return count


def is_own(node: ast.Attribute) -> bool:
    """Return whether an attribute is one of the object or class whose method reads it."""
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def is_private(name: str) -> bool:
    """Return whether a name says that it is private."""
    return name.startswith("_") and not name.startswith("__") and name not in ("_", *_NOT_PRIVATE)


def sleeps(source: Source) -> list[ast.Call]:
    """Return the calls that wait for time."""
    calls = (node for node in source.all(ast.Call) if isinstance(node, ast.Call) and node.args)
    return [node for node in calls if ast.unparse(node.func) in _SLEEPS]


if __name__ == "__main__":
    main()
