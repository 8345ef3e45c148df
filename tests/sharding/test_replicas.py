"""Copies that differ: every bit is noticed, the device is named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from capibara import sharding
from capibara.sharding import Plan
from capibara.sharding.replicas import ReplicaCheck, SilentCorruption


@pytest.fixture
def mesh():
    return sharding.make_mesh(Plan(batch_size=8, data=4, fsdp=2))


def arrays_on(mesh):
    def put(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

    return {
        "kernel": put(jax.random.normal(jax.random.key(0), (8, 6)), "fsdp"),
        "norm": put(jnp.ones(5, jnp.bfloat16)),
        "whole": put(jax.random.normal(jax.random.key(1), (16,)), ("data", "fsdp")),
        "count": put(jnp.int32(7)),
    }


def flipped(array, device, bit):
    """The array with one bit of its first element changed on one device."""
    parts = []
    for shard in array.addressable_shards:
        data = np.array(shard.data)
        if shard.device == device:
            data.reshape(-1)[:1].view(f"uint{8 * data.dtype.itemsize}")[0] ^= 1 << bit
        parts.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def test_equal_copies_are_left_alone(mesh):
    arrays = arrays_on(mesh)
    check = ReplicaCheck(arrays, mesh)
    check.check(arrays)
    assert check.copies == 8
    assert ReplicaCheck({"whole": arrays["whole"]}, mesh).copies == 1


@pytest.mark.parametrize("bit", [0, 9, 15, 31])
@pytest.mark.parametrize("name", ["kernel", "norm", "count"])
def test_a_bit_that_differs_is_noticed_and_the_device_named(mesh, name, bit):
    arrays = arrays_on(mesh)
    bit = min(bit, 8 * arrays[name].dtype.itemsize - 1)
    device = jax.devices()[5]
    wrong = {**arrays, name: flipped(arrays[name], device, bit)}
    with pytest.raises(SilentCorruption, match=rf"silent data corruption: {name} differs on \S*{device}"):
        ReplicaCheck(arrays, mesh).check(wrong)


def test_what_has_one_copy_cannot_be_compared(mesh):
    arrays = arrays_on(mesh)
    ReplicaCheck(arrays, mesh).check({**arrays, "whole": flipped(arrays["whole"], jax.devices()[3], 7)})


def test_several_arrays_and_devices_are_counted(mesh):
    arrays = arrays_on(mesh)
    for name in ("kernel", "norm"):
        arrays[name] = flipped(arrays[name], jax.devices()[1], 3)
    arrays["kernel"] = flipped(arrays["kernel"], jax.devices()[6], 2)
    with pytest.raises(SilentCorruption, match=r"kernel and 1 more arrays differs on .*1.*, .*6"):
        ReplicaCheck(arrays, mesh).check(arrays)
