"""Rules, plans and meshes."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from capibara import sharding
from capibara.sharding import Plan, Rules
from capibara.types import UserError


def test_spec_follows_the_rules_and_drops_trailing_nones():
    rules = Rules()
    assert rules.spec(("vocab", "embed")) == P("tensor", "fsdp")
    assert rules.spec(("layers", "embed", "heads", "head_dim")) == P(None, "fsdp", "tensor")
    assert rules.spec(("batch", "act_time", "act_embed")) == P(("data", "fsdp"))
    assert rules.spec((None, "norm")) == P()


def test_two_dimensions_on_one_mesh_axis_raise_and_name_both():
    with pytest.raises(UserError, match=r"Rules\.embed and Rules\.mlp both map to the mesh axis 'fsdp'"):
        Rules(mlp=("fsdp",)).spec(("embed", "mlp"))


def test_unknown_names_come_with_the_nearest():
    with pytest.raises(UserError, match="did you mean fsdp"):
        Rules(embed=("fsdb",))
    with pytest.raises(UserError, match="did you mean embed"):
        Rules().spec(("embd",))


@pytest.mark.parametrize(
    "sizes, devices, shape",
    [
        (dict(), 8, (1, 8, 1)),
        (dict(data=-1, fsdp=1), 8, (8, 1, 1)),
        (dict(tensor=2), 8, (1, 4, 2)),
        (dict(data=2, fsdp=2, tensor=2), 8, (2, 2, 2)),
        (dict(), 1, (1, 1, 1)),
    ],
)
def test_mesh_shape(sizes, devices, shape):
    assert tuple(Plan(batch_size=64, **sizes).mesh_shape(devices).values()) == shape


def test_a_mesh_that_does_not_fit_says_what_would():
    with pytest.raises(UserError, match="needs 64 devices, 8 are here.*--emulate=64"):
        Plan(batch_size=64, fsdp=64).mesh_shape(8)
    with pytest.raises(UserError, match="must divide the 8 devices: try 2"):
        Plan(batch_size=64, tensor=3).mesh_shape(8)
    with pytest.raises(UserError, match="more than one"):
        Plan(batch_size=64, data=-1, fsdp=-1)


@pytest.mark.parametrize("batch_size, nearest", [(9, 8), (30, 32), (3, 8)])
def test_a_batch_that_does_not_divide_names_the_nearest_that_does(batch_size, nearest):
    with pytest.raises(UserError, match=rf"Plan\.batch_size \({batch_size}\).*multiple of 8 .*try {nearest}$"):
        sharding.make_mesh(Plan(batch_size=batch_size))


def test_accumulation_counts_in_the_batch():
    with pytest.raises(UserError, match="multiple of 16.*2 accumulation steps.*try 32"):
        sharding.make_mesh(Plan(batch_size=24, accumulation=2))


def test_a_dimension_that_does_not_divide_is_named():
    mesh = sharding.make_mesh(Plan(batch_size=8, fsdp=2, tensor=4))
    axes = {"layer": {"key": ("embed", "kv_heads", "head_dim")}}
    shapes = {"layer": {"key": jax.ShapeDtypeStruct((64, 2, 16), np.float32)}}
    with pytest.raises(UserError, match=r"layer/key: axis 'kv_heads' \(2\) must be a multiple of tensor=4"):
        sharding.shardings(mesh, Rules(), axes, shapes)
    assert sharding.shardings(mesh, Rules(kv_heads=()), axes, shapes)["layer"]["key"].spec == P("fsdp")


def test_global_batch_puts_rows_where_the_rules_say():
    mesh = sharding.make_mesh(Plan(batch_size=8, data=2, fsdp=2, tensor=2))
    rows = np.arange(8 * 3, dtype=np.int32).reshape(8, 3)
    array = sharding.global_batch(sharding.batch_sharding(mesh, Rules()), {"tokens": rows})["tokens"]
    np.testing.assert_array_equal(array, rows)
    assert {shard.data.shape for shard in array.addressable_shards} == {(2, 3)}


def test_emulation_is_bounded():
    with pytest.raises(UserError, match="must be from 1 to 64"):
        sharding.emulate(65)


def test_platform_is_that_of_the_active_mesh_even_of_one_device():
    class Chip:
        platform = "tpu"

    class OneChip:
        devices = np.array([Chip()])
        size = 1

    assert sharding.platform() == jax.default_backend()
    with sharding.activate(OneChip(), Rules()):
        assert sharding.platform() == "tpu"
        assert sharding.active() is None
