"""Goodput: seconds by what took them, over all starts of a run."""

import pytest

from capibara.monitoring.metrics_file import goodput


def start(step, time, **spent):
    return [
        {"kind": "event", "event": "start", "step": step, "time": time},
        {"kind": "event", "event": "spent", "step": step, "time": time, **spent},
    ]


def train(step, time, step_s, wait_s=0.0, **more):
    return {"kind": "train", "step": step, "time": time, "step_s": step_s, "data_wait_s": wait_s, **more}


def test_one_life():
    records = start(0, 110.0, start=4.0, set_up=5.0, restore=1.0)
    records += [train(10, 120.0, 1.0, 0.1), train(20, 133.0, 1.0, 0.1, save_s=2.0, evaluate_s=1.0)]
    records += [{"kind": "event", "event": "spent", "step": 20, "time": 137.0, "save": 3.5}]
    found = goodput.account(records)
    assert found["total"] == pytest.approx(37.0)
    assert found["productive"] == pytest.approx(18.0) and found["data_wait"] == pytest.approx(2.0)
    assert (found["start"], found["set_up"], found["restore"]) == (4.0, 5.0, 1.0)
    assert found["save"] == pytest.approx(5.5) and found["evaluate"] == 1.0
    assert found["other"] == pytest.approx(0.5) and found["lost"] == found["down"] == 0.0
    assert goodput.line(found).startswith(
        "goodput 48.6% of 37 s (data wait 5.4%, evaluate 2.7%, save 14.9%, start 10.8%"
    )


def test_steps_that_the_next_life_makes_again_are_lost():
    """Killed after step 17, of which 10 were saved; 6 seconds until the process was started again."""
    records = [*start(0, 10.0, start=1.0), train(10, 20.0, 1.0), train(17, 27.0, 1.0)]
    records += [*start(10, 36.0, start=2.0, restore=1.0), train(20, 46.0, 1.0)]
    found = goodput.account(records)
    assert found["lost"] == pytest.approx(7.0) and found["productive"] == pytest.approx(20.0)
    assert found["down"] == pytest.approx(6.0) and found["start"] == 3.0
    assert sum(found[name] for name in goodput.CATEGORIES) == pytest.approx(found["total"]) == pytest.approx(37.0)


def test_steps_that_a_run_goes_back_over_are_lost():
    """In one start: 7 steps again after a loss spike, and 2 seconds until it had gone back."""
    records = [*start(0, 10.0, start=1.0), train(10, 20.0, 1.0), train(17, 27.0, 1.0)]
    records += [{"kind": "event", "event": "roll_back", "step": 10, "time": 29.0}, train(20, 39.0, 1.0)]
    found = goodput.account(records)
    assert found["lost"] == pytest.approx(7.0) and found["productive"] == pytest.approx(20.0)
    assert found["restore"] == pytest.approx(2.0) and found["down"] == 0.0
    assert sum(found[name] for name in goodput.CATEGORIES) == pytest.approx(found["total"]) == pytest.approx(30.0)


def test_a_life_without_steps_and_numbers_that_are_null():
    assert goodput.account([]) == {} and goodput.line({}) is None
    assert goodput.account([train(1, 1.0, 1.0)]) == {}
    found = goodput.account([*start(0, 5.0, start=5.0), train(1, 6.0, None, None)])
    assert found["productive"] == 0.0 and goodput.line(found) == "goodput 0.0% of 6 s (start 83.3%, other 16.7%)"


def test_rollouts_and_the_reference_are_told_apart_from_steps():
    records = start(0, 15.0, start=4.0, set_up=5.0, reference=6.0)
    records += [train(10, 30.0, 1.0, rollout_s=5.0)]
    found = goodput.account(records)
    assert (found["reference"], found["rollout"], found["productive"]) == (6.0, 5.0, 10.0)
    assert found["total"] == pytest.approx(30.0) and found["other"] == 0.0
