"""Which devices generate, and that `infer` and `serve` use them."""

from __future__ import annotations

import collections

import jax
import pytest

from capibara.core.types import UserError
from capibara.inference.engine.placement.serving_mesh import ServingMesh
from capibara.models import api
from capibara.models.api import DecoderConfig
from capibara.planner.hardware import topology

SIZES = dict(vocab_size=384, embed_dim=32, num_layers=1, num_heads=8, mlp_dim=64)


def shape(devices, mesh=ServingMesh(), **sizes):
    """Axes with more than one device that a model is sharded on."""
    found = mesh.shardings(api.build(DecoderConfig(**SIZES | sizes)), devices)
    first = jax.tree.leaves(found)[0]
    return {axis: n for axis, n in first.mesh.shape.items() if n > 1} if hasattr(first, "mesh") else {}


@pytest.mark.parametrize(
    "sizes, mesh, want",
    [
        (dict(num_kv_heads=8), {}, {"tensor": 4}),
        (dict(num_kv_heads=2), {}, {"data": 2, "tensor": 2}),
        (dict(num_kv_heads=1), {}, {"data": 4}),
        (dict(vocab_size=385), {}, {"tensor": 4}),
        (dict(mlp_dim=66), {}, {"data": 2, "tensor": 2}),
        ({}, dict(tensor=2), {"data": 2, "tensor": 2}),
        ({}, dict(tensor=2, data=1), {"tensor": 2}),
        ({}, dict(data=2), {"data": 2, "tensor": 2}),
        ({}, dict(data=1, tensor=1), {}),
    ],
    ids=str,
)
def test_the_chips_of_a_slice_are_shared(sizes, mesh, want):
    assert shape(topology.slice_devices("v5e-4"), ServingMesh(**mesh), **sizes) == want


def test_emulated_devices_are_one_processor_unless_more_are_asked_for():
    assert shape(jax.devices()) == {}
    assert shape(jax.devices(), ServingMesh(tensor=2)) == {"tensor": 2}
    assert shape(jax.devices(), ServingMesh(data=4)) == {"data": 4}


@pytest.mark.parametrize(
    "mesh, said",
    [
        (dict(tensor=3, data=1), r"ServingMesh.tensor \(3\) must divide the model's 8 heads of keys and values: try 1"),
        (dict(tensor=6, data=1), r"must divide the model's 8 heads of keys and values: try 2"),
        (
            dict(tensor=4, data=4),
            r"ServingMesh.tensor \(4\) x ServingMesh.data \(4\) must be at most the 8 available devices",
        ),
        (dict(tensor=0), "ServingMesh.tensor is 0"),
    ],
)
def test_what_cannot_be_is_named(mesh, said):
    with pytest.raises(UserError, match=said):
        shape(jax.devices(), ServingMesh(**mesh))


@pytest.mark.parametrize(
    "mesh, want",
    [({}, {"data": 2, "tensor": 8}), (dict(tensor=4), {"data": 4, "tensor": 4}), (dict(data=1), {"tensor": 8})],
    ids=str,
)
def test_every_process_of_a_slice_has_a_share(mesh, want):
    devices = topology.slice_devices("v5e-16")
    assert len({device.process_index for device in devices}) == 4
    assert shape(devices, ServingMesh(**mesh)) == want
    found = jax.tree.leaves(ServingMesh(**mesh).shardings(api.build(DecoderConfig(**SIZES)), devices))[0].mesh
    counts = collections.Counter(device.process_index for device in found.devices.flat)
    assert len(counts) == 4 and len(set(counts.values())) == 1


@pytest.mark.parametrize(
    "mesh, said",
    [
        (dict(tensor=2, data=1), r"ServingMesh.data \(2\) must be a multiple of the 4 processes, .* try 4"),
        (dict(tensor=4, data=1), "4 of 16 chips, which are not adjacent on the slice: use all of them"),
    ],
)
def test_a_process_without_a_share_is_refused(mesh, said):
    with pytest.raises(UserError, match=said):
        shape(topology.slice_devices("v5e-16"), ServingMesh(**mesh))
