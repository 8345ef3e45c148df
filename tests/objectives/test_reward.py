"""Reward models: the loss and its gradient against a formula in float64."""

from __future__ import annotations

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.models.api import DecoderConfig
from capibara.objectives.reward import Reward

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from pairs_case import log_sigmoid, rows_of_pairs  # noqa: E402


@pytest.mark.parametrize("centering", [0.0, 0.1])
def test_the_loss_and_its_gradient_equal_the_formula(centering):
    """Scores are read at the last position of each answer alone, whatever the order of a row's positions."""
    rng, margins = np.random.default_rng(0), np.array([0.0, 1.5, -0.5, 0.25, 2.0])
    batch, answers = rows_of_pairs(rng)
    segments, last = batch["segment_ids"], []
    batch["positions"], batch["labels"] = np.zeros_like(segments), np.zeros_like(batch["weights"])
    for row, begin, *_ in answers:
        (at,) = np.nonzero(segments[row] == segments[row, begin])
        batch["positions"][row, at] = np.arange(at.size)
        last.append((row, at[-1]))
    for (row, begin, *_), margin in zip(answers[::2], margins, strict=True):
        batch["labels"][row, begin] = margin
    scores = rng.normal(size=segments.shape)
    chosen, rejected = np.array([scores[at] for at in last]).reshape(-1, 2).T
    want = np.mean(-log_sigmoid(chosen - rejected - margins) + centering * (chosen + rejected) ** 2)
    slope = np.exp(log_sigmoid(rejected - chosen + margins))
    both, want_gradient = 2 * centering * (chosen + rejected), np.zeros_like(scores)
    for (first, second), c, r in zip(zip(last[::2], last[1::2]), both - slope, both + slope, strict=True):
        want_gradient[first], want_gradient[second] = c / 5, r / 5

    def mean(scores, batch):
        loss, totals = Reward(centering=centering).totals(scores, batch, 2)
        return loss / totals.weight, totals

    (got, totals), gradient = jax.value_and_grad(mean, has_aux=True)(jnp.asarray(scores, jnp.float32), batch)
    assert float(got) == pytest.approx(want, rel=1e-5) and float(totals.weight) == 5
    np.testing.assert_allclose(gradient, want_gradient, atol=1e-6)
    assert float(totals.values["reward_accuracy"]) == (chosen > rejected).sum()
    assert float(totals.values["reward_margin"]) == pytest.approx((chosen - rejected).sum(), rel=1e-5)
    order = np.argsort(np.random.default_rng(3).random(segments.shape[1]))
    moved = {name: value[:, order] for name, value in batch.items()}
    again, _ = mean(jnp.asarray(scores[:, order], jnp.float32), moved)
    assert float(again) == pytest.approx(want, rel=1e-5)


def test_bad_options_are_named():
    with pytest.raises(UserError, match="Reward.centering is -1.0, must be finite and at least 0"):
        Reward(centering=-1.0)
    sizes = dict(vocab_size=384, embed_dim=32, num_layers=1, num_heads=2, mlp_dim=64)
    with pytest.raises(UserError, match="DecoderConfig.head is 'tied': set it to 'score'"):
        Reward().check_model(DecoderConfig(**sizes))
    with pytest.raises(UserError, match="DecoderConfig.head is 'score', which causal decoders without head_bias"):
        DecoderConfig(**sizes, head="score", head_bias="vocab")
