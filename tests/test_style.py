"""No name that is not there, used before it is set, or never used; one layout: `make format` mends it."""

import ast
import functools
import pathlib
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import NamedTuple

import pytest

from capibara.__main__ import VERBS

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("command", ["check", "format --check"], ids=lambda command: command.split()[0])
def test_ruff_has_nothing_to_say(command):
    folders = ["capibara", "benchmarks", "tests", "examples", "launch", "docs"]
    argv = [sys.executable, "-m", "ruff", *command.split(), "--no-cache", *folders]
    done = subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


# Words that were given up, as patterns, and what is said instead (docs/glossary.md).
GIVEN_UP = {
    r"carr(y|ies|ied|ying)[ _]on\b": "resume",
    r"\bAttentionKind\b": "AttentionSpec",
    r"(?<![-.])\bdamaged\b": "corrupted",  # --damaged and STEP.damaged are still known
    r"--objective=": "--goal",
    r"config\.objective\b": "data_kind",
    r"\bmoved aside\b": "quarantined",
    r"(?-i:\bHolds\.[A-Z]|import .*\bHolds\b)": "DataFormat, RecordFormat",
    r"(?-i:\bHeld\(|import .*\bHeld\b)": "ResidentArrays",
    r"(?-i:\bSupply\b)": "BatchProvider",
    r"(?-i:\bplaces?_[A-Z]+\b)": "positions_T, row_positions_T",
    r"\bcarr(y|ies|ied|ying) (no )?loss\b": "has loss",
    r"\bin the midst\b": "in the middle of",
    r"quantis": "quantize, as the field spells it",
    r"\bis_remote\b": "what stores.of(path) says of it: has_local_paths, appends, renames, verifies",
}


@pytest.fixture(scope="module")
def texts():
    """File -> what is written in it, of all but this one."""
    files = [
        path
        for folder in ("capibara", "tests", "benchmarks", "docs", "examples", "gin", "launch")
        for path in (ROOT / folder).rglob("*")
    ]
    files = [
        path for path in files if path.suffix in (".py", ".md", ".gin") and path != pathlib.Path(__file__).resolve()
    ]
    return {path: path.read_text(encoding="utf-8") for path in [*files, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]}


@pytest.mark.parametrize("pattern", GIVEN_UP)
def test_a_word_that_was_given_up_is_said_nowhere(pattern, texts):
    given_up = re.compile(pattern, re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, said.start()) + 1}"
        for path, text in texts.items()
        for said in given_up.finditer(text)
    ]
    assert not found, f"say {GIVEN_UP[pattern]}: {', '.join(found)}"


def test_the_glossary_names_places_that_are_there():
    terms = re.findall(
        r"^\| (?!term\b|-)([^|]+) \|[^|]+\|([^|]+)\|$", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE
    )
    assert len(terms) > 40
    gone = [f"{term}: {place}" for term, places in terms for place in re.findall(r"`([^`]+)`", places)
            if not (ROOT / place).exists()]  # fmt: skip
    assert not gone, gone
    each = [name.strip() for term, _ in terms for name in term.split(",")]
    assert len(each) == len({*each}), "a term is there twice"


# Lines of a class, a function and a file, and files of a folder, at most.
LIMITS = {"class": 200, "function": 60, "file": 700, "folder": 14}


class Documented(NamedTuple):
    """What the docstring of a class or function lists under Args or Attributes, and what its code names.

    `bases`: the classes whose names it has, too.
    """

    line: int
    listed: list[str]
    names: set[str]
    bases: list[str]


@functools.cache
def read(path: pathlib.Path) -> tuple[dict[str, int], list[int], list[str], dict[str, Documented]]:
    """What the tests below ask of a file of the package, which is parsed once: see the functions that it calls."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    return sizes_of(path, text, tree), packed_calls(tree), vague_names(tree), documented(tree)


def sizes_of(path: pathlib.Path, text: str, tree: ast.AST) -> dict[str, int]:
    """Of a file and all that it defines: the kind, where it is and its name -> its lines."""
    where = path.relative_to(ROOT)
    found = {f"file {where}": text.count("\n")}
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            name = f"{kind} {where} {node.name}"
            found[name] = max(found.get(name, 0), node.end_lineno - node.lineno + 1)
    return found


def test_classes_functions_files_and_folders_are_short():
    paths = sorted((ROOT / "capibara").rglob("*.py"))
    sizes = {name: lines for path in paths for name, lines in read(path)[0].items()}
    for path in (path for folder in ("tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")):
        sizes[f"file {path.relative_to(ROOT)}"] = path.read_text(encoding="utf-8").count("\n")
    verbs = {f"{verb.replace('-', '_')}.py" for verb in VERBS}  # a module each, however many there are
    for folder in {path.parent for path in paths}:
        own = {"__init__.py"} | (verbs if folder in (ROOT / "capibara", ROOT / "capibara" / "cli") else set())
        files = [path for path in paths if path.parent == folder and path.name not in own]
        sizes[f"folder {folder.relative_to(ROOT)}"] = len(files)
    assert {name.split()[0] for name in sizes} == LIMITS.keys()
    above = [f"{name}: {size}" for name, size in sizes.items() if size > LIMITS[name.split()[0]]]
    assert not above, f"divide by concepts what has more than {LIMITS}: {above}"


def packed_calls(tree: ast.AST) -> list[int]:
    """The lines of calls that take their arguments from a tuple which the same function has packed."""
    found = []
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        inside, waiting = [], list(ast.iter_child_nodes(function))
        while waiting:
            node = waiting.pop()
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inside.append(node)
                waiting += ast.iter_child_nodes(node)
        packed = set()
        for node in inside:
            if isinstance(node, ast.Assign):
                target, value = node.targets[0], node.value
                several = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
                pairs = zip(target.elts, value.elts) if several else [(target, value)]
                packed |= {t.id for t, v in pairs if isinstance(t, ast.Name) and isinstance(v, ast.Tuple) and v.elts}
        calls = [node for node in inside if isinstance(node, ast.Call)]
        starred = [(call.lineno, arg.value) for call in calls for arg in call.args if isinstance(arg, ast.Starred)]
        found += [line for line, value in starred if isinstance(value, ast.Name) and value.id in packed]
    return found


def test_no_arguments_are_packed_into_a_tuple_for_a_call():
    """The call says its arguments in order: a tuple hides which is which."""
    paths = sorted((ROOT / "capibara").rglob("*.py"))
    found = {path: read(path)[1] for path in paths}
    assert not [f"{path.relative_to(ROOT)}:{line}" for path, lines in found.items() for line in lines]


@pytest.mark.parametrize("code", ["of = a, b\n    g(*of)", "x, of = 1, (a, b)\n    y = g(x, *of, z)"])
def test_packed_arguments_are_found(code):
    assert len(packed_calls(ast.parse(f"def f(a, b):\n    {code}\n"))) == 1
    assert not packed_calls(ast.parse("def f(of):\n    h = ()\n    g(*of, *h)\n"))


# What a value was is no name for it: say what it is.
VAGUE = {
    "apart", "began", "begun", "beside", "came", "dog", "found", "given", "gone", "kept", "lives", "made", "one", "own", "parting",
    "said", "told", "took", "what",
}  # fmt: skip


def vague_names(tree: ast.AST) -> list[str]:
    """The lines and names of variables, parameters, attributes, functions and classes that are called so."""
    names = []
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            name = node.name
        if name.strip("_") in VAGUE:
            names.append(f"{node.lineno} {name}")
    return names


def documented(tree: ast.AST) -> dict[str, Documented]:
    """The classes and functions of a file, by their names and lines."""
    result = {}
    for node in ast.walk(tree):
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        section = re.search(r"^(?:Args|Attributes):\n((?: .*\n?|\n)+)", ast.get_docstring(node) or "", re.M)
        lines = re.findall(r"^  ((?:\*{0,2}\w+(?:, )?)+):", section.group(1) if section else "", re.M)
        names, bases = {item.arg for item in ast.walk(node) if isinstance(item, ast.arg)}, []
        if isinstance(node, ast.ClassDef):
            names |= {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}
            names |= {item.attr for item in ast.walk(node) if isinstance(item, ast.Attribute)}
            names |= {item.name for item in node.body if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))}
            bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
        listed = [name.strip("* ") for line in lines for name in line.split(",")]
        result[f"{node.name} {node.lineno}"] = Documented(node.lineno, listed, names, bases)
    return result


def stale_names(files: Mapping[str, Mapping[str, Documented]]) -> list[str]:
    """The names that docstrings list and that neither the function, nor the class or its bases have."""
    classes: dict[str, list[Documented]] = {}
    for items in files.values():
        for key, item in items.items():
            classes.setdefault(key.partition(" ")[0], []).append(item)

    def names(item: Documented) -> set[str]:
        return item.names.union(*(names(base) for name in item.bases for base in classes.get(name, ()) if base != item))

    return [
        f"{path}:{item.line} {name}"
        for path, items in files.items()
        for item in items.values()
        if not item.names.issuperset(item.listed)
        for name in item.listed
        if name not in names(item)
    ]


def test_docstrings_list_what_is_there():
    paths = sorted((ROOT / "capibara").rglob("*.py"))
    assert not stale_names({str(path.relative_to(ROOT)): read(path)[3] for path in paths})


def test_stale_names_are_seen():
    docstring = "Adds.\n\n    Args:\n      a, c: numbers.\n      b: a number: any.\n        d: no argument.\n    "
    code = (
        f"def f(a, b):\n    '''{docstring}'''\nclass A:\n    c: int\nclass B(A):\n    '''{docstring}'''\n    a: int\n"
    )
    assert stale_names({"file": documented(ast.parse(code))}) == ["file:1 c", "file:11 b"]


def test_no_name_is_vague():
    paths = sorted((ROOT / "capibara").rglob("*.py"))
    assert not [f"{path.relative_to(ROOT)}:{name}" for path in paths for name in read(path)[2]]


def test_vague_names_are_seen():
    code = "class A:\n    own: int\n    def _found(self, told):\n        self.kept = [one for one in told]\n"
    assert {name.split()[1] for name in vague_names(ast.parse(code))} == {"own", "_found", "told", "kept", "one"}
