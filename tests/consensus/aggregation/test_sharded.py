"""Sharded aggregation is the unsharded one, without a gathered copy; on other numbers of devices in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capibara.consensus.aggregation import (
    Aggregation,
    Arc,
    Bucketing,
    Bulyan,
    Caf,
    CenteredClipping,
    Clipping,
    CoordinateMedian,
    GeometricMedian,
    Krum,
    Mda,
    Meamed,
    Mean,
    Monna,
    MultiKrum,
    Nnm,
    Smea,
    TrimmedMean,
)
from capibara.core import devices
from capibara.core.types import UserError

MOST_SHARDS = 2.5
RULES = (
    Mean(),
    CoordinateMedian(),
    TrimmedMean(),
    Meamed(),
    GeometricMedian(),
    Krum(),
    MultiKrum(),
    Bulyan(),
    Monna(),
    Mda(),
    Smea(),
    Caf(),
    CenteredClipping(radius=100.0),
)
BEFORE = ((Nnm(),), (Bucketing(),), (Clipping(radius=50.0),), (Arc(),))
AGGREGATIONS = [(rule, ()) for rule in RULES] + [(rule, each) for rule in (Meamed(), Caf()) for each in BEFORE]
SHORT = {"CenteredClipping Arc Nnm": (CenteredClipping(radius=100.0), (Arc(), Nnm())), "Bulyan": (Bulyan(), ())}


def check(rule, before, nodes, others):
    """On a mesh of nodes x others, with leaves that are sharded, replicated, and of no multiple of the nodes."""
    mesh = Mesh(np.array(jax.devices()[: nodes * others]).reshape(nodes, others), ("node", "fsdp"))
    specs = {"kernel": PartitionSpec(None, "fsdp"), "bias": PartitionSpec()}
    shapes = {"kernel": (67, 512 * others), "bias": (13,)}
    draw = np.random.default_rng(nodes)
    stacked = {name: draw.normal(size=(nodes, *shape)).astype(np.float32) for name, shape in shapes.items()}
    stacked["kernel"][1] *= -3
    stacked["bias"][-1, 5] = np.nan
    reference = {name: 0.1 * draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    faults = min(Aggregation(rule=rule, before=before).largest_faults(nodes), 2)
    aggregation, key = Aggregation(rule=rule, before=before, faults=faults), jax.random.key(3)
    placed = {
        name: jax.device_put(leaf, NamedSharding(mesh, PartitionSpec("node", *specs[name])))
        for name, leaf in stacked.items()
    }
    program = jax.jit(aggregation.sharded(mesh, specs)).lower(placed, reference, key).compile()
    # Before another program starts: the devices' threads are few, and those of a collective wait for each other.
    got, report = jax.block_until_ready(program(placed, reference, key))
    want, wanted = jax.jit(aggregation)(stacked, reference, key)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=0, atol=1e-6)
        assert got[name].sharding.is_equivalent_to(NamedSharding(mesh, specs[name]), got[name].ndim)
    np.testing.assert_allclose(report.distances, wanted.distances, rtol=1e-5)
    assert report.masked == wanted.masked == (nodes - 1,)
    shard_bytes = 4 * (67 * 512 + 13)
    temporary_bytes = program.memory_analysis().temp_size_in_bytes
    assert temporary_bytes <= MOST_SHARDS * shard_bytes, temporary_bytes / shard_bytes


def name_of(case):
    rule, before = case
    return " ".join(type(each).__name__ for each in (rule, *before))


@pytest.mark.parametrize("case", SHORT)
def test_sharded_is_unsharded(case):
    check(*SHORT[case], nodes=4, others=2)


@pytest.mark.heavy
@pytest.mark.parametrize("mesh", [(8, 1), (4, 2)], ids=["8 nodes", "4 nodes over 2"])
@pytest.mark.parametrize("case", AGGREGATIONS, ids=name_of)
def test_sharded_is_unsharded_for_each_rule(case, mesh):
    check(*case, *mesh)


@pytest.mark.heavy
def test_sharded_is_unsharded_on_12_devices():
    flags = devices.with_emulation_flags("--xla_force_host_platform_device_count=12")
    # In threads: each device may hold one while it waits for the others, and eigh needs more.
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": "24"}
    subprocess.run([sys.executable, __file__], env=environment, check=True, timeout=1800)


def test_what_does_not_fit_the_mesh_is_refused():
    mesh = jax.make_mesh((4, 2), ("node", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = {"a": PartitionSpec("fsdp")}
    with pytest.raises(UserError, match="faults is 2, must be at most 1 of 4 nodes"):
        Aggregation(rule=Mda(), faults=2).sharded(mesh, specs)
    with pytest.raises(UserError, match="must have the nodes' axis 'replica'"):
        Aggregation().sharded(mesh, specs, axis="replica")
    with pytest.raises(UserError, match="the spec of a has the axis 'node'"):
        Aggregation().sharded(mesh, {"a": PartitionSpec("node")})
    with pytest.raises(UserError, match="must begin with the nodes' axis of 4"):
        Aggregation().sharded(mesh, specs)({"a": jnp.zeros((8, 2))})


if __name__ == "__main__":
    for rule, before in AGGREGATIONS:
        check(rule, before, 12, 1)
        check(rule, before, 6, 2)
