"""Neighbourhood gradient descent: its gradient against finite differences, its steps, and the surrogate that it lowers."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from capibara.core.types import UserError
from capibara.evaluation import scoring
from capibara.evaluation.remix import descent
from capibara.evaluation.remix.remixing import RemixExperts, layers, unmixed
from capibara.evaluation.scoring import Pair, Scorer
from capibara.models import api
from capibara.models.api import DecoderConfig, Moe

CONFIG = DecoderConfig(
    vocab_size=259, embed_dim=16, num_layers=3, num_heads=2, mlp_dim=24, dtype="float32",
    moe=Moe(num_experts=6, top_k=6, first_dense=1),
)  # fmt: skip
REMIX = RemixExperts(
    references=("a.jsonl",),
    neighbours=2,
    strength=1.0,
    layers=2,
    method="neighborhood_gradient",
    steps=5,
    learning_rate=0.5,
)
SIGMOID = dataclasses.replace(CONFIG, moe=Moe(num_experts=6, top_k=2, first_dense=1, score="sigmoid"))


def model_of(config: DecoderConfig):
    model = api.build(config)
    return model, jax.tree.map(lambda x: 3 * x, model.init(jax.random.key(0)))


def problem(config: DecoderConfig = CONFIG, prompts: int = 3):
    """A scorer, the neighbours of each prompt, their weights, and the scores from which the descent begins."""
    model, params = model_of(config)
    rng = np.random.default_rng(0)
    neighbours = [
        [Pair(rng.integers(3, 259, rng.integers(5, 12)).tolist(), rng.integers(3, 259, 3).tolist()) for _ in range(2)]
        for _ in range(prompts)
    ]
    weights = rng.dirichlet([1, 1], prompts).astype(np.float32)
    starts = rng.dirichlet(np.ones(6), (prompts, 2)).astype(np.float32)
    return Scorer(model, params, 64), model, params, neighbours, weights, starts


def loss_of(scorer, remix, config, neighbours, weights, scores) -> np.ndarray:
    """The surrogate of each prompt by the scorer alone."""
    routings = [remix.mixed(of_prompt, config) for of_prompt in scores]
    pairs = [p._replace(routing=routing) for of_prompt, routing in zip(neighbours, routings) for p in of_prompt]
    losses = [-score.log_probability / len(pair.continuation) for score, pair in zip(scorer(pairs), pairs)]
    return (np.reshape(losses, weights.shape) * weights).sum(1)


def surrogate_of(scorer, model, params, neighbours, weights, remix):
    """The surrogate as a jitted function of log scores."""
    routing = remix.mixed(np.zeros((2, 6)), model.config)
    pairs = [pair._replace(routing=routing) for of_prompt in neighbours for pair in of_prompt]
    batch = jax.tree.map(jnp.asarray, scorer._filled(pairs, 32, len(pairs)))
    log_p = lambda params, batch: scoring.score(model, params, batch)[0]  # noqa: E731
    return jax.jit(lambda scores: descent.surrogate(log_p, layers(model.config), scores, params, batch, weights))


def test_the_surrogate_is_the_weighted_loss_of_right_answers():
    scorer, model, params, neighbours, weights, starts = problem()
    got = surrogate_of(scorer, model, params, neighbours, weights, REMIX)(jnp.log(starts))
    np.testing.assert_allclose(got, loss_of(scorer, REMIX, CONFIG, neighbours, weights, starts), rtol=1e-5)
    plain = [pair._replace(routing=unmixed(CONFIG)) for of_prompt in neighbours for pair in of_prompt]
    unrouted = [-score.log_probability / 3 for score in scorer(plain)]
    assert np.abs(np.reshape(unrouted, weights.shape) * weights).sum() != pytest.approx(float(np.sum(got)), rel=1e-3)


def test_the_first_step_is_the_gradient_of_finite_differences():
    """With all experts chosen the surrogate is smooth; a step of the descent moves by the learning rate times the gradient."""
    scorer, model, params, neighbours, weights, starts = problem()
    remix = dataclasses.replace(REMIX, steps=1, learning_rate=1e-2)
    after = np.stack([*scorer.descended(remix, neighbours, weights, starts)])
    log_start = np.log(starts).astype(np.float64)

    of_scores = surrogate_of(scorer, model, params, neighbours, weights, remix)

    def loss(log_scores):
        normal = log_scores - np.log(np.exp(log_scores).sum(-1, keepdims=True))
        return np.asarray(of_scores(jnp.asarray(normal, jnp.float32)), np.float64)

    want, size = np.zeros_like(log_start), 2e-2
    for layer in range(2):
        for expert in range(6):
            shift = np.zeros((2, 6))
            shift[layer, expert] = size
            want[:, layer, expert] = (loss(log_start + shift) - loss(log_start - shift)) / (2 * size)
    moved = (np.log(after) - log_start) / -1e-2
    moved -= moved.mean(-1, keepdims=True)  # the step is normalised
    assert np.abs(want).max() > 1e-2
    np.testing.assert_allclose(moved, want - want.mean(-1, keepdims=True), rtol=5e-2, atol=2e-3)


@pytest.mark.parametrize("config", [CONFIG, SIGMOID], ids=["softmax", "sigmoid"])
def test_steps_lower_the_loss_of_each_prompt(config):
    scorer, _, _, neighbours, weights, starts = problem(config)
    before = loss_of(scorer, REMIX, config, neighbours, weights, starts)
    after = np.stack([*scorer.descended(REMIX, neighbours, weights, starts)])
    assert np.all(loss_of(scorer, REMIX, config, neighbours, weights, after) < before - 1e-4)
    assert np.all(after > 0)
    if config is CONFIG:
        np.testing.assert_allclose(after.sum(-1), 1, rtol=1e-5)
    alone = [*scorer.descended(REMIX, neighbours[1:2], weights[1:2], starts[1:2])]
    np.testing.assert_allclose(alone[0], after[1], rtol=1e-4, atol=1e-6)


def test_the_descent_comes_near_the_least_loss_of_a_direct_minimisation():
    """By Adam on the logits of the scores, which knows nothing of the descent."""
    scorer, model, params, neighbours, weights, starts = problem(prompts=1)
    remix = dataclasses.replace(REMIX, steps=100, learning_rate=20.0)
    [after] = scorer.descended(remix, neighbours, weights, starts)
    of_scores = surrogate_of(scorer, model, params, neighbours, weights, remix)
    loss = lambda logits: jnp.sum(of_scores(jax.nn.log_softmax(logits)))  # noqa: E731
    adam = optax.adam(0.1)

    def step(carry, _):
        logits, state = carry
        value, gradient = jax.value_and_grad(loss)(logits)
        change, state = adam.update(gradient, state)
        return (logits + change, state), value

    logits = jnp.log(starts)
    _, losses = jax.lax.scan(step, (logits, adam.init(logits)), length=300)
    got, first, least = float(of_scores(jnp.log(after[None]))[0]), float(losses[0]), float(losses.min())
    assert first - least > 1e-2
    assert got - least < 0.05 * (first - least)


def test_the_learning_rate_falls_along_a_cosine():
    """Of two steps the second has half the rate of the first: as two descents of a step each."""
    scorer, _, _, neighbours, weights, starts = problem()
    both = dataclasses.replace(REMIX, steps=2, learning_rate=2.0)
    scores = starts
    for rate in (2.0, 1.0):
        one = dataclasses.replace(REMIX, steps=1, learning_rate=rate)
        scores = np.stack([*scorer.descended(one, neighbours, weights, scores)])
    together = np.stack([*scorer.descended(both, neighbours, weights, starts)])
    np.testing.assert_allclose(together, scores, rtol=1e-4, atol=1e-6)
    assert np.abs(together - starts).max() > 1e-2


def test_only_the_last_layers_are_changed():
    scorer, _, _, neighbours, weights, starts = problem()
    remix = dataclasses.replace(REMIX, layers=1)
    after = np.stack([*scorer.descended(remix, neighbours, weights, starts)])
    np.testing.assert_allclose(after[:, 0], starts[:, 0], rtol=1e-5)
    assert np.abs(after[:, 1] - starts[:, 1]).max() > 1e-3


def test_steps_without_end_are_refused():
    scorer, _, _, neighbours, weights, starts = problem(SIGMOID)
    remix = dataclasses.replace(REMIX, learning_rate=1e38)
    with pytest.raises(
        UserError, match="scores of experts are not finite after 5 steps: lower RemixExperts.learning_rate"
    ):
        list(scorer.descended(remix, neighbours, weights, starts))
