"""Whether a model fits a process's own chips, how it is sharded there, and that its outputs are unchanged."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from capibara import sharding
from capibara.core.types import UserError
from capibara.inference.engine.engine import EngineConfig
from capibara.inference.engine.placement import footprint, own_chips
from capibara.inference.engine.placement.own_chips import OwnChips, Where
from capibara.inference.engine.placement.serving_mesh import ServingMesh
from capibara.models import api
from capibara.models.api import DecoderConfig, Lora
from capibara.planner.hardware import topology
from capibara.sharding import Plan

SIZES = dict(vocab_size=384, embed_dim=64, num_layers=2, num_heads=8, num_kv_heads=4, mlp_dim=128, dtype="bfloat16")
BATCHING, LENGTH = EngineConfig(slots=2, prefix_cache_mib=0), 16


def found(free, where=Where.AUTO, mesh=ServingMesh(), **sizes):
    """Axes with more than one chip; None: it does not fit."""
    model = api.build(DecoderConfig(**SIZES | sizes))
    layout = own_chips.layout_of(model, mesh, where, BATCHING, LENGTH, free=free)
    if layout is None:
        return None
    first = jax.tree.leaves(layout)[0]
    return {axis: n for axis, n in first.mesh.shape.items() if n > 1} if hasattr(first, "mesh") else {}


def test_a_layer_is_shared_by_the_fewest_chips_that_hold_the_model(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: topology.slice_devices("v5e-4"))
    model = api.build(DecoderConfig(**SIZES))
    slots = footprint.state_bytes(model, BATCHING, LENGTH)
    whole = (footprint.parameters_bytes(model) + slots) / 0.9
    assert found(None) == found(whole + 9) == {"data": 4}
    assert found(whole - 9) == {"data": 2, "tensor": 2}
    assert found(whole / 3) == {"tensor": 4}
    assert own_chips.layout_of(model, ServingMesh(), Where.AUTO, BATCHING, LENGTH, free=whole + 9, copies=9) is None
    assert found(whole / 3, num_kv_heads=2) is None  # two heads are not for four chips
    assert found(whole / 8) is None and found(whole, Where.ALL) is None
    assert found(None, mesh=ServingMesh(tensor=2)) == {"data": 2, "tensor": 2}
    with pytest.raises(UserError, match=r"own 4 chips have 0.0 GiB free each, .* let all processes generate together"):
        found(whole / 8, Where.OWN)
    with pytest.raises(UserError, match=r"ServingMesh.tensor x ServingMesh.data \(3\) must divide the 4 devices"):
        found(None, mesh=ServingMesh(data=3))
    with pytest.raises(UserError, match="must divide the model's 2 heads"):
        found(None, mesh=ServingMesh(tensor=4), num_kv_heads=2)


@pytest.mark.parametrize("lora", [None, Lora(rank=2, targets=("all-linear",))], ids=["plain", "adapted"])
def test_what_comes_to_the_chips_is_the_merged_model_in_the_compute_dtype(lora):
    model = api.build(DecoderConfig(**SIZES, lora=lora))
    plan = Plan(batch_size=8, tensor=2)
    mesh = sharding.make_mesh(plan)
    params = jax.jit(model.init)(jax.random.key(0))
    params = jax.tree.map(lambda x: x + 0.01 if x.dtype == np.float32 else x, params)
    want = model.plain.computed(model.merge(params))
    spread = jax.device_put(params, sharding.shardings(mesh, plan.rules, model.axes))
    for asked in (ServingMesh(), ServingMesh(tensor=2, data=2)):
        layout = own_chips.layout_of(model, asked, Where.OWN, BATCHING, LENGTH)
        got = OwnChips(model, layout, plan.rules)(spread)
        same = jax.tree.map(lambda x, at: x.sharding.is_equivalent_to(at, x.ndim), got, layout)
        assert all(jax.tree.leaves(same))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2e-2, atol=1e-5)


@pytest.mark.parametrize(
    ("source", "chips", "asked"),
    [
        (slice(0, 4), slice(4, 8), ServingMesh()),
        (slice(0, 4), slice(4, 8), ServingMesh(tensor=2, data=2)),
        (slice(0, 4), slice(4, 5), ServingMesh()),
        (slice(0, 2), slice(4, 8), ServingMesh(tensor=4)),  # too few to have a shard of the target each
    ],
)
def test_parameters_come_to_other_chips_without_the_host(monkeypatch, source, chips, asked):
    model = api.build(DecoderConfig(**SIZES))
    mesh = sharding.make_mesh(Plan(batch_size=8), jax.devices()[source])
    params = jax.jit(model.init)(jax.random.key(0))
    want = jax.device_get(model.computed(params))
    spread = jax.device_put(params, sharding.shardings(mesh, sharding.Rules(), model.axes))
    layout = own_chips.layout_of(model, asked, Where.OWN, BATCHING, LENGTH, devices=jax.devices()[chips])

    def read(x):
        raise AssertionError("an array was read to the host")

    with monkeypatch.context() as patch:
        patch.setattr(type(spread["embedding"]), "_value", property(read))
        with pytest.raises(AssertionError, match="to the host"):
            jax.device_get(spread)
        got = jax.block_until_ready(OwnChips(model, layout)(spread))
    for a, b, at in zip(*map(jax.tree.leaves, (got, want, layout)), strict=True):
        assert a.sharding.is_equivalent_to(at, a.ndim)
        np.testing.assert_array_equal(a, b)


def test_devices_that_say_nothing_have_room():
    assert own_chips.free_bytes() is None


def test_the_fullest_device_counts(monkeypatch):
    @dataclasses.dataclass
    class Device:
        used: int

        def memory_stats(self):
            return {"bytes_limit": 100, "bytes_in_use": self.used}

    monkeypatch.setattr(jax, "local_devices", lambda: [Device(10), Device(40)])
    assert own_chips.free_bytes() == 60 and own_chips.free_bytes(25) == 35
