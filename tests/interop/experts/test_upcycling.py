"""Experts made of an MLP: the function is the MLP's, whatever the router says."""

from __future__ import annotations

import dataclasses
import pathlib
import sys

import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.interop.experts.upcycling import UpcycleExperts
from capibara.models.api import DecoderConfig, Moe

sys.path.append(str(pathlib.Path(__file__).resolve().parent))
import layer  # noqa: E402

CONFIG = DecoderConfig(vocab_size=8, embed_dim=layer.D, num_layers=1, num_heads=1, mlp_dim=layer.F)


def dense(seed=0, biases=False):
    whole = layer.weights(Moe(num_experts=1, top_k=1, bias="all" if biases else "mlp"), seed)
    return {name: value[0] for name, value in whole.items() if not name.startswith("router")}


def made(operation, mlp, seed=0):
    return operation.layer(mlp, layer.place(None, seed=seed))[0], operation.result(CONFIG).moe


@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize(("experts", "top_k", "granularity"), [(4, 2, 1), (4, 1, 1), (8, 4, 2), (8, 4, 4), (2, 2, 2)])
def test_experts_compute_the_mlp(experts, top_k, granularity, biases):
    operation = UpcycleExperts(experts=experts, top_k=top_k, granularity=granularity)
    mlp, x = dense(biases=biases), layer.tokens()
    found, moe = made(operation, mlp)
    assert found["up"].shape == (experts, layer.D, layer.F // granularity) and moe.expert_dim == layer.F // granularity
    np.testing.assert_allclose(layer.output(found, moe, x), layer.mlp(mlp, x), rtol=1e-5, atol=1e-5)


def test_routers_are_random_and_parts_of_one_mlp_share_a_row():
    found, _ = made(UpcycleExperts(experts=64, top_k=4, granularity=2, router_scale=3.0), dense())
    assert np.array_equal(found["router"][0::2], found["router"][1::2])
    assert len(np.unique(found["router"][:, 0])) == 32
    assert 0.8 < found["router"].std() / (3 / layer.D**0.5) < 1.2


def test_dropped_units_are_the_same_in_all_weights_of_an_expert():
    mlp = dense() | {"up": dense()["up"] + 7}
    found, moe = made(UpcycleExperts(experts=4, drop_ratio=0.5), mlp)
    new = [(found["up"][e] != mlp["up"]).all(0) for e in range(4)]
    for e, units in enumerate(new):
        assert units.sum() == 4
        np.testing.assert_array_equal((found["gate"][e] != mlp["gate"]).all(0), units)
        np.testing.assert_array_equal((found["down"][e] != mlp["down"]).all(1), units)
        np.testing.assert_array_equal(found["up"][e][:, ~units], mlp["up"][:, ~units])
        assert abs(found["up"][e][:, units].mean() - 7) < 1  # drawn as the weights that they replace
    assert len({tuple(units) for units in new}) > 1  # each expert has its own
    assert np.abs(layer.output(found, moe, layer.tokens()) - layer.mlp(mlp, layer.tokens())).max() > 0.1


@pytest.mark.parametrize(
    ("settings", "fields", "message"),
    [
        ({"experts": 0}, {}, "experts is 0, must be at least 1"),
        ({"experts": 4, "drop_ratio": 1.5}, {}, "drop_ratio is 1.5, must be from 0 to 1"),
        ({"experts": 4, "router_scale": 0}, {}, "router_scale is 0.0, must be finite and above 0"),
        (
            {"experts": 4, "top_k": 3, "granularity": 2},
            {},
            r"top_k \(3\) must be a multiple of granularity \(2\).*: try 4",
        ),
        (
            {"experts": 6, "top_k": 3, "granularity": 3},
            {},
            r"granularity \(3\) must divide the 8 hidden units of an MLP: try 4",
        ),
        ({"experts": 4, "top_k": 5}, {}, r"Moe.top_k \(5\) must be at most num_experts \(4\)"),
        ({"experts": 4}, {"moe": Moe(num_experts=2)}, "the model has 2 experts already, upcycle is for MLPs"),
        ({"experts": 4}, {"bias": "all"}, "gated MLPs with biases"),
        ({"experts": 4}, {"layer_pattern": ("global", "feed_forward")}, "layers have one branch each"),
    ],
)
def test_what_cannot_be_upcycled_is_refused(settings, fields, message):
    with pytest.raises(UserError, match=message):
        UpcycleExperts(**settings).result(dataclasses.replace(CONFIG, **({"num_layers": 2} | fields)))
