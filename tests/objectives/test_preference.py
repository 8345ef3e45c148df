"""Preference pairs: the loss and its gradients against plain formulas."""

from __future__ import annotations

import functools
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara import sharding
from capibara.core.types import UserError
from capibara.kernels.cross_entropy import by_tokens
from capibara.kernels.cross_entropy.dispatch import token_log_probabilities
from capibara.models.api import DecoderConfig
from capibara.objectives.preference import Dpo
from capibara.sharding import Plan, Rules

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import pairs_case  # noqa: E402
from pairs_case import log_sigmoid, rows_of_pairs, sigmoid  # noqa: E402

MODEL = DecoderConfig(vocab_size=384, embed_dim=32, num_layers=1, num_heads=2, mlp_dim=64, dtype="float32")


# The loss.


@pytest.mark.parametrize("cap, temperature, usable", [(None, 1.0, None), (5.0, 1.0, 40), (5.0, 0.7, 33)])
@pytest.mark.parametrize("blocks", [1, 4])
def test_log_probabilities_and_their_gradients_equal_those_of_whole_logits(
    cap, temperature, usable, blocks, monkeypatch
):
    monkeypatch.setattr(by_tokens, "BLOCK_BYTES", {"cpu": 3 * 8 * 40 * 4 // blocks})
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


@pytest.mark.parametrize("dpo", LOSSES, ids=lambda x: f"{x.kind}-{x.beta}-{x.label_smoothing}-{x.sft_weight}")
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


# Kinds and divergences that the formula above does not have: the loss of the log ratios c of chosen and r of rejected answers.
def of_sorted(left, right, beta, smoothing):
    margin = np.sort(left) - np.sort(right)
    return -(1 - smoothing) * log_sigmoid(beta * margin) - smoothing * log_sigmoid(-beta * margin)


def exo(x, smoothing):
    return sigmoid(x) * (log_sigmoid(x) - np.log(1 - smoothing)) + sigmoid(-x) * (log_sigmoid(-x) - np.log(smoothing))


FORMULAS = [
    (
        Dpo(kind="sigmoid_norm", beta=2.0, label_smoothing=0.1),
        lambda c, r, a: (
            -0.9 * log_sigmoid(2 * (c / a.tokens[:, 0] - r / a.tokens[:, 1]))
            - 0.1 * log_sigmoid(-2 * (c / a.tokens[:, 0] - r / a.tokens[:, 1]))
        ),
    ),
    (Dpo(kind="exo_pair", beta=0.2, label_smoothing=0.01), lambda c, r, a: exo(0.2 * (c - r), 0.01)),
    (
        Dpo(kind="discopop", beta=0.1, discopop_tau=0.5),
        lambda c, r, a: (
            -log_sigmoid(0.1 * (c - r)) * sigmoid(-0.2 * (c - r)) + np.exp(-0.1 * (c - r)) * sigmoid(0.2 * (c - r))
        ),
    ),
    (
        Dpo(kind="aot", beta=0.2, label_smoothing=0.2),
        lambda c, r, a: of_sorted(a.log_p @ [1, -1], a.reference @ [1, -1], 0.2, 0.2),
    ),
    (Dpo(kind="aot_unpaired", beta=0.2), lambda c, r, a: of_sorted(c, r, 0.2, 0.0)),
    (
        Dpo(kind="nca_pair", beta=0.2),
        lambda c, r, a: -log_sigmoid(0.2 * c) - 0.5 * log_sigmoid(-0.2 * c) - 0.5 * log_sigmoid(-0.2 * r),
    ),
    (Dpo(kind="bco_pair", beta=0.2), lambda c, r, a: -log_sigmoid(0.2 * c) - log_sigmoid(-0.2 * r)),
    (Dpo(kind="sppo_hard", beta=0.2), lambda c, r, a: (c - 2.5) ** 2 + (r + 2.5) ** 2),
    (Dpo(kind="apo_zero", beta=0.2), lambda c, r, a: 1 - sigmoid(0.2 * c) + sigmoid(0.2 * r)),
    (Dpo(kind="apo_down", beta=0.2), lambda c, r, a: sigmoid(0.2 * c) + 1 - sigmoid(0.2 * (c - r))),
    (
        Dpo(beta=1e-3, divergence="forward_kl"),
        lambda c, r, a: -log_sigmoid(1e-3 * (np.exp(-r) - np.exp(-c))),
    ),
    (
        Dpo(kind="hinge", beta=0.2, divergence="js_divergence"),
        lambda c, r, a: np.maximum(0, 1 - 0.2 * (log_sigmoid(c) - log_sigmoid(r))),
    ),
    (
        Dpo(kind="ipo", beta=0.2, divergence="alpha_divergence", alpha=0.75),
        lambda c, r, a: ((np.exp(-0.25 * c) - np.exp(-0.25 * r)) / -0.25 - 2.5) ** 2,
    ),
    (
        Dpo(beta=0.2, divergence="alpha_divergence", alpha=1.0, sft_weight=0.5),
        lambda c, r, a: -log_sigmoid(0.2 * (c - r)) - 0.5 * a.log_p[:, 0] / a.tokens[:, 0],
    ),
]


@pytest.mark.parametrize(("dpo", "formula"), FORMULAS, ids=[f"{x.kind}-{x.divergence}-{x.alpha}" for x, _ in FORMULAS])
def test_each_kind_and_divergence_has_the_loss_and_gradient_of_its_paper(dpo, formula):
    # Answers are about as probable as in the reference, so that no exponential is far from 1.
    ratios = lambda answers: (answers.log_p - answers.reference).T  # noqa: E731
    pairs_case.check(dpo, lambda answers: np.mean(formula(*ratios(answers), answers)), scale=1.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "exo_pair"}, "Dpo.label_smoothing is 0, and must be above 0 for Dpo.kind 'exo_pair'"),
        ({"kind": "nca_pair", "label_smoothing": 0.1}, "Dpo.label_smoothing is 0.1, and Dpo.kind 'nca_pair' has none"),
        ({"kind": "discopop", "label_smoothing": 0.1}, "'discopop' has none"),
        ({"kind": "discopop", "discopop_tau": 0.0}, "Dpo.discopop_tau is 0.0, must be above 0"),
        ({"kind": "aot", "divergence": "forward_kl"}, "Dpo.divergence is 'forward_kl', and Dpo.kind 'aot' is of"),
        ({"kind": "apo_zero", "divergence": "js_divergence"}, "Dpo.kind 'apo_zero' is of 'reverse_kl' alone"),
        ({"divergence": "alpha_divergence", "alpha": float("inf")}, "Dpo.alpha is inf"),
    ],
)
def test_options_that_a_kind_does_not_have_are_refused(options, message):
    with pytest.raises(UserError, match=re.escape(message)):
        Dpo(**options)
