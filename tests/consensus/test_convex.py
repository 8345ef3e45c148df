"""Weights on the simplex: optima that are known, certificates that hold, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

from capibara.consensus.convex import ConvexMerge, in_probability_space, in_weight_space, project
from capibara.core.types import UserError


def predictions(models=4, tokens=200, seed=0):
    draw = np.random.default_rng(seed)
    return np.log(draw.beta(1.0, 3.0, size=(models, tokens)) + 1e-9)


def objective(log_p, weights, strength=0.0):
    n = len(weights)
    return -np.log(weights @ np.exp(log_p)).mean() + strength * n / 2 * np.square(weights - 1 / n).sum()


@pytest.mark.parametrize("strength", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_the_gap_bounds_what_any_other_weights_would_gain(strength, seed):
    log_p = predictions(seed=seed)
    found = in_probability_space(log_p, ConvexMerge(lambda_reg=strength))
    assert found.converged and 0 <= found.gap <= 1e-6
    assert math.isclose(found.weights.sum(), 1) and (found.weights >= 0).all()
    assert math.isclose(found.objective, objective(log_p, found.weights, strength), rel_tol=1e-12)
    draw = np.random.default_rng(9)
    others = [
        *np.eye(4),
        *draw.dirichlet(np.ones(4), 200),
        *(project(found.weights + 0.01 * draw.normal(size=(50, 4)).T[:, 0]),),
    ]
    assert all(objective(log_p, other, strength) >= found.objective - found.gap - 1e-12 for other in others)
    assert found.loss <= found.losses.min() or strength


def test_the_gap_holds_before_it_has_converged():
    log_p = predictions(8)
    least = in_probability_space(log_p, ConvexMerge(tolerance=1e-10)).objective
    for iterations in (1, 3, 10):
        found = in_probability_space(log_p, ConvexMerge(max_iterations=iterations))
        assert found.iterations == iterations and least - 1e-10 <= found.objective <= least + found.gap


def test_known_optima():
    halves = np.log(np.float64([[0.9, 0.9, 0.1, 0.1], [0.1, 0.1, 0.9, 0.9]]))
    np.testing.assert_allclose(in_probability_space(halves).weights, [0.5, 0.5], atol=1e-6)
    dominated = np.log(np.float64([[0.9, 0.8], [0.5, 0.4], [0.2, 0.3]]))
    np.testing.assert_array_equal(in_probability_space(dominated).weights, [1, 0, 0])
    thirds = np.log(np.float64([[0.999, 0.999, 0.001], [0.001, 0.001, 0.999]]))
    np.testing.assert_allclose(in_probability_space(thirds).weights, [2 / 3, 1 / 3], atol=2e-3)
    drawn = in_probability_space(dominated, ConvexMerge(lambda_reg=1e6)).weights
    np.testing.assert_allclose(drawn, np.full(3, 1 / 3), atol=1e-5)
    with np.errstate(divide="ignore"):
        certain = np.log(np.float64([[1, 0], [0, 1]]))
    np.testing.assert_allclose(in_probability_space(certain).weights, [0.5, 0.5], atol=1e-6)
    assert in_probability_space(np.log([[0.5, 0.25]])).weights == 1


def quadratic(target):
    """The loss of a merged linear model whose parameters are those of the corners."""
    return lambda w: (float(np.square(w - target).sum()), 2 * (w - target))


def test_in_weight_space_the_nearest_mixture_is_found():
    for target in (np.float64([0.2, 0.5, 0.3]), np.float64([1.4, 0.2, -0.9])):
        found = in_weight_space(quadratic(target), 3, ConvexMerge(tolerance=1e-12))
        np.testing.assert_allclose(found.weights, project(target), atol=1e-5)
        assert found.converged and found.gap is None and "a local optimum" in found.describe()


def test_in_weight_space_it_is_never_worse_than_the_best_model():
    def bumpy(w):  # best at the second corner; the slope leads away from it elsewhere
        value = -np.exp(-50 * np.square(w - np.eye(3)[1]).sum())
        return float(value), value * -100 * (w - np.eye(3)[1])

    found = in_weight_space(bumpy, 3)
    np.testing.assert_allclose(found.weights, [0, 1, 0], atol=1e-6)

    def broken(w):  # finite at the corners only
        return (float(w @ [3, 1, 2]) if w.max() == 1 else math.nan), np.zeros(3)

    found = in_weight_space(broken, 3)
    np.testing.assert_array_equal(found.weights, [0, 1, 0])
    assert found.loss == 1 and found.describe().endswith("model 1 alone 1.0000")


def test_a_projection_is_the_nearest_point():
    draw = np.random.default_rng(3)
    for x in draw.normal(size=(20, 5)):
        nearest = project(x)
        assert math.isclose(nearest.sum(), 1) and (nearest >= 0).all()
        assert all(
            np.square(x - y).sum() >= np.square(x - nearest).sum() - 1e-12 for y in draw.dirichlet(np.ones(5), 50)
        )


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda: ConvexMerge(lambda_reg=-1), "lambda_reg is -1, must be finite and not negative"),
        (lambda: ConvexMerge(max_iterations=0), "max_iterations is 0"),
        (lambda: ConvexMerge(tolerance=0), "tolerance is 0, must be positive"),
        (lambda: in_probability_space(np.zeros(3)), r"has the shape \(3,\), must be \[models, tokens\]"),
        (lambda: in_probability_space([[0.0, math.nan]]), "has nan for model 0, token 1"),
        (lambda: in_probability_space([[0.0], [0.5]]), "has 0.5 for model 1, token 0"),
        (lambda: in_probability_space([[0.0, -math.inf]] * 2), "no model gives token 1 any probability"),
        (lambda: in_weight_space(quadratic(0), 0), "num_models is 0"),
        (lambda: in_weight_space(lambda w: (math.nan, w), 2), "the loss is finite for none of the 2 models"),
    ],
)  # fmt: skip
def test_bad_input(call, said):
    with pytest.raises(UserError, match=said):
        call()
