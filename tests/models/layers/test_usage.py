"""What experts are used for: against a loop over tokens in numpy; equal packed, padded and on a mesh."""

from __future__ import annotations

import dataclasses
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from capibara import sharding
from capibara.models import api
from capibara.models.api import DecoderConfig, Moe
from capibara.models.layers import usage
from capibara.models.parts.moe import MoeMLP
from capibara.sharding import Plan

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "interop" / "experts"))
import layer  # noqa: E402

CONFIG = DecoderConfig(vocab_size=64, embed_dim=16, num_layers=2, num_heads=2, mlp_dim=24, dtype="float32")
MIXTURES = {
    "softmax": Moe(num_experts=8, top_k=2),
    "sigmoid with groups": Moe(
        num_experts=8,
        top_k=2,
        score="sigmoid",
        correction="expert",
        groups=2,
        top_groups=1,
        scale=2.5,
        shared_experts=1,
    ),
    "biases": Moe(num_experts=4, top_k=3, bias="all"),
    "weighted inputs": Moe(num_experts=4, top_k=2, score="sigmoid", gates="scores", weighted="inputs"),
}


def rows(count=4, length=12, seed=0):
    rng = np.random.default_rng(seed)
    segments = np.ones((count, length), np.int32)
    for row in range(count):
        segments[row, length - 2 * row :] = 0
    return {
        "tokens": rng.integers(0, 64, (count, length)).astype(np.int32),
        "positions": np.broadcast_to(np.arange(length, dtype=np.int32), segments.shape),
        "segment_ids": segments,
        "domains": rng.integers(0, 4, (count, length)).astype(np.int32),
    }


def of_moe(moe, **fields):
    model = api.build(dataclasses.replace(CONFIG, moe=moe, **fields))
    params = model.init(jax.random.key(0))
    rng = np.random.default_rng(1)  # biases are 0 at first, and would hide that they are missing
    return model, jax.tree.map(lambda x: 2 * x + 0.1 * rng.standard_normal(x.shape).astype(np.float32), params)


def measured(model, params, batch, domains=2):
    with usage.measured(domains):
        _, stats = model.hidden(params, batch)
    return {name.removeprefix(usage.PREFIX): value for name, value in stats.items() if name.startswith(usage.PREFIX)}


@pytest.mark.parametrize("moe", MIXTURES.values(), ids=[*MIXTURES])
def test_sums_are_those_of_a_loop_over_tokens(moe):
    config = dataclasses.replace(CONFIG, embed_dim=layer.D, mlp_dim=layer.F, num_heads=1)
    graphdef, state = nnx.split(MoeMLP(config, dataclasses.replace(moe, shared_experts=0), nnx.Rngs(0)))
    weights, batch = layer.weights(moe), rows()
    nnx.replace_by_pure_dict(state, weights | {"router": weights["router"].T})
    x = np.random.default_rng(2).standard_normal((4, 12, layer.D)).astype(np.float32)

    @jax.jit
    def run(state, x):
        with usage.measured(2):
            return nnx.merge(graphdef, state)(x, batch["segment_ids"], jnp.asarray(batch["domains"]))[1]

    found = {name.removeprefix(usage.PREFIX): value for name, value in run(state, x).items()}
    want = {name: np.zeros((3, moe.num_experts)) for name in ("routed", "gates", "norms", "activations")}
    outputs, pairs = np.zeros((moe.num_experts, layer.D)), np.zeros((moe.num_experts, moe.num_experts))
    for b, t in zip(*np.nonzero(batch["segment_ids"])):
        domain, token = batch["domains"][b, t] * (batch["domains"][b, t] <= 2), x[b, t : t + 1]
        experts, gates = (value[0] for value in layer.chosen(weights, moe, token))
        for e, gate in zip(experts, gates):
            own = {name: value[e] for name, value in weights.items()}
            x_1D, factor = (token * gate, 1.0) if moe.weighted == "inputs" else (token, gate)
            y = layer.mlp(own, x_1D)[0]
            for name, value in (("routed", 1), ("gates", factor), ("norms", np.linalg.norm(y))):
                want[name][domain, e] += value
            want["activations"][domain, e] += factor * np.linalg.norm(y)
            outputs[e] += y
        pairs[np.ix_(experts, experts)] += 1
    for name, value in want.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    np.testing.assert_array_equal(found["pairs"], pairs)
    np.testing.assert_allclose(found["outputs"], outputs @ usage._sketch(layer.D), rtol=1e-3, atol=1e-3)
    counts = [((batch["domains"] == d) & (batch["segment_ids"] > 0)).sum() for d in (1, 2)]
    assert found["tokens"].tolist() == [batch["segment_ids"].sum() - sum(counts), *counts]


def test_a_model_that_is_not_measured_has_no_such_sums():
    model, params = of_moe(MIXTURES["softmax"])
    _, stats = model.hidden(params, rows())
    assert not [name for name in stats if name.startswith(usage.PREFIX)]


@pytest.mark.parametrize(
    "moe", [MIXTURES["sigmoid with groups"], Moe(num_experts=8, dispatch="capacity")], ids=["dropless", "capacity"]
)
def test_a_mesh_of_8_devices_measures_what_one_does(moe):
    model, params = of_moe(moe)
    batch = rows(8, 16)
    want = measured(model, params, batch)
    plan = Plan(batch_size=8, data=1, fsdp=2, expert=2, tensor=2)
    mesh = sharding.make_mesh(plan)
    assert mesh.size == 8
    placed = jax.device_put(params, sharding.shardings(mesh, plan.rules, model.axes, model.abstract_params))

    def step(params, batch):
        with sharding.activate(mesh, plan.rules, plan.pipeline(mesh)):
            return measured(model, params, batch)

    found = jax.jit(step)(placed, sharding.global_batch(sharding.batch_sharding(mesh, plan.rules), batch))
    for name, value in want.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-4, err_msg=name)
