"""What benchmarks/ take from capibara is there: they run too long for tests, and a name that went would show in none."""

from __future__ import annotations

import ast
import importlib
import pathlib
import types

import pytest

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "benchmarks"


def _taken(module: str, name: str):
    """What `from module import name` gives."""
    of = importlib.import_module(module)
    return getattr(of, name) if hasattr(of, name) else importlib.import_module(f"{module}.{name}")


def missing(source: str) -> list[str]:
    """Names of capibara that a script uses and that are not there, as "line 3: devices.name"."""
    nodes = list(ast.walk(ast.parse(source)))
    modules, found = {}, []
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "capibara":
            for alias in node.names:
                try:
                    taken = _taken(node.module, alias.name)
                except ModuleNotFoundError:
                    found.append(f"line {node.lineno}: {node.module}.{alias.name}")
                    continue
                if isinstance(taken, types.ModuleType):
                    modules[alias.asname or alias.name] = taken
    # A name that stands for something else as well is not looked at.
    others = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    others |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id not in others:
            if node.value.id in modules and not hasattr(modules[node.value.id], node.attr):
                found.append(f"line {node.lineno}: {node.value.id}.{node.attr}")
    return found


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: path.relative_to(FOLDER).as_posix())
def test_names_are_there(path):
    assert missing(path.read_text()) == []


def test_names_that_are_not_there_are_found():
    source = "from capibara import config, nothing\nfrom capibara.config import Lost\nconfig.build\nconfig.lost = 1\n"
    assert missing(source) == ["line 1: capibara.nothing", "line 2: capibara.config.Lost", "line 4: config.lost"]
