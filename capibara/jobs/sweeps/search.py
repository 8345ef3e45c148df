"""Chooses the values of the next trial, and the trials that are stopped early.

What is chosen for a trial depends on the seed and the trial's number, and with `bayesian` on the trials that are on record:
a sweep that was killed goes the same way when it is resumed. Sources: random search, Bergstra and Bengio 2012; the
tree-structured Parzen estimator, Bergstra et al. 2011; the median rule, Golovin et al. 2017 (Vizier); asynchronous
successive halving, Li et al. 2020.
"""

from __future__ import annotations

import math
import random
import types
from collections.abc import Sequence
from typing import TYPE_CHECKING

from capibara.core import extras
from capibara.jobs.sweeps import space as spaces
from capibara.jobs.sweeps.metrics import Point
from capibara.jobs.sweeps.space import Kind, Parameter, Space
from capibara.jobs.sweeps.sweep import EarlyStop, Search, Sweep
from capibara.jobs.sweeps.trial import State, Trial

if TYPE_CHECKING:
    import optuna

_RANDOM_FIRST = 8  # trials before the model of `bayesian` chooses
_ATTEMPTS = 10  # at a combination that is not on record, where the space is finite
_MEDIAN_OF = 4  # finished trials, at least
_REDUCTION = 3  # of successive halving

Choice = dict[str, str]  # name -> value, as Gin text


def choose(sweep: Sweep, number: int, trials: Sequence[Trial]) -> Choice:
    """The values of a trial.

    Args:
      sweep: what varies, and how values are chosen.
      number: of the trial, from 0 and below `sweep.count`.
      trials: all others on record.
    """
    if sweep.search is Search.GRID:
        return _combination(sweep.space, number)
    if sweep.search is Search.RANDOM:
        return _random(sweep, number)
    return _bayesian(sweep, number, trials)


def _combination(space: Space, index: int) -> Choice:
    """A point of a finite space; the last parameter changes first."""
    result: Choice = {}
    for parameter in reversed(space):
        size = parameter.size
        assert size is not None
        index, digit = divmod(index, size)
        result[parameter.name] = parameter.value(digit)
    return {parameter.name: result[parameter.name] for parameter in space}


def _random(sweep: Sweep, number: int) -> Choice:
    # Python promises that `random()` of a seed stays what it is, and not more.
    if (size := spaces.size_of(sweep.space)) is not None:
        return _combination(sweep.space, _shuffled(size, sweep.seed, number))
    dice = random.Random(f"{sweep.seed}/{number}")
    return {parameter.name: parameter.sample(dice.random()) for parameter in sweep.space}


def _shuffled(size: int, seed: int, number: int) -> int:
    """The index at this place of a shuffle of so many, without the rest of it (Fisher and Yates)."""
    moved: dict[int, int] = {}
    result = 0
    for place in range(number + 1):
        other = min(place + int(random.Random(f"{seed}/{place}").random() * (size - place)), size - 1)
        result = moved.get(other, other)
        moved[other] = moved.get(place, place)
    return result


def _bayesian(sweep: Sweep, number: int, trials: Sequence[Trial]) -> Choice:
    taken = [dict(trial.bindings) for trial in trials]
    study, distributions = _study(sweep, trials), {item.name: _distribution(item) for item in sweep.space}
    for attempt in range(_ATTEMPTS):
        study.sampler = _optuna().samplers.TPESampler(
            n_startup_trials=_RANDOM_FIRST,
            multivariate=True,
            constant_liar=True,  # trials that run count as bad, so that those beside them are elsewhere
            seed=random.Random(f"{sweep.seed}/{number}/{attempt}").getrandbits(32),
        )
        result = study.ask(distributions).params
        choice = {item.name: _text(item, result[item.name]) for item in sweep.space}
        if choice not in taken:
            return choice
    # A range of floats does not come here; a finite space has a point that is left, since `count` is not above its size.
    others = (_random(sweep, place) for place in range(spaces.size_of(sweep.space) or 0))
    return next(choice for choice in others if choice not in taken)


def _study(sweep: Sweep, trials: Sequence[Trial]) -> optuna.Study:
    """Optuna's study of the trials on record."""
    library = _optuna()
    study = library.create_study(direction=str(sweep.goal))
    distributions = {item.name: _distribution(item) for item in sweep.space}
    states = library.trial.TrialState
    for trial in trials:
        is_done, is_stopped = trial.state is State.DONE, trial.state is State.STOPPED
        # One that failed counts as stopped before its first value, the worst there is: its like fails, too.
        state = states.COMPLETE if is_done else states.PRUNED if trial.state.has_ended else states.RUNNING
        study.add_trial(
            library.trial.create_trial(
                state=state,
                value=trial.value if is_done else None,
                params={item.name: _value(item, trial.bindings[item.name]) for item in sweep.space},
                distributions=distributions,
                intermediate_values=dict(trial.points) if is_stopped else {},
            )
        )
    return study


def _distribution(parameter: Parameter) -> optuna.distributions.BaseDistribution:
    library = _optuna().distributions
    if parameter.kind is Kind.VALUES:
        return library.CategoricalDistribution(parameter.values)
    if parameter.kind is Kind.INT:
        return library.IntDistribution(int(parameter.low), int(parameter.high))
    return library.FloatDistribution(parameter.low, parameter.high, log=parameter.kind is Kind.LOG)


def _value(parameter: Parameter, text: str) -> str | float:
    """A Gin text as optuna has it."""
    number = spaces.number_of(text)
    if parameter.kind is Kind.VALUES or number is None:
        return text
    return int(number) if parameter.kind is Kind.INT else number


def _text(parameter: Parameter, value: str | float) -> str:
    """What optuna has chosen as Gin text."""
    if isinstance(value, str):
        return value
    return repr(int(value)) if parameter.kind is Kind.INT else parameter.rounded(value)


def _optuna() -> types.ModuleType:
    library = extras.require("optuna", extra="launch", why="--search=bayesian and --early_stop")
    library.logging.set_verbosity(library.logging.WARNING)
    return library


class Stopper:
    """Says which trials are stopped early, by the sweep's rule or for a value that is not finite; it must see all values.

    Args:
      sweep: which rule it has.
    """

    def __init__(self, sweep: Sweep):
        library, self._stop_after = _optuna(), sweep.early_stop_after
        self._trials: dict[int, optuna.Trial] = {}
        self._steps: dict[int, int] = {}  # the last step that each has reported
        pruner: optuna.pruners.BasePruner = library.pruners.SuccessiveHalvingPruner(
            min_resource=max(1, sweep.early_stop_after), reduction_factor=_REDUCTION
        )
        if sweep.early_stop is EarlyStop.MEDIAN:
            pruner = library.pruners.MedianPruner(n_startup_trials=_MEDIAN_OF, n_warmup_steps=sweep.early_stop_after)
        self._study = library.create_study(direction=str(sweep.goal), pruner=pruner)

    def stops(self, trial: Trial) -> int | None:
        """The first new step of a trial at which it is to be stopped; None: it may continue."""
        if trial.number not in self._trials:
            self._trials[trial.number], self._steps[trial.number] = self._study.ask(), -1
        result: list[int] = []
        for step, value in self._new(trial):
            self._steps[trial.number] = step
            if math.isnan(value):
                result += [step] if step >= self._stop_after else []
                continue
            self._trials[trial.number].report(value, step)
            if self._trials[trial.number].should_prune():  # also after it was: the rules note how far it has come
                result.append(step)
        return result[0] if result else None

    def _new(self, trial: Trial) -> list[Point]:
        return [point for point in trial.points if point[0] > self._steps[trial.number]]

    def end(self, trial: Trial) -> None:
        """Takes the result of a trial."""
        self.stops(trial)
        states = _optuna().trial.TrialState
        if trial.state is State.DONE:
            self._study.tell(self._trials[trial.number], trial.value, state=states.COMPLETE)
        else:
            self._study.tell(self._trials[trial.number], state=states.FAIL)


def stopper_of(sweep: Sweep, trials: Sequence[Trial]) -> Stopper | None:
    """What says which trials are stopped early, with what is on record; None: none are."""
    if sweep.early_stop is EarlyStop.NONE:
        return None
    stopper = Stopper(sweep)
    for trial in trials:
        stopper.stops(trial)
        if trial.state.has_ended:
            stopper.end(trial)
    return stopper
