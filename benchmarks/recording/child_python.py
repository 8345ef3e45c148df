"""Runs sessions of Python cells as IPython does: a namespace each, and the value of a last expression is displayed.

Reads {"limits", "imports", "sessions"} from standard input and writes [number of the session, execution] lines. Every session
has a process of its own, forked after the imports, without network, threads, other processes, or files outside its folder.
"""

import _posixsubprocess
import _thread
import ast
import builtins
import contextlib
import importlib
import io
import json
import os
import random
import resource
import signal
import sys
import threading
import traceback

FOLDER = os.path.realpath(os.getcwd())
WALL = 6  # times the processor time: a busy machine must not decide what is recorded
REFUSED = {"socket", "subprocess", "ctypes", "ftplib", "smtplib", "webbrowser", "winreg"}
REFUSED_CALLS = {
    f"os.{name}"
    for name in "system exec posix_spawn fork forkpty kill killpg chmod chown link symlink setxattr utime truncate".split()
}
CHANGING = {"os.remove", "os.rename", "os.rmdir", "os.mkdir", "shutil.rmtree", "open"}


def refuse(event, args):
    if event.split(".")[0] in REFUSED or event in REFUSED_CALLS:
        raise PermissionError(f"{event} is not allowed here")
    if event in CHANGING and (event != "open" or _writes(args[1], args[2])):
        for path in args[: 2 if event == "os.rename" else 1]:
            if isinstance(path, str | bytes) and not _is_inside(os.fsdecode(path)):
                raise PermissionError(f"{path!r} is not allowed here: it is not in the folder of the session")


def _writes(mode, flags):
    return (
        bool(set(mode) & set("wax+"))
        if isinstance(mode, str)
        else bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
    )


def _is_inside(path):
    return os.path.realpath(path).startswith(FOLDER + os.sep)


def no_thread(*given, **named):
    raise RuntimeError("can't start new thread")


def no_process(*given, **named):
    raise PermissionError("a process is not allowed here")


class Pieces(io.TextIOBase):
    def __init__(self):
        self.pieces = []

    def write(self, text):
        if text:
            self.pieces.append(text)
        return len(text)


def traceback_of(error, number, codes):
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


def execution(code, number, names, codes):
    out, err, results, failure = Pieces(), Pieces(), [], None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            tree = ast.parse(code, f"<cell {number}>")
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, f"<cell {number}>", "exec"), names)
            value = (
                None if last is None else eval(compile(ast.Expression(last.value), f"<cell {number}>", "eval"), names)
            )
            if value is not None:
                results.append({"text": repr(value), "is_main_result": True})
        except (Exception, SystemExit) as error:
            try:
                text = str(error)
            except Exception:
                text = ""
            failure = {"name": type(error).__name__, "value": text, "traceback": traceback_of(error, number, codes)}
    return {
        "results": results,
        "logs": {"stdout": out.pieces, "stderr": err.pieces},
        "error": failure,
        "execution_count": number,
    }


def run(place, cells, limits, answer):
    """Runs a session in this process, which ends after its wall time, or by a limit."""
    signal.setitimer(signal.ITIMER_REAL, WALL * limits["RLIMIT_CPU"])
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, name), (value, value))
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    _thread.start_new_thread = threading._start_new_thread = _thread.start_joinable_thread = no_thread
    threading._start_joinable_thread = no_thread
    _posixsubprocess.fork_exec = no_process  # multiprocessing calls it without an event
    sys.addaudithook(refuse)
    names = {"__name__": "__main__", "__builtins__": builtins}
    for number, code in enumerate(cells, 1):
        answer.write(json.dumps([place, execution(code, number, names, cells)]) + "\n")
        answer.flush()


def main():
    given = json.load(sys.stdin)
    answer = os.fdopen(os.dup(1), "w")
    for name in given["imports"]:
        with contextlib.suppress(Exception, SystemExit), contextlib.redirect_stdout(io.StringIO()):
            importlib.import_module(name)
    for place, cells in enumerate(given["sessions"]):
        answer.flush()
        process = os.fork()
        if process == 0:
            try:
                run(place, cells, given["limits"], answer)
            finally:
                os._exit(0)
        os.waitpid(process, 0)


main()
