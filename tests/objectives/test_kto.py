"""KTO: the loss and its gradient against formulas in float64, with answers of one label alone."""

from __future__ import annotations

import pathlib
import re
import sys

import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.objectives.kto import Kto

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import pairs_case  # noqa: E402
from pairs_case import sigmoid  # noqa: E402

LABELS = {"both": [1, 0, 1, 1, 0], "desirable": [1] * 5, "undesirable": [0] * 5}


def losses(answers, kto, labels, shift):
    rewards = kto.beta * (answers.log_p - answers.reference)[:, 0]
    desirable = kto.desirable_weight * (1 - sigmoid(rewards - kto.beta * shift))
    undesirable = kto.undesirable_weight * (1 - sigmoid(kto.beta * shift - rewards))
    return np.mean(np.where(np.array(labels) > 0, desirable, undesirable))


def divergence(answers):
    """The mean log ratio of the mismatched answers."""
    return np.mean((answers.log_p - answers.reference)[:, 1])


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
@pytest.mark.parametrize("scale", [0.2, 8.0])
def test_the_loss_and_its_gradient_equal_the_formula(labels, scale):
    """The divergence has no gradient, and is at least 0: it is above with a scale of 0.2 and below with 8."""
    kto, fixed = Kto(beta=0.1, desirable_weight=1.5, undesirable_weight=0.5), []

    def formula(answers):
        fixed.append(max(divergence(answers), 0.0))  # of the first call: the others differentiate
        return losses(answers, kto, labels, fixed[0])

    metrics, answers = pairs_case.check(kto, formula, scale=scale, labels=labels)
    assert (metrics["kl"] > 0) == (scale < 1) and metrics["kl"] == pytest.approx(fixed[0], rel=1e-4)
    rewards = kto.beta * (answers.log_p - answers.reference)[:, 0]
    for name, label in (("reward_desirable", 1), ("reward_undesirable", 0)):
        these = rewards[np.array(labels) == label]
        assert metrics[name] == pytest.approx(these.mean() if len(these) else 0.0, rel=1e-4), name


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
def test_bco_classifies_rewards_about_their_mean(labels):
    kto, fixed = Kto(kind="bco", beta=0.1, undesirable_weight=0.5), []

    def formula(answers):
        rewards = 0.1 * (answers.log_p - answers.reference)[:, 0]
        fixed.append(rewards.mean())  # of the first call: it has no gradient
        gains = np.where(np.array(labels) > 0, 1, -1) * (rewards - fixed[0])
        return np.mean(np.where(np.array(labels) > 0, 1.0, 0.5) * np.log1p(np.exp(-gains)))

    pairs_case.check(kto, formula, labels=labels)


def test_without_mismatched_answers_the_divergence_is_left_out():
    kto, labels = Kto(kind="apo_zero_unpaired", beta=0.1), LABELS["both"]
    metrics, _ = pairs_case.check(kto, lambda answers: losses(answers, kto, labels, 0.0), labels=labels)
    assert metrics["kl"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": -0.1}, "Kto.beta is -0.1, must be above 0"),
        ({"desirable_weight": -1.0}, "Kto.desirable_weight is -1.0, must be finite and at least 0"),
        ({"undesirable_weight": float("inf")}, "Kto.undesirable_weight is inf"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(UserError, match=re.escape(message)):
        Kto(**options)
