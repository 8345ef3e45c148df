"""Experts that are merged: copies in any order of hidden units become the one that they are copies of."""

from __future__ import annotations

import pathlib
import sys

import numpy as np
import pytest

from capibara.interop.experts.merging import MergeExperts, aligned, clusters
from capibara.interop.experts.operation import HIDDEN
from capibara.models.api import DecoderConfig, Moe

sys.path.append(str(pathlib.Path(__file__).resolve().parent))
import layer  # noqa: E402

MOE = Moe(num_experts=4, top_k=1, bias="all")


def permuted(whole, expert, source, seed=3):
    """Makes an expert a copy of another, its hidden units in another order."""
    order = np.random.default_rng(seed).permutation(layer.F)
    for name, value in whole.items():
        value[expert] = np.take(value[source], order, HIDDEN[name] - 1) if name in HIDDEN else value[source]


def test_copies_with_other_orders_of_hidden_units_become_one():
    """With one expert per token a token of either copy gets what it had."""
    whole, x = layer.weights(MOE), layer.tokens()
    permuted(whole, 2, 0)
    place = layer.place(MOE, [5, 2, 1, 3], outputs=np.array([[0.0, 0], [9, 0], [0, 0.1], [0, 9]]))
    found, made_of = MergeExperts(experts=3).layer(whole, place)
    assert made_of == [[0, 2], [1], [3]]
    merged = Moe(num_experts=3, top_k=1, bias="all")
    np.testing.assert_allclose(layer.output(found, merged, x), layer.output(whole, MOE, x), rtol=1e-5, atol=1e-5)
    plain, _ = MergeExperts(experts=3, alignment="none").layer(whole, place)
    assert np.abs(layer.output(plain, merged, x) - layer.output(whole, MOE, x)).max() > 0.1


def test_weights_are_averaged_by_use():
    whole = layer.weights(MOE)
    place = layer.place(MOE, [6, 0, 2, 0], outputs=np.array([[0.0, 0], [9, 0], [0, 0.1], [9, 0.1]]))
    found, made_of = MergeExperts(experts=2, alignment="none").layer(whole, place)
    assert made_of == [[0, 2], [1, 3]]
    for name, value in whole.items():
        np.testing.assert_allclose(found[name][0], 0.75 * value[0] + 0.25 * value[2], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found[name][1], 0.5 * value[1] + 0.5 * value[3], rtol=1e-5, atol=1e-6)  # both unused


def test_an_aligned_expert_computes_the_same():
    whole, x = layer.weights(MOE), layer.tokens()
    ours, theirs = ({name: value[expert] for name, value in whole.items()} for expert in (0, 1))
    found = aligned(ours, theirs)
    np.testing.assert_allclose(layer.mlp(found, x), layer.mlp(ours, x), rtol=1e-5, atol=1e-5)
    assert not np.array_equal(found["up"], ours["up"]) and np.array_equal(found["down_bias"], ours["down_bias"])
    inner = lambda a: sum(float((a[name] * theirs[name]).sum()) for name in HIDDEN)  # noqa: E731
    assert inner(found) > inner(ours)


def test_the_router_can_say_what_is_alike():
    whole = layer.weights(MOE)
    whole["router"][3] = whole["router"][1] + 0.01
    _, made_of = MergeExperts(experts=3, similarity="router").layer(whole, layer.place(MOE))
    assert made_of == [[0], [1, 3], [2]]


def test_clusters_stay_in_their_groups():
    moe = Moe(num_experts=8, top_k=2, groups=2, top_groups=1)
    outputs = np.array([0, 1, 9, 9.5, 0, 1, 9, 9.5])[:, None]  # equal pairs in both groups
    _, made_of = MergeExperts(experts=4).layer(layer.weights(moe), layer.place(moe, outputs=outputs))
    assert made_of == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", [2, 4, 7])
def test_average_linkage_is_scipys(count, seed):
    from scipy.cluster.hierarchy import fcluster, linkage

    points = np.random.default_rng(seed).standard_normal((30, 3))
    labels = fcluster(linkage(points, "average"), count, "maxclust")
    want = sorted(sorted(np.flatnonzero(labels == label).tolist()) for label in set(labels))
    assert clusters(points, count) == want


def test_the_number_of_experts_is_checked_as_for_prune():
    config = DecoderConfig(vocab_size=8, embed_dim=8, num_layers=1, num_heads=1, mlp_dim=8, moe=MOE)
    assert MergeExperts(experts=2).result(config).moe.num_experts == 2
    with pytest.raises(ValueError, match="experts is 4, must be from 1 to 3 for merge"):
        MergeExperts(experts=4).result(config)
