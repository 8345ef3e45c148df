"""Runs the trials of a sweep as jobs of a back end, in the records of the manager of jobs."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Self

from capibara.core.types import TryAgain, UserError
from capibara.jobs import bundle, systems
from capibara.jobs.backends.backend import Backend
from capibara.jobs.bundle import Sources
from capibara.jobs.managing import spec_file
from capibara.jobs.managing.lifecycle import Rules
from capibara.jobs.managing.manager import Manager, Times
from capibara.jobs.managing.records import Record, Records, State
from capibara.jobs.spec import Attempt, JobSpec
from capibara.jobs.sweeps.launcher import Progress, Status
from capibara.jobs.sweeps.trial import Trial
from capibara.jobs.systems.system import System

_PROGRESS = {State.SUCCEEDED: Progress.SUCCEEDED, State.FAILED: Progress.FAILED, State.CANCELLED: Progress.FAILED}


class JobLauncher:
    """Launches each trial as a job, and manages the jobs in a thread while it is in a `with` block.

    A job is known by the trial's name and key: as the launch of the job, the key is in the records and in the labels of all
    that is made for it. The jobs still run after the block. Then `capibara launch manage` manages them, or the next
    launcher of the sweep.

    Args:
      records: of all jobs.
      backend: where they run.
      spec: of a job without a trial's values; its name and a number make the names of theirs.
      sources: its files, as they are when the block begins.
      times: how often the manager looks.
      rules: of the manager.
      connect: opens the back end's system.
      say: called with each line of the jobs' history.
    """

    def __init__(
        self,
        records: Records,
        backend: Backend,
        spec: JobSpec,
        sources: Sources,
        *,
        times: Times = Times(),  # noqa: B008
        rules: Rules = Rules(),  # noqa: B008
        connect: Callable[[Backend], System] = systems.connect,
        say: Callable[[str], None] = print,
    ):
        self._records, self._backend, self._spec, self._sources, self._times = records, backend, spec, sources, times
        # It waits in `_is_over`, not between two passes, so that it need not be waited for.
        self._names: set[str] = set()
        pauses = dataclasses.replace(times, poll_s=0.0)
        self._manager = Manager(records, self._names, rules=rules, times=pauses, connect=connect, say=say)
        self._wake, self._has_ended = threading.Event(), False
        self._thread = threading.Thread(target=self._manage, name="capibara-sweep", daemon=True)
        self._fault: BaseException | None = None

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="capibara-sweep-"))
            self._sources = _copied(self._sources, pathlib.Path(folder))
            self._copies = stack.pop_all()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended = True
        self._wake.set()
        self._thread.join()
        self._copies.close()

    def name_of(self, trial: Trial) -> str:
        """The name of a trial's job."""
        return f"{self._spec.name}-{trial.name}"

    def spec_of(self, trial: Trial) -> JobSpec:
        """A trial's job."""
        name = self.name_of(trial)
        spec = dataclasses.replace(
            self._spec,
            name=name,
            arguments=(*self._spec.arguments, *(f"--gin_bindings={statement}" for statement in trial.statements)),
            bundle=bundle.describe(self._sources, name, self._spec.folder.rpartition("/")[0]),
            labels={"sweep": self._spec.name, **self._spec.labels},
        )
        return spec_file.signed(self._backend, spec)

    def running(self) -> list[str]:
        """The names of the sweep's jobs that have not ended."""
        return sorted(item.name for item in self._records.all() if item.name in self._names and not item.state.is_final)

    def knows(self, trial: Trial) -> bool:
        return self._record(trial) is not None

    def start(self, trial: Trial) -> None:
        self._check()
        name = self.name_of(trial)
        if not self.knows(trial):
            other = self._records.find(name)
            if other is not None and not other.state.is_final:
                raise UserError(
                    f"job {name} is {other.state}, and is not of this sweep: choose another --name, or end it with capibara "
                    f"launch cancel {name}"
                )
            spec = self.spec_of(trial)
            _stage(self._backend, spec, self._sources)
            text = spec_file.text_of(self._backend, spec)
            self._records.add(Record(name=name, text=text, attempt=Attempt(launch=trial.key), launched_s=time.time()))
            self._records.note(name, f"launched as trial {trial.name} of sweep {self._spec.name}")
        self._names.add(name)
        self._wake.set()

    def state(self, trial: Trial) -> Status:
        self._check()
        record = self._record(trial)
        if record is None:
            return Status(Progress.FAILED, f"job {self.name_of(trial)} is not there any more")
        progress = _PROGRESS.get(record.state, Progress.RUNNING)
        return Status(progress, f"job {record.name}: {record.reason or record.state}")

    def stop(self, trial: Trial) -> None:
        if self.knows(trial):
            self._records.cancel(self.name_of(trial))
            self._wake.set()

    def _record(self, trial: Trial) -> Record | None:
        record = self._records.find(self.name_of(trial))
        return record if record is not None and record.attempt.launch == trial.key else None

    def _manage(self) -> None:
        try:
            with self._manager:
                self._manager.run(self._is_over)
        except BaseException as error:  # for the thread that runs the sweep
            self._fault = error

    def _is_over(self, _: Sequence[Record]) -> bool:
        """Waits until the next pass is due; returns whether there is none."""
        self._wake.wait(self._times.poll_s)
        self._wake.clear()
        return self._has_ended

    def _check(self) -> None:
        """Raises what has ended the manager, such as Denied."""
        if self._fault is not None:
            raise self._fault


def _copied(sources: Sources, folder: pathlib.Path) -> Sources:
    """The same files, elsewhere: the user may change theirs while the sweep runs."""
    paths = {}
    for path, file in sources.paths.items():
        paths[path] = folder / path
        paths[path].parent.mkdir(parents=True, exist_ok=True)
        paths[path].write_bytes(file.read_bytes())
    return dataclasses.replace(sources, paths=paths)


def _stage(backend: Backend, spec: JobSpec, sources: Sources) -> None:
    """Writes a job's files to its storage.

    Raises:
      UserError: the storage refuses that.
      TryAgain: the storage does not answer.
    """
    try:
        bundle.stage(spec.bundle, sources)
        spec_file.write(backend, spec)
    except UserError:
        raise
    except Exception as error:  # of any bucket library
        raise TryAgain(f"{spec.folder} cannot be written: {type(error).__name__}: {error}") from None
