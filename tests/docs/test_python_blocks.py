"""What Python on the pages says: it compiles, its names are there, and functions take the arguments that they are given."""

from __future__ import annotations

import ast
import importlib
import inspect
import pathlib
import re
import textwrap

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "SECURITY.md"])


def blocks(page: pathlib.Path) -> list[str]:
    """Python of a page: fenced as such, and indented blocks that use the package."""
    text = page.read_text(encoding="utf-8")
    fenced = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    indented = re.findall(
        r"(?:(?<=\n\n)|\A)((?:    .*\n|\n(?=    ))+)", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    )
    parts = [part for block in indented for part in re.split(r"\n(?=    # \S+\.\w+$)", block, flags=re.MULTILINE)]
    parts = [part for part in parts if not re.match(r"\s*# \S+\.gin$", part, re.MULTILINE)]
    own = re.compile(r"^\s*(import capibara|from capibara|.*\bcb\.\w+\()", re.MULTILINE)
    return [*fenced, *(textwrap.dedent(part) for part in parts if own.search(part))]


ALL = [pytest.param(block, id=f"{page.name}-{i}") for page in PAGES for i, block in enumerate(blocks(page))]


def names_of(tree: ast.AST) -> dict[str, object]:
    """Name -> the module, class or function of ours that it is imported as."""
    result: dict[str, object] = {"cb": importlib.import_module("capibara")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                if item.name.partition(".")[0] == "capibara":
                    module = importlib.import_module(item.name)
                    result[item.asname or "capibara"] = module if item.asname else importlib.import_module("capibara")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "capibara":
            for item in node.names:
                result[item.asname or item.name] = member(importlib.import_module(node.module or ""), item.name)
    return result


def member(owner: object, name: str) -> object:
    if inspect.ismodule(owner) and not hasattr(owner, name):
        return importlib.import_module(f"{owner.__name__}.{name}")
    return getattr(owner, name)


def resolved(node: ast.expr, names: dict[str, object]) -> object | None:
    """What an expression such as cb.aggregation.Krum names; None: nothing of ours."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = resolved(node.value, names)
        return member(owner, node.attr) if inspect.ismodule(owner) or inspect.isclass(owner) else None
    return None


def check_call(call: ast.Call, names: dict[str, object]) -> None:
    """Raises TypeError for arguments that a function or class of ours does not take."""
    function = resolved(call.func, names)
    starred = any(isinstance(arg, ast.Starred) for arg in call.args) or any(item.arg is None for item in call.keywords)
    if callable(function) and not starred:
        inspect.signature(function).bind(*call.args, **{item.arg: item.value for item in call.keywords})


def test_pages_have_python():
    assert len(ALL) >= 25
    assert {"python.md", "sweeps.md", "merging.md", "consensus.md"} <= {param.id.rpartition("-")[0] for param in ALL}


@pytest.mark.parametrize("block", ALL)
def test_a_block_compiles_and_calls_what_is_there(block):
    tree = ast.parse(block)
    names = names_of(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            resolved(node, names)
        if isinstance(node, ast.Call):
            check_call(node, names)


def test_the_vote_of_the_page_is_as_it_says(capsys):
    (vote,) = [block for block in blocks(ROOT / "docs" / "consensus.md") if "vote.decide" in block]
    exec(compile(vote, "consensus.md", "exec"), {})
    assert "9f3c" in (text := capsys.readouterr().out) and "f: its score is below" in text and "6 votes of 5" in text


@pytest.mark.parametrize(
    "block", ["cb.finetuned()", "cb.convert()", "cb.Schedule(rate=1)", "from capibara.api import nothing"]
)
def test_a_mistake_is_seen(block):
    tree = ast.parse(block)
    with pytest.raises((AttributeError, TypeError, ImportError)):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                check_call(node, names_of(tree))
        names_of(tree)
