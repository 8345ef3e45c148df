"""CPO, SimPO and AlphaPO: the loss and its gradient against formulas in float64."""

from __future__ import annotations

import pathlib
import re
import sys

import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.objectives.cpo import Cpo

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import pairs_case  # noqa: E402
from pairs_case import log_sigmoid  # noqa: E402


def nll(answers):
    """Per token of the batch, not of each answer."""
    return -answers.log_p[:, 0].sum() / answers.tokens[:, 0].sum()


def smoothed(loss, margin, smoothing):
    return (1 - smoothing) * loss(margin) + smoothing * loss(-margin)


def alpha_rewards(answers, alpha):
    return (1 - np.exp(answers.log_p / answers.tokens) ** -alpha) / alpha


FORMULAS = [
    (
        Cpo(beta=0.2, label_smoothing=0.1),
        lambda a: np.mean(smoothed(lambda h: -log_sigmoid(0.2 * h), a.log_p @ [1, -1], 0.1)) + nll(a),
    ),
    (
        Cpo(kind="hinge", beta=0.2, nll_weight=0.5),
        lambda a: np.mean(np.maximum(0, 1 - 0.2 * (a.log_p @ [1, -1]))) + 0.5 * nll(a),
    ),
    (Cpo(kind="ipo", beta=0.2), lambda a: np.mean(((a.log_p / a.tokens) @ [1, -1] - 2.5) ** 2) + nll(a)),
    (
        Cpo(kind="simpo", beta=2.0, gamma=1.0, nll_weight=0.0, label_smoothing=0.2),
        lambda a: np.mean(smoothed(lambda x: -log_sigmoid(x), 2 * (a.log_p / a.tokens) @ [1, -1] - 1, 0.2)),
    ),
    (
        Cpo(kind="simpo", beta=2.0, gamma=0.5, nll_weight=0.0, alpha=0.25),
        lambda a: np.mean(-log_sigmoid(2 * alpha_rewards(a, 0.25) @ [1, -1] - 0.5)),
    ),
]


@pytest.mark.parametrize(("loss", "formula"), FORMULAS, ids=[f"{x.kind}-{x.alpha}" for x, _ in FORMULAS])
def test_the_loss_and_its_gradient_equal_the_formula(loss, formula):
    metrics, answers = pairs_case.check(loss, formula)
    assert metrics["pairs"] == 5 and metrics["nll_chosen"] == pytest.approx(nll(answers), rel=1e-5)
    if not loss.alpha:
        log_p = answers.log_p / (answers.tokens if loss.kind in ("ipo", "simpo") else 1)
        assert metrics["reward_margin"] == pytest.approx(loss.beta * np.mean(log_p @ [1, -1]), rel=1e-4)
        assert metrics["reward_accuracy"] == pytest.approx(np.mean(log_p @ [1, -1] > 0))


def test_rewards_of_improbable_answers_are_finite():
    batch, _ = pairs_case.rows_of_pairs(np.random.default_rng(1))
    loss, _ = Cpo(alpha=1.0).totals(np.full(batch["weights"].shape, -200.0, np.float32), batch, 2)
    assert np.isfinite(loss)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0.0}, "Cpo.beta is 0.0, must be above 0"),
        ({"label_smoothing": 0.5}, "Cpo.label_smoothing is 0.5, must be from 0 to below 0.5"),
        ({"gamma": -1.0}, "Cpo.gamma is -1.0, must be finite and at least 0"),
        ({"nll_weight": float("nan")}, "Cpo.nll_weight is nan"),
        ({"alpha": float("inf")}, "Cpo.alpha is inf"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(UserError, match=re.escape(message)):
        Cpo(**options)
