"""Rows of pairs with random log-probabilities, and the check of a loss of theirs against a formula in float64."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest


@dataclasses.dataclass(frozen=True)
class Answers:
    """Of each pair, [pairs, 2], float64: log-probability, that of the reference, tokens, and the same of whole conversations."""

    log_p: np.ndarray
    reference: np.ndarray
    tokens: np.ndarray
    whole_log_p: np.ndarray
    whole_tokens: np.ndarray


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


def summed(log_p, batch, answers):
    """The sums over answers of a matrix of log-probabilities."""
    reference, segments = [ref for *_, ref in answers], batch["segment_ids"]
    columns = [reference]
    for weights in (batch["weights"], segments > 0):
        sums = [
            [((x * weights)[row])[segments[row] == segments[row, begin]].sum() for row, begin, *_ in answers]
            for x in (log_p, np.ones_like(log_p))
        ]
        columns += sums
    reference, log_p, tokens, whole_log_p, whole_tokens = (np.array(x, np.float64).reshape(-1, 2) for x in columns)
    return Answers(log_p, reference, tokens, whole_log_p, whole_tokens)


def check(loss, formula, *, scale=4.0, labels=None):
    """The loss and its gradient are those of formula(Answers) -> the loss, by central differences in float64.

    Returns the means of the metrics, and the answers.
    """
    batch, answers = rows_of_pairs(np.random.default_rng(1))
    log_p = -np.random.default_rng(2).uniform(0.1, scale, batch["targets"].shape)
    if labels is not None:
        batch["labels"] = np.zeros_like(batch["weights"])
        for (row, begin, *_), label in zip(answers[::2], labels, strict=True):
            batch["labels"][row, begin] = label

    def mean(log_p):
        value, totals = loss.totals(log_p, batch, 2)
        return value / totals.weight, totals

    (got, totals), gradient = jax.value_and_grad(mean, has_aux=True)(jnp.asarray(log_p, jnp.float32))
    assert float(got) == pytest.approx(formula(summed(log_p, batch, answers)), rel=1e-5, abs=1e-6)
    want, step = np.zeros_like(log_p), 1e-5
    for at in np.ndindex(log_p.shape):
        values = []
        for sign in (1, -1):
            moved = log_p.copy()
            moved[at] += sign * step
            values.append(formula(summed(moved, batch, answers)))
        want[at] = (values[0] - values[1]) / (2 * step)
    np.testing.assert_allclose(gradient, want, atol=2e-5 * np.abs(want).max())
    metrics = {name: float(value) for name, value in loss.metrics(totals, totals.weight).items()}
    return metrics, summed(log_p, batch, answers)


def log_sigmoid(x):
    return -np.log1p(np.exp(-x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))
