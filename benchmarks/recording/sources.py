"""Finds sessions of cells in texts, in packages of Python and JavaScript, and in files of SQL."""

from __future__ import annotations

import ast
import itertools
import json
import os
import pathlib
import pkgutil
import re
import sqlite3
import subprocess
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from capibara.builders.executions import sessions as interactive

MOST_CELLS = 100  # of a session
CONVENTIONS = {
    "np": "import numpy as np",
    "pd": "import pandas as pd",
    "jnp": "import jax.numpy as jnp",
    "jax": "import jax",
    "sp": "import scipy as sp",
    "sparse": "from scipy import sparse",
    "optax": "import optax",
}
"""What the documentation of these packages takes as imported."""
_SQL_WORD = re.compile(
    r"(?:\s|--.*\n)*(?:select|with|insert|update|delete|create|values|drop|alter|explain|replace)\b", re.IGNORECASE
)


class Session(NamedTuple):
    """Cells that run one after the other; `name` is unique within a log."""

    name: str
    cells: list[str]


class Batch(NamedTuple):
    """Sessions that one child runs, and the modules that are imported before them."""

    sessions: list[Session]
    imports: tuple[str, ...] = ()


def spaced(items: Sequence, most: int) -> list:
    """At most so many of the items, evenly spaced, in their order."""
    count = min(most, len(items))
    return [items[number * len(items) // count] for number in range(count)]


def statements(text: str) -> list[str]:
    """The statements of the `>>>` sessions of a text."""
    return [example.code for example in interactive.examples(text)]


def examples(text: str) -> list[str]:
    """The `>>>` sessions of a text, each as one cell, as a program is written: results in the middle are printed.

    A cell begins with those imports of earlier ones that it uses.
    """
    cells: list[str] = []
    imports: dict[str, str] = {}
    for _, of_session in itertools.groupby(interactive.examples(text), key=lambda one: one.session):
        lines: list[str] = []
        found = list(of_session)
        for one in found:
            lines.append(_printed(one.code) if one.output and one is not found[-1] else one.code)
        code = "\n".join(lines)
        cells.append("\n".join([*_used(imports, code), code]))
        for line in lines:
            imports |= _imported(line)
    return cells


def _printed(code: str) -> str:
    try:
        body = ast.parse(code).body
    except SyntaxError:
        return code
    if (
        len(body) != 1
        or not isinstance(body[0], ast.Expr)
        or "#" in code
        or code.startswith(("print(", "pprint(", "help("))
    ):
        return code
    return f"print({code})"


def _imported(code: str) -> dict[str, str]:
    """The names that import statements bind, each with its statement."""
    if not re.match(r"(?:import|from)\s", code):
        return {}
    try:
        body = ast.parse(code).body
    except SyntaxError:
        return {}
    nodes = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    return {(name.asname or name.name).partition(".")[0]: code for node in nodes for name in node.names}


def _used(imports: dict[str, str], code: str) -> list[str]:
    names = {*re.findall(r"(?<![\w.])[A-Za-z_]\w*", code)}
    bound = _imported(code) if "\n" not in code else {}
    return list(
        dict.fromkeys(line for name, line in imports.items() if (name in names or name == "*") and name not in bound)
    )


def texts(paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Names and contents of the texts with sessions, in files and folders; equal names get numbers."""
    named: dict[str, int] = {}
    for path in map(pathlib.Path, paths):
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.is_file() and file.suffix in (".txt", ".rst", ".md", ".py", ".pycon"):
                text = file.read_text(encoding="utf-8", errors="replace")
                if ">>> " in text:
                    name = os.path.relpath(file, path if path.is_dir() else path.parent)
                    number = named[name] = named.get(name, 0) + 1
                    yield (name if number == 1 else f"{name}:{number}"), text


def standard_library() -> Iterator[tuple[str, str]]:
    """The modules of the standard library; their examples use the names of their module."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    for module in sorted(pkgutil.iter_modules([str(root)]), key=lambda one: one.name):
        file = root / module.name / "__init__.py" if module.ispkg else root / f"{module.name}.py"
        if file.is_file() and ">>> " in (text := file.read_text(encoding="utf-8", errors="replace")):
            yield module.name, f">>> from {module.name} import *\n\n{text}"


def package(name: str, python: str, most: int, size: int = 50) -> list[Batch]:
    """The sessions of a package's docstrings, at most so many, in batches of `size`.

    Args:
      name: of a package or module that `python` imports, such as "scipy.stats".
      python: the path of an interpreter.
      most: sessions that are taken, evenly spaced.
      size: sessions of a batch.
    """
    find = "import importlib.util, sys; print(importlib.util.find_spec(sys.argv[1]).origin)"
    done = subprocess.run([python, "-P", "-c", find, name], capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise SystemExit(f"error: {python} does not have the package {name!r}: install it there")
    origin = pathlib.Path(done.stdout.strip())
    files = sorted(origin.parent.rglob("*.py")) if origin.name == "__init__.py" else [origin]
    found: list[tuple[str, Session]] = []
    for file in files:
        parts = file.relative_to(origin.parent).with_suffix("").parts
        if not {"tests", "test", "_vendor", "vendored", "conftest", "__main__"} & {*parts}:
            inner = parts[:-1] if parts[-1] == "__init__" else parts
            module = ".".join((name, *inner)) if origin.name == "__init__.py" else name
            found += [(module, session) for session in _docstrings(file, module)]
    taken = spaced(found, most)
    batches = [taken[at : at + size] for at in range(0, len(taken), size)]
    root = name.partition(".")[0]
    return [
        Batch([session for _, session in batch], tuple(dict.fromkeys((root, *(module for module, _ in batch)))))
        for batch in batches
    ]


def _docstrings(file: pathlib.Path, module: str) -> list[Session]:
    text = file.read_text(encoding="utf-8", errors="replace")
    if ">>> " not in text:
        return []
    found: dict[str, Session] = {}

    def visit(node: ast.AST, path: tuple[str, ...]) -> None:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            path = (*path, node.name)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and ">>> " in node.value:
            name = ".".join((module, *path))
            cells = examples(node.value)[:MOST_CELLS]
            if cells:
                found.setdefault(
                    name if name not in found else f"{name}:{node.lineno}", _with_imports(name, cells, module)
                )
        for child in ast.iter_child_nodes(node):
            visit(child, path)

    try:
        visit(ast.parse(text), ())
    except SyntaxError:
        return []
    return [session._replace(name=name) for name, session in found.items()]


def _with_imports(name: str, cells: list[str], module: str) -> Session:
    """The session with the imports before its first cell that its documentation takes as done."""
    code = "\n".join(cells)
    lines = [
        line
        for short, line in CONVENTIONS.items()
        if re.search(rf"(?<![\w.]){short}\.", code) and not re.search(rf"\bimport\b.*\b{short}\b", code)
    ]
    root = module.partition(".")[0]
    if not re.search(rf"^\s*(?:import|from) {root}\b", code, re.MULTILINE) and not any(root in line for line in lines):
        public = module if not re.search(r"\._", module) else module[: module.index("._")]
        lines.append(f"from {public} import *")
    return Session(name, ["\n".join([*lines, "", cells[0]]), *cells[1:]] if lines else cells)


def javascript(folder: pathlib.Path, variable: str, most: int) -> list[Session]:
    """The sessions of the `@example` blocks of a package's JSDoc: one for each function, whose paragraphs are cells.

    Args:
      folder: of an unpacked package.
      variable: what its examples call the package; "*": they use its names without it.
      most: sessions that are taken, evenly spaced.
    """
    name = json.loads((folder / "package.json").read_text(encoding="utf-8"))["name"]
    blocks: list[tuple[pathlib.Path, list[str]]] = []
    for file in sorted(folder.rglob("*.js")):
        inner = file.relative_to(folder)
        if not {"node_modules", "dist", "test", "es", "esm"} & {*inner.parts}:
            text = file.read_text(encoding="utf-8", errors="replace")
            blocks.append((inner.with_suffix(""), re.findall(r"/\*\*(?:(?!\*/).)*?@example\b.*?\*/", text, re.DOTALL)))
    found: list[Session] = []
    known: set[str] = set()
    # A file of all functions comes after those of one, which have the same examples.
    for inner, of_file in sorted(blocks, key=lambda pair: len(pair[1])):
        for number, cells in enumerate(map(_javascript_cells, of_file), 1):
            if cells and known.isdisjoint(cells):
                place = f":{number}" if len(of_file) > 1 else ""
                found.append(Session(f"{name}/{inner}{place}", _required(cells, name, variable, inner.name)))
            known.update(cells)
    return spaced(found, most)


def _javascript_cells(block: str) -> list[str]:
    """The paragraphs of the examples; one also ends where its value is stated (`// => 3`), without that comment."""
    cells: list[list[str]] = [[]]
    inside = False
    for raw in block.split("\n"):
        line = re.sub(r"^\s*\* ?", "", raw.removesuffix("*/")).rstrip()
        if line.lstrip().startswith("@"):
            inside = line.lstrip().startswith("@example")
            line = ""  # what stands behind the tag is a title
        if not inside or not line.strip():
            cells.append([])
            continue
        code, stated, _ = re.sub(r"\s*//\s*=>", "\0", line, count=1).partition("\0")
        if code.strip():
            cells[-1].append(code.rstrip())
        if stated and _is_closed("\n".join(cells[-1])):
            cells.append([])
    has_code = (lines for lines in cells if any(not line.lstrip().startswith("//") for line in lines))
    return [textwrap.dedent("\n".join(lines)) for lines in has_code][:MOST_CELLS]


def _is_closed(code: str) -> bool:
    return sum(map(code.count, "([{")) == sum(map(code.count, ")]}"))


def _required(cells: list[str], name: str, variable: str, function: str) -> list[str]:
    code = "\n".join(cells)
    if "require(" in code or re.search(r"^\s*import\b", code, re.MULTILINE):
        return cells
    bound = f"{{ {function} }}" if variable == "*" else variable
    return [f"const {bound} = require('{name}');\n{cells[0]}", *cells[1:]]


def sql(paths: Sequence[str], most: int, longest: int = 12) -> Iterator[tuple[list[Session], list[str]]]:
    """The sessions of each SQL file, and the CSV files beside it, whose tables they use.

    A session is a run of statements without an empty line or a rule of dashes between them, and has `longest` statements at
    most. A file with hardly a semicolon has a statement in each line.
    """
    for path in map(pathlib.Path, paths):
        for file in sorted(path.rglob("*.sql")) if path.is_dir() else [path]:
            tables = sorted(str(one) for one in file.parent.glob("*.csv*"))
            name = os.path.relpath(file, path if path.is_dir() else path.parent)
            blocks = list(_blocks(file.read_text(encoding="utf-8", errors="replace")))
            pieces = [block[at : at + longest] for block in blocks for at in range(0, len(block), longest)]
            yield (
                [Session(f"{name}:{number}", piece) for number, piece in spaced([*enumerate(pieces, 1)], most)],
                tables,
            )


def _blocks(text: str) -> Iterator[list[str]]:
    lines = [line for line in text.split("\n") if not line.startswith("#")]
    ended = sum(line.rstrip().endswith(";") for line in lines)
    each_line = ended * 200 < len([line for line in lines if line.strip()])
    block: list[str] = []
    pending = ""
    for line in lines:
        is_rule = bool(re.fullmatch(r"\s*-{4,}\s*", line))
        if not pending.strip() and (is_rule or not line.strip()):
            if block:
                yield block
            block, pending = [], ""
            continue
        pending += "" if is_rule else f"{line}\n"
        if each_line or sqlite3.complete_statement(pending):
            if _SQL_WORD.match(pending):
                block.append(pending.strip())
            pending = ""
    if block:
        yield block


def batches(of_texts: Iterable[tuple[str, str]], *, by_example: bool) -> list[Batch]:
    """The sessions of texts, which run in a child each: a later one may use the names of an earlier one."""
    cells_of = examples if by_example else statements
    return [Batch([Session(name, cells)]) for name, text in of_texts if (cells := cells_of(text)[:MOST_CELLS])]
