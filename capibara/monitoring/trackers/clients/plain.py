"""Trackers without a service: a file of JSON lines, and lines in the output of the run."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping

from capibara.config import configurable
from capibara.core.fields import FilePath
from capibara.core.types import UserError
from capibara.monitoring.trackers.tracker import ADDRESS, Moment, TrackedRun, Tracker


@configurable
@dataclasses.dataclass(kw_only=True)
class JsonlTracker(Tracker):
    """Appends to a local file outside of the run folder, which several runs may share: one JSON object a line.

    Each has `run` (its name), `uid`, `step`, `time` and `line`, and one of `metrics` (by name: "train/loss"), `facts`,
    `text` (with its `name`), `picture` (a path), `rolled_back` (true: later steps are void) or `finished` (the reason).

    Attributes:
      path: the file.
    """

    path: FilePath = dataclasses.field(metadata=ADDRESS)

    def __post_init__(self) -> None:
        if not self.path.strip() or "://" in self.path:
            raise UserError(f"JsonlTracker.path is {self.path!r}, must be a local file: name one, e.g. all_runs.jsonl")
        self._run: TrackedRun  # set by start
        self._moment = Moment(0, 0.0, 0)
        self._lines: list[str] = []

    def start(self, run: TrackedRun) -> str | None:
        self._run, self._lines = run, []
        os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
        return run.uid

    def log(self, moment: Moment, metrics: Mapping[str, float]) -> None:
        self._add(moment, metrics=dict(metrics))

    def text(self, moment: Moment, name: str, text: str) -> None:
        self._add(moment, name=name, text=text)

    def facts(self, moment: Moment, facts: Mapping[str, object]) -> None:
        self._add(moment, facts=dict(facts))

    def picture(self, moment: Moment, name: str, path: str) -> None:
        self._add(moment, name=name, picture=path)

    def roll_back(self, moment: Moment) -> None:
        self._add(moment, rolled_back=True)

    def flush(self) -> bool:
        if self._lines:
            with open(self.path, "a", encoding="utf-8", errors="backslashreplace") as file:
                file.write("".join(self._lines))
            self._lines = []
        return True

    def finish(self, reason: str) -> None:
        self._add(self._moment, finished=reason)
        self.flush()

    def _add(self, moment: Moment, **fields: object) -> None:
        self._moment = moment
        about = {"run": self._run.name, "uid": self._run.uid, "step": moment.step, "time": moment.time_s}
        self._lines.append(json.dumps(about | {"line": moment.line} | fields, ensure_ascii=False) + "\n")


@configurable
@dataclasses.dataclass(kw_only=True)
class PrintTracker(Tracker):
    """Prints metrics as plain lines in the output of the run: `step 10 train/loss=2.5 train/grad_norm=0.7`.

    Attributes:
      metrics: names, or beginnings of names, of what is printed.
      every: only steps that this number divides.
    """

    metrics: tuple[str, ...] = ("train/", "eval/")
    every: int = 1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise UserError(f"PrintTracker.every is {self.every}, must be at least 1: try 10")
        self._run: TrackedRun  # set by start

    def start(self, run: TrackedRun) -> str | None:
        self._run = run
        return None

    def log(self, moment: Moment, metrics: Mapping[str, float]) -> None:
        shown = [f"{name}={value:.6g}" for name, value in metrics.items() if name.startswith(self.metrics)]
        if shown and moment.step % self.every == 0:
            self._run.say(f"step {moment.step} {' '.join(shown)}")
