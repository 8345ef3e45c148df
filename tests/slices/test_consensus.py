"""Sharded aggregation, compiled by the TPU compiler: it needs at most a few shards beside the nodes' own.

And train steps of nodes that train apart.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from matrix import Case, mesh_of, running

from capibara import sharding
from capibara.consensus.aggregation import (
    Aggregation,
    Bucketing,
    Bulyan,
    Caf,
    CenteredClipping,
    GeometricMedian,
    Meamed,
    Mean,
    Nnm,
    Smea,
    TrimmedMean,
)
from capibara.consensus.compression import Compression
from capibara.planner.compiler import compile as compiler
from capibara.planner.hardware import topology
from capibara.sharding import Plan
from capibara.strategies.consensus import ConsensusConfig, StrategyName
from capibara.training import setup

SITE = "consensus/aggregation/sharded.py make.aggregate"
OF_STEPS = "training/methods/nodes.py make_nodes_step.by_node", "strategies/consensus/rounds.py _received"
GROUPS = "strategies/consensus/hierarchy.py group_means"
# What partitions by hand -> the aggregation, or the model of a step, that has it.
WITHIN = {SITE: "geometric median after NNM"} | dict.fromkeys((*OF_STEPS, GROUPS), "decoder")
AGGREGATIONS = {
    WITHIN[SITE]: Aggregation(rule=GeometricMedian(), before=(Nnm(),), faults=1),
    "trimmed mean": Aggregation(rule=TrimmedMean(), faults=1),
    "Meamed after bucketing": Aggregation(rule=Meamed(), before=(Bucketing(),)),
    "Bulyan": Aggregation(rule=Bulyan()),
    "CAF": Aggregation(rule=Caf(), faults=1),
    "SMEA": Aggregation(rule=Smea(), faults=1),
    "centred clipping": Aggregation(rule=CenteredClipping(), faults=1),
}
START = "training/methods/nodes.py Nodes.restarted"
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


# Model -> mesh of a v5e-8 on which its nodes train apart.
STEPS = {
    "decoder": dict(node=4, fsdp=2),
    "windows": dict(node=8),
    "experts": dict(node=2, expert=2, tensor=2),
    "decoder LoRA": dict(node=2, fsdp=2, context=2),
}


ROUNDS = {
    "fragments": {"fragments": 2},
    "mean": {"aggregation": Aggregation(rule=Mean())},
    "robust": {"aggregation": Aggregation(rule=GeometricMedian(), before=(Nnm(),))},
    "vote on a convex merge": {
        "voting_strategy": "byzantine",
        "merge_strategy": "convex",
        "strategies": tuple(StrategyName),
    },
}


@pytest.mark.parametrize(
    "model, round_",
    [
        ("decoder", "mean"),
        pytest.param("decoder", "fragments", marks=pytest.mark.heavy),
        pytest.param("decoder", "vote on a convex merge", marks=pytest.mark.heavy),
        *(pytest.param(name, "robust", marks=pytest.mark.heavy) for name in STEPS),
    ],
)
def test_a_step_of_nodes_compiles_for_the_slice(model, round_, tell):
    strategy = ConsensusConfig(compression=Compression(bits=4), quality_threshold=0.85, **ROUNDS[round_])
    case = Case(model, "v5e-8", STEPS[model], {"strategy": strategy, "ema_decay": None})
    with running(*OF_STEPS, GROUPS if "merge" in round_ else SITE):
        lowered = setup.lower_step(case.trainer, case.model, case.mesh, case.state)
    report = compiler.compile_train_step(lowered)
    assert report.fits
    tell(f"train step of nodes, {round_}", model, "v5e-8", STEPS[model], report)


@pytest.mark.parametrize("model", ["decoder", pytest.param("experts", marks=pytest.mark.heavy)])
def test_the_initial_weights_of_a_node_compile_for_the_slice(model, tell):
    case = Case(
        model,
        "v5e-8",
        STEPS[model],
        {"strategy": ConsensusConfig(init_from=("a", "b")), "ema_decay": None, "init_from": "c"},
    )
    everywhere = NamedSharding(case.mesh, PartitionSpec())
    node = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    abstract = case.state.abstract
    begun = case.trainer.training_method.restarted(case.state.shardings)
    report = compiler.compile_train_step(begun.lower(abstract.opt_state, node, case.model.trained(abstract.params)))
    assert report.fits
    tell("initial weights of a node", model, "v5e-8", STEPS[model], report)


def test_a_source_with_rows_apart_reaches_its_node_on_hosts_whose_chips_are_of_several_nodes():
    """On a v5e-16 a host's four chips are a square, and the four chips of a node are a row."""
    mesh = mesh_of(dict(node=4, fsdp=4), "v5e-16")
    plan = Plan(batch_size=16, node=4, fsdp=4)
    places = sharding.row_places(mesh, plan.rules, 16)
    assert places is not None and sorted(places) == list(range(16))
    held = {}
    for device, index in sharding.batch_sharding(mesh, plan.rules).devices_indices_map((16,)).items():
        held.setdefault(device.process_index, []).extend(range(*index[0].indices(16)))
    parts = sharding.host_shards(mesh, plan.rules)
    for process, rows in held.items():
        assert sorted(rows) == list(places[4 * parts[process] : 4 * parts[process] + 4])
    alone = mesh_of(dict(node=4, fsdp=1), "v5e-4")
    assert sharding.row_places(alone, plan.rules, 16) is None
