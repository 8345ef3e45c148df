"""Experts that are split or doubled: the function is the same wherever it can be."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import sys

import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.interop.experts.splitting import DuplicateExperts, SplitExperts
from capibara.models.api import DecoderConfig, Moe

sys.path.append(str(pathlib.Path(__file__).resolve().parent))
import layer  # noqa: E402

CONFIG = DecoderConfig(vocab_size=8, embed_dim=layer.D, num_layers=1, num_heads=1, mlp_dim=layer.F)
MIXTURES = {
    "mixtral": Moe(num_experts=4, top_k=2),
    "probabilities": Moe(num_experts=4, top_k=2, gates="scores"),
    "biases": Moe(num_experts=4, top_k=3, bias="all"),
    "biases, sigmoid scores": Moe(num_experts=4, top_k=2, score="sigmoid", gates="scores", bias="all"),
    "normalised sigmoid, correction": Moe(num_experts=4, top_k=2, score="sigmoid", correction="expert", scale=2.5),
    "softmax with correction": Moe(num_experts=4, top_k=2, correction="expert"),
    "softmax with correction of logits": Moe(num_experts=4, top_k=2, correction="logit"),
    "sigmoid with correction of logits": Moe(num_experts=4, top_k=2, score="sigmoid", correction="logit"),
    "groups by their best": Moe(num_experts=8, top_k=2, groups=4, top_groups=2, group_score="best"),
    "all groups": Moe(num_experts=8, top_k=2, groups=2, top_groups=2, score="sigmoid"),
    "weighted inputs": Moe(num_experts=4, top_k=1, score="sigmoid", gates="scores", weighted="inputs"),
}


def config(moe):
    return dataclasses.replace(CONFIG, moe=moe)


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("moe", MIXTURES.values(), ids=[*MIXTURES])
def test_parts_of_an_expert_compute_it_together(moe, parts):
    whole, x, operation = layer.weights(moe), layer.tokens(), SplitExperts(parts=parts)
    found, made_of = operation.layer(whole, layer.place(moe))
    split = operation.result(config(moe)).moe
    assert (split.num_experts, split.top_k, split.expert_dim) == (
        moe.num_experts * parts,
        moe.top_k * parts,
        8 // parts,
    )
    assert found["up"].shape == (moe.num_experts * parts, layer.D, 8 // parts) and made_of[parts] == [1]
    np.testing.assert_allclose(layer.output(found, split, x), layer.output(whole, moe, x), rtol=1e-5, atol=1e-5)
    assert operation.caveat(config(moe)) is None


def test_groups_by_their_two_best_are_said_to_change():
    moe = Moe(num_experts=8, top_k=2, groups=4, top_groups=2)
    assert "two best" in SplitExperts().caveat(config(moe))
    found, _ = SplitExperts().layer(whole := layer.weights(moe), layer.place(moe))
    split, x = SplitExperts().result(config(moe)).moe, layer.tokens()
    assert np.abs(layer.output(found, split, x) - layer.output(whole, moe, x)).max() > 0.1


@pytest.mark.parametrize(("width", "experts"), [(None, 4), (12, 2)])
def test_shared_experts_keep_their_width(width, experts):
    moe = Moe(num_experts=4, shared_experts=2, shared_dim=width)
    split = SplitExperts().result(config(moe)).moe
    assert (split.shared_experts, split.shared_dim) == (experts, width)
    of = lambda m: m.shared_experts * (m.expert_dim or layer.F if m.shared_dim is None else m.shared_dim)  # noqa: E731
    assert of(split) == of(moe)


@pytest.mark.parametrize(
    ("moe", "parts", "message"),
    [
        (Moe(num_experts=4), 3, r"parts \(3\) must divide the 8 hidden units of an expert: try 2"),
        (Moe(num_experts=4), 1, "parts is 1, must be at least 2"),
        (Moe(num_experts=4, gates="close"), 2, "split is not for Moe.gates = 'close'"),
        (Moe(num_experts=4, weighted="inputs"), 2, "split is not for Moe.weighted = 'inputs'"),
        (None, 2, "split is for models with experts, this has MLPs"),
    ],
)
def test_what_cannot_be_split_is_refused(moe, parts, message):
    with pytest.raises(UserError, match=message):
        SplitExperts(parts=parts).result(config(moe))


def test_copies_of_experts_that_are_all_chosen_change_nothing():
    moe = Moe(num_experts=4, top_k=4, bias="all")
    operation = DuplicateExperts(experts=6)
    whole, x = layer.weights(moe), layer.tokens()
    found, made_of = operation.layer(whole, layer.place(moe, [1, 5, 2, 9]))
    assert made_of == [[0], [1], [2], [3], [3], [1]] and operation.caveat(config(moe)) is None
    doubled = dataclasses.replace(operation.result(config(moe)).moe, top_k=6)
    np.testing.assert_allclose(layer.output(found, doubled, x), layer.output(whole, moe, x), rtol=1e-5, atol=1e-5)
    halved = whole["router_bias"][made_of].ravel() - math.log(2) * np.array([0, 1, 0, 1, 1, 1])
    np.testing.assert_allclose(found["router_bias"], halved, rtol=1e-6)


def test_copies_stand_in_their_groups_and_noise_tells_them_apart():
    moe = Moe(num_experts=4, top_k=2, groups=2, top_groups=2, score="sigmoid", correction="expert")
    whole, place = layer.weights(moe), layer.place(moe, [1, 5, 9, 2])
    found, made_of = DuplicateExperts(experts=6, noise=0.1).layer(whole, place)
    assert made_of == [[0], [1], [1], [2], [3], [2]]
    assert np.array_equal(found["router"][[0, 4]], whole["router"][[0, 3]])  # others stay
    distance = np.sqrt(np.mean((found["router"][1] - found["router"][2]) ** 2) / np.mean(whole["router"][1] ** 2))
    assert 0.05 < distance < 0.4
    assert "no bias" in DuplicateExperts(experts=6).caveat(config(moe))


@pytest.mark.parametrize("experts", [4, 9])
def test_at_least_one_and_at_most_all_are_doubled(experts):
    with pytest.raises(UserError, match=f"experts is {experts}, must be from 5 to 8 and a multiple of the groups"):
        DuplicateExperts(experts=experts).result(config(Moe(num_experts=4)))
    with pytest.raises(UserError, match="noise is -1"):
        DuplicateExperts(experts=6, noise=-1)
