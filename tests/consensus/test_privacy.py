"""Differential privacy: the ledger is the published one, the budget holds, and the noise is what it counts."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.consensus import privacy
from capibara.consensus.privacy import Accounting, Privacy, epsilon
from capibara.core.types import UserError

ABADI = dict(noise_multiplier=4.0, sampling=0.01, releases=10_000, delta=1e-5)


def test_the_moments_accountant_is_that_of_abadi_2016():
    """Their section 5.1: q = 0.01, sigma = 4, 10,000 steps and delta = 1e-5 are epsilon 1.26."""
    found = {how: epsilon(**ABADI, accounting=how) for how in Accounting}
    assert found[Accounting.MOMENTS] == pytest.approx(1.26, abs=0.005)
    assert found[Accounting.PLD] < found[Accounting.RDP] < found[Accounting.MOMENTS]
    assert found[Accounting.RDP] == pytest.approx(1.035, abs=0.005)
    assert found[Accounting.PLD] == pytest.approx(0.947, abs=0.005)


@pytest.mark.parametrize("sigma", [0.7, 2.0, 30.0])
def test_one_gaussian_has_the_epsilon_of_its_formula(sigma):
    """Balle & Wang 2018 (arXiv:1805.06530), theorem 8: delta of a Gaussian mechanism with sensitivity 1."""
    from scipy.stats import norm

    found = epsilon(sigma, 1.0, 1, 1e-5)
    delta = norm.cdf(0.5 / sigma - found * sigma) - np.exp(found) * norm.cdf(-0.5 / sigma - found * sigma)
    assert delta == pytest.approx(1e-5, rel=0.02) or found == 0


@pytest.mark.parametrize("releases", [1, 7, 100])
def test_releases_without_sampling_cost_what_the_library_composes(releases):
    """Which composes distributions of the privacy loss numerically."""
    from dp_accounting import GaussianDpEvent
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant()
    accountant.compose(GaussianDpEvent(5.0), releases)
    assert epsilon(5.0, 1.0, releases, 1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)


def test_much_noise_costs_nothing_and_little_noise_is_counted_at_once():
    assert epsilon(1e6, 1.0, 1, 1e-5) == 0.0
    assert epsilon(2.0, 1.0, 1 << 20, 1e-5) == pytest.approx((1 << 20) / 8, rel=0.02)


@pytest.mark.parametrize("how", Accounting)
def test_a_budget_of_one_stops_where_it_should(how):
    promise = Privacy(clip_norm=1.0, noise_multiplier=4.0, budget=1.0, accounting=how)
    most = promise.releases_within(0.01)
    assert promise.epsilon(most, 0.01) <= 1.0 < promise.epsilon(most + 1, 0.01)
    assert (
        {"moments": 4000, "rdp": 8000, "pld": 10_000}[how] < most < {"moments": 8000, "rdp": 10_000, "pld": 12_000}[how]
    )
    assert promise.epsilon(0) == 0.0


def test_a_budget_that_the_first_round_exceeds_is_one_line():
    promise = Privacy(clip_norm=1.0, noise_multiplier=0.5, budget=1.0)
    with pytest.raises(
        UserError, match=r"Privacy.budget is 1, and the first round costs epsilon \d+.*raise it, or noise_m"
    ):
        promise.releases_within()


def test_without_a_budget_there_is_no_end(monkeypatch):
    monkeypatch.setattr(privacy, "MOST_RELEASES", 64)
    unlimited = Privacy(clip_norm=1.0, noise_multiplier=1.0, accounting="rdp")
    assert unlimited.releases_within() == 64


START = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.zeros(4)}


def models(scales):
    """Nodes whose updates have these norms."""
    rng = np.random.default_rng(0)
    updates = [{name: rng.standard_normal(x.shape) for name, x in START.items()} for _ in scales]
    norms = [np.sqrt(sum(np.sum(np.square(x)) for x in one.values())) for one in updates]
    updates = [jax.tree.map(lambda x: x * s / n, one) for one, s, n in zip(updates, scales, norms, strict=True)]
    stacked = {name: np.stack([START[name] + one[name] for one in updates]).astype(np.float32) for name in START}
    return updates, stacked


def test_updates_are_clipped_and_averaged_over_all_nodes_of_the_group():
    updates, stacked = models([0.5, 1.0, 8.0])
    silent = Privacy(clip_norm=1.0, noise_multiplier=1e-9)
    found = jax.jit(silent.noisy_mean, static_argnums=2)(START, stacked, 4, jax.random.key(0))
    for name in START:
        want = START[name] + (updates[0][name] + updates[1][name] + updates[2][name] / 8) / 4
        np.testing.assert_allclose(found[name], want, atol=1e-6)


def test_what_is_not_finite_counts_as_no_update():
    updates, stacked = models([0.5, 1.0, 1.0])
    stacked["w"][1, 0, 0] = np.nan
    stacked["b"][2, :] = np.inf
    found = Privacy(clip_norm=1.0, noise_multiplier=1e-9).noisy_mean(START, stacked, 3, jax.random.key(0))
    for name in START:
        np.testing.assert_allclose(found[name], START[name] + updates[0][name] / 3, atol=1e-6)


def test_the_noise_has_the_standard_deviation_that_is_counted():
    start = {"a": jnp.zeros(20_000), "b": jnp.zeros((50, 400))}
    nobody = {name: jnp.zeros((1, *x.shape)) for name, x in start.items()}
    promise = Privacy(clip_norm=0.5, noise_multiplier=3.0)
    one, other = (promise.noisy_mean(start, nobody, 5, jax.random.key(seed)) for seed in (0, 1))
    for name in start:
        assert np.std(one[name]) == pytest.approx(3.0 * 0.5 / 5, rel=0.02)
        assert abs(np.corrcoef(np.ravel(one[name]), np.ravel(other[name]))[0, 1]) < 0.05
    assert abs(np.corrcoef(np.ravel(one["a"]), np.ravel(one["b"]))[0, 1]) < 0.05


def test_noise_that_drowns_the_signal_is_warned_of_with_numbers():
    promise = Privacy(clip_norm=2.0, noise_multiplier=1.0)
    line = promise.warning(units=4, params=1_000_000)
    assert "the norm 500, 250 times the largest update's (2)" in line and "with 1,000 nodes" in line
    assert promise.warning(units=1000, params=1_000_000) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"clip_norm": 0.0},
        {"noise_multiplier": -1.0},
        {"noise_multiplier": float("inf")},
        {"delta": 1.0},
        {"budget": 0.0},
    ],
)
def test_bad_options_are_one_line(fields):
    (name,) = fields
    with pytest.raises(UserError, match=f"Privacy.{name} is"):
        Privacy(**{"clip_norm": 1.0, "noise_multiplier": 1.0} | fields)


def test_the_accounting_may_be_named_and_must_be_known():
    assert epsilon(**ABADI, accounting="moments") == epsilon(**ABADI, accounting=Accounting.MOMENTS)
    with pytest.raises(UserError, match="accounting is 'foo', must be one of moments, rdp, pld: try 'pld'"):
        epsilon(**ABADI, accounting="foo")


def test_the_noise_has_tails_beyond_those_of_float32():
    """A draw of float32 is one of 2 ** 23 numbers, the largest 5.42; a sum of four has no such grid."""
    noise = np.asarray(jax.jit(lambda key: privacy.normal(key, (1 << 22,)))(jax.random.key(0)))
    assert np.std(noise) == pytest.approx(1.0, abs=2e-3) and abs(np.mean(noise)) < 2e-3
    assert len(np.unique(noise)) > 0.9 * len(noise)  # float32 draws have a coarser grid
    assert np.mean(np.abs(noise) > 3) == pytest.approx(0.0027, rel=0.05)


@pytest.mark.parametrize("fields", [{"noise_multiplier": 1e200}, {"clip_norm": 1e-300}, {"noise_multiplier": 1e-160}])
def test_numbers_that_no_float_holds_are_refused(fields):
    with pytest.raises(UserError, match="must be from 1e-9 to 1e9"):
        Privacy(**{"clip_norm": 1.0, "noise_multiplier": 1.0} | fields)


@pytest.mark.parametrize("accounting", Accounting)
@pytest.mark.parametrize("sampling", [1.0, 0.01])
def test_the_ledger_at_its_edges(accounting, sampling):
    assert epsilon(1.0, sampling, 0, 1e-5, accounting) == 0.0 and epsilon(1.0, 0.0, 7, 1e-5, accounting) == 0.0
    assert (
        epsilon(1.0, sampling, 1, 0.0, accounting) == math.inf
        and epsilon(0.0, sampling, 1, 1e-5, accounting) == math.inf
    )
    assert epsilon(1.0, sampling, 1, 1.0, accounting) == 0.0 and epsilon(0.0, sampling, 0, 0.0, accounting) == 0.0


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("noise_multiplier", (-1.0, 1.0, 1, 1e-5)),
        ("noise_multiplier", (math.inf, 1.0, 1, 1e-5)),
        ("noise_multiplier", (math.nan, 1.0, 1, 1e-5)),
        ("sampling", (1.0, 1.5, 1, 1e-5)),
        ("sampling", (1.0, math.nan, 1, 1e-5)),
        ("releases", (1.0, 1.0, -1, 1e-5)),
        ("releases", (1.0, 1.0, 1.5, 1e-5)),
        ("delta", (1.0, 1.0, 1, -1e-5)),
        ("delta", (1.0, 1.0, 1, 2.0)),
    ],
)
def test_what_no_ledger_has_is_refused(name, arguments):
    with pytest.raises(UserError, match=f"{name} is .*, must be "):
        epsilon(*arguments)
