"""The search of an index's settings on vectors that compress well."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.retrieval.quantizers import Codes, Quantizer, balanced_rotation, divisors, library
from capibara.retrieval.tuning import Goal, Tuner

GOAL = Goal(recall=0.9, k=10, ms=1000.0, train_vectors=2000, seed=0)


@pytest.fixture(scope="module")
def vectors():
    """1,500 vectors of 32 dimensions, almost all of whose variance is in 8 of them, rotated; and 200 queries."""
    rng = np.random.default_rng(0)
    rotation = np.linalg.qr(rng.normal(size=(32, 32)))[0]
    scales = np.where(np.arange(32) < 8, 1.0, 0.02)
    drawn = (rng.normal(size=(1700, 32)) * scales) @ rotation
    drawn = (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float32)
    return drawn[:1500], drawn[1500:]


def test_the_smallest_index_that_reaches_the_goal_is_chosen(vectors):
    tuned = Tuner(*vectors, GOAL, lambda *_: None).run()
    within = [trial for trial in tuned.trials if trial.recall - trial.recall_error >= GOAL.recall]
    assert tuned.chosen.bytes == min(trial.bytes for trial in within) == len(library().serialize_index(tuned.index))
    assert tuned.chosen.bytes < 1500 * 4 * 32 / 4
    found = tuned.chosen.quantizer.nearest(tuned.index, vectors[1][100:], 10)[1]
    exact = np.argsort(-vectors[1][100:] @ vectors[0].T)[:, :10]
    recall = np.mean([len({*a} & {*b}) / 10 for a, b in zip(found, exact)])
    assert recall == pytest.approx(tuned.chosen.held_out_recall, abs=1e-9) and recall > 0.88
    flat = next(trial for trial in tuned.trials if trial.quantizer.codes is Codes.FLOAT32)
    assert flat.recall == flat.held_out_recall == 1.0


def test_a_goal_that_nothing_reaches_is_refused(vectors):
    with pytest.raises(
        UserError, match=r"no index reaches IndexPreparation.recall \(0.9\) within IndexPreparation.ms \(1e-06\)"
    ):
        Tuner(*vectors, dataclasses.replace(GOAL, ms=1e-6), lambda *_: None).run()


@pytest.mark.parametrize("quantizer", [Quantizer(pq_bytes=8, opq=True), Quantizer(pq_bytes=4, refined=Codes.INT8)])
def test_rotated_and_refined_codes_find_their_vectors(vectors, quantizer):
    index = quantizer.trained(vectors[0], 0)
    index.add(vectors[0])
    quantizer.searched(index, 32)
    assert np.mean(index.search(vectors[0][:500], 1)[1][:, 0] == np.arange(500)) > 0.9


def test_the_nearest_are_compared_by_what_their_codes_stand_for(vectors):
    quantizer, queries = Quantizer(pq_bytes=16), vectors[1]
    index = quantizer.trained(vectors[0], 0)
    index.add(vectors[0])
    exact = np.argsort(-queries @ vectors[0].T)[:, :10]
    recall = lambda found: np.mean([len({*a} & {*b}) / 10 for a, b in zip(found, exact)])  # noqa: E731
    scores, found = quantizer.nearest(index, queries, 10)
    assert recall(found) > recall(index.search(queries, 10)[1]) + 0.005
    assert found.shape == scores.shape == (200, 10) and (np.diff(scores) <= 0).all() and scores.max() <= 1.001


def test_a_rotation_deals_the_variance_to_all_parts():
    scales = np.linspace(3, 0.1, 32)
    drawn = (np.random.default_rng(0).normal(size=(4000, 32)) * scales).astype(np.float32)
    rotation = balanced_rotation(drawn, 8)
    assert np.allclose(rotation @ rotation.T, np.eye(32), atol=1e-4)
    products = np.log((drawn @ rotation.T).var(0)).reshape(8, 4).sum(1)
    plain = np.log(drawn.var(0)).reshape(8, 4).sum(1)
    assert np.ptp(products) < np.ptp(plain) / 5


def test_lists_are_searched_with_rising_effort(vectors):
    quantizer = Quantizer(pq_bytes=16, lists=16)
    index = quantizer.trained(vectors[0], 0)
    index.add(vectors[0])
    shares = []
    for effort in quantizer.efforts:
        quantizer.searched(index, effort)
        shares.append(np.mean(index.search(vectors[0][:100], 1)[1][:, 0] == np.arange(100)))
    assert quantizer.efforts == (1, 2, 4, 8, 16) and shares[-1] >= shares[0] and shares[-1] > 0.9


def test_codes_have_bytes_for_as_many_dimensions_each():
    assert divisors(576) == [18, 24, 32, 36, 48, 64, 72, 96, 144, 192, 288]
    assert divisors(7) == [1] and divisors(37) == []


def test_equal_seeds_give_equal_indices(vectors):
    made = [
        library().serialize_index(Quantizer(pq_bytes=8, opq=True).trained(vectors[0], 3)).tobytes() for _ in range(2)
    ]
    assert made[0] == made[1]
