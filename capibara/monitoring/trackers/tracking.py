"""Starts the process that feeds a run's trackers, and at the end of the run gives it a limited time."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.monitoring.trackers import feeds
from capibara.monitoring.trackers.feeds import EXIT_REFUSED
from capibara.monitoring.trackers.tracker import Tracker, addresses
from capibara.storage import stores
from capibara.training.base.callbacks import Callback, RunInfo

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
# At the end of the path: before it, what is beside an installed package would hide modules of Python's own.
_CODE = f"import sys; sys.path.append({_PACKAGE!r}); from capibara.monitoring import tracker_process as process; process.run()"
_STATUS_EVERY_S = 5.0
_LAST_WORDS_S = 2.0  # for lines that the process wrote before it ended
RESTART_S, _LONGEST_RESTART_S = 1.0, 300.0


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tracking:
    """How `Monitoring.trackers` are fed.

    Attributes:
      finish_s: seconds at the end of a run for what the trackers have not got yet.
    """

    finish_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.finish_s <= 86400:
            raise UserError(f"Tracking.finish_s is {self.finish_s}, must be from 0 to 86400 seconds: try 30")


class TrackingProcess(Callback):
    """Feeds trackers in a process of its own, which reads metrics.jsonl: training never waits for them.

    Args:
      trackers: as configured.
      gin: Gin statements that configure them, with the imports that they need.
      how: options.
      report: gets lines for the user, from any thread.
    """

    def __init__(self, trackers: Sequence[Tracker], gin: Sequence[str], how: Tracking, report: Callback):
        self._trackers, self._gin, self._how, self._say = trackers, gin, how, report.on_status
        self._request, self._model_dir = "", ""
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._supervise, name="trackers", daemon=True)
        self._lock = threading.Lock()
        self._ending = threading.Event()

    def on_train_begin(self, run: RunInfo) -> None:
        self._model_dir = stores.of(run.model_dir).absolute(run.model_dir)
        path = [os.path.abspath(folder) for folder in sys.path if folder]
        request = {"model_dir": self._model_dir, "gin": self._gin, "path": path, "finish_s": self._how.finish_s}
        self._request = json.dumps(request) + "\n"
        self._thread.start()

    def on_train_end(self, step: int, reason: str) -> None:
        self._ending.set()
        limit_s = time.monotonic() + self._how.finish_s
        with self._lock:
            process = self._process
        if process is not None and not self._ends(process, limit_s):  # killed: one more try
            self._end_again(limit_s)
        self._thread.join(_LAST_WORDS_S)
        self._report()

    def _end_again(self, limit_s: float) -> None:
        """Starts the process for what one that was killed has not sent, and waits for its end."""
        process = self._started()
        if process is None:
            return
        listening = threading.Thread(target=self._listen, args=[process], daemon=True)
        listening.start()
        self._ends(process, limit_s)
        listening.join(_LAST_WORDS_S)

    def close(self) -> None:
        """After an error: the process sends what is there, and ends by itself."""
        self._ending.set()
        with self._lock:
            if self._process is not None and self._process.stdin is not None:
                with contextlib.suppress(OSError):
                    self._process.stdin.close()

    def _supervise(self) -> None:
        """Starts the process, passes its lines on, and starts it again if it is killed."""
        wait_s, has_said = RESTART_S, False
        while not self._ending.is_set():
            begun_s = time.monotonic()
            process = self._started()
            if process is None:
                return
            self._listen(process)
            code = process.wait()
            if self._ending.is_set() or code == EXIT_REFUSED:
                return
            if not has_said:
                has_said = True
                self._say(f"the process of the trackers ended ({_how(code)}): it is started again")
            wait_s = RESTART_S if time.monotonic() - begun_s > _LONGEST_RESTART_S else wait_s
            self._ending.wait(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_RESTART_S)

    def _started(self) -> subprocess.Popen[str] | None:
        """Starts the process; None: it cannot be started, which is said."""
        try:
            with self._lock:
                process = self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _CODE],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    start_new_session=True,  # ctrl-C is for the run
                )
                _send(process, self._request)
        except OSError as error:
            self._say(f"trackers cannot be started: {error}")
            return None
        return process

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(ValueError, KeyError):
                self._say(json.loads(line)["say"])

    def _ends(self, process: subprocess.Popen[str], limit_s: float) -> bool:
        """Says that the run has ended, and waits; False: the process was killed, and not by us."""
        _send(process, "end\n")
        said_s = time.monotonic()
        while process.poll() is None and (left_s := limit_s - time.monotonic()) > 0:
            time.sleep(min(0.05, left_s))
            if time.monotonic() - said_s >= _STATUS_EVERY_S:
                said_s = time.monotonic()
                self._say(f"waiting for {_listed(self._unsent())}, at most {left_s:.0f} s more")
        was_there = process.poll() is None
        _kill(process)
        return was_there or process.returncode in (0, EXIT_REFUSED)

    def _report(self) -> None:
        """Says what the trackers have not got, and the command that sends it."""
        for label, count in self._unsent().items():
            tracker = dict(zip(feeds.labels(self._trackers), self._trackers))[label]
            self._say(
                f"{label} has not got the last {_lines(count)} of metrics.jsonl; this sends what is missing: "
                f"{command(self._model_dir, tracker)}"
            )

    def _unsent(self) -> Mapping[str, int]:
        result = {}
        for label in feeds.labels(self._trackers):
            with contextlib.suppress(OSError, UserError):
                if count := feeds.unsent(self._model_dir, label):
                    result[label] = count
        return result


def command(model_dir: str, tracker: Tracker) -> str:
    """The command line that sends a tracker what it has not got."""
    cls = type(tracker)
    is_own = cls.__module__.partition(".")[0] == "capibara"
    parts = ["capibara", "track", model_dir, f"--to={cls.__name__}", *([] if is_own else ["--trust_config"])]
    if is_own:
        parts += [f"--gin.{cls.__name__}.{name}={value}" for name, value in addresses(tracker).items()]
    return shlex.join(parts)


def _send(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError, ValueError):  # it may have ended
        process.stdin.write(text)
        process.stdin.flush()


def _kill(process: subprocess.Popen[str]) -> None:
    """Ends the process and those that clients have started; without effect if it has ended."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _listed(unsent: Mapping[str, int]) -> str:
    return ", ".join(f"{label} ({_lines(count)} left)" for label, count in unsent.items()) or "the trackers"


def _lines(count: int) -> str:
    return f"{count} line{'' if count == 1 else 's'}"
