"""Preference pairs: the loss and its gradients against plain formulas."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara import sharding
from capibara.kernels.cross_entropy import by_tokens
from capibara.kernels.cross_entropy.dispatch import token_log_probabilities
from capibara.models.api import DecoderConfig
from capibara.objectives.preference import Dpo
from capibara.sharding import Plan, Rules

MODEL = DecoderConfig(vocab_size=384, embed_dim=32, num_layers=1, num_heads=2, mlp_dim=64, dtype="float32")


# The loss.


@pytest.mark.parametrize("cap, temperature, usable", [(None, 1.0, None), (5.0, 1.0, 40), (5.0, 0.7, 33)])
@pytest.mark.parametrize("blocks", [1, 4])
def test_log_probabilities_and_their_gradients_equal_those_of_whole_logits(
    cap, temperature, usable, blocks, monkeypatch
):
    monkeypatch.setattr(by_tokens, "_BLOCK_BYTES", {"cpu": 3 * 8 * 40 * 4 // blocks})
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(3, 8, 16)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(40, 16)), jnp.float32)
    targets, upstream = rng.integers(0, usable or 40, (3, 8)), rng.normal(size=(3, 8)).astype(np.float32)

    def plain(hidden, head):
        logits = hidden @ head.T
        logits = (logits if cap is None else cap * jnp.tanh(logits / cap)) / temperature
        logits = jnp.where(np.arange(40) < (usable or 40), logits, -jnp.inf)
        return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]

    given = dict(soft_cap=cap, temperature=temperature, usable=usable)
    ours = functools.partial(token_log_probabilities, targets_BT=targets, **given)
    np.testing.assert_allclose(ours(hidden, head), plain(hidden, head), atol=1e-5)
    got = jax.grad(lambda *a: jnp.vdot(jnp.sin(ours(*a)), upstream), (0, 1))(hidden, head)
    want = jax.grad(lambda *a: jnp.vdot(jnp.sin(plain(*a)), upstream), (0, 1))(hidden, head)
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("axes", [{"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 2, "context": 2, "stage": 2}])
def test_log_probabilities_on_every_mesh(axes):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(8, 8, 32)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(40, 32)), jnp.float32)
    targets, upstream = rng.integers(0, 40, (8, 8)), rng.normal(size=(8, 8)).astype(np.float32)
    mesh, rules = sharding.make_mesh(Plan(batch_size=8, **{"fsdp": 1} | axes)), Rules()

    def weighed(hidden, head):
        found = token_log_probabilities(hidden, head, targets)
        return jnp.vdot(found, upstream), found

    def on_mesh(hidden, head):
        with sharding.activate(mesh, rules):
            return weighed(hidden, head)

    (want_grads, want), (got_grads, got) = (
        jax.jit(jax.grad(loss, (0, 1), has_aux=True))(hidden, head) for loss in (weighed, on_mesh)
    )
    for a, b in zip((got, *got_grads), (want, *want_grads)):
        np.testing.assert_allclose(a, b, atol=2e-5)


def rows_of_pairs(rng, rows=3, length=24, pairs=2):
    """Targets, weights, segment ids and reference of rows of two pairs, and of each answer (row, begin, end, reference)."""
    targets = rng.integers(0, 40, (rows, length))
    weights, segments, reference = (np.zeros((rows, length), np.float32) for _ in range(3))
    answers = []
    for row in range(rows):
        cuts = np.sort(rng.choice(np.arange(1, 10), 2 * pairs - 1, replace=False)) * 2
        bounds = [0, *cuts.tolist(), 22]
        for k in range(2 * pairs - 2 * (row == 1)):  # the second row has one pair
            begin, end = bounds[k] + 1, bounds[k + 1]
            segments[row, bounds[k] : end], weights[row, begin:end] = k + 1, 1
            reference[row, begin] = -rng.uniform(3, 30)
            answers.append((row, begin, end, reference[row, begin]))
    return {
        "targets": targets,
        "weights": weights,
        "segment_ids": segments.astype(np.int32),
        "reference": reference,
    }, answers


def plain_loss(log_p, answers, dpo):
    """Of a matrix of log-probabilities, in its precision: the mean over pairs, pair by pair, and its gradient."""
    loss, gradient, count = 0.0, np.zeros_like(log_p), len(answers) // 2
    for (row, first, last, ref), (_, begin, end, other) in zip(answers[::2], answers[1::2]):
        sizes = (last - first, end - begin) if dpo.kind == "ipo_mean" else (1, 1)
        h = (log_p[row, first:last].sum() - ref) / sizes[0] - (log_p[row, begin:end].sum() - other) / sizes[1]
        slope, turned = 0.0, dpo.label_smoothing
        shares = (1 - turned, turned)
        if dpo.kind == "robust":
            shares = ((1 - turned) / (1 - 2 * turned), -turned / (1 - 2 * turned))
        for share, sign in zip(shares, (1.0, -1.0)):
            if dpo.kind == "hinge":
                loss += share * max(0.0, 1 - sign * dpo.beta * h)
                slope -= share * sign * dpo.beta * (sign * dpo.beta * h < 1)
            elif dpo.kind.startswith("ipo"):
                loss += share * (sign * h - 0.5 / dpo.beta) ** 2
                slope += share * 2 * sign * (sign * h - 0.5 / dpo.beta)
            else:
                loss += share * np.log1p(np.exp(-sign * dpo.beta * h))
                slope -= share * sign * dpo.beta / (1 + np.exp(sign * dpo.beta * h))
        loss -= dpo.sft_weight * log_p[row, first:last].mean()
        gradient[row, first:last] += slope / sizes[0] - dpo.sft_weight / (last - first)
        gradient[row, begin:end] -= slope / sizes[1]
    return loss / count, gradient / count


LOSSES = [
    Dpo(),
    Dpo(beta=0.5, label_smoothing=0.2),
    Dpo(beta=0.3, sft_weight=0.7),
    Dpo(kind="hinge", beta=0.1, label_smoothing=0.1),
    Dpo(kind="ipo", beta=0.2),
    Dpo(kind="ipo_mean", beta=0.2),
    Dpo(kind="ipo_mean", beta=0.1, label_smoothing=0.1),
    Dpo(kind="ipo", beta=0.1, label_smoothing=0.1),
    Dpo(kind="robust", beta=0.3, label_smoothing=0.2),
]


@pytest.mark.parametrize("dpo", LOSSES, ids=str)
def test_the_loss_and_its_gradient_equal_the_formula_in_float64(dpo):
    rng = np.random.default_rng(1)
    batch, answers = rows_of_pairs(rng)
    log_p = -rng.uniform(0.1, 4, batch["targets"].shape)
    want, want_gradient = plain_loss(log_p, answers, dpo)

    def mean(log_p):
        loss, totals = dpo.totals(log_p, batch, 2)
        return loss / totals.weight, totals

    (got, totals), gradient = jax.value_and_grad(mean, has_aux=True)(jnp.asarray(log_p, jnp.float32))
    assert float(got) == pytest.approx(want, rel=1e-5)
    np.testing.assert_allclose(gradient, want_gradient, atol=1e-5 * np.abs(want_gradient).max())
    ratios = np.array([log_p[row, begin:end].sum() - ref for row, begin, end, ref in answers]).reshape(-1, 2)
    assert float(totals.weight) == 5 and float(totals.tokens) == batch["weights"].sum()
    want_values = {
        "reward_chosen": dpo.beta * ratios[:, 0],
        "reward_rejected": dpo.beta * ratios[:, 1],
        "reward_margin": dpo.beta * (ratios[:, 0] - ratios[:, 1]),
        "reward_accuracy": ratios[:, 0] > ratios[:, 1],
    }
    for name, values in want_values.items():
        assert float(totals.values[name]) == pytest.approx(values.sum(), rel=1e-4), name
