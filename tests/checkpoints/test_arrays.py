"""Arrays as chunks: every dtype and shape is restored on every mesh, Orbax reads them, and bad files are refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from capibara import sharding
from capibara.checkpoints import arrays, manifest
from capibara.checkpoints.encryption import Key
from capibara.checkpoints.manifest import Corrupted, Manifest
from capibara.core import tree
from capibara.sharding import Plan
from capibara.storage import hashing, stores

KEY = Key(bytes(range(32)))
LAYOUTS = [
    ({"fsdp": 8}, PartitionSpec("fsdp", None)),
    ({"fsdp": 4, "tensor": 2}, PartitionSpec("fsdp", "tensor")),
    ({"fsdp": 2, "tensor": 4}, PartitionSpec("tensor", "fsdp")),
    ({"data": 8}, PartitionSpec()),
    ({"fsdp": 2, "data": 4}, PartitionSpec(("data", "fsdp"), None)),
]


def place(axes, spec):
    mesh = sharding.make_mesh(Plan(batch_size=8, **axes))
    return lambda x: NamedSharding(mesh, spec if x.ndim == 2 and x.size else PartitionSpec())


def values_of(where):
    rng = np.random.default_rng(0)
    found = {
        name: jnp.asarray(rng.integers(-8, 8, (16, 8))).astype(name)
        for name in ("float32", "bfloat16", "float16", "int8", "uint32", "bool", "float8_e4m3fn", "int4")
    }
    found |= {
        "scalar": jnp.float32(2.5),
        "vector": jnp.arange(5),
        "deep": jnp.ones((2, 3, 4)),
    }
    return jax.tree.map(lambda x: jax.device_put(x, where(x)), found)


def write(folder, values, key=None, compress=False):
    """Writes the arrays; returns the manifest."""
    files = arrays.write(folder, values, key=key, compress=compress)
    known = {file.path for file in files}
    others = [path for path in stores.of(folder).list(folder) if path not in known]
    encryption = None if key is None else {"cipher": "AES-256-GCM", "key": key.id}
    return Manifest(7, (*files, *manifest.of_disk(folder, others)), encryption=encryption)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
@pytest.mark.parametrize("saved", range(len(LAYOUTS)))
def test_all_come_back_on_all_meshes(tmp_path, saved, key, compress):
    folder, values = epath.Path(tmp_path) / "7", values_of(place(*LAYOUTS[saved]))
    found = write(folder, values, key, compress)
    for axes, spec in LAYOUTS:
        where = place(axes, spec)
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where(x)), values)
        back = arrays.read(folder, found, target, key=key)
        for name, wanted in values.items():
            assert back[name].dtype == wanted.dtype and back[name].sharding == target[name].sharding
            np.testing.assert_array_equal(jax.device_get(back[name]), jax.device_get(wanted), err_msg=name)
            for shard in back[name].addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), jax.device_get(wanted)[shard.index])


def test_a_state_that_was_read_can_be_donated(tmp_path):
    """On a CPU the arrays' buffers are those that were read into, so a step must not write to them."""
    folder, where = epath.Path(tmp_path) / "7", place(*LAYOUTS[3])
    values = {"x": jax.device_put(jnp.arange(64.0), where(jnp.ones(1)))}
    found = write(folder, values)
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), values)
    add = jax.jit(lambda x: jax.tree.map(lambda leaf: leaf + 1, x), donate_argnums=0)
    state = add(add(arrays.read(folder, found, target)))
    for shard in state["x"].addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), np.arange(64.0) + 2)


def test_in_groups_that_the_memory_has_room_for(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "TOGETHER_BYTES", 100)
    folder, values = epath.Path(tmp_path) / "7", values_of(place(*LAYOUTS[1]))
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), values)
    back = arrays.read(folder, write(folder, values), target)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(jax.device_get(a), jax.device_get(b)), back, values)


@pytest.mark.parametrize("how", ["no layout", "another layout", "no chunk"])
def test_what_does_not_fit_is_damage(tmp_path, how):
    """Even if the manifest claims it."""
    folder, values = epath.Path(tmp_path) / "7", {"x": jnp.ones((4, 4))}
    found = write(folder, values)
    files = [file for file in found.files]
    if how == "another layout":
        path = tmp_path / "7" / "state" / "x" / ".zarray"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chunks": [4, 2]}))
        files = [manifest.of_disk(folder, ["state/x/.zarray"])[0] if f.path.endswith("x/.zarray") else f for f in files]
    else:
        files = [file for file in files if file.path != f"state/x/{'.zarray' if how == 'no layout' else '0.0'}"]
    target = {"x": jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=values["x"].sharding)}
    message = {"no layout": r"\.zarray is gone", "another layout": "is not a chunk of", "no chunk": "0.0 .* is gone"}[
        how
    ]
    with pytest.raises(Corrupted, match=message):
        arrays.read(folder, Manifest(7, tuple(files)), target)


MESH = {"fsdp": 4, "tensor": 2}


def put(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))


def state_of(mesh):
    return {
        "step": put(mesh, jnp.int32(3)),
        "params": {
            "kernel": put(mesh, jnp.arange(128.0).reshape(8, 16), "fsdp", "tensor"),
            "norm": put(mesh, jnp.zeros((4, 6), jnp.bfloat16), None, "tensor"),
        },
        "opt_state": (put(mesh, jnp.int8(np.arange(4))), None, {"flag": put(mesh, jnp.array([True, False]))}),
    }


@pytest.fixture
def mesh():
    return sharding.make_mesh(Plan(batch_size=8, **MESH))


def test_all_chunks_are_hashed_in_memory_and_are_the_files(mesh, tmp_path):
    folder = epath.Path(tmp_path)
    files = arrays.write(folder, state_of(mesh))
    on_disk = {p for p in tmp_path.rglob("*") if p.is_file() and p.name.replace(".", "").isdigit()}
    assert {tmp_path / file.path for file in files} == on_disk
    for file in files:
        content = (tmp_path / file.path).read_bytes()
        assert (len(content), hashing.hash_of(content)) == (file.size, file.xxh128)
    by_array = {name: [f for f in files if f.array == name] for name in {f.array for f in files}}
    assert set(by_array) == {"step", "params/kernel", "params/norm", "opt_state/0", "opt_state/2/flag"}
    assert len(by_array["params/kernel"]) == 8 and {f.chunk for f in by_array["step"]} == {()}


@pytest.mark.parametrize("compress", [False, True])
def test_they_come_back_on_another_mesh_and_in_part(mesh, tmp_path, compress):
    folder, saved = epath.Path(tmp_path) / "7", state_of(mesh)
    whole = write(folder, saved, compress=compress)
    other = sharding.make_mesh(Plan(batch_size=8, fsdp=2), jax.devices()[:2])
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(other, PartitionSpec())), saved
    )
    back = arrays.read(folder, whole, target)
    jax.tree.map(np.testing.assert_array_equal, back, saved)
    assert back["params"]["kernel"].sharding.mesh == other
    params = arrays.read(folder, whole, {"params": target["params"]})
    jax.tree.map(np.testing.assert_array_equal, params, {"params": saved["params"]})


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("reader", [ocp.PyTreeCheckpointer, ocp.StandardCheckpointer])
def test_orbax_reads_them_too(mesh, tmp_path, reader, compress):
    saved = state_of(mesh) | {"empty": (), "one device": jnp.arange(3)}
    arrays.write(epath.Path(tmp_path), saved, compress=compress)
    with reader() as orbax:
        back = orbax.restore(tmp_path / "state")
    assert back["opt_state"][1] is None and back["empty"] == ()
    assert back["params"]["kernel"].sharding == saved["params"]["kernel"].sharding
    for name, leaf in zip(tree.path_names(saved), jax.tree.leaves(saved), strict=True):
        [found] = [x for other, x in zip(tree.path_names(back), jax.tree.leaves(back), strict=True) if other == name]
        assert found.dtype == leaf.dtype
        np.testing.assert_array_equal(found, leaf)


def test_what_orbax_wrote_is_read(mesh, tmp_path):
    """The array in the format of earlier versions, with the same bytes in each chunk."""
    theirs, ours, saved = epath.Path(tmp_path) / "7", epath.Path(tmp_path) / "other" / "7", state_of(mesh)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)) as orbax:
        orbax.save(theirs / "state", args=ocp.args.PyTreeSave(saved))
    files = arrays.write(ours, saved)
    assert all((theirs / file.path).read_bytes() == (ours / file.path).read_bytes() for file in files)
    layouts = {file.path.rpartition("/")[0] + "/.zarray" for file in files}
    assert all(arrays.Layout.parse((theirs / path).read_bytes()) == arrays.Layout.parse((ours / path).read_bytes())
               for path in layouts)  # fmt: skip
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), saved)
    found = Manifest(7, (*files, *manifest.of_disk(theirs, sorted(layouts))))
    jax.tree.map(np.testing.assert_array_equal, arrays.read(theirs, found, target), saved)
