"""Arrays as files: which chunks are hashed in memory; what Orbax says of failed writes."""

import logging
import types

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from capibara import sharding
from capibara.checkpoints import array_files, chunks, manifest
from capibara.checkpoints.manifest import Manifest
from capibara.sharding import Plan
from capibara.storage import durable

MESH = {"fsdp": 4, "tensor": 2}


def put(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))


def arrays(mesh):
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
    files = array_files.write(folder, arrays(mesh))
    on_disk = {p for p in tmp_path.rglob("*") if p.is_file() and p.name.replace(".", "").isdigit()}
    assert {tmp_path / file.path for file in files} == on_disk
    for file in files:
        content = (tmp_path / file.path).read_bytes()
        assert (len(content), durable.hash_of(content)) == (file.size, file.xxh128)
    by_array = {name: [f for f in files if f.array == name] for name in {f.array for f in files}}
    assert set(by_array) == {"step", "params/kernel", "params/norm", "opt_state/0", "opt_state/2/flag"}
    assert len(by_array["params/kernel"]) == 8 and {f.chunk for f in by_array["step"]} == {()}


def found(folder, files):
    """A manifest of what was written."""
    known = {file.path for file in files}
    others = [path for path in durable.files_below(folder) if path not in known]
    return Manifest(int(folder.name), (*files, *manifest.of_disk(folder, others)))


@pytest.mark.parametrize("compress", [False, True])
def test_they_come_back_on_another_mesh_and_in_part(mesh, tmp_path, compress):
    folder, saved = epath.Path(tmp_path) / "7", arrays(mesh)
    whole = found(folder, array_files.write(folder, saved, compress=compress))
    other = sharding.make_mesh(Plan(batch_size=8, fsdp=2), jax.devices()[:2])
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(other, PartitionSpec())), saved
    )
    back = chunks.read(folder, whole, target)
    jax.tree.map(np.testing.assert_array_equal, back, saved)
    assert back["params"]["kernel"].sharding.mesh == other
    params = chunks.read(folder, whole, {"params": target["params"]})
    jax.tree.map(np.testing.assert_array_equal, params, {"params": saved["params"]})


def test_orbax_reads_them_too(mesh, tmp_path):
    saved = arrays(mesh)
    array_files.write(epath.Path(tmp_path), saved)
    with ocp.PyTreeCheckpointer() as reader:
        back = reader.restore(tmp_path / "state")
    np.testing.assert_array_equal(back["params"]["kernel"], saved["params"]["kernel"])
    assert back["params"]["norm"].dtype == jnp.bfloat16 and back["step"] == 3


def test_orbax_does_not_log_a_full_disk_with_its_traceback():
    def record(error):
        return logging.LogRecord("absl", logging.ERROR, "f", 1, "failed", (), (type(error), error, None))

    assert not array_files._is_news(record(OSError(28, "No space left on device")))
    assert array_files._is_news(record(ValueError("another fault")))


def test_what_a_thread_of_orbax_fails_of_is_raised_where_it_is_waited_for_and_not_logged_too(caplog):
    """So is what follows from the first fault of a save, whose folder is gone when other threads come to write there."""
    from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals

    async def fails():
        raise FileNotFoundError("array_metadatas/process_0")

    array_files.hush()
    with caplog.at_level(logging.ERROR, "absl"):
        future = CommitFutureAwaitingContractedSignals(fails(), name="metadata", operation_id="1")
        with pytest.raises(FileNotFoundError):
            future.result(10)
        logging.getLogger("absl").error("another fault")
    assert caplog.messages == ["another fault"]


def test_only_the_orphans_of_a_failed_save_are_dropped():
    reported = []
    for error in (RuntimeError("Event loop is closed"), RuntimeError("another"), ValueError("Event loop is closed")):
        array_files._without_orphans(reported.append, types.SimpleNamespace(exc_value=error))
    assert [str(unraisable.exc_value) for unraisable in reported] == ["another", "Event loop is closed"]
