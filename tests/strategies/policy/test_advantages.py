"""Advantages, against their papers' formulas."""

import numpy as np
import pytest

from capibara.strategies.policy import advantages
from capibara.strategies.policy.advantages import Advantages, Baseline, KlIn, RewardScale

REWARDS = np.array([[1.0, 0.0, 0.0, 1.0], [0.1, 0.1, 0.1, 0.1], [3.0, 1.0, 1.0, 1.0]])


def advantages_of(baseline, scale, kl=0.0, kl_in="loss"):
    return Advantages(Baseline(baseline), RewardScale(scale), kl, KlIn(kl_in))


@pytest.mark.parametrize("scale", ["group", "batch", "answers", "none"])
@pytest.mark.parametrize("baseline", ["group", "leave_one_out", "none"])
def test_answers_are_compared_with_the_baseline_and_divided_by_the_scale(baseline, scale):
    want = np.zeros((3, 4))
    for p, group in enumerate(REWARDS):
        for g, reward in enumerate(group):
            others = np.delete(group, g)
            want[p, g] = reward - {"group": group.mean(), "leave_one_out": others.mean(), "none": 0.0}[baseline]
    if scale == "answers":
        want = (want - want.mean()) / (want.std(ddof=1) + 1e-4)
    elif scale != "none":
        std = REWARDS.std(axis=1, ddof=1, keepdims=True) if scale == "group" else REWARDS.std(ddof=1)
        want = want / (std + 1e-4)
    got = advantages_of(baseline, scale).of_answers(REWARDS)
    np.testing.assert_allclose(got, want, atol=1e-12)
    if baseline != "none" and scale != "answers":
        assert (got[1] == 0).all()


def rows(lengths, width=6):
    return (np.arange(width) < np.array(lengths)[:, None]).astype(np.float32)


def test_the_divergence_in_the_reward_is_the_sum_over_an_answer():
    rng = np.random.default_rng(0)
    weights, kl, rewards = rows([2, 5, 3, 6]), rng.normal(size=(4, 6)), rng.normal(size=(2, 2))
    got = advantages_of("leave_one_out", "none", 0.3, "reward").of_tokens(rewards, weights, kl)
    less = rewards.reshape(-1) - 0.3 * (kl * weights).sum(1)
    want = np.array([less[0] - less[1], less[1] - less[0], less[2] - less[3], less[3] - less[2]])
    np.testing.assert_allclose(got, want[:, None] * weights, rtol=1e-6)
    assert got.dtype == np.float32


@pytest.mark.parametrize("baseline", ["none", "group"])
def test_reinforce_pp_has_returns_of_tokens_normalised_over_all_tokens(baseline):
    rng = np.random.default_rng(1)
    lengths, rewards = [2, 5, 3, 6], rng.normal(size=(2, 2))
    weights, kl = rows(lengths), rng.normal(size=(4, 6))
    flat = (rewards - (rewards.mean(1, keepdims=True) if baseline == "group" else 0.0)).reshape(-1)
    returns = [[flat[b] - 0.2 * kl[b, t:length].sum() for t in range(length)] for b, length in enumerate(lengths)]
    every = np.concatenate(returns)
    got = advantages_of(baseline, "tokens", 0.2, "tokens").of_tokens(rewards, weights, kl)
    for b, length in enumerate(lengths):
        want = (np.array(returns[b]) - every.mean()) / (every.std(ddof=1) + 1e-4)
        np.testing.assert_allclose(got[b, :length], want, rtol=1e-5)
        assert (got[b, length:] == 0).all()


def test_rewards_are_normalised_each_before_their_sum():
    parts = np.stack([REWARDS, 100 * REWARDS[::-1]], axis=-1)
    each = lambda group: (group - group.mean()) / (group.std(ddof=1) + 1e-4)  # noqa: E731
    want = [each(group) + 0.5 * each(100 * other) for group, other in zip(REWARDS, REWARDS[::-1])]
    np.testing.assert_allclose(advantages.normalized_each(parts, (1.0, 0.5)), want, atol=1e-9)


def test_long_answers_are_punished_softly():
    """Eq. 13 of DAPO with a maximum of 100 tokens and a margin of 20."""
    got = advantages.overlong_penalty(np.array([[10, 80, 81, 90, 100]]), 100, 20)
    np.testing.assert_allclose(got, [[0, 0, -0.05, -0.5, -1]])
