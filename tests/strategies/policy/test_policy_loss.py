"""Ratios, weights of tokens and mistakes of policy losses; tests/interop/test_trl_rollouts.py compares whole runs with TRL."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.inference.sampling.sampling import Sampling
from capibara.strategies.grpo import Grpo
from capibara.strategies.policy.cispo import Cispo
from capibara.strategies.policy.clipped import Clipped
from capibara.strategies.policy.gmpo import Gmpo
from capibara.strategies.policy.sapo import Sapo
from capibara.strategies.policy.vespo import Vespo
from capibara.strategies.rewards.functions import exact_answer

NEW = 8


def grpo(**options):
    return Grpo(rewards=(exact_answer,), updates=2, sampling=Sampling(max_new_tokens=NEW, temperature=1.0), **options)


def case():
    rng = np.random.default_rng(2)
    weights = (np.arange(10) < np.array([[2], [5], [9], [0]])).astype(np.float32)
    log_p = -rng.uniform(1, 4, (4, 10))
    batch = {
        "weights": weights,
        "advantages": weights * np.array([[1.0], [-0.5], [0.3], [0.0]]),
        "old": log_p + rng.normal(0, 0.1, (4, 10)),
        "drawn": log_p + rng.normal(0, 0.1, (4, 10)),
        "segment_ids": np.ones((4, 10)),
    }
    return jnp.asarray(log_p, jnp.float32), {name: jnp.asarray(value, jnp.float32) for name, value in batch.items()}


def loss_and_gradient(loss):
    log_p, batch = case()
    (value, totals), gradient = jax.value_and_grad(loss.totals, has_aux=True)(log_p, batch)
    return value, gradient, totals


def test_gspo_token_has_the_gradient_of_gspo():
    """The paper's section 4.3: they are equal where all tokens of an answer have its advantage, also in the value."""
    bounds = Clipped(low=0.01, high=0.01)
    want, got = (
        loss_and_gradient(grpo(level=level, surrogate=bounds, importance_cap=None))
        for level in ("sequence", "sequence_token")
    )
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    np.testing.assert_allclose(got[1], want[1], atol=1e-7)
    assert 0 < float(want[2].values["clip_fraction"]) < 4


@pytest.mark.parametrize(
    ("token_weights", "shares", "weight"),
    [
        ("answer", [1 / 2, 1 / 5, 1 / 9], 4),
        ("micro_batch", [4 / 16] * 3, 4),
        ("batch", [1] * 3, 16),
        ("max_length", [1 / NEW] * 3, 4),
        ("sum", [1] * 3, 4),
    ],
)
def test_tokens_have_the_weights_of_their_mean(token_weights, shares, weight):
    """The last answer is cut off and masked, and counts as an answer, as in TRL."""
    loss = grpo(token_weights=token_weights, importance_cap=None, surrogate=Clipped(low=0.9, high=9.0))
    log_p, batch = case()
    value, _, totals = loss_and_gradient(loss)
    gain = np.exp(np.asarray(log_p, np.float64) - np.asarray(batch["old"])) * np.asarray(batch["advantages"])
    want = -sum(share * row.sum() for share, row in zip(shares, gain))
    assert float(value) == pytest.approx(want, rel=1e-5) and float(totals.weight) == weight
    assert float(totals.values["ratio"] / totals.weight) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Clipped(low=1.5), "Clipped.low is 1.5, must lie between 0 and 1: try 0.2"),
        (lambda: Clipped(high=0.0), "Clipped.high is 0.0, must be finite and above 0: try 0.2"),
        (lambda: Clipped(high=0.3, ceiling=1.2), "Clipped.ceiling is 1.2, must be finite and above 1 + Clipped.high (1.3)"),
        (lambda: Cispo(cap=1.0), "Cispo.cap is 1.0, must be finite and above 1: try 5.0"),
        (lambda: Sapo(temperature_negative=-1.0), "Sapo.temperature_negative is -1.0, must be finite and above 0: try 1.05"),
        (lambda: Gmpo(low=float("nan")), "Gmpo.low is nan, must be finite and above 0: try 0.4"),
        (lambda: Vespo(decay_negative=0.0), "Vespo.decay_negative is 0.0, must be finite and above 0: try 2.0"),
        (lambda: grpo(level="sequence", surrogate=Gmpo()), "Grpo.level is 'sequence', and @Gmpo() makes the ratio of an answer"),
        (lambda: grpo(level="sequence", surrogate=Vespo()), "Grpo.level is 'sequence', and @Vespo() makes"),
        (lambda: grpo(level="sequence", kl=0.1, kl_in="tokens"), "Grpo.kl_in = 'tokens' makes an advantage for each token"),
        (lambda: grpo(unbiased_kl=True, kl=0.1, kl_in="reward"), "Grpo.unbiased_kl is True, and Grpo.kl_in is 'reward'"),
        (
            lambda: grpo(surrogate=Vespo(), importance_mode="sequence_mask"),
            "Grpo.importance_mode is 'sequence_mask', and @Vespo() takes those of tokens: set it to 'token_truncate'",
        ),
        (lambda: grpo(importance_floor=1.5), "Grpo.importance_floor is 1.5, must be above 0 and at most 1, or None"),
        (lambda: grpo(off_policy_limit=0.0), "Grpo.off_policy_limit is 0.0, must be above 0, or None: try 0.5"),
        (lambda: grpo(resample=-1), "Grpo.resample is -1, must be at least 0 (0: never)"),
        (lambda: grpo(mini_batches=0), "Grpo.mini_batches is 0, must be at least 1"),
        (lambda: grpo(overlong_tokens=NEW + 1), f"Grpo.overlong_tokens is {NEW + 1}, must be from 1 to Sampling.max_new_tokens"),
        (lambda: grpo(group=1), "Grpo.group is 1, must be at least 2, since answers are compared"),
        (lambda: grpo(group=1, baseline="none", scale="tokens", resample=1), "Grpo.group is 1, must be at least 2"),
    ],
)  # fmt: skip
def test_mistakes_are_named_in_a_line(make, said):
    with pytest.raises(UserError, match=re.escape(said)) as error:
        make()
    assert "\n" not in str(error.value)


def test_one_answer_a_prompt_is_enough_without_groups():
    assert dataclasses.replace(grpo(group=2), group=1, baseline="none", scale="tokens").rows_of_a_prompt == 1
