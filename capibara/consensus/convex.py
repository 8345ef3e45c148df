"""Convex merging: weights on the simplex that make a mixture of models best on validation data.

In probability space the mixture of predictions sum_i w_i p_i is evaluated: its loss is convex in w, and the Frank-Wolfe gap
bounds its distance from the optimum. In weight space the merged model sum_i w_i theta_i is evaluated: its loss is not
convex, and what is found is a local optimum.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from capibara.core.types import UserError

# (weights [n], float64) -> the loss of the merged model, and its gradient [n].
Loss = Callable[[np.ndarray], tuple[float, np.ndarray]]

_BISECTIONS = 60
_SHRINK, _GROW, _SMALLEST = 0.5, 2.0, 1e-12  # of a step in weight space
_SUFFICIENT = 1e-4  # of the predicted decrease (Armijo)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvexMerge:
    """How weights are found.

    Attributes:
      lambda_reg: coefficient of n / 2 * |w - 1/n|^2, which draws the weights to the uniform mean.
      max_iterations: steps at most.
      tolerance: the gap (probability space), or the decrease of the loss in a step (weight space), at which it ends.
    """

    lambda_reg: float = 0.0
    max_iterations: int = 1000
    tolerance: float = 1e-6

    def __post_init__(self) -> None:
        if not (math.isfinite(self.lambda_reg) and self.lambda_reg >= 0):
            raise UserError(f"lambda_reg is {self.lambda_reg}, must be finite and not negative: try 0.01")
        if self.max_iterations < 1:
            raise UserError(f"max_iterations is {self.max_iterations}, must be at least 1: try 1000")
        if not self.tolerance > 0:
            raise UserError(f"tolerance is {self.tolerance}, must be positive: try 1e-6")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture:
    """Weights, and what is known of them.

    Attributes:
      weights: float64 [n], not negative, sum 1.
      loss: of the mixture, without the regularisation.
      losses: of each model alone, [n].
      objective: loss and regularisation.
      gap: an upper bound of `objective` less the least possible one; None in weight space, where none is known.
      iterations: steps that were made.
      converged: whether `tolerance` was reached.
    """

    weights: np.ndarray
    loss: float
    losses: np.ndarray
    objective: float
    gap: float | None
    iterations: int
    converged: bool

    def describe(self) -> str:
        """One line: the losses, and how sure they are."""
        best = int(np.argmin(self.losses))
        sure = "a local optimum" if self.gap is None else f"at most {self.gap:.2g} above the optimum"
        ended = "" if self.converged else f", not converged in {self.iterations} iterations"
        shown = ", ".join(f"{weight:.3f}" for weight in self.weights)
        return f"loss {self.loss:.4f} with weights {shown} ({sure}{ended}); model {best} alone {self.losses[best]:.4f}"


def in_probability_space(log_probabilities: np.ndarray, config: ConvexMerge | None = None) -> Mixture:
    """Weights that minimise -mean_t log sum_i w_i p_i(t) + regularisation, by pairwise Frank-Wolfe.

    A step moves weight from the model with the largest gradient to that with the smallest, by exact line search
    (Lacoste-Julien & Jaggi 2015): it converges linearly where the loss is strongly convex.

    Args:
      log_probabilities: log p_i(t), [n, T]: what model i predicts for the true token t of the validation data; -inf is
        allowed where another model is finite.
      config: None: the defaults.

    Raises:
      UserError: no models or tokens, a value is NaN or above 0, or no model gives a token any probability.
    """
    config, log_p = config or ConvexMerge(), np.asarray(log_probabilities, np.float64)
    if log_p.ndim != 2 or not log_p.size:
        raise UserError(f"log_probabilities has the shape {log_p.shape}, must be [models, tokens] and not empty")
    if np.isnan(log_p).any() or (log_p > 1e-6).any():
        model, token = np.argwhere(np.isnan(log_p) | (log_p > 1e-6))[0]
        raise UserError(
            f"log_probabilities has {log_p[model, token]} for model {model}, token {token}, must be at most 0 and no NaN"
        )
    largest = log_p.max(axis=0)
    if np.isneginf(largest).any():
        token = int(np.flatnonzero(np.isneginf(largest))[0])
        raise UserError(f"no model gives token {token} any probability: drop it, or add a model that does")
    n = len(log_p)
    p, offset, strength = np.exp(log_p - largest), float(largest.mean()), config.lambda_reg * n
    weights = np.full(n, 1 / n)  # all positive: every token has a finite loss

    def gradient_of(mix_T: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return -(p / mix_T).mean(axis=1) + strength * (weights - 1 / n)

    gap, created = math.inf, 0
    for created in range(config.max_iterations + 1):
        mix_T = weights @ p
        gradient = gradient_of(mix_T, weights)
        toward = int(np.argmin(gradient))
        gap = float(weights @ gradient - gradient[toward])
        if gap <= config.tolerance or created == config.max_iterations:
            break
        away = int(np.argmax(np.where(weights > 0, gradient, -np.inf)))
        direction = np.zeros(n)
        direction[toward], direction[away] = 1.0, -1.0
        step = _line_search(p[toward] - p[away], mix_T, strength, weights, direction)
        left = 0.0 if step >= weights[away] else weights[away] - step
        weights = weights + step * direction
        weights[away] = left
    loss = -float(np.log(weights @ p).mean()) - offset
    penalty = strength / 2 * float(np.square(weights - 1 / n).sum())
    return Mixture(
        weights=weights,
        loss=loss,
        losses=-log_p.mean(axis=1),
        objective=loss + penalty,
        gap=max(gap, 0.0),
        iterations=created,
        converged=gap <= config.tolerance,
    )


def in_weight_space(loss: Loss, num_models: int, config: ConvexMerge | None = None) -> Mixture:
    """Weights of a local optimum of the merged model's loss, by projected gradient steps from the best known weights.

    It starts at the uniform mean or at the best single model, whichever is better, and never becomes worse.

    Args:
      loss: of the merged model, with its gradient by the weights.
      num_models: n.
      config: None: the defaults.

    Raises:
      UserError: no models, or the loss is finite for none of them.
    """
    config, n = config or ConvexMerge(), num_models
    if n < 1:
        raise UserError(f"num_models is {n}, must be at least 1: name some models")

    def objective(weights: np.ndarray) -> tuple[float, np.ndarray, float]:
        value, gradient = loss(weights)
        off = weights - 1 / n
        whole = value + config.lambda_reg * n / 2 * float(np.square(off).sum())
        return (
            whole if math.isfinite(whole) else math.inf,
            np.asarray(gradient, np.float64) + config.lambda_reg * n * off,
            value,
        )

    starts = [*np.eye(n), np.full(n, 1 / n)]
    result = [objective(start) for start in starts]
    losses = np.array([value for _, _, value in result[:n]])
    best = min(range(n + 1), key=lambda i: result[i][0])
    if math.isinf(result[best][0]):
        raise UserError(f"the loss is finite for none of the {n} models: check them")
    weights, (value, gradient, plain), step, created, converged = starts[best], result[best], 1.0, 0, False
    while created < config.max_iterations and not converged:
        created += 1
        candidate = project(weights - step * gradient)
        new = objective(candidate)
        while new[0] > value - _SUFFICIENT * float(gradient @ (weights - candidate)) and step > _SMALLEST:
            step *= _SHRINK
            candidate = project(weights - step * gradient)
            new = objective(candidate)
        if not new[0] < value:  # no step decreases it
            converged = True
            break
        converged = value - new[0] <= config.tolerance
        weights, (value, gradient, plain), step = candidate, new, step * _GROW
    return Mixture(
        weights=weights,
        loss=plain,
        losses=losses,
        objective=value,
        gap=None,
        iterations=created,
        converged=converged,
    )


def project(x: np.ndarray) -> np.ndarray:
    """The nearest point of the simplex, [n] (Duchi et al. 2008)."""
    descending = np.sort(x)[::-1]
    excess = (np.cumsum(descending) - 1) / np.arange(1, len(x) + 1)
    return np.maximum(x - excess[np.flatnonzero(descending > excess)[-1]], 0.0)


def _line_search(
    change_T: np.ndarray, mix_T: np.ndarray, strength: float, weights: np.ndarray, direction: np.ndarray
) -> float:
    """The step along a direction, up to the boundary, where the objective's derivative is 0."""
    off, longest = weights - 1 / len(weights), float(weights[direction < 0][0])

    def slope(step: float) -> float:
        mixed = mix_T + step * change_T
        if (mixed <= 0).any():  # a token would lose all probability
            return math.inf
        return -float((change_T / mixed).mean()) + strength * float(direction @ (off + step * direction))

    if slope(longest) <= 0:
        return longest
    low, high = 0.0, longest
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return low
