"""Bytes that are not those that were saved: every one is noticed, and the newest whole step is used."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from capibara.checkpoints import manifest, retention
from capibara.checkpoints.manager import Checkpointing, CheckpointReader, Checkpoints
from capibara.checkpoints.manifest import Corrupted
from capibara.cli import convert
from capibara.core.types import UserError
from capibara.multihost import exits

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import saver  # noqa: E402

LAYOUTS = {
    "one device": {"devices": 1, "fsdp": 1},
    "two": {"devices": 2, "fsdp": 2},
    "eight": {"devices": 8, "fsdp": 8},
    "copies": {"devices": 8, "data": 4, "fsdp": 2},
    "copies alone": {"devices": 4, "data": 4},
    "tensor": {"devices": 8, "fsdp": 4, "tensor": 2},
}


QUICK = ("two", "copies")
EACH = [name if name in QUICK else pytest.param(name, marks=pytest.mark.heavy) for name in LAYOUTS]


@pytest.fixture(scope="module", params=EACH)
def saved(request, tmp_path_factory):
    """The folder of a run with steps 1 and 2, its arrays split in one of several ways."""
    layout = dict(LAYOUTS[request.param])
    folder = tmp_path_factory.mktemp("run")
    with Checkpoints(str(folder), Checkpointing()) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, saver.sharded(saver.state_of(step), layout["devices"], **_axes(layout)), {}, {})
    return folder


def _axes(layout):
    return {name: size for name, size in layout.items() if name != "devices"}


@pytest.fixture
def run(saved, tmp_path):
    """A copy of it that may be corrupted."""
    shutil.copytree(saved / "checkpoints", tmp_path / "checkpoints")
    return tmp_path


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def fault_of(folder):
    """What is said of a step; None where it is whole."""
    try:
        manifest.verify(epath.Path(folder))
    except Corrupted as fault:
        return str(fault)
    return None


@contextlib.contextmanager
def changed(path, content):
    """The file with another content; yields whether that is another."""
    before = path.read_bytes()
    path.write_bytes(content)
    try:
        yield content != before
    finally:
        path.write_bytes(before)


def assert_noticed(step, path, content):
    """Another content is noticed where it means anything else; and nothing is said of the old one."""
    values = json.loads(path.read_bytes()) if path.name == manifest.NAME else None
    with changed(path, content) as another:
        fault = fault_of(step)
        if fault is None and values is not None and another:
            another = json.loads(path.read_bytes()) != values  # white space
        assert (fault is not None) == another, (path, fault)
        if fault is not None and path.name != manifest.NAME:
            assert str(path.relative_to(step)) in fault
    assert fault_of(step) is None
    return fault


@pytest.mark.fault(13)
def test_every_flipped_bit(saved):
    step, rng = saved / "checkpoints" / "2", random.Random(0)
    for _ in range(40):
        path = rng.choice(files(step))
        content = bytearray(path.read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        fault = assert_noticed(step, path, bytes(content))
        if fault and path.parent.name.startswith("params") and not path.name.startswith("."):
            assert f"(array {path.parent.name.replace('.', '/')}) has changed since it was saved" in fault


@pytest.mark.fault(14)
def test_zeroed_blocks(saved):
    step, rng = saved / "checkpoints" / "2", random.Random(1)
    for _ in range(20):
        path = rng.choice(files(step))
        content = bytearray(path.read_bytes())
        at = rng.randrange(len(content))
        content[at : at + 512] = bytes(len(content[at : at + 512]))
        assert_noticed(step, path, bytes(content))


@pytest.mark.fault(15)
def test_files_cut_short(saved):
    step = saved / "checkpoints" / "2"
    for path in files(step):
        content = path.read_bytes()
        for length in (0, len(content) // 2, len(content) - 1):
            assert_noticed(step, path, content[:length])


@pytest.mark.fault(16, 19)
def test_files_that_are_gone(run):
    step = run / "checkpoints" / "2"
    for path in files(step):
        content = path.read_bytes()
        path.unlink()
        assert path.name in fault_of(step)
        path.write_bytes(content)
    assert fault_of(step) is None


@pytest.mark.fault(17)
def test_files_of_one_size_that_are_swapped(run):
    step, swapped = run / "checkpoints" / "2", 0
    chunks = [path for path in files(step / "state") if path.name.replace(".", "").isdigit()]
    for one in chunks:
        for other in chunks:
            if one < other and one.stat().st_size == other.stat().st_size and one.read_bytes() != other.read_bytes():
                contents = one.read_bytes(), other.read_bytes()
                one.write_bytes(contents[1]), other.write_bytes(contents[0])
                assert f"{one.parent.name}/{one.name}" in fault_of(step)
                one.write_bytes(contents[0]), other.write_bytes(contents[1])
                swapped += 1
    assert swapped and fault_of(step) is None


@pytest.mark.fault(18)
def test_files_of_another_step(run):
    one, two = (run / "checkpoints" / name for name in "12")
    copied = 0
    for path in files(two):
        before, other = path.read_bytes(), (one / path.relative_to(two)).read_bytes()
        if before != other:
            path.write_bytes(other)
            assert fault_of(two) is not None, path
            path.write_bytes(before)
            copied += 1
    assert copied > 3 and fault_of(two) is None
    shutil.rmtree(two)
    shutil.copytree(one, two)  # all of it
    assert fault_of(two) == "manifest.json is of step 1"


@pytest.mark.fault(19)
def test_files_that_were_added_harm_nothing(run, capsys):
    """Whatever programs leave in folders; and what Orbax would take for the arrays, which are not read by it."""
    step = run / "checkpoints" / "2"
    added = ("state/.DS_Store", "state/ocdbt.process_0/manifest.ocdbt", "state/params.layer.kernel/9.9")
    for name in added:
        (step / name).parent.mkdir(exist_ok=True)
        (step / name).write_bytes(b"x")
    assert fault_of(step) is None
    with CheckpointReader(str(run), Checkpointing()) as reader:
        restored, state = reader.restore(saver.target_of(saver.sharded(saver.state_of(0), 2)))
    jax.tree.map(np.testing.assert_array_equal, state, saver.state_of(2))
    assert restored.step == 2 and exits.run_verb(convert.main, ["verify", str(run)]) == 0
    assert all(f"no part of it: {name}" in capsys.readouterr().out for name in added[:1])


@pytest.mark.fault(20, 21)
@pytest.mark.parametrize("how", ["gone", "empty", "an empty folder", "a file"])
def test_what_has_no_manifest_is_no_step(run, how):
    folder = run / "checkpoints"
    match how:
        case "gone":
            (folder / "2" / "manifest.json").unlink()
        case "empty":
            (folder / "2" / "manifest.json").write_bytes(b"")
        case "an empty folder":
            (folder / "9").mkdir()
        case "a file":
            (folder / "9").write_bytes(b"x")
    with CheckpointReader(str(run), Checkpointing()) as reader:
        assert reader.verified_step() == (1 if how in ("gone", "empty") else 2)
        assert reader.latest_step() == (1 if how == "gone" else 2)


@pytest.mark.fault(22)
def test_a_corrupted_newest_step_is_passed_over(run, caplog):
    path = max(files(run / "checkpoints" / "2" / "state"), key=lambda path: path.stat().st_size)
    os.truncate(path, path.stat().st_size // 2)
    with Checkpoints(str(run), Checkpointing()) as checkpoints:
        assert checkpoints.verified_step() == 1 and list(checkpoints.corrupted) == [2]
        assert "checkpoints/2 is corrupted: state/" in caplog.text
        state = checkpoints.restore_state(checkpoints.restore_progress(1), saver.target_of(saver.state_of(0)))
        jax.tree.map(np.testing.assert_array_equal, state, saver.state_of(1))
        checkpoints.save(2, saver.state_of(2), {}, {})  # that step comes again
    assert fault_of(run / "checkpoints" / "2") is None and (run / "checkpoints" / "2.corrupted").is_dir()


@pytest.mark.fault(23)
def test_the_last_whole_step_is_not_removed(run):
    path = max(files(run / "checkpoints" / "2" / "state"), key=lambda path: path.stat().st_size)
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with Checkpoints(str(run), Checkpointing(keep=1)) as checkpoints:
        retention.retain(checkpoints._folder, checkpoints._config)
        assert checkpoints.steps() == [1, 2] and checkpoints.verified_step() == 1
        checkpoints.save(2, saver.state_of(2), {}, {})
    assert checkpoints.steps() == [2] and fault_of(run / "checkpoints" / "2") is None


@pytest.mark.fault(27)
@pytest.mark.parametrize("layout", EACH)
def test_arrays_are_the_same_on_every_mesh(saved, layout):
    layout = LAYOUTS[layout]
    target = saver.target_of(saver.sharded(saver.state_of(0), layout["devices"], **_axes(layout)))
    with CheckpointReader(str(saved), Checkpointing()) as reader:
        state = reader.restore_state(reader.restore_progress(2), target)
    jax.tree.map(np.testing.assert_array_equal, state, saver.state_of(2))
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, target)


@pytest.mark.fault(45)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda p: {**p, "layer": {**p["layer"], "bias": jnp.zeros(4)}},
            r"layer/bias is float32\[8\] there, float32\[4\]",
        ),
        (
            lambda p: {**p, "layer": {**p["layer"], "bias": jnp.zeros(8, jnp.bfloat16)}},
            r"layer/bias is float32\[8\] there, bfloat16\[8\]",
        ),
        (
            lambda p: {**p, "layer": {**p["layer"], "bias": jnp.zeros(8, jnp.int32)}},
            r"layer/bias is float32\[8\] there, int32\[8\]",
        ),
        (lambda p: {"layer": p["layer"]}, r"embedding is bfloat16\[8,8\] there, nothing"),
        (lambda p: {**p, "more": jnp.zeros(1)}, r"more is nothing there, float32\[1\]"),
    ],
)
def test_another_state_is_refused(saved, change, message):
    state = saver.state_of(0)
    target = saver.target_of(type(state)(**{**vars(state), "params": change(state.params)}))
    with CheckpointReader(str(saved), Checkpointing()) as reader:
        with pytest.raises(UserError, match=message):
            reader.restore_state(reader.restore_progress(2), target)


@pytest.mark.fault(45)
def test_another_precision_is_taken_where_that_is_asked_for(saved):
    """Of floating-point numbers; nothing else."""
    as_asked = Checkpointing(cast=True)
    state = saver.state_of(0)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, state.params)
    other = dataclasses.replace(state, params=half)
    with CheckpointReader(str(saved), Checkpointing()) as reader:
        with pytest.raises(UserError, match=r"the configuration of the run, set Checkpointing.cast = True, or set"):
            reader.restore(saver.target_of(other))
    with CheckpointReader(str(saved), as_asked) as reader:
        _, back = reader.restore(saver.target_of(other))
        right = jax.tree.map(lambda x, like: x.astype(like.dtype), saver.state_of(2), other)
        jax.tree.map(np.testing.assert_array_equal, back, right)
        whole = dataclasses.replace(state, params={**state.params, "embedding": jnp.zeros((8, 8), jnp.int32)})
        with pytest.raises(UserError, match=r"embedding is bfloat16\[8,8\] there, int32\[8,8\] .* of the run, or set"):
            reader.restore(saver.target_of(whole))


@pytest.mark.fault(40)
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_parameters_that_are_no_numbers_are_not_saved(tmp_path, number):
    state = saver.state_of(2)
    state.params["layer"]["kernel"] = state.params["layer"]["kernel"].at[3, 3].set(number)
    with pytest.raises(UserError, match="params/layer/kernel is not finite at step 2, not saved"):
        with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
            checkpoints.save(1, saver.state_of(1), {}, {})
            checkpoints.save(2, state, {}, {})
    assert checkpoints.steps() == [1]


@pytest.mark.fault(43)
def test_buffers_that_are_donated_after_the_save(tmp_path):
    change = jax.jit(lambda state: jax.tree.map(lambda x: -x, state), donate_argnums=0)
    state = saver.sharded(saver.state_of(1, saver.LARGE))
    with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
        checkpoints.save(1, state, {}, {})
        for _ in range(5):
            state = change(state)
        jax.block_until_ready(state)
    with CheckpointReader(str(tmp_path), Checkpointing()) as reader:
        back = reader.restore_state(reader.restore_progress(1), saver.target_of(saver.state_of(0, saver.LARGE)))
    jax.tree.map(np.testing.assert_array_equal, back, saver.state_of(1, saver.LARGE))
