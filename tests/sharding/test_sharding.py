"""Rules, plans and meshes."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from capibara import sharding
from capibara.core.types import UserError
from capibara.sharding import Plan, Rules


def test_spec_follows_the_rules_and_drops_trailing_nones():
    rules = Rules()
    assert rules.spec(("vocab", "embed")) == P("tensor", ("fsdp", "expert", "context"))
    assert rules.spec(("layers", "embed", "heads", "head_dim")) == P("stage", ("fsdp", "expert", "context"), "tensor")
    assert rules.spec(("batch", "act_time", "act_embed")) == P(("data", "fsdp", "expert"), "context")
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
        (dict(), 8, dict(fsdp=8)),
        (dict(data=-1, fsdp=1), 8, dict(data=8)),
        (dict(tensor=2), 8, dict(fsdp=4, tensor=2)),
        (dict(data=2, fsdp=2, tensor=2), 8, dict(data=2, fsdp=2, tensor=2)),
        (dict(stage=2, expert=2, context=2), 8, dict(stage=2, expert=2, context=2)),
        (dict(), 1, dict()),
    ],
)
def test_mesh_shape(sizes, devices, shape):
    got = Plan(batch_size=64, **sizes).mesh_shape(devices)
    assert got == {axis: shape.get(axis, 1) for axis in sharding.MESH_AXES}


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
    assert sharding.shardings(mesh, Rules(kv_heads=()), axes, shapes)["layer"]["key"].spec == P(
        ("fsdp", "expert", "context")
    )


def test_layers_that_do_not_divide_over_the_stages_name_what_would():
    mesh = sharding.make_mesh(Plan(batch_size=16, fsdp=2, stage=4))
    shapes = {"layers": {"scale": jax.ShapeDtypeStruct((6, 8), np.float32)}}
    with pytest.raises(
        UserError, match=r"^num_layers \(6\) must be a multiple of 4 \(stage=4\): try 8 layers, or Plan.stage = 2"
    ):
        sharding.shardings(mesh, Rules(), {"layers": {"scale": ("layers", "norm")}}, shapes)


def test_an_advised_mesh_axis_divides_the_devices():
    mesh = sharding.make_mesh(Plan(batch_size=16, fsdp=2, tensor=4))
    with pytest.raises(
        UserError, match=r"axis 'mlp' \(6\) must be a multiple of tensor=4: try a mesh axis of 2, or Rules"
    ):
        sharding.shardings(mesh, Rules(), {"up": ("mlp",)}, {"up": jax.ShapeDtypeStruct((6,), np.float32)})


def test_global_batch_puts_rows_where_the_rules_say():
    mesh = sharding.make_mesh(Plan(batch_size=8, data=2, fsdp=2, tensor=2))
    rows = np.arange(8 * 3, dtype=np.int32).reshape(8, 3)
    array = sharding.global_batch(sharding.batch_sharding(mesh, Rules()), {"tokens": rows})["tokens"]
    np.testing.assert_array_equal(array, rows)
    assert {shard.data.shape for shard in array.addressable_shards} == {(2, 3)}


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


def test_zigzag_gives_each_shard_an_early_and_a_late_part():
    places = sharding.zigzag(16, 4).reshape(4, 4)
    np.testing.assert_array_equal(places[0], [0, 1, 14, 15])
    np.testing.assert_array_equal(places[3], [6, 7, 8, 9])
    assert set(places.sum(1)) == {30}  # the same work for each under a causal mask


def test_a_batch_is_balanced_only_where_a_context_axis_divides_it():
    batch = {"tokens": np.arange(32).reshape(2, 16), "encoder_tokens": np.arange(32).reshape(2, 16)}
    mesh = sharding.make_mesh(Plan(batch_size=8, fsdp=2, context=4))
    with sharding.activate(mesh, Rules()):
        moved = sharding.balanced(batch)
        assert set(sharding.balanced({"tokens": np.zeros((2, 12))})) == {"tokens"}
    np.testing.assert_array_equal(moved["tokens"][0], moved["row_positions"])
    np.testing.assert_array_equal(moved["encoder_tokens"], batch["encoder_tokens"])
    assert set(sharding.balanced(batch)) == set(batch)


def test_constraints_keep_the_mesh_axes_that_divide():
    mesh = sharding.make_mesh(Plan(batch_size=8, fsdp=2, tensor=4))
    with sharding.activate(mesh, Rules()):
        one_head = jax.jit(lambda x: sharding.constrain(x, ("batch", "act_time", "act_kv_heads", None)))
        assert one_head(np.zeros((4, 8, 1, 16))).sharding.spec == P("fsdp")


def test_a_host_is_told_which_rows_its_devices_need():
    class Device:
        def __init__(self, id, process_index):
            self.id, self.process_index, self.platform, self.device_kind = id, process_index, "cpu", "cpu"

    def shards(processes, **sizes):
        shape = {axis: sizes.get(axis, 1) for axis in sharding.MESH_AXES}
        devices = np.array([Device(i, p) for i, p in enumerate(processes)], object).reshape(tuple(shape.values()))
        return sharding.host_shards(jax.sharding.Mesh(devices, tuple(shape)), Rules())

    assert shards([0, 0, 1, 1], fsdp=4) == [0, 1]
    assert shards([0, 0, 1, 1], tensor=4) == [0, 0]  # both hold every row
    assert shards([0, 1, 2, 3], fsdp=2, tensor=2) == [0, 0, 1, 1]
    assert shards([0, 0, 1, 1], stage=2, fsdp=2) == [0, 0]
    with pytest.raises(UserError, match="the rows of the . hosts overlap or differ"):
        shards([0, 0, 0, 1], fsdp=4)


def test_pipelines():
    mesh = sharding.make_mesh(Plan(batch_size=16, fsdp=2, stage=4))
    assert Plan(batch_size=16).pipeline(mesh) == sharding.Pipeline(stages=4, microbatches=8)
    with pytest.raises(UserError, match=r"pipeline_microbatches \(2\) must be at least the stages \(4\): try 8"):
        Plan(batch_size=16, pipeline_microbatches=2).pipeline(mesh)
    with pytest.raises(UserError, match=r"multiple of 16 \(fsdp=2 x 8 pipeline microbatches\): try 16"):
        Plan(batch_size=12).check_batch(mesh)


@pytest.mark.parametrize("microbatches", [0, -2])
def test_a_pipeline_has_at_least_one_microbatch(microbatches):
    with pytest.raises(UserError, match=f"Plan.pipeline_microbatches is {microbatches}, must be at least 1, or None"):
        Plan(batch_size=8, pipeline_microbatches=microbatches)


def test_remat_names_are_known():
    with pytest.raises(UserError, match="remat_names has 'keys'.*did you mean key"):
        Plan(batch_size=8, remat="save", remat_names=("keys",))


def test_each_node_has_consecutive_rows_of_a_batch_and_a_mesh_of_its_own():
    plan = Plan(batch_size=16, node=2, fsdp=4)
    mesh = sharding.make_mesh(plan)
    assert (*mesh.shape,) == ("node", *sharding.MESH_AXES) and mesh.shape["node"] == 2
    rows = sharding.batch_sharding(mesh, plan.rules).devices_indices_map((16,))
    for node, devices in enumerate(mesh.devices.reshape(2, 4)):
        held = sorted(row for device in devices for row in range(*rows[device][0].indices(16)))
        assert held == list(range(8 * node, 8 * node + 8))
    with sharding.activate(mesh, plan.rules):
        everywhere, rules = sharding.active()
        assert everywhere is mesh and rules.batch == ("node", "data", "fsdp", "expert")
        inside = []
        jax.eval_shape(
            jax.shard_map(
                lambda x: [inside.append(sharding.active()), x][1],
                mesh=mesh, in_specs=P("node"), out_specs=P("node"), axis_names=sharding.manual_axes(mesh),
            ),
            np.zeros(16, np.float32),
        )  # fmt: skip
    ((of_node, rules),) = inside
    assert of_node.manual_axes == ("node",) and rules.batch == ("data", "fsdp", "expert")
    with pytest.raises(UserError, match=r"Plan.batch_size \(12\) must be a multiple of 8 \(node=2 x fsdp=4\): try 16"):
        sharding.make_mesh(Plan(batch_size=12, node=2, fsdp=4))


def test_a_node_of_one_device_is_manual_over_all_axes():
    """Kernels cannot be partitioned, not even over axes of one device."""
    one, two = (
        sharding.make_mesh(sharding.Plan(batch_size=8, **sizes))
        for sizes in (dict(node=8, fsdp=1), dict(node=4, fsdp=2))
    )
    assert sharding.manual_axes(one) == set(one.axis_names) and sharding.manual_axes(two) == {"node"}
