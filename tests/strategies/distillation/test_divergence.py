"""Divergences against their formulas in float64, and what blocks and the rest of the tokens change."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, rel_entr

from capibara.strategies.distillation.divergence import (
    TeacherLogProbs,
    block_length,
    blocks,
    generalized_jsd,
    log_probs_of,
    token_terms,
    with_rest,
)


@pytest.fixture
def pair():
    """Log-probabilities [3, 5, 7] of a teacher and a student, float64."""
    rng = np.random.default_rng(0)
    return [log_softmax(3 * rng.normal(size=(3, 5, 7)), axis=-1) for _ in range(2)]


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
def test_the_divergence_is_that_of_the_paper(pair, beta):
    p, q = map(np.exp, pair)
    mixture = beta * p + (1 - beta) * q
    want = {0.0: rel_entr(p, q), 1.0: rel_entr(q, p)}.get(
        beta, beta * rel_entr(p, mixture) + (1 - beta) * rel_entr(q, mixture)
    )
    got = generalized_jsd(*(jnp.asarray(x, jnp.float32) for x in pair), beta)
    np.testing.assert_allclose(got, want.sum(-1), rtol=2e-5, atol=1e-6)


def test_other_tokens_count_as_one(pair):
    """Probabilities of some tokens and of the rest add up to one, and never diverge more than those of all."""
    teacher, student = (jnp.asarray(x, jnp.float32) for x in pair)
    top = log_probs_of(teacher, 1.0, 3)
    parts = [with_rest(jnp.take_along_axis(x, top.ids_BTK, -1)) for x in (teacher, student)]
    for part in parts:
        np.testing.assert_allclose(np.exp(part).sum(-1), 1.0, rtol=1e-5)
    for beta in (0.0, 0.5, 1.0):
        some, every = generalized_jsd(*parts, beta), generalized_jsd(teacher, student, beta)
        assert (np.asarray(some) <= np.asarray(every) + 1e-6).all() and (np.asarray(some) < 0.999 * every).any()


@pytest.mark.parametrize("top_k", [None, 3])
def test_a_student_that_equals_its_teacher_has_no_loss_and_no_gradient(top_k):
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(2, 4, 7)), jnp.float32)
    teacher = log_probs_of(logits, 2.0, top_k)
    targets = jnp.zeros((2, 4), jnp.int32)
    terms = lambda x: token_terms(x, targets, teacher, 2.0, 0.5)  # noqa: E731
    np.testing.assert_allclose(terms(logits).divergence, 0.0, atol=1e-6)
    np.testing.assert_array_equal(terms(logits).agreement, 1.0)
    np.testing.assert_allclose(jax.grad(lambda x: terms(x).divergence.sum())(logits), 0.0, atol=1e-6)
    other = terms(logits[..., ::-1])
    assert (other.divergence > 1e-3).all() and other.agreement.mean() < 0.5


def test_a_distribution_without_a_rest_stays_finite():
    """One token has all the probability."""
    logits = jnp.zeros((1, 1, 5)).at[..., 2].set(200.0)
    terms = token_terms(logits[..., ::-1], jnp.zeros((1, 1), jnp.int32), log_probs_of(logits, 1.0, 2), 1.0, 0.5)
    assert np.isfinite(terms.divergence).all()
    gradient = jax.grad(
        lambda x: token_terms(x, jnp.zeros((1, 1), jnp.int32), log_probs_of(logits, 1.0, 2), 1.0, 1.0).divergence.sum()
    )
    assert np.isfinite(gradient(logits)).all()


def test_the_targets_likelihood_is_at_temperature_one(pair):
    _, student = (jnp.asarray(x, jnp.float32) for x in pair)
    targets = jnp.asarray(np.random.default_rng(2).integers(0, 7, (3, 5)))
    terms = token_terms(5 + student, targets, TeacherLogProbs(student, None), 3.0, 0.0)
    want = -np.take_along_axis(pair[1], np.asarray(targets)[..., None], -1)[..., 0]
    np.testing.assert_allclose(terms.nll, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("length", "block"), [(1024, 128), (96, 32), (72, 72), (24, 24)])
def test_blocks_divide_a_row(length, block):
    assert block_length(length) == block
    x = np.arange(2 * length * 3).reshape(2, length, 3)
    parts = np.asarray(blocks(jnp.asarray(x), block))
    np.testing.assert_array_equal(np.concatenate(list(parts), axis=1), x)
