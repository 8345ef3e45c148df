"""ORPO: the loss and its gradient against a formula in float64."""

from __future__ import annotations

import pathlib
import sys

import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.objectives.orpo import Orpo

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import pairs_case  # noqa: E402
from pairs_case import log_sigmoid  # noqa: E402


def odds_ratio(answers):
    p = np.exp(answers.log_p / answers.tokens)
    return np.log(p / (1 - p)) @ [1, -1]


def test_the_loss_and_its_gradient_equal_the_formula():
    """The likelihood is of chosen conversations with their prompts, per token of the batch."""
    nll = lambda a: -a.whole_log_p[:, 0].sum() / a.whole_tokens[:, 0].sum()  # noqa: E731
    metrics, answers = pairs_case.check(Orpo(beta=0.5), lambda a: nll(a) - 0.5 * np.mean(log_sigmoid(odds_ratio(a))))
    assert (answers.whole_tokens > answers.tokens).all()
    assert metrics["nll_chosen"] == pytest.approx(nll(answers), rel=1e-5)
    assert metrics["log_odds_ratio"] == pytest.approx(np.mean(odds_ratio(answers)), rel=1e-4)


def test_the_odds_of_a_certain_answer_are_finite():
    batch, _ = pairs_case.rows_of_pairs(np.random.default_rng(1))
    loss, totals = Orpo().totals(np.zeros(batch["weights"].shape, np.float32), batch, 2)
    assert np.isfinite(loss) and np.isfinite(totals.values["log_odds_ratio"])


def test_bad_options_are_named():
    with pytest.raises(UserError, match="Orpo.beta is -1.0, must be finite and at least 0"):
        Orpo(beta=-1.0)
