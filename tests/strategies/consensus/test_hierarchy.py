"""Nodes take the mean of their group between rounds."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from capibara import sharding
from capibara.sharding import Plan
from capibara.strategies.consensus.hierarchy import group_means


def means(models, groups, has_part=None, **sizes):
    """Of eight values a node, with one more dimension that other axes of the mesh share."""
    has_part = np.ones(sizes["node"], bool) if has_part is None else np.array(has_part)
    mesh = sharding.make_mesh(Plan(batch_size=8, **sizes))
    spec = {"w": PartitionSpec("fsdp"), "b": PartitionSpec()}
    placed = {
        name: jax.device_put(np.float32(x), NamedSharding(mesh, PartitionSpec("node", *spec[name])))
        for name, x in models.items()
    }
    return jax.device_get(jax.jit(group_means(mesh, spec, groups))(placed, has_part))


@pytest.mark.parametrize(
    "sizes, groups", [(dict(node=4, fsdp=2), 2), (dict(node=8, fsdp=1), 2), (dict(node=8, fsdp=1), 4)]
)
def test_each_node_takes_the_mean_of_its_group(sizes, groups):
    rng, nodes = np.random.default_rng(0), sizes["node"]
    models = {"w": rng.standard_normal((nodes, 8)), "b": rng.standard_normal((nodes, 3))}
    found = means(models, groups, **sizes)
    for name, x in models.items():
        of_groups = x.reshape(groups, -1, x.shape[1]).mean(axis=1)
        np.testing.assert_allclose(found[name], of_groups.repeat(nodes // groups, axis=0), rtol=1e-5, atol=1e-6)


def test_a_member_that_is_not_finite_is_left_out_and_gets_the_mean_of_the_others():
    """All of it, although only one shard of one array shows it."""
    models = {"w": np.arange(32.0).reshape(4, 8), "b": np.arange(12.0).reshape(4, 3)}
    models["w"][1, 7] = np.nan
    found = means(models, 2, node=4, fsdp=2)
    for name, x in models.items():
        np.testing.assert_allclose(found[name][:2], np.stack([x[0], x[0]]))
        np.testing.assert_allclose(found[name][2:], np.stack([x[2:].mean(axis=0)] * 2))


def test_a_group_without_a_finite_member_keeps_its_models():
    models = {"w": np.full((4, 8), np.nan), "b": np.arange(12.0).reshape(4, 3)}
    models["w"][2:] = 1
    found = means(models, 2, node=4, fsdp=2)
    np.testing.assert_array_equal(found["b"][:2], models["b"][:2])
    assert np.isnan(found["w"][:2]).all()
    np.testing.assert_array_equal(found["b"][2:], [models["b"][2:].mean(axis=0)] * 2)


def test_a_member_without_a_part_gets_the_mean_of_the_others():
    models = {"w": np.arange(32.0).reshape(4, 8), "b": np.arange(12.0).reshape(4, 3)}
    found = means(models, 2, [True, False, False, False], node=4, fsdp=2)
    np.testing.assert_array_equal(found["w"], models["w"][[0, 0, 2, 3]])
