"""What a sweep is: a class that Gin can bind, and the file sweep.json in its folder."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
from collections.abc import Mapping, Sequence

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.jobs.sweeps import space as spaces
from capibara.jobs.sweeps.metrics import Metric
from capibara.jobs.sweeps.space import Space

_VERSION = 1  # of the file
_MOST = 10_000  # trials
_MAY_CHANGE = ("trials",)


class Search(enum.StrEnum):
    """How the values of a trial are chosen.

    Attributes:
      GRID: all combinations, the last parameter's values first.
      RANDOM: independently at random; where the space is finite, no combination twice.
      BAYESIAN: by a model of the results so far (tree-structured Parzen estimator, of optuna).
    """

    GRID = "grid"
    RANDOM = "random"
    BAYESIAN = "bayesian"


class Goal(enum.StrEnum):
    """Which end of the metric is best."""

    MINIMIZE = "minimize"
    MAXIMIZE = "maximize"


class EarlyStop(enum.StrEnum):
    """Which trials are stopped early.

    Attributes:
      NONE: none.
      MEDIAN: whose best value is worse than the median of the finished trials at the same step.
      HALVING: which are not in the best third of those that have come as far, at `early_stop_after` steps, 3 times as
        many, 9 times, ... (asynchronous successive halving).
    """

    NONE = "none"
    MEDIAN = "median"
    HALVING = "halving"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """Many runs of one configuration with different bindings.

    Attributes:
      vary: what varies: "LEARNING_RATE = log(1e-4, 1e-2)", also "NAME = [value, ...]", uniform(low, high) and int(low, high).
      search: how values are chosen.
      metric: by which trials are compared, at their last step: eval/NAME or train/NAME, of metrics.jsonl.
      goal: which end of it is best.
      trials: how many; None: all of a grid.
      seed: of random choices.
      early_stop: which trials are stopped early.
      early_stop_after: no trial is stopped at an earlier step.
      run: what every trial runs, such as the Gin files and bindings of the command line: a sweep does not resume with
        another run.
      files: the hash of the user's Gin files and modules, for the same reason; empty: unknown.
    """

    vary: tuple[str, ...] = ()
    search: Search = Search.RANDOM
    metric: str = "eval/loss"
    goal: Goal = Goal.MINIMIZE
    trials: int | None = None
    seed: int = 0
    early_stop: EarlyStop = EarlyStop.NONE
    early_stop_after: int = 0
    run: tuple[str, ...] = ()
    files: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "vary", tuple(parameter.text for parameter in self.space))
        Metric.parse(self.metric)
        size = spaces.size_of(self.space)
        if self.search is Search.GRID:
            self._check_grid()
        elif self.trials is None:
            raise UserError(f"--trials is not set, and --search is {self.search}: say how many, e.g. --trials=20")
        if self.trials is not None and not 1 <= self.trials <= _MOST:
            raise UserError(f"--trials={self.trials} must be from 1 to {_MOST}")
        if size is not None and (self.trials or 0) > size:
            raise UserError(f"--trials={self.trials} must be at most {size}: --vary has no more combinations")
        if self.early_stop_after < 0:
            raise UserError(f"--early_stop_after={self.early_stop_after} must be a step, at least 0")
        if self.early_stop is EarlyStop.HALVING and not self.early_stop_after:
            raise UserError("--early_stop=halving needs the step of its first decision: add --early_stop_after=STEP")
        if self.early_stop_after and self.early_stop is EarlyStop.NONE:
            raise UserError(
                f"--early_stop_after={self.early_stop_after} has no effect without --early_stop=median or halving"
            )

    def _check_grid(self) -> None:
        for parameter in self.space:
            if parameter.size is None:
                raise UserError(
                    f"--search=grid needs a list of values, and {parameter.text} is a range: write {parameter.name} = "
                    "[value, ...], or choose --search=random"
                )
        if self.count > _MOST:
            raise UserError(
                f"the grid has {self.count:,} trials, must have at most {_MOST:,}: add --trials, or vary less"
            )

    @functools.cached_property
    def space(self) -> Space:
        """The parameters that `vary` describes."""
        return spaces.parse_all(self.vary)

    @property
    def count(self) -> int:
        """How many trials it has."""
        return self.trials or spaces.size_of(self.space) or 0

    def text(self) -> str:
        """The content of its file."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return json.dumps({"version": _VERSION, **fields}, indent=1, ensure_ascii=False) + "\n"

    def check_resumes(self, earlier: Sweep) -> None:
        """Raises UserError if it differs from the sweep that its folder has by more than the number of trials."""
        for field in dataclasses.fields(self):
            old, new = getattr(earlier, field.name), getattr(self, field.name)
            if old == new or field.name in _MAY_CHANGE:
                continue
            if field.name == "files":
                raise UserError(
                    "the Gin files or modules have changed since this sweep began: restore them, or name another --sweep_dir"
                )
            if isinstance(old, tuple):
                old, new = _difference(old, new), _difference(new, old)
            raise UserError(
                f"the sweep in this folder has {field.name} {old}, not {new}: repeat its command, or name another --sweep_dir"
            )


def _difference(these: Sequence[str], others: Sequence[str]) -> str:
    """What only these have, in a line."""
    return "; ".join(item for item in these if item not in others) or "less"


def read_text(text: str) -> Sweep:
    """The sweep of a file's content; raises UserError for other content."""
    try:
        known = json.loads(text)
        if not isinstance(known, Mapping) or known["version"] != _VERSION:
            raise UserError("it is of another version of capibara")
        return Sweep(**{name: value for name, value in known.items() if name != "version"})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"no file of a sweep: {type(error).__name__}: {error}") from None
