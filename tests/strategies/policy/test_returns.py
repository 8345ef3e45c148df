"""Rewards of tokens and generalised advantages, against their sums written out in float64."""

import numpy as np
import pytest

from capibara.strategies.policy import returns

LENGTHS, STARTS, WIDTH = [2, 5, 0, 7], [1, 3, 0, 0], 9
GAMMAS = [(1.0, 0.95), (0.9, 0.5), (0.9, 0.0), (1.0, 1.0)]


def case():
    rng = np.random.default_rng(0)
    weights = np.zeros((4, WIDTH))
    for row, (start, length) in enumerate(zip(STARTS, LENGTHS)):
        weights[row, start : start + length] = 1
    return weights, rng.normal(size=(4, WIDTH)), rng.normal(size=(4, WIDTH)), rng.normal(size=4)


@pytest.mark.parametrize("whiten", [False, True])
def test_the_reward_is_of_the_last_token_and_the_divergence_of_each(whiten):
    weights, kl, _, rewards = case()
    want = [-0.3 * kl[row, start : start + length] for row, (start, length) in enumerate(zip(STARTS, LENGTHS))]
    for row in (0, 1, 3):
        want[row][-1] += rewards[row]
    if whiten:
        every = np.concatenate(want)
        want = [(x - every.mean()) / np.sqrt(every.var(ddof=1) + 1e-8) + every.mean() for x in want]
    got = returns.token_rewards(rewards, weights, kl, 0.3, whiten)
    for row, (start, length) in enumerate(zip(STARTS, LENGTHS)):
        np.testing.assert_allclose(got[row, start : start + length], want[row], rtol=1e-12)
    assert (got[weights == 0] == 0).all()


@pytest.mark.parametrize(("gamma", "gae_lambda"), GAMMAS)
def test_advantages_pass_over_what_an_environment_says(gamma, gae_lambda):
    weights, rewards, values, _ = case()
    want = returns.generalized_advantages(rewards * weights, values, weights, gamma, gae_lambda)
    apart = np.array([0, 2, 3, 7, 8, 9, 12, 14, 15])  # where the columns are with gaps between them

    def moved(x):
        result = np.ones((len(x), 17)) * (x is not weights)
        result[:, apart] = x
        return result

    got = returns.generalized_advantages(
        moved(rewards) * moved(weights), moved(values), moved(weights), gamma, gae_lambda
    )
    np.testing.assert_allclose(got[:, apart], want, rtol=1e-12)
    assert (got[moved(weights) == 0] == 0).all()


@pytest.mark.parametrize(("gamma", "gae_lambda"), GAMMAS)
def test_advantages_are_the_discounted_sums_of_later_differences(gamma, gae_lambda):
    """Equation 16 of the paper, of the differences r + gamma * V(next) - V; the value after the last token is 0."""
    weights, rewards, values, _ = case()
    got = returns.generalized_advantages(rewards * weights, values, weights, gamma, gae_lambda)
    for row, (start, length) in enumerate(zip(STARTS, LENGTHS)):
        r, v = (x[row, start : start + length] for x in (rewards, values))
        differences = r + gamma * np.append(v, 0.0)[1:] - v if length else r
        for t in range(length):
            want = sum((gamma * gae_lambda) ** k * differences[t + k] for k in range(length - t))
            assert got[row, start + t] == pytest.approx(want, rel=1e-9)
    assert (got[weights == 0] == 0).all()
