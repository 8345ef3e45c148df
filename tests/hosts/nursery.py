"""Starts verbs in processes that have imported everything already: what several processes import takes most of their time.

`python nursery.py` takes a JSON line for each process to start, forks it, and says its pid, and later how it ended. As on
a host of a TPU slice there are chips on the PCI bus of $FAKE_PCI (see fake_tpu_vm.py). `Nursery` is the other end of it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time

_LOOK_S = 0.02


class Nursery:
    """Starts processes; `close` ends those that are left."""

    def __init__(self, environment: dict[str, str]):
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env={**environment, "OPENBLAS_NUM_THREADS": "1"},  # it is forked, so it has one thread
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._outputs = tempfile.TemporaryDirectory(prefix="nursery-")
        self._codes: dict[int, int] = {}
        self._pids: list[int] = []
        self._told = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, verb: str, args, cwd: os.PathLike, environment: dict[str, str]) -> Child:
        """A process of `capibara VERB`, or of a Python file in place of a verb."""
        with self._told:
            number = len(self._pids)
            names = [os.path.join(self._outputs.name, f"{number}.{stream}") for stream in ("out", "err")]
            for name in names:  # the process may be slower to write than who started it is to read
                pathlib.Path(name).touch()
            asked = {"verb": verb, "args": list(args), "cwd": os.fspath(cwd), "environment": environment}
            print(json.dumps({**asked, "names": names}), file=self._process.stdin, flush=True)
            assert self._told.wait_for(lambda: len(self._pids) > number, 120), "the nursery does not answer"
            return Child(self, self._pids[number], *map(pathlib.Path, names))

    def preload(self, module: str) -> None:
        """Imports a module, unless it has been, before the next process is forked."""
        print(json.dumps({"module": module}), file=self._process.stdin, flush=True)

    def close(self) -> None:
        """Ends it, with all that it has started."""
        self._process.stdin.close()
        self._process.wait(30)
        self._outputs.cleanup()

    def code(self, pid: int) -> int | None:
        """How a process has ended, as of Popen.returncode."""
        return self._codes.get(pid)

    def _listen(self) -> None:
        for line in self._process.stdout:
            told = json.loads(line)
            with self._told:
                if "code" in told:
                    self._codes[told["pid"]] = told["code"]
                else:
                    self._pids.append(told["pid"])
                self._told.notify_all()


class Child:
    """What subprocess.Popen is for a process of a nursery."""

    def __init__(self, nursery: Nursery, pid: int, out: pathlib.Path, err: pathlib.Path):
        self.pid, self._nursery, self._out, self._err = pid, nursery, out, err

    @property
    def returncode(self) -> int | None:
        return self._nursery.code(self.pid)

    def said(self) -> str:
        """On standard output, so far."""
        return self._out.read_text()

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        end_s = time.monotonic() + (timeout or 600)
        while self.returncode is None:
            if time.monotonic() > end_s:
                raise subprocess.TimeoutExpired(f"process {self.pid}: {self._err.read_text()[-2000:]}", timeout)
            time.sleep(_LOOK_S)
        return self._out.read_text(), self._err.read_text()


def _serve(answers) -> None:
    """Until standard input ends."""
    children: set[int] = set()
    pending = b""

    def tell(**message) -> None:
        print(json.dumps(message), file=answers, flush=True)

    while True:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                children.discard(found[0])
                tell(pid=found[0], code=os.waitstatus_to_exitcode(found[1]))
        if not select.select([0], [], [], _LOOK_S)[0]:
            continue
        if not (data := os.read(0, 1 << 16)):
            break
        *lines, pending = (pending + data).split(b"\n")
        for asked in map(json.loads, lines):
            if "module" in asked:
                importlib.import_module(asked["module"])
                continue
            if not (pid := os.fork()):
                _become(answers, **asked)
            children.add(pid)
            tell(pid=pid)
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _become(answers, verb, args, cwd, environment, names) -> None:
    """Of a child: is the verb from here to its end."""
    import runpy

    answers.close()
    for descriptor, name in enumerate(["/dev/null", *names]):
        opened = os.open(name, os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    code = 1
    try:
        sys.argv = [verb, *args]
        sys.modules.pop(f"capibara.{verb}", None)  # it becomes __main__
        if verb.endswith(".py"):
            runpy.run_path(verb, run_name="__main__")
        else:
            runpy.run_module(f"capibara.{verb}", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        _end(code)


def _end(code: int) -> None:
    """As an interpreter ends: what has registered itself for that is called."""
    import atexit

    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with contextlib.suppress(BaseException):
        threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _main() -> None:
    import fake_tpu_vm  # noqa: F401 - before JAX

    from capibara.evaluation import evaluate, subject  # noqa: F401
    from capibara.inference.server import server  # noqa: F401
    from capibara.interop import open_model  # noqa: F401
    from capibara.monitoring import defaults  # noqa: F401
    from capibara.multihost import joining  # noqa: F401
    from capibara.planner.search import automatic  # noqa: F401
    from capibara.training import emulation, loop, run_folder  # noqa: F401

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"a process of {threads} threads is not to be forked"
    _serve(answers)


if __name__ == "__main__":
    _main()
