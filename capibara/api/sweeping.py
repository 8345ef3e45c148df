"""Many runs of one configuration with different values: `capibara.sweep`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from capibara.api.results import TrainingResult
from capibara.cli.launching import trial_runs
from capibara.config import written
from capibara.core import devices, extras
from capibara.core.types import Dataclass, TryAgain, UserError
from capibara.jobs.sweeps import results
from capibara.jobs.sweeps import space as spaces
from capibara.jobs.sweeps.folder import Folder
from capibara.jobs.sweeps.local import LocalLauncher
from capibara.jobs.sweeps.study import Study
from capibara.jobs.sweeps.sweep import Search, Sweep
from capibara.jobs.sweeps.trial import Trial
from capibara.training.trainer import Trainer

if TYPE_CHECKING:
    import pandas

_RUN = "run.gin"  # in the folder of a sweep
_POLL_S = 1.0


@dataclasses.dataclass(frozen=True)
class SweepResult:
    """The trials of a sweep, as its folder has them.

    Attributes:
      folder: of the sweep.
    """

    folder: str

    @property
    def trials(self) -> list[Trial]:
        """The trials, best first: those that are done by their value, then those that were stopped, then all others."""
        study = Study.load(self.folder)
        return results.ranked(study.sweep, study.trials)

    @property
    def best(self) -> Trial | None:
        """The best trial of those that are done; None: none is."""
        study = Study.load(self.folder)
        return results.best(study.sweep, study.trials)

    @property
    def best_run(self) -> TrainingResult:
        """The run of the best trial, with its history and its model.

        Raises:
          UserError: no trial is done.
        """
        best = self.best
        if best is None:
            raise UserError(f"no trial of {self.folder} has ended well: print(sweep) shows why")
        return TrainingResult(best.model_dir, best.step or 0, "finished")

    def frame(self) -> pandas.DataFrame:
        """A row for each trial, best first: its values, its metric, step and state."""
        frames = extras.require("pandas", why="SweepResult.frame")
        metric = Study.load(self.folder).sweep.metric
        rows: list[dict[str, Any]] = []
        for trial in self.trials:
            values = {name: spaces.plain(text) for name, text in trial.bindings.items()}
            rows.append(
                {"trial": trial.name, **values, metric: trial.value, "step": trial.step, "state": str(trial.state)}
            )
        return frames.DataFrame(rows)

    def __str__(self) -> str:
        study = Study.load(self.folder)
        return results.table(study.sweep, study.trials)


def sweep(
    trainer: Trainer,
    vary: Mapping[str, str | Sequence[object]],
    out: str | os.PathLike[str],
    *,
    others: Sequence[Dataclass] = (),
    parallel: int = 1,
    emulate: int | None = None,
    retry_failed: bool = False,
    **options: Any,
) -> SweepResult:
    """Trains a run many times with different values, as `capibara launch sweep local`; called again, it resumes.

    Each trial is a process of its own, which reads the run from OUT/run.gin. Ctrl-C lets the trials save, and returns.

    Args:
      trainer: the run; its `model_dir` does not count, since each trial has a folder in `out`.
      vary: what varies: "Class.field" -> a list of values, or "log(low, high)", "uniform(low, high)", "int(low, high)".
      out: the sweep's folder.
      others: as for `train`.
      parallel: trials at once.
      emulate: number of emulated CPU devices of each trial; None: the devices of this machine.
      retry_failed: run trials that have failed again.
      options: of `Sweep`: search, trials, metric, goal, seed, early_stop, early_stop_after. Lists alone without `trials` are
        searched whole.

    Raises:
      UserError: the first trials cannot be trained as described, or have all failed; the folder has another sweep.
    """
    if type(trainer) is not Trainer:
        raise UserError(
            f"cb.sweep is given a {type(trainer).__name__}, must be given a cb.Trainer: cb.sweep(cb.Trainer(...), ...)"
        )
    _check_start(out, parallel, emulate)
    if names := written.unnamed(trainer, *others):
        raise UserError(
            f"{names[0]} is of this script, and the processes of the trials cannot import it: define it in a module"
        )
    text = written.text_of(trainer, *others)
    path = os.fspath(out)
    folder = Folder(os.path.abspath(os.path.expanduser(path)) if "://" not in path else path)
    study = Study(folder, _described(vary, options))
    modules = trial_runs.check_trials(study, (), text.split("\n"), ())
    files = trial_runs.digest(modules, text)
    run = ("python", *(() if emulate is None else (f"--emulate={emulate}",)))
    study = Study.open(str(folder), dataclasses.replace(study.sweep, run=run, files=files))
    folder.write(_RUN, text)

    def check() -> None:
        if trial_runs.digest(modules, text) != files:
            raise TryAgain("its modules have changed since the sweep began: restore them")

    launcher = LocalLauncher(str(folder), [f"--gin_file={folder}/{_RUN}", *run[1:]], check=check)
    with launcher, contextlib.suppress(KeyboardInterrupt):
        study.run(launcher, parallel=parallel, poll_s=_POLL_S, retry_failed=retry_failed)
    return SweepResult(str(folder))


def _check_start(out: object, parallel: object, emulate: object) -> None:
    """Raises UserError for arguments of `sweep` with which no trial could be started."""
    if not isinstance(out, str | os.PathLike) or not os.fspath(out):
        raise UserError(f"out is {out!r}, must be the path of a folder: try 'sweeps/mine'")
    if type(parallel) is not int or parallel < 1:
        raise UserError(f"parallel is {parallel!r}, must be a number of trials, at least 1")
    if emulate is not None and (type(emulate) is not int or not 1 <= emulate <= devices.MOST_EMULATED):
        raise UserError(
            f"emulate is {emulate!r}, must be a number of devices from 1 to {devices.MOST_EMULATED}, or None"
        )


def _described(vary: Mapping[str, str | Sequence[object]], options: Mapping[str, Any]) -> Sweep:
    """The sweep of the arguments of `sweep`."""
    fields = [field.name for field in dataclasses.fields(Sweep) if field.name not in ("vary", "run", "files")]
    if unknown := [name for name in options if name not in fields]:
        raise UserError(f"sweep has no option {unknown[0]!r}: must be one of {', '.join(fields)}")
    if not isinstance(vary, Mapping) or not vary:
        raise UserError(f"vary is {vary!r}, must say what varies: try {{'Schedule.learning_rate': [1e-4, 3e-4]}}")
    texts = tuple(f"{name} = {_text(name, values)}" for name, values in vary.items())
    options = dict(options)
    if "trials" not in options and all(item.size is not None for item in spaces.parse_all(texts)):
        options.setdefault("search", Search.GRID)
    return Sweep(vary=texts, **options)


def _text(name: str, values: str | Sequence[object]) -> str:
    """Values as `Sweep.vary` has them."""
    if "." not in str(name):
        raise UserError(f"vary has {name!r}, must name a field of a class of the run, such as 'Schedule.learning_rate'")
    if not isinstance(values, (str, list, tuple)):
        raise UserError(
            f"vary[{name!r}] is {values!r}, must be a list of values, or 'log(low, high)', 'uniform(...)' or 'int(...)'"
        )
    return values if isinstance(values, str) else repr(list(values))
