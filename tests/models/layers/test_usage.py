"""What experts are used for: against a loop over tokens in numpy; equal packed, padded and on a mesh."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from capibara import sharding
from capibara.models import api
from capibara.models.api import DecoderConfig, Moe
from capibara.models.layers import usage
from capibara.sharding import Plan

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


def inputs_of_experts(model, params, batch, monkeypatch):
    """The input of each layer's experts, and the tokens' choices, as the model computes them."""
    from capibara.models.parts import moe

    seen, original = [], moe.router.choose

    def choose(logits, *arguments):
        choice, stats = original(logits, *arguments)
        seen.append(choice)
        return choice, stats

    inputs, call = [], moe.MoeMLP.__call__
    monkeypatch.setattr(moe.router, "choose", choose)
    monkeypatch.setattr(moe.MoeMLP, "__call__", lambda self, x, *rest: (inputs.append(x), call(self, x, *rest))[1])
    with jax.disable_jit():
        model.hidden(params, batch)
    monkeypatch.undo()
    return [np.asarray(x) for x in inputs], seen


def expert(layer, number, x, config):
    """An expert's output for a token, in numpy."""
    up, gate = x @ layer["up"][number], x @ layer["gate"][number]
    if "up_bias" in layer:
        up, gate = up + layer["up_bias"][number], gate + layer["gate_bias"][number]
    y = (gate / (1 + np.exp(-gate)) * up) @ layer["down"][number]
    return y + layer["down_bias"][number] if "down_bias" in layer else y


@pytest.mark.parametrize("moe", MIXTURES.values(), ids=[*MIXTURES])
def test_sums_are_those_of_a_loop_over_tokens(moe, monkeypatch):
    model, params = of_moe(moe, layer_loop="unroll")
    batch = rows()
    found = measured(model, params, batch)
    inputs, choices = inputs_of_experts(model, params, batch, monkeypatch)
    assert len(inputs) == 2
    for number in range(2):
        layer = {name: np.asarray(value[number]) for name, value in params["layers"]["mlp"].items() if name != "shared"}
        want = {name: np.zeros((3, moe.num_experts)) for name in ("routed", "gates", "norms", "activations")}
        outputs, pairs = np.zeros((moe.num_experts, 16)), np.zeros((moe.num_experts, moe.num_experts))
        for b, t in zip(*np.nonzero(batch["segment_ids"])):
            domain = batch["domains"][b, t] if batch["domains"][b, t] <= 2 else 0
            own, gates = np.asarray(choices[number].experts)[b, t], np.asarray(choices[number].gates)[b, t]
            for e, gate in zip(own, gates):
                x, factor = (
                    (inputs[number][b, t] * gate, 1) if moe.weighted == "inputs" else (inputs[number][b, t], gate)
                )
                y = expert(layer, e, x, model.config)
                for name, value in (("routed", 1), ("gates", factor), ("norms", np.linalg.norm(y))):
                    want[name][domain, e] += value
                want["activations"][domain, e] += factor * np.linalg.norm(y)
                outputs[e] += y
            pairs[np.ix_(own, own)] += 1
        for name, value in want.items():
            np.testing.assert_allclose(found[name][number], value, rtol=2e-5, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(found["pairs"][number], pairs)
        np.testing.assert_allclose(found["outputs"][number], outputs @ usage._sketch(16), rtol=2e-4, atol=1e-5)
        np.testing.assert_allclose(found["tokens"][number].sum(), batch["segment_ids"].sum())


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
