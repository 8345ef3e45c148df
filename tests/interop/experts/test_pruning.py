"""Experts that are removed: those that count least, with their rows of the router, in every group."""

from __future__ import annotations

import dataclasses
import pathlib
import sys

import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.interop.experts.pruning import PruneExperts
from capibara.models.api import DecoderConfig, Moe

sys.path.append(str(pathlib.Path(__file__).resolve().parent))
import layer  # noqa: E402

MOE = Moe(num_experts=6, top_k=2)
CONFIG = DecoderConfig(vocab_size=8, embed_dim=layer.D, num_layers=1, num_heads=1, mlp_dim=layer.F)


def config(moe):
    return dataclasses.replace(CONFIG, moe=moe)


@pytest.mark.parametrize(("by", "kept"), [("activation", [0, 4, 5]), ("use", [1, 2, 3]), ("gate", [0, 2, 5])], ids=str)
def test_the_experts_that_count_most_stay_in_their_order(by, kept):
    place = layer.place(
        MOE,
        [1, 9, 8, 7, 2, 3],
        activation=np.array([5.0, 1, 2, 1, 6, 4]),
        gate=np.array([9.0, 0.1, 2, 0.2, 1, 4]),
    )
    whole = layer.weights(MOE)
    found, made_of = PruneExperts(experts=3, by=by).layer(whole, place)
    assert made_of == [[expert] for expert in kept]
    for name, value in whole.items():
        np.testing.assert_array_equal(found[name], value[kept], err_msg=name)


def test_experts_that_no_token_chooses_are_missed_by_no_token():
    moe = Moe(num_experts=6, top_k=2, bias="all")
    whole, x = layer.weights(moe), layer.tokens()
    whole["router_bias"][[1, 4]] = -50
    routed = np.bincount(layer.chosen(whole, moe, x)[0].ravel(), minlength=6)
    assert (routed == 0).nonzero()[0].tolist() == [1, 4]
    operation = PruneExperts(experts=4, by="use")
    found, _ = operation.layer(whole, layer.place(moe, routed))
    pruned = operation.result(config(moe)).moe
    assert pruned == dataclasses.replace(moe, num_experts=4)
    np.testing.assert_allclose(layer.output(found, pruned, x), layer.output(whole, moe, x), rtol=1e-6, atol=1e-6)


def test_every_group_keeps_as_many():
    moe = Moe(num_experts=8, top_k=2, score="sigmoid", correction="expert", groups=2, top_groups=1)
    place = layer.place(moe, [9, 8, 7, 6, 1, 2, 3, 4])
    found, made_of = PruneExperts(experts=4, by="use").layer(layer.weights(moe), place)
    assert made_of == [[0], [1], [6], [7]] and found["correction"].shape == (4,)
    assert PruneExperts(experts=4, by="use").result(config(moe)).moe.groups == 2


def test_random_experts_are_those_of_the_seed_and_need_no_statistics():
    drawn = [
        PruneExperts(experts=3, by="random").layer(layer.weights(MOE), layer.place(MOE, seed=s))[1] for s in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert not PruneExperts(experts=3, by="random").needs_statistics and PruneExperts(experts=3).needs_statistics


@pytest.mark.parametrize(
    ("moe", "experts", "message"),
    [
        (MOE, 6, r"experts is 6, must be from 1 to 5 for prune: the model has 6"),
        (MOE, 0, r"experts is 0, must be from 1 to 5"),
        (MOE, 1, r"experts \(1\) leave a token 1 to choose from, it has 2 \(num_experts_per_tok\): try 2"),
        (
            Moe(num_experts=8, groups=4, top_groups=2),
            6,
            r"multiple of the 4 groups \(n_group\) with at least 2 in each: try 8",
        ),
        (Moe(num_experts=8, groups=2, top_groups=1, top_k=3), 4, r"leave a token 2 to choose from, it has 3 .*: try 6"),
        (None, 3, r"prune is for models with experts, this has MLPs: `capibara experts upcycle`"),
        (Moe(num_experts=8, routing="expert_choice"), 4, r"Moe.routing is 'expert_choice'"),
    ],
    ids=["all", "none", "too few", "groups", "top groups", "dense", "expert choice"],
)
def test_what_does_not_fit_is_refused(moe, experts, message):
    with pytest.raises(UserError, match=message):
        PruneExperts(experts=experts).result(config(moe))
