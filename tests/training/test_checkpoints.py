"""Checkpoints: what comes back, what is kept, other models refused, full disks explained."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import subprocess
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.training import checkpoints as module
from capibara.training.checkpoints import Checkpointing, Checkpoints
from capibara.training.loss_scale import LossScale
from capibara.training.state import TrainState, with_shardings
from capibara.types import UserError


def state_of(step, width=4, ema=False):
    params = {"layer": {"kernel": jnp.arange(8.0 * width).reshape(8, width) + step, "bias": jnp.full(width, 0.5)}}
    average = jax.tree.map(lambda x: x * 2, params) if ema else None
    return TrainState(step=jnp.int32(step), params=params, opt_state=(jnp.ones(width) * step,), ema=average)


def target_of(state):
    on_device = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    return with_shardings(state, jax.tree.map(lambda _: on_device, state))


def test_what_was_saved_comes_back(tmp_path):
    data, progress = {"rows": [[1, 2, 3, 4]], "settings": {"name": "x"}}, {"early_stopping": {"best": None, "bad": 0}}
    with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
        assert checkpoints.latest_step() is None
        checkpoints.save(3, state_of(3, ema=True), data, progress)
        checkpoints.save(7, state_of(7, ema=True), data, progress)
    with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
        assert checkpoints.latest_step() == 7
        restored = checkpoints.restore_progress(7)
        assert (restored.step, restored.data, restored.progress) == (7, data, progress)
        assert restored.shapes["params/layer/kernel"] == "float32[8,4]"
        state = checkpoints.restore_state(restored, target_of(state_of(0, ema=True)))
        jax.tree.map(np.testing.assert_array_equal, state, state_of(7, ema=True))
        assert state.params["layer"]["kernel"].devices() == {jax.devices()[1]}


def test_a_loss_scale_comes_back_and_is_no_part_of_other_runs(tmp_path):
    state = dataclasses.replace(state_of(1), loss_scale=LossScale(jnp.float32(1024.0), jnp.int32(7)))
    with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
        checkpoints.save(1, state, {}, {})
        checkpoints.save(2, state_of(2), {}, {})
        restored = checkpoints.restore_state(checkpoints.restore_progress(1), target_of(state))
        jax.tree.map(np.testing.assert_array_equal, restored, state)
        assert isinstance(restored.loss_scale, LossScale)
        # A run without one writes what runs wrote before there was one.
        assert {path.partition("/")[0] for path in checkpoints.restore_progress(2).shapes} == {
            "step", "params", "opt_state",
        }  # fmt: skip
        assert checkpoints.restore_state(checkpoints.restore_progress(2), target_of(state_of(0))).loss_scale is None


@pytest.mark.parametrize("ema", [False, True])
def test_parameters_alone_are_the_averaged_ones_where_kept(tmp_path, ema):
    with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
        state = state_of(5, ema=ema)
        checkpoints.save(5, state, {}, {})
        checkpoints.wait()
        params = checkpoints.restore_params(5, target_of(state.params))
    jax.tree.map(np.testing.assert_array_equal, params, state.eval_params)


def test_retention(tmp_path):
    with Checkpoints(str(tmp_path), Checkpointing(keep=2, keep_every=10)) as checkpoints:
        for step in (5, 10, 15, 20, 25, 30, 35):
            checkpoints.save(step, state_of(step), {}, {})
    assert sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir()) == [10, 20, 30, 35]


@pytest.mark.parametrize(
    "other, message",
    [
        (state_of(0, width=6), r"holds another model: params/layer/bias is float32\[4\] there, float32\[6\]"),
        (dataclasses.replace(state_of(0), opt_state=()), "holds another optimizer's state: opt_state/0 is"),
        (
            dataclasses.replace(state_of(0), loss_scale=LossScale(jnp.float32(1.0), jnp.int32(0))),
            "holds another dtype's state: loss_scale/good_steps is nothing there",
        ),
        (state_of(0, ema=True), "holds another ema_decay's state: ema/layer/bias is nothing there"),
    ],
    ids=["model", "optimizer", "loss scale", "ema"],
)
def test_another_model_is_refused(tmp_path, other, message):
    with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
        checkpoints.save(1, state_of(1), {}, {})
        checkpoints.wait()
        with pytest.raises(UserError, match=message):
            checkpoints.restore_state(checkpoints.restore_progress(1), target_of(other))
        if "model" in message:
            with pytest.raises(UserError, match=message):
                checkpoints.restore_params(1, target_of(other.params))


@pytest.mark.parametrize("bad", [dict(every=-1), dict(keep=0)])
def test_bad_settings(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        Checkpointing(**bad)


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/checkpoints cannot be written .*: set another MODEL_DIR"):
        Checkpoints(str(tmp_path / "file"), Checkpointing())


@pytest.fixture
def small_disk(tmp_path):
    """A 1 MB file system; skips where this user may not mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_is_one_clear_mistake_and_older_checkpoints_stay(small_disk):
    with Checkpoints(str(small_disk), Checkpointing()) as checkpoints:
        checkpoints.save(1, state_of(1), {}, {})
        checkpoints.wait()
        free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
        (small_disk / "filler").write_bytes(b"x" * free)
        with pytest.raises(UserError, match=rf"disk full while saving to {small_disk}/checkpoints \(0 MiB free\)"):
            checkpoints.save(2, state_of(2), {}, {})
        (small_disk / "filler").unlink()
        checkpoints.save(3, state_of(3), {}, {})
    with Checkpoints(str(small_disk), Checkpointing()) as checkpoints:
        for step in (1, 3):
            state = checkpoints.restore_state(checkpoints.restore_progress(step), target_of(state_of(0)))
            jax.tree.map(np.testing.assert_array_equal, state, state_of(step))


def test_a_save_that_fails_in_the_background_is_raised_where_it_is_waited_for(tmp_path, monkeypatch):
    full = OSError(28, "No space left on device")
    with pytest.raises(UserError, match="disk full while saving"):
        with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
            monkeypatch.setattr(checkpoints._manager, "wait_until_finished", lambda: _raise(RuntimeError("save"), full))


def _raise(error, cause):
    raise error from cause


def test_orbax_does_not_log_a_full_disk_with_its_traceback():
    def record(error):
        return logging.LogRecord("absl", logging.ERROR, "f", 1, "failed", (), (type(error), error, None))

    assert not module._is_news(record(OSError(28, "No space left on device")))
    assert module._is_news(record(ValueError("another fault")))


def test_leftovers_of_a_failed_save_are_removed(tmp_path):
    with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state_of(step), {}, {})
    leftover = tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp"
    (tmp_path / "checkpoints" / "2").rename(leftover)
    with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
        assert checkpoints.latest_step() == 1
        checkpoints.save(3, state_of(3), {}, {})
    assert not leftover.exists()


def test_only_the_orphans_of_a_failed_save_are_dropped():
    reported = []
    for error in (RuntimeError("Event loop is closed"), RuntimeError("another"), ValueError("Event loop is closed")):
        module._without_orphans(reported.append, types.SimpleNamespace(exc_value=error))
    assert [str(unraisable.exc_value) for unraisable in reported] == ["another", "Event loop is closed"]


def _damage(step_folder, how):
    if how == "progress":
        shutil.rmtree(step_folder / "progress")
    elif how == "empty":
        for part in step_folder.iterdir():
            shutil.rmtree(part) if part.is_dir() else part.unlink()
    else:
        largest = max((f for f in (step_folder / "state").rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
        os.truncate(largest, largest.stat().st_size // 2)


@pytest.mark.parametrize("how", ["progress", "empty", "truncated"])
def test_a_damaged_step_is_named_with_the_one_to_go_on_from(tmp_path, how):
    with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state_of(step), {}, {})
    _damage(tmp_path / "checkpoints" / "2", how)
    with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
        with pytest.raises(
            UserError, match=r"checkpoints/2 is damaged .*move that folder away to carry on from step 1"
        ):
            checkpoints.restore_state(checkpoints.restore_progress(2), target_of(state_of(0)))
        checkpoints.restore_state(checkpoints.restore_progress(1), target_of(state_of(0)))


def test_a_reader_leaves_a_save_in_flight_alone(tmp_path):
    with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
        checkpoints.save(1, state_of(1), {}, {})
    in_flight = tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp" / "state"
    in_flight.mkdir(parents=True)
    with Checkpoints(str(tmp_path), Checkpointing(), read_only=True) as reader:
        assert reader.latest_step() == 1
        reader.restore_params(1, target_of(state_of(0).params))
    assert in_flight.exists()


def test_a_device_out_of_memory_is_no_full_disk(tmp_path):
    with pytest.raises(RuntimeError, match="Out of memory"), module.disk_full_explained(str(tmp_path)):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte")


def test_keep_every_is_checked():
    with pytest.raises(UserError, match="keep_every is 0, must be at least 1, or None"):
        Checkpointing(keep_every=0)
