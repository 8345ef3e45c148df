"""Rewards beside each other and in turn: their order, their sum, and what ends them."""

from __future__ import annotations

import threading

import pytest

from capibara.core.types import UserError
from capibara.strategies.rewards.reward_sum import RewardSum, each
from capibara.strategies.rewards.verifier import Verifier


class Meets(Verifier):
    """Waits until as many answers are verified at the same time."""

    def __init__(self, count):
        self.barrier = threading.Barrier(count)

    def __call__(self, prompt, answer, record):
        self.barrier.wait(20)
        return len(answer)

    def check_record(self, record):
        pass


def test_verifiers_run_beside_each_other_and_functions_in_turn():
    threads = []

    def plain(prompt, answer, record):
        threads.append(threading.current_thread())
        return record["n"]

    total = RewardSum((Meets(3), plain), (1.0, 10.0))
    with total.threads() as pool:
        begun = [total.begin(pool, "", "x" * n, {"n": n}, "line 1") for n in (1, 2, 3)]
        assert not threads
        assert [begin() for begin in begun] == [(11.0 * n, (float(n), float(n))) for n in (1, 2, 3)]
    assert {*threads} == {threading.current_thread()}


def test_functions_alone_need_no_threads():
    total = RewardSum((lambda prompt, answer, record: 2,), None)
    with total.threads() as pool:
        assert pool is None and total.begin(pool, "", "", {}, "")() == (2.0, (2.0,))


@pytest.mark.parametrize(("weights", "total"), [(None, 3.0 + 5.0), ((1.0, -2.0), 3.0 - 10.0)])
def test_rewards_are_summed_by_their_weights(weights, total):
    rewards = RewardSum((lambda *_: 3, lambda *_: 5.0), weights)
    assert rewards.begin(None, "", "", {}, "")() == (total, (3.0, 5.0))


@pytest.mark.parametrize("value", [float("nan"), None, "1"])
def test_a_reward_is_a_finite_number(value):
    total = RewardSum((lambda prompt, answer, record: value,), None)
    with pytest.raises(
        UserError, match=r"<lambda> returned .* for an answer to a.jsonl:3: it must return a finite number"
    ):
        total.begin(None, "", "", {}, "a.jsonl:3")()


def test_an_error_ends_without_the_rewards_that_have_not_begun():
    counted, release = [], threading.Event()

    class Slow(Meets):
        def __call__(self, prompt, answer, record):
            counted.append(answer)
            release.wait(20)
            return 0

    total = RewardSum((Slow(1),), None)
    with pytest.raises(KeyboardInterrupt), total.threads() as pool:
        for number in range(100):
            total.begin(pool, "", str(number), {}, "")
        raise KeyboardInterrupt
    release.set()
    pool.shutdown()
    assert len(counted) < 100


def test_episodes_are_stepped_together_where_they_may_be():
    barrier = threading.Barrier(2)
    assert each([lambda: barrier.wait(20) >= 0] * 2, True) == [True, True]
    assert each([threading.current_thread] * 2, False) == [threading.current_thread()] * 2
