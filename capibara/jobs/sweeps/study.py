"""A sweep that runs: chooses, starts, watches and stops its trials, and continues where it was killed.

A trial's file is written before its run is started, and again at each change; each time as a whole. So whatever the
process was doing when it was killed, the next one knows every trial that may have been started, with its values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from capibara.core.types import TryAgain, UserError
from capibara.jobs.sweeps import results, search
from capibara.jobs.sweeps.folder import Folder
from capibara.jobs.sweeps.launcher import Launcher, Progress, Status
from capibara.jobs.sweeps.metrics import Metric, Report
from capibara.jobs.sweeps.sweep import Sweep
from capibara.jobs.sweeps.trial import State, Trial


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Study:
    """A sweep with its folder and its trials; `open` and `load` make it.

    Attributes:
      sweep: what it is.
      folder: where it lies.
    """

    def __init__(self, folder: Folder, sweep: Sweep):
        self.folder, self.sweep = folder, sweep

    @classmethod
    def open(cls, url: str, sweep: Sweep) -> Study:
        """A new sweep in a folder, or the one that the folder has, which may get more trials.

        Raises:
          UserError: the folder has another sweep, or cannot be written.
        """
        folder = Folder(url)
        earlier = folder.sweep()
        if earlier is not None:
            sweep.check_resumes(earlier)
        if sweep != earlier:
            folder.write("sweep.json", sweep.text())
        return cls(folder, sweep)

    @classmethod
    def load(cls, url: str) -> Study:
        """The sweep that a folder has; raises UserError if it has none."""
        folder = Folder(url)
        sweep = folder.sweep()
        if sweep is None:
            raise UserError(f"{folder} has no sweep.json: name the --sweep_dir of a sweep")
        return cls(folder, sweep)

    @property
    def trials(self) -> list[Trial]:
        """The trials on record, by number."""
        return self.folder.trials()

    def first_trials(self, most: int) -> list[Trial]:
        """The trials with which the sweep begins; whether their statements can be parsed shows most mistakes."""
        result: list[Trial] = []
        for number in range(min(most, self.sweep.count)):
            result.append(_chosen(self.sweep, number, result, self.folder))
        return result

    def run(
        self,
        launcher: Launcher,
        *,
        parallel: int = 1,
        poll_s: float = 10.0,
        give_up_after: int | None = 3,
        retry_failed: bool = False,
        say: Callable[[str], None] = _print,
        watch: Callable[[Sequence[Trial]], None] = lambda trials: None,
        pause: Callable[[float], None] = time.sleep,
    ) -> list[Trial]:
        """Runs the trials that have not ended, and writes the results: after each trial, and however this ends.

        Args:
          launcher: starts and stops their runs.
          parallel: how many run at once.
          poll_s: seconds between two looks at them.
          give_up_after: the sweep ends when so many trials have failed and no other has a value; None: it does not.
          retry_failed: run trials that have failed again.
          say: called with each line of the log.
          watch: called with all trials after each look at them.
          pause: waits so many seconds; what it raises ends the sweep.

        Returns:
          All trials, by number.

        Raises:
          UserError: another process runs the sweep, the launcher refuses a trial, the runs do not report the metric, or
            the first trials have all failed.
        """
        for name, value in (
            ("--parallel", parallel),
            ("--give_up_after", 1 if give_up_after is None else give_up_after),
        ):
            if value < 1:
                raise UserError(f"{name}={value} must be at least 1")
        with self.folder.locked():
            for trial in self.trials if retry_failed else ():
                if trial.state is State.FAILED:
                    self.folder.save(_new(trial.number, trial.bindings, self.folder))
            running = _Running(self.sweep, self.folder, launcher, say)
            running.check_failed(give_up_after)
            with self._written(running):
                while running.fill(parallel):
                    ended = running.look()
                    watch(running.trials)
                    running.check_failed(give_up_after)
                    pause(0.0 if ended else poll_s)
            return running.trials

    @contextlib.contextmanager
    def _written(self, running: _Running) -> Iterator[None]:
        """Writes the results at the end of the block; after an exception, which says more, as far as they can be written."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(UserError):
                results.write(self.folder, self.sweep, running.trials)
            raise
        results.write(self.folder, self.sweep, running.trials)


def _chosen(sweep: Sweep, number: int, trials: list[Trial], folder: Folder) -> Trial:
    return _new(number, search.choose(sweep, number, trials), folder)


def _new(number: int, bindings: Mapping[str, str], folder: Folder) -> Trial:
    """A trial that was not started; if its run folder is there, its run resumes."""
    return Trial(number=number, key=secrets.token_hex(4), bindings=bindings, model_dir=folder.model_dir(number))


class _Running:
    """The trials of a sweep, of which some run.

    Args:
      sweep, folder: of the study.
      launcher: starts and stops runs.
      say: called with each line of the log.
    """

    def __init__(self, sweep: Sweep, folder: Folder, launcher: Launcher, say: Callable[[str], None]):
        self._sweep, self._folder, self._launcher, self._say = sweep, folder, launcher, say
        self._metric = Metric.parse(sweep.metric)
        self._trials = {trial.number: trial for trial in folder.trials()}
        self._active: set[int] = set()  # started by this process
        self._ending: set[int] = set()  # of those, the ones that the launcher was to stop
        self._faults: dict[str, str] = {}  # what does not answer, and why
        self._stopper = search.stopper_of(sweep, self.trials)

    @property
    def trials(self) -> list[Trial]:
        """All trials on record, by number."""
        return [self._trials[number] for number in sorted(self._trials)]

    def check_failed(self, most: int | None) -> None:
        """Raises UserError if so many trials have failed and no other has a value."""
        failed = [trial for trial in self.trials if trial.state is State.FAILED]
        if most is None or len(failed) < most or any(trial.points for trial in self.trials if trial not in failed):
            return
        raise UserError(
            f"the first {len(failed)} trials have failed; trial {failed[0].name}: {failed[0].reason}; mend that and add "
            "--retry_failed, or raise --give_up_after"
        )

    def fill(self, parallel: int) -> bool:
        """Starts trials until so many run or none is left; returns whether a trial has not ended."""
        while len(self._active) < parallel and (trial := self._next()) is not None:
            if not self._start(trial):
                return True
        return bool(self._active)

    def look(self) -> bool:
        """Looks at all that run; returns whether one has ended."""
        return any([self._look(self._trials[number]) for number in sorted(self._active)])

    def _next(self) -> Trial | None:
        """The first trial that has neither ended nor been started by this process; None: there is none."""
        waiting = [trial for trial in self.trials if not trial.state.has_ended and trial.number not in self._active]
        if waiting:
            return waiting[0]
        left = (number for number in range(self._sweep.count) if number not in self._trials)
        number = next(left, None)
        if number is None:
            return None
        trial = _chosen(self._sweep, number, self.trials, self._folder)
        self._save(trial)
        return trial

    def _start(self, trial: Trial) -> bool:
        """Starts a trial, unless an earlier process has and it has ended; returns False if the launcher does not answer."""
        try:
            report = self._metric.read(trial.model_dir)
            is_known = self._launcher.knows(trial)
            if report.reason is not None and not is_known:
                self._end(self._seen(trial, report), Status(Progress.SUCCEEDED), report)
                return True
            if trial.stop_step is None or is_known:
                self._launcher.start(trial)
                event = "was started before" if is_known else "is started"
                again = " again" if trial.state is State.RUNNING and not is_known else ""
                self._say(f"trial {trial.name} {event}{again}: {trial.shown}")
        except TryAgain as error:
            self._fault(f"trial {trial.name} cannot be started", error)
            return False
        self._active.add(trial.number)
        self._save(dataclasses.replace(trial, state=State.RUNNING))
        return True

    def _look(self, trial: Trial) -> bool:
        """Takes what a run has reported, stops or ends it; returns whether it has ended."""
        event = f"trial {trial.name} cannot be seen"
        try:
            status = self._launcher.state(trial)
            report = self._metric.read(trial.model_dir)  # after its state, so that of one that has ended it is all
            trial = self._seen(trial, report)
            if status.progress is not Progress.RUNNING:
                self._end(trial, status, report)
                return True
            if trial.stop_step is not None and trial.number not in self._ending:
                self._launcher.stop(trial)
                self._ending.add(trial.number)
        except TryAgain as error:
            self._fault(event, error)
            return False
        self._faults.pop(event, None)
        return False

    def _seen(self, trial: Trial, report: Report) -> Trial:
        """Takes a run's new values, and whether it is to be stopped for them; raises UserError if it lacks the metric."""
        if self._metric.is_absent(report):
            raise UserError(
                f"trial {trial.name}: {self._metric.missing(report)} (set --metric, and with it another --sweep_dir)"
            )
        if not report.points or repr(report.points) == repr(trial.points):  # NaN is not equal to itself
            return trial
        trial = dataclasses.replace(trial, points=report.points)
        if self._stopper is not None and (step := self._stopper.stops(trial)) is not None and trial.stop_step is None:
            trial = dataclasses.replace(trial, stop_step=step)
        self._save(trial)
        return trial

    def _end(self, trial: Trial, status: Status, report: Report) -> None:
        """Takes the result of a trial."""
        value = trial.points[-1][1] if trial.points and math.isfinite(trial.points[-1][1]) else None
        state, reason = State.FAILED, status.reason
        if status.progress is Progress.SUCCEEDED:
            state, reason = (State.DONE, "") if value is not None else (State.FAILED, self._metric.missing(report))
        elif trial.stop_step is not None:
            state, reason = State.STOPPED, ""
        value = None if state is State.FAILED else value
        trial = dataclasses.replace(trial, state=state, value=value, reason=" ".join(reason.split()))
        self._save(trial)
        self._active.discard(trial.number)
        if self._stopper is not None:
            self._stopper.end(trial)
        results.write_texts(self._folder, self._sweep, self.trials)
        self._say(results.line(self._sweep, trial))

    def _save(self, trial: Trial) -> None:
        self._folder.save(trial)
        self._trials[trial.number] = trial

    def _fault(self, event: str, error: TryAgain) -> None:
        """Says once that something does not answer."""
        if self._faults.get(event) != str(error):
            self._faults[event] = str(error)
            self._say(f"{event}: {error}; it is tried again")
