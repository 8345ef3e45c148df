"""The results of a sweep: a table as text, and the files results.txt, results.json, results.csv and results.png."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence

from capibara.jobs.sweeps import picture
from capibara.jobs.sweeps import space as spaces
from capibara.jobs.sweeps.folder import Folder
from capibara.jobs.sweeps.sweep import Goal, Sweep
from capibara.jobs.sweeps.trial import State, Trial

_ORDER = (State.DONE, State.STOPPED, State.RUNNING, State.PENDING, State.FAILED)


def ranked(sweep: Sweep, trials: Sequence[Trial]) -> list[Trial]:
    """The trials, best first: those that are done by their value, then those that were stopped, then all others."""
    sign = -1 if sweep.goal is Goal.MAXIMIZE else 1

    def rank(trial: Trial) -> tuple[int, bool, float, int]:
        value = 0.0 if trial.value is None else sign * trial.value
        return _ORDER.index(trial.state), trial.value is None, value, trial.number

    return sorted(trials, key=rank)


def best(sweep: Sweep, trials: Sequence[Trial]) -> Trial | None:
    """The best trial of those that are done; None: none is."""
    done = [trial for trial in ranked(sweep, trials) if trial.state is State.DONE]
    return done[0] if done else None


def table(sweep: Sweep, trials: Sequence[Trial]) -> str:
    """The trials as lines of text, best first, and below them why trials failed."""
    rows = [_header(sweep), *(_row(sweep, trial) for trial in ranked(sweep, trials))]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    failed = [f"trial {trial.name}: {trial.reason}" for trial in trials if trial.reason]
    return "".join(f"{line}\n" for line in (*lines, *failed))


def line(sweep: Sweep, trial: Trial) -> str:
    """A trial that has ended, in a line."""
    value = "" if trial.value is None else f", {sweep.metric} {trial.value:.6g} at step {trial.step}"
    reason = f" ({trial.reason})" if trial.reason else ""
    return f"trial {trial.name} {trial.state}{value}{reason}: {trial.shown}"


def write(folder: Folder, sweep: Sweep, trials: Sequence[Trial]) -> None:
    """Writes all files; the picture only if a trial has a value.

    Raises:
      UserError: they cannot be written.
    """
    write_texts(folder, sweep, trials)
    if (image := picture.draw(sweep, trials, best(sweep, trials))) is not None:
        folder.write("results.png", image)


def write_texts(folder: Folder, sweep: Sweep, trials: Sequence[Trial]) -> None:
    """Writes all files but the picture; raises as `write`."""
    rows = io.StringIO()
    csv.writer(rows, lineterminator="\n").writerows(
        [_header(sweep), *(_row(sweep, trial, digits=17) for trial in ranked(sweep, trials))]
    )
    folder.write("results.csv", rows.getvalue())
    folder.write("results.txt", table(sweep, trials))
    folder.write("results.json", json_of(sweep, trials))


def json_of(sweep: Sweep, trials: Sequence[Trial]) -> str:
    """The trials as JSON, best first."""
    first = best(sweep, trials)
    content = {
        "metric": sweep.metric,
        "goal": sweep.goal,
        "best": None if first is None else first.name,
        "trials": [
            {
                "trial": trial.name,
                "state": trial.state,
                "value": trial.value,
                "step": trial.step,
                "bindings": {name: spaces.plain(text) for name, text in trial.bindings.items()},
                "model_dir": trial.model_dir,
                "reason": trial.reason,
            }
            for trial in ranked(sweep, trials)
        ],
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _header(sweep: Sweep) -> list[str]:
    return ["trial", *(parameter.name for parameter in sweep.space), sweep.metric, "step", "state"]


def _row(sweep: Sweep, trial: Trial, digits: int = 6) -> list[str]:
    result = trial.points[-1][1] if trial.state is State.RUNNING and trial.points else trial.value
    value = "" if result is None else f"{result:.{digits}g}"
    step = "" if trial.step is None else str(trial.step)
    return [trial.name, *(trial.bindings[parameter.name] for parameter in sweep.space), value, step, str(trial.state)]
