"""The losses on preferences and rewards, and their gradients, against torch in float64 (golden/make_preference.py)."""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.inference.sampling.sampling import Sampling
from capibara.kernels.cross_entropy.dispatch import token_log_probabilities
from capibara.objectives.preference import Dpo
from capibara.strategies.grpo import Grpo
from capibara.strategies.policy.clipped import Clipped
from capibara.strategies.rewards.functions import matches_pattern

GOLDEN = pathlib.Path(__file__).resolve().parent / "golden"
sys.path.insert(0, str(GOLDEN))

from preference_case import DPO, GRPO, NEW_TOKENS, case  # noqa: E402

ANSWERS = json.loads((GOLDEN / "preference.json").read_text())


def dpo_batch(given, other):
    """The reference's sums stand at one place of each answer."""
    reference = np.zeros_like(other)
    for segment in (1, 2):
        said = given["weights"] * (given["segments"] == segment)
        reference[np.arange(len(said)), said.argmax(1)] = (other * said).sum(1)
    return {"weights": given["weights"], "segment_ids": given["segments"], "reference": reference}


@pytest.mark.parametrize("name", [*DPO, *GRPO])
def test_losses_and_gradients_equal_those_of_torch(name):
    given, answer = case(), ANSWERS[name]
    log_p = lambda hidden, head: token_log_probabilities(hidden, head, given["targets"])  # noqa: E731
    other = np.asarray(log_p(given["other_hidden"], given["head"]))
    if name in DPO:
        loss, batch, options = Dpo(**DPO[name]), dpo_batch(given, other), (1,)
    else:
        sampling = Sampling(max_new_tokens=NEW_TOKENS, temperature=1.0)
        bounds = {key: value for key, value in GRPO[name].items() if key in ("low", "high")}
        more = {key: value for key, value in GRPO[name].items() if key not in bounds}
        surrogate, options = Clipped(**bounds), ()
        loss = Grpo(rewards=(matches_pattern,), sampling=sampling, updates=2, surrogate=surrogate, **more)
        batch = {"weights": given["weights"], "old": other, "drawn": other, "reference": other}
        batch["segment_ids"] = given["segments"]
        batch["advantages"] = given["weights"] * given["gains"][:, None]

    def mean(hidden, head):
        total, totals = loss.totals(log_p(hidden, head), batch, *options)
        return total / totals.weight

    value, gradients = jax.value_and_grad(mean, (0, 1))(jnp.asarray(given["hidden"]), jnp.asarray(given["head"]))
    assert float(value) == pytest.approx(answer["loss"], rel=2e-5)
    for got, part in zip(gradients, ("hidden", "head")):
        want = np.array(answer[part])
        np.testing.assert_allclose(np.reshape(got, want.shape), want, atol=2e-5 * np.abs(want).max())
