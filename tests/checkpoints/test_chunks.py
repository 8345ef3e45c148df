"""Chunks: every dtype and shape comes back on every mesh, whoever wrote it; what is not a chunk is damage."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from capibara import sharding
from capibara.checkpoints import array_files, chunks, manifest
from capibara.checkpoints.encryption import Key
from capibara.checkpoints.manifest import Corrupted, Manifest
from capibara.sharding import Plan
from capibara.storage import durable

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


def arrays(where):
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


def write(folder, values, key, compress):
    """Writes by Orbax, or encrypted; returns the manifest."""
    if key is None:
        files = array_files.write(folder, values, compress=compress)
    else:
        files = chunks.write(folder, values, key, chunks.COMPRESSOR if compress else None)
    known = {file.path for file in files}
    others = [path for path in durable.files_below(folder) if path not in known]
    encryption = None if key is None else {"cipher": "AES-256-GCM", "key": key.id}
    return Manifest(7, (*files, *manifest.of_disk(folder, others)), encryption=encryption)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
@pytest.mark.parametrize("saved", range(len(LAYOUTS)))
def test_all_come_back_on_all_meshes(tmp_path, saved, key, compress):
    folder, values = epath.Path(tmp_path) / "7", arrays(place(*LAYOUTS[saved]))
    found = write(folder, values, key, compress)
    for axes, spec in LAYOUTS:
        where = place(axes, spec)
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where(x)), values)
        back = chunks.read(folder, found, target, key=key)
        for name, wanted in values.items():
            assert back[name].dtype == wanted.dtype and back[name].sharding == target[name].sharding
            np.testing.assert_array_equal(jax.device_get(back[name]), jax.device_get(wanted), err_msg=name)
            for shard in back[name].addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), jax.device_get(wanted)[shard.index])


def test_a_state_that_was_read_can_be_donated(tmp_path):
    """On a CPU its buffers are those that were read into: a step writes none of them."""
    folder, where = epath.Path(tmp_path) / "7", place(*LAYOUTS[3])
    values = {"x": jax.device_put(jnp.arange(64.0), where(jnp.ones(1)))}
    found = write(folder, values, None, False)
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), values)
    add = jax.jit(lambda x: jax.tree.map(lambda leaf: leaf + 1, x), donate_argnums=0)
    state = add(add(chunks.read(folder, found, target)))
    for shard in state["x"].addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), np.arange(64.0) + 2)


def test_in_groups_that_the_memory_has_room_for(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "_TOGETHER_BYTES", 100)
    folder, values = epath.Path(tmp_path) / "7", arrays(place(*LAYOUTS[1]))
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), values)
    back = chunks.read(folder, write(folder, values, None, False), target)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(jax.device_get(a), jax.device_get(b)), back, values)


@pytest.mark.parametrize("how", ["no layout", "another layout", "no chunk"])
def test_what_does_not_fit_is_damage(tmp_path, how):
    """Also where the manifest says that it is so."""
    folder, values = epath.Path(tmp_path) / "7", {"x": jnp.ones((4, 4))}
    found = write(folder, values, None, False)
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
        chunks.read(folder, Manifest(7, tuple(files)), target)
