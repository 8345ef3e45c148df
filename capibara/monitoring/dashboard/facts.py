"""What other rooms know of a run folder (checkpoints, lineage, plan, group), found out in processes of their own.

The dashboard's process stays small: a question may import JAX, or take long, and its process ends with it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection

from capibara.core import limits
from capibara.monitoring.dashboard.views.names import Json, clean
from capibara.monitoring.reading.run import Run

Question = Callable[[str], dict[str, Json]]  # a function of a module, with the run folder; raises UserError

_TIMEOUT_S = 90.0
_AT_ONCE = 2
_KEPT_S = {"checkpoints": 10.0, "lineage": 60.0, "plan": 3600.0, "group": 5.0}
_MOST_KEPT = 256
_WAIT_S = 20.0  # for other questions to end
_NICER = 5


class Facts:
    """Answers questions about run folders, and remembers the answers for a while.

    Args:
      questions: "checkpoints", "lineage", "plan" and "group"; those that are missing are unavailable.
    """

    def __init__(self, questions: Mapping[str, Question]):
        self._questions = dict(questions)
        self._cached: dict[tuple[str, str], tuple[float, dict[str, Json]]] = {}
        self._lock, self._room = threading.Lock(), threading.Semaphore(_AT_ONCE)
        self._asked: dict[tuple[str, str], threading.Lock] = {}

    def ask(self, name: str, run: Run) -> dict[str, Json]:
        """The answer, or {"unavailable": why}. Takes seconds the first time."""
        question = self._questions.get(name)
        if question is None:
            return {"unavailable": "this server does not look for it"}
        key = (name, run.folder)
        with self._lock:
            lock = self._asked.setdefault(key, threading.Lock())
        with lock:  # viewers who ask the same share one answer
            retained = self._cached.get(key)
            if retained is not None and time.monotonic() - retained[0] < _KEPT_S.get(name, 60.0):
                return retained[1]
            if not self._room.acquire(timeout=_WAIT_S):
                return {"unavailable": "too much is being looked for: try again"}
            try:
                answer = _answer(question, run.folder)
            finally:
                self._room.release()
            with self._lock:
                self._cached[key] = time.monotonic(), answer
                while len(self._cached) > _MOST_KEPT:
                    oldest = min(self._cached, key=lambda item: self._cached[item][0])
                    del self._cached[oldest]
                    self._asked.pop(oldest, None)
            return answer


def _answer(question: Question, folder: str) -> dict[str, Json]:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, question, folder), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(_TIMEOUT_S):
            return {"unavailable": f"it took more than {_TIMEOUT_S:.0f} s"}
        answer = ours.recv()
        return answer if isinstance(answer, dict) else {"unavailable": "no answer"}
    except (EOFError, OSError):
        return {"unavailable": "the process that looked for it ended"}
    finally:
        ours.close()
        if process.is_alive():
            process.join(0.5)
            process.kill()
        process.join(5.0)
        process.close()


def _work(line: Connection, question: Question, folder: str) -> None:
    """Runs in a process of its own, which must say nothing on the run's terminal."""
    with open(os.devnull, "wb") as nowhere:
        for descriptor in (1, 2):
            os.dup2(nowhere.fileno(), descriptor)
    with contextlib.suppress(OSError):
        os.nice(_NICER)
    try:
        answer = {name: clean(value, 12) for name, value in question(folder).items()}
    except Exception as error:  # whatever an untrusted folder leads to
        answer = {"unavailable": limits.cause(error, 300)}
    with contextlib.suppress(OSError):
        line.send(answer)
    line.close()
