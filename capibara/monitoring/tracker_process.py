"""The process that feeds a run's trackers; `tracking.TrackingProcess` starts it.

It reads a request from standard input, one line of JSON, and answers with lines of JSON: {"say": text}. The line "end", or
the end of the input, says that the run has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import IO

_LOOK_S = 0.2
_NICE = 10
# Clients wait for minutes, and try again themselves; here a failed call is tried again anyhow.
_PATIENCE = {
    "JAX_PLATFORMS": "cpu",  # if a tracker imports JAX: the devices are the run's
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MPLBACKEND": "agg",
}


def main() -> int:
    """Feeds the trackers until the run ends; returns the exit code."""
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the run, which then ends this process
        signal.signal(number, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    for descriptor in (1, 2):  # clients print
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    os.environ.update({name: os.environ.get(name, value) for name, value in _PATIENCE.items()})
    os.environ["JAX_PLATFORMS"] = "cpu"
    request = json.loads(sys.stdin.readline())
    sys.path += [folder for folder in request["path"] if folder not in sys.path]
    return _feed(request["model_dir"], request["gin"], request["finish_s"], answers)


def _feed(model_dir: str, bindings: Sequence[str], finish_s: float, answers: IO[str]) -> int:
    from capibara.config import written
    from capibara.core.types import UserError
    from capibara.monitoring.defaults import Monitoring
    from capibara.monitoring.trackers import state
    from capibara.monitoring.trackers.feeds import EXIT_REFUSED, Feeds

    lock = threading.Lock()

    def say(line: str) -> None:
        with lock, contextlib.suppress(OSError, ValueError):  # the run may be gone
            answers.write(json.dumps({"say": line}) + "\n")
            answers.flush()

    try:
        trackers = written.read(Monitoring, bindings).trackers
    except UserError as error:
        say(f"trackers cannot be started: {error}")
        return EXIT_REFUSED
    try:
        with state.locked(model_dir, finish_s + 10.0):  # the process of a crashed start may still be at work
            feeds = Feeds(trackers, model_dir, say)
            feeds.start()
            run, orphaned = os.getppid(), _listen(feeds.end)
            while not feeds.wait(_LOOK_S):
                if orphaned.is_set() or os.getppid() != run:
                    feeds.end()
                    feeds.wait(finish_s)
                    break
    except UserError as error:
        say(str(error))
        return EXIT_REFUSED
    return 0


def _listen(end: Callable[[], None]) -> threading.Event:
    """Waits in a thread for the end of the run, and calls `end`; the event is set when the run's process is gone."""
    closed = threading.Event()

    def listen() -> None:
        if sys.stdin.readline():
            end()
            sys.stdin.readline()
        closed.set()

    threading.Thread(target=listen, daemon=True).start()
    return closed


def run() -> None:
    """Runs `main` and ends the process: threads of clients that wait for their servers must not keep it alive."""
    code = 1
    try:
        code = main()
    finally:
        os._exit(code)
