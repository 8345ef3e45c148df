"""Sharded aggregation, compiled by the TPU compiler: it needs at most a few shards beside the nodes' own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from matrix import running

from capibara.consensus.aggregation import (
    Aggregation,
    Bucketing,
    Bulyan,
    Caf,
    CenteredClipping,
    GeometricMedian,
    Meamed,
    Nnm,
    Smea,
    TrimmedMean,
)
from capibara.planner.compiler import compile as compiler
from capibara.planner.hardware import topology

SITE = "consensus/aggregation/sharded.py make.aggregate"
WITHIN = {SITE: "geometric median after NNM"}  # what partitions by hand -> the aggregation that has it
AGGREGATIONS = {
    WITHIN[SITE]: Aggregation(rule=GeometricMedian(), before=(Nnm(),), faults=1),
    "trimmed mean": Aggregation(rule=TrimmedMean(), faults=1),
    "Meamed after bucketing": Aggregation(rule=Meamed(), before=(Bucketing(),)),
    "Bulyan": Aggregation(rule=Bulyan()),
    "CAF": Aggregation(rule=Caf(), faults=1),
    "SMEA": Aggregation(rule=Smea(), faults=1),
    "centred clipping": Aggregation(rule=CenteredClipping(), faults=1),
}
SIZES = {"node": 4, "fsdp": 2}
SHAPES = {"kernel": ((1024, 2048), PartitionSpec(None, "fsdp")), "norm": ((1000,), PartitionSpec())}


@pytest.mark.heavy
@pytest.mark.parametrize("name", AGGREGATIONS)
def test_an_aggregation_compiles_for_the_slice(name, tell):
    mesh = Mesh(np.array(topology.slice_devices("v5e-8")).reshape(*SIZES.values()), tuple(SIZES))

    def array(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    specs = {leaf: spec for leaf, (_, spec) in SHAPES.items()}
    stacked = {leaf: array((SIZES["node"], *shape), "node", *spec) for leaf, (shape, spec) in SHAPES.items()}
    reference = {leaf: array(shape, *spec) for leaf, (shape, spec) in SHAPES.items()}
    key = jax.eval_shape(lambda: jax.random.key(0))
    combine = AGGREGATIONS[name].sharded(mesh, specs)
    with running(SITE):
        lowered = jax.jit(combine).lower(stacked, reference, key)
    report = compiler.compile_train_step(lowered)
    shard_bytes = 4 * (1024 * 1024 + 1000)
    assert report.temporary_bytes <= 2.5 * shard_bytes, report.temporary_bytes / shard_bytes
    tell(f"aggregation, {name}", "two leaves", "v5e-8", SIZES, report)
