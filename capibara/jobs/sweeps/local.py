"""Runs the trials of a sweep on this machine, each in a process of its own."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Self

from capibara.jobs import guard, workers
from capibara.jobs.sweeps import folder as folders
from capibara.jobs.sweeps import logged
from capibara.jobs.sweeps.launcher import Progress, Status
from capibara.jobs.sweeps.trial import Trial
from capibara.jobs.workers import Worker
from capibara.storage import copies, stores

_SLACK_S = 10.0  # for `launch local` itself to end after its workers


class LocalLauncher:
    """Starts each trial by `python -m capibara.launch local -- train`, which restarts it after a crash.

    Within `with`: at its end, and at the end of this process, however it ends, the trials save a checkpoint and end, too.
    A trial that is started once more resumes from it. The output of each trial is in its log.

    Args:
      folder: of the sweep.
      arguments: of `train`, such as --gin_file=quickstart.gin and --emulate=8.
      flags: of `launch local`, such as --restarts=1.
      grace_s: seconds that trials have to save and end.
      check: called before each start; what it raises says why the trial must not start.
    """

    def __init__(
        self,
        folder: str,
        arguments: Sequence[str],
        *,
        flags: Sequence[str] = (),
        grace_s: float = 300.0,
        check: Callable[[], None] = lambda: None,
    ):
        self._arguments, self._flags, self._grace_s, self._check = tuple(arguments), tuple(flags), grace_s, check
        self._logs = pathlib.Path(logs_of(folder))
        self._guard = guard.Guard()
        self._running: dict[int, Worker] = {}
        self._codes: dict[int, int] = {}

    def __enter__(self) -> Self:
        self._guard.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        left = workers.end(
            list(self._running.values()), self._grace_s + _SLACK_S, self._grace_s + _SLACK_S, hurry=lambda: False
        )
        self._guard.watch(left, 0.0)
        self._guard.__exit__()

    def command(self, trial: Trial) -> list[str]:
        """The program that a trial runs, with its arguments."""
        bindings = [f"--gin_bindings={statement}" for statement in trial.statements]
        launch = [sys.executable, "-m", "capibara.launch", "local", f"--grace={self._grace_s:g}", *self._flags]
        return [*launch, "--", "train", *self._arguments, *bindings]

    def log(self, trial: Trial) -> pathlib.Path:
        """The file that has the output of a trial, of all its starts."""
        return self._logs / f"{trial.name}.log"

    def knows(self, trial: Trial) -> bool:
        return trial.number in self._running or trial.number in self._codes

    def start(self, trial: Trial) -> None:
        if self.knows(trial):
            return
        self._check()
        self._logs.mkdir(parents=True, exist_ok=True)
        # As a file, so that it starts at once and takes no module of the working directory for one of Python's.
        command = [sys.executable, "-I", "-S", os.path.abspath(logged.__file__), str(self.log(trial))]
        self._running[trial.number] = Worker(trial.number, [*command, *self.command(trial)], {})
        self._guard.watch([worker.pid for worker in self._running.values()], self._grace_s)

    def state(self, trial: Trial) -> Status:
        worker = self._running.get(trial.number)
        if worker is not None and (code := worker.code) is not None:
            self._codes[trial.number] = code
            worker.reap()
            del self._running[trial.number]
            self._guard.watch([item.pid for item in self._running.values()], self._grace_s)
        elif worker is not None:
            return Status(Progress.RUNNING)
        if trial.number not in self._codes:
            return Status(Progress.FAILED, "it is not there any more")
        code = self._codes[trial.number]
        if code == 0:
            return Status(Progress.SUCCEEDED)
        return Status(Progress.FAILED, f"{workers.meaning(code)}, {self._last_line(trial)}")

    def stop(self, trial: Trial) -> None:
        if trial.number in self._running:
            self._running[trial.number].send(signal.SIGTERM)

    def _last_line(self, trial: Trial) -> str:
        path = self.log(trial)
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
        errors = [line.strip() for line in lines if line.startswith("error: ")] or [line.strip() for line in lines]
        return f"see {path}: {errors[-1][:300]}" if errors else f"see {path}"


def logs_of(folder: str) -> str:
    """The local folder that has the logs of a sweep's trials."""
    if stores.of(folder).has_local_paths:
        return f"{folder}/trials"
    return copies.cache_folder(f"sweeps/{folders.name_of(folder)}")
