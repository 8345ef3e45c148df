"""Which values a sweep tries, and which trials it stops."""

import math
import statistics

import pytest

from capibara.core.types import UserError
from capibara.jobs.sweeps import search, sweep
from capibara.jobs.sweeps.sweep import Sweep
from capibara.jobs.sweeps.trial import State, Trial

PLANE = ["LEARNING_RATE = log(1e-5, 1e-1)", "x = uniform(0, 1)"]


def sweep_of(*texts, **fields):
    return Sweep(vary=texts, **{"trials": 20, **fields})


def done(number, bindings, value):
    return Trial(number=number, bindings=bindings, model_dir="", state=State.DONE, points=((1, value),), value=value)


def searched(found, objective):
    trials = []
    for number in range(found.count):
        bindings = search.choose(found, number, trials)
        trials.append(done(number, bindings, objective(bindings)))
    return trials


def quadratic(bindings):
    return (math.log10(float(bindings["LEARNING_RATE"])) + 3) ** 2 + (4 * (float(bindings["x"]) - 0.3)) ** 2


def test_a_grid_has_all_combinations_the_last_parameter_first():
    grid = sweep_of("A = [2, 1]", "B = int(0, 2)", "C = ['x', 'y']", search="grid", trials=None)
    assert grid.count == 12
    found = [tuple(search.choose(grid, number, []).values()) for number in range(12)]
    assert found == [(a, b, c) for a in ("2", "1") for b in ("0", "1", "2") for c in ("'x'", "'y'")]
    assert sweep_of("A = [3, 2, 1]", search="grid", trials=2).count == 2


def test_random_is_the_same_for_a_seed_and_a_number_whatever_came_before():
    first, other = sweep_of(*PLANE, seed=1), sweep_of(*PLANE, seed=2)
    found = [search.choose(first, number, []) for number in range(20)]
    assert [search.choose(first, number, []) for number in reversed(range(20))] == found[::-1]
    assert not [one for one in found if one in [search.choose(other, number, []) for number in range(20)]]
    assert found[0] == {"LEARNING_RATE": "0.042256", "x": "0.38128"}  # on any machine
    rates = sorted(float(one["LEARNING_RATE"]) for one in found)
    assert rates[0] >= 1e-5 and rates[-1] <= 1e-1 and 1e-4 < rates[10] < 1e-2


def test_random_takes_no_combination_of_a_finite_space_twice():
    found = sweep_of("A = [1, 2, 3]", "B = int(1, 4)", trials=12)
    points = [tuple(search.choose(found, number, []).values()) for number in range(12)]
    assert len({*points}) == 12 and points != sorted(points)
    huge = sweep_of("A = int(0, 9007199254740991)", "B = int(0, 9007199254740991)", trials=5)
    assert len({search.choose(huge, number, [])["A"] for number in range(5)}) == 5


def test_bayesian_beats_random_on_a_quadratic():
    best = {
        search: [
            min(trial.value for trial in searched(sweep_of(*PLANE, search=search, seed=seed, trials=25), quadratic))
            for seed in range(8)
        ]
        for search in ("bayesian", "random")
    }
    assert statistics.median(best["bayesian"]) < 0.3 * statistics.median(best["random"])
    assert sum(one < other for one, other in zip(best["bayesian"], best["random"])) >= 6


def test_bayesian_maximizes():
    found = searched(sweep_of(*PLANE, search="bayesian", goal="maximize", trials=25), lambda one: -quadratic(one))
    assert max(trial.value for trial in found) > -0.2


def test_bayesian_depends_on_what_is_on_record_only():
    found = sweep_of(*PLANE, "K = ['a', 'b']", "L = int(1, 4)", search="bayesian", seed=3, trials=12)
    trials = searched(found, quadratic)
    assert [dict(trial.bindings) for trial in searched(found, quadratic)] == [dict(trial.bindings) for trial in trials]
    assert search.choose(found, 11, trials[:11]) == trials[11].bindings
    # Beside trials that run or have failed it goes elsewhere.
    others = [
        Trial(number=0, bindings=trials[0].bindings, model_dir="", state=State.RUNNING, points=((1, math.nan),)),
        Trial(number=1, bindings=trials[1].bindings, model_dir="", state=State.FAILED),
        Trial(
            number=2, bindings=trials[2].bindings, model_dir="", state=State.STOPPED, points=((1, 2.0), (2, math.nan))
        ),
        *trials[3:11],
    ]
    assert search.choose(found, 11, others) not in [dict(trial.bindings) for trial in others]


def test_bayesian_takes_all_combinations_of_a_small_space():
    found = searched(
        sweep_of("A = [1, 2, 3]", "B = int(1, 4)", search="bayesian", trials=12), lambda one: float(one["A"])
    )
    assert len({tuple(trial.bindings.values()) for trial in found}) == len(found) == 12


def ended(found, values):
    """A stopper that has seen so many trials with these values to their end, and which of them it would have stopped."""
    stopper, stopped = search.Stopper(found), []
    for number, curve in enumerate(values):
        points = tuple((10 * (index + 1), value) for index, value in enumerate(curve))
        trial = Trial(number=number, bindings={}, model_dir="", state=State.RUNNING, points=points)
        if stopper.stops(trial) is not None:
            stopped.append(number)
        stopper.end(done(number, {}, curve[-1]))
    return stopper, stopped


def test_the_median_rule_stops_what_is_worse_than_half_of_those_that_are_done():
    curves = [[5, 4, 3], [5, 3, 2], [5, 2, 1], [6, 5, 4]]
    stopper, stopped = ended(sweep_of(*PLANE, early_stop="median", early_stop_after=20), curves)
    assert not stopped  # there must be four
    trial = Trial(number=4, bindings={}, model_dir="", points=((10, 9.0),))
    assert stopper.stops(trial) is None  # too early
    trial = Trial(number=4, bindings={}, model_dir="", points=((10, 9.0), (20, 3.4)))
    assert stopper.stops(trial) is None
    trial = Trial(number=4, bindings={}, model_dir="", points=((10, 9.0), (20, 3.4), (30, 3.2)))
    assert stopper.stops(trial) == 30
    assert stopper.stops(trial) is None  # the same values say nothing more
    trial = Trial(number=5, bindings={}, model_dir="", points=((10, math.nan), (20, 1.0), (30, math.nan)))
    assert stopper.stops(trial) == 30  # the best so far, and not finite


def test_halving_keeps_the_best_third_at_each_rung():
    halving = sweep_of(*PLANE, early_stop="halving", early_stop_after=10)
    _, stopped = ended(halving, [[float(9 - number)] * 9 for number in range(9)])
    assert not stopped  # each is the best so far
    _, stopped = ended(halving, [[float(number)] * 9 for number in range(9)])
    assert stopped == [1, 2, 3, 4, 5, 6, 7, 8]
    _, stopped = ended(halving, [[1.0] * 9, [3.0] * 9, [0.5, 0.5, 2.0, 2.0, 2.0]])
    assert stopped == [1, 2]  # at the second rung


@pytest.mark.parametrize("early_stop", ["median", "halving"])
def test_a_stopper_that_is_made_again_says_the_same(early_stop):
    found = sweep_of(*PLANE, early_stop=early_stop, early_stop_after=10)
    curves = [[1.0 + (7 * number) % 5 + 1 / step for step in range(1, 6)] for number in range(12)]
    trials = [
        Trial(
            number=number, bindings={}, model_dir="", state=State.DONE, value=curve[-1],
            points=tuple((10 * step, value) for step, value in enumerate(curve, 1)),
        )
        for number, curve in enumerate(curves)
    ]  # fmt: skip
    whole, _ = ended(found, curves)
    again = search.stopper_of(found, trials)
    for value in (0.5, 2.4, 3.1, 9.0):
        asked = Trial(number=12 + int(value), bindings={}, model_dir="", points=((10, value), (20, value), (30, value)))
        assert again.stops(asked) == whole.stops(asked)


@pytest.mark.parametrize(
    ("texts", "fields", "message"),
    [
        (PLANE, {"search": "grid"}, "--search=grid needs a list of values, and LEARNING_RATE = log"),
        (["A = int(0, 9)", "B = int(0, 9999)"], {"search": "grid", "trials": None}, "the grid has 100,000 trials"),
        (PLANE, {"trials": None}, "--trials is not set, and --search is random"),
        (PLANE, {"trials": 0}, "--trials=0 must be from 1 to 10000"),
        (PLANE, {"search": "genetic"}, "Sweep.search is 'genetic', must be"),
        (PLANE, {"goal": "low"}, "Sweep.goal is 'low', must be"),
        (PLANE, {"early_stop": "early"}, "Sweep.early_stop is 'early', must be"),
        (PLANE, {"early_stop": "halving"}, "add --early_stop_after=STEP"),
        (PLANE, {"early_stop_after": -1}, "--early_stop_after=-1 must be a step"),
        (PLANE, {"early_stop_after": 9}, "--early_stop_after=9 has no effect without --early_stop"),
        (["A = [2, 1]"], {"trials": 3}, "--trials=3 must be at most 2: --vary has no more combinations"),
        (["A = int(1, 3)"], {"search": "grid", "trials": 4}, "--trials=4 must be at most 3"),
        ([], {}, "--vary is not set"),
        (PLANE, {"metric": "loss"}, "--metric=loss must be eval/NAME"),
    ],
)
def test_a_sweep_that_is_none(texts, fields, message):
    with pytest.raises(UserError, match=message):
        sweep_of(*texts, **fields)


def test_a_sweep_is_read_from_its_file():
    found = sweep_of(
        *PLANE, "C = [1e-3, 'é', (1, 2)]", "D = int(1, 3)", early_stop="halving", early_stop_after=5, run=("a.gin",)
    )
    assert sweep.read_text(found.text()) == found
    for text in ("", "[]", "{}", '{"version": 2}', found.text().replace("halving", "none").replace("random", "grid")):
        with pytest.raises(UserError, match="no file of a sweep"):
            sweep.read_text(text)
