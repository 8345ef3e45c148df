"""Checkpoints: restored, kept and skipped steps, refused models, and explained full disks."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xxhash
from etils import epath

from capibara.checkpoints import arrays, manifest, run_manifest, step_folders
from capibara.checkpoints.manager import Checkpointing, CheckpointReader, Checkpoints
from capibara.checkpoints.verification import RestoredFromCorruption
from capibara.core.types import UserError
from capibara.storage import full_disk, hashing, stores
from capibara.training.base.state import TrainState, with_shardings
from capibara.training.stability.anomalies import LossWindow
from capibara.training.stability.loss_scale import LossScale


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
        # A run without a loss scale writes the files of versions that had none.
        assert {path.partition("/")[0] for path in checkpoints.restore_progress(2).shapes} == {
            "step", "params", "opt_state",
        }  # fmt: skip
        assert checkpoints.restore_state(checkpoints.restore_progress(2), target_of(state_of(0))).loss_scale is None


def test_a_window_of_losses_comes_back_where_it_is_wanted_as_it_was(tmp_path):
    """Disabled, enabled, or changed in length between two starts: everything else is restored."""
    none = state_of(1)
    four = dataclasses.replace(none, losses=LossWindow(jnp.arange(4.0), jnp.int32(7)))
    six = dataclasses.replace(none, losses=LossWindow(jnp.zeros(6), jnp.int32(0)))
    with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
        checkpoints.save(1, none, {}, {})
        checkpoints.save(2, four, {}, {})
        for step, target, want in ((2, four, four), (1, four, none), (2, none, none), (2, six, none)):
            state = checkpoints.restore_state(checkpoints.restore_progress(step), target_of(target))
            jax.tree.map(np.testing.assert_array_equal, state, want)
        with pytest.raises(UserError, match="holds another model: params/layer/bias is"):
            other = dataclasses.replace(state_of(1, width=5), losses=six.losses)
            checkpoints.restore_state(checkpoints.restore_progress(2), target_of(other))


def test_going_back_quarantines_newer_steps(tmp_path, caplog):
    with Checkpoints(str(tmp_path), Checkpointing(keep=9)) as checkpoints:
        for step in (2, 4, 6, 8):
            checkpoints.save(step, state_of(step), {"batches": step}, {})
        checkpoints.wait()
        assert [checkpoints.step_before(7, most) for most in (7, 5, 4, 1)] == [6, 4, 4, 2]
        assert checkpoints.step_before(2, 1) is None
        os.truncate(tmp_path / "checkpoints" / "4" / "run.json", 3)
        assert checkpoints.step_before(7, 5) == 2 and "4 is corrupted: run.json has 3 bytes" in caplog.text
        assert checkpoints.go_back(2).data == {"batches": 2}
        assert checkpoints.steps() == [2]
        checkpoints.save(4, state_of(4), {"batches": 9}, {})
        checkpoints.wait()
        assert checkpoints.steps() == [2, 4] and checkpoints.restore_progress(4).data == {"batches": 9}
        about = manifest.read(epath.Path(tmp_path) / "checkpoints" / "4").about
        assert about["parent"] == 2
        assert (tmp_path / "checkpoints" / "8.rolled_back" / "manifest.json").exists()


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


def test_nothing_is_removed_unless_a_step_that_is_kept_is_whole(tmp_path, monkeypatch, caplog):
    """Each newer step is corrupted right after its commit: the last intact one stays, with any `keep`."""
    with Checkpoints(str(tmp_path), Checkpointing(keep=1)) as checkpoints:
        checkpoints.save(1, state_of(1), {}, {})
        checkpoints.wait()
        commit = manifest.write

        def damaging(folder, written):
            commit(folder, written)
            _damage(tmp_path / "checkpoints" / folder.name, "truncated")

        monkeypatch.setattr(manifest, "write", damaging)
        for step in (2, 3):
            checkpoints.save(step, state_of(step), {}, {})
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2, 3] and "older steps are kept" in caplog.text
        assert checkpoints.verified_step() == 1
        monkeypatch.setattr(manifest, "write", commit)
        checkpoints.save(4, state_of(4), {}, {})
    assert checkpoints.steps() == [4]


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


@pytest.mark.parametrize("bad", [dict(every=-1), dict(keep=0), dict(keep_best=-1), dict(milestones=(0,))])
def test_bad_settings(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        Checkpointing(**bad)


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/checkpoints cannot be written .*, or set another MODEL_DIR"):
        Checkpoints(str(tmp_path / "file"), Checkpointing())


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
    def full(folder, state, **options):
        raise RuntimeError("save") from OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match="disk full while saving"):
        with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
            monkeypatch.setattr(arrays, "write", full)
            checkpoints.save(1, state_of(1), {}, {})
    assert not (tmp_path / "checkpoints" / "1").exists()


def test_leftovers_of_a_failed_save_are_removed(tmp_path):
    with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state_of(step), {}, {})
    folder = tmp_path / "checkpoints"
    run_manifest.forget_step(run_manifest.folder_of(tmp_path), 2)  # as it is before the step is committed
    (folder / "2" / "manifest.json").rename(folder / "2" / "manifest.json.partial")
    with CheckpointReader(str(tmp_path), Checkpointing()) as reader:
        assert reader.latest_step() == 1 and (folder / "2").exists()
    with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
        assert checkpoints.latest_step() == 1 and not (folder / "2").exists()
        checkpoints.save(2, state_of(2), {}, {})
    assert reader.steps() == [1, 2]


def test_what_is_all_there_is_stays_until_a_step_is_committed(tmp_path):
    with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
        checkpoints.save(1, state_of(1), {}, {})
    folder = tmp_path / "checkpoints"
    run_manifest.forget_step(run_manifest.folder_of(tmp_path), 1)
    (folder / "1" / "manifest.json").unlink()
    with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
        assert checkpoints.verified_step() is None and (folder / "1.unfinished" / "state").exists()
        checkpoints.save(1, state_of(1), {}, {})
    assert [path.name for path in folder.iterdir()] == ["1"]


def test_a_write_that_outlived_its_save_is_a_leftover(tmp_path):
    """It makes the folder again that the failed save removed."""
    (tmp_path / "checkpoints" / "1" / "state.orbax-checkpoint-tmp" / "params.layer.bias").mkdir(parents=True)
    with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
        assert checkpoints.restore(target_of(state_of(0))) is None
        checkpoints.save(1, state_of(1), {}, {})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["1"]


def test_steps_of_others_are_left_alone_and_no_run_starts_anew_over_them(tmp_path):
    theirs = tmp_path / "checkpoints" / "9"
    (theirs / "state").mkdir(parents=True)
    (theirs / "_CHECKPOINT_METADATA").write_text("{}")
    for read_only in (True, False):
        with (CheckpointReader if read_only else Checkpoints)(str(tmp_path), Checkpointing()) as checkpoints:
            with pytest.raises(UserError, match=r"checkpoints/9 has no manifest.json: another program wrote it"):
                checkpoints.verified_step()
    assert (theirs / "_CHECKPOINT_METADATA").exists()


def _damage(step_folder, how):
    if how == "run":
        (step_folder / "run.json").unlink()
    elif how == "manifest":
        text = (step_folder / "manifest.json").read_text()
        (step_folder / "manifest.json").write_text(text.replace('"step": 3', '"step": 4'))
    else:
        largest = max((f for f in (step_folder / "state").rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
        os.truncate(largest, largest.stat().st_size // 2)


@pytest.mark.parametrize("how", ["run", "manifest", "truncated"])
def test_a_corrupted_step_is_passed_over_and_quarantined(tmp_path, how, caplog):
    with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state_of(step), {}, {})
    folder = tmp_path / "checkpoints"
    _damage(folder / "3", how)
    for read_only in (True, False):
        with (CheckpointReader if read_only else Checkpoints)(str(tmp_path), Checkpointing()) as checkpoints:
            assert checkpoints.verified_step() == 2
            assert list(checkpoints.corrupted) == [3] and "checkpoints/3 is corrupted: " in caplog.text
            state = checkpoints.restore_state(checkpoints.restore_progress(2), target_of(state_of(0)))
            jax.tree.map(np.testing.assert_array_equal, state, state_of(2))
            assert (folder / "3").exists() == read_only and (folder / "3.corrupted").exists() != read_only
            if not read_only:
                checkpoints.save(3, state_of(3), {}, {})
    assert checkpoints.steps() == [1, 2, 3]


def test_where_no_step_is_whole_nothing_is_started_anew(tmp_path):
    with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
        checkpoints.save(1, state_of(1), {}, {})
    _damage(tmp_path / "checkpoints" / "1", "truncated")
    with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
        with pytest.raises(
            UserError, match=r"holds no step that is what was saved: 1: state/.* bytes, not .*MODEL_DIR"
        ):
            checkpoints.verified_step()
    assert (tmp_path / "checkpoints" / "1").exists()  # and does not look like a new folder at the next start


@pytest.mark.parametrize("name", ["4.corrupted", "4.damaged"])
def test_what_is_left_of_a_run_with_corrupted_steps_alone_is_no_new_run(tmp_path, name):
    (tmp_path / "checkpoints" / name).mkdir(parents=True)
    with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
        with pytest.raises(UserError, match=f"holds no step but {name}, which was found corrupted: restore the folder"):
            checkpoints.restore(target_of(state_of(0)))


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.ESTALE, errno.EIO])
@pytest.mark.parametrize("times", [1, 99])
def test_a_disk_that_refuses_is_asked_again_and_is_no_damage(tmp_path, monkeypatch, number, times):
    """Except for a persistent EIO: such a step cannot become readable."""
    with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state_of(step), {}, {})
    monkeypatch.setattr(manifest, "_PAUSE_S", 0.0)
    left, read = [times], hashing.read_hashed

    def refusing(path, size):
        if "/2/" in str(path) and left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number), str(path))
        return read(path, size)

    monkeypatch.setattr(hashing, "read_hashed", refusing)
    with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
        if times == 1 or number == errno.EIO:
            restored, _ = checkpoints.restore(target_of(state_of(0)))
            assert restored.step == (2 if times == 1 else 1)
        else:
            with pytest.raises(UserError, match="checkpoints/2/.* cannot be read .*: nothing was changed"):
                checkpoints.restore(target_of(state_of(0)))
            assert checkpoints.steps() == [1, 2]


@pytest.mark.parametrize("verify", ["background", "off"])
@pytest.mark.parametrize("name", ["run.json", ".zarray"])
def test_small_files_are_always_verified(tmp_path, verify, name):
    """A changed digit still parses: without a check it would be used."""
    with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state_of(step), {"rows": [7]}, {})
    path = next((tmp_path / "checkpoints" / "2").rglob(name))
    path.write_text(path.read_text().replace("7", "3").replace("4", "5"))
    with Checkpoints(str(tmp_path), Checkpointing(verify=verify)) as checkpoints:
        restored, state = checkpoints.restore(target_of(state_of(0)))
    assert (restored.step, restored.data) == (1, {"rows": [7]})
    jax.tree.map(np.testing.assert_array_equal, state, state_of(1))


def test_what_was_trained_from_damage_is_not_committed(tmp_path, monkeypatch):
    """A step is verified during training, and found corrupted while the next step is being saved."""
    beside = Checkpointing(verify="background")
    with Checkpoints(str(tmp_path), beside) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state_of(step), {}, {})
    largest = max((tmp_path / "checkpoints" / "2" / "state").rglob("[0-9]*"), key=lambda f: f.stat().st_size)
    content = largest.read_bytes()
    largest.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    saving, verify = threading.Event(), manifest.verify
    monkeypatch.setattr(manifest, "verify", lambda *args: (saving.wait(10), verify(*args))[1])
    with pytest.raises(RestoredFromCorruption):
        with Checkpoints(str(tmp_path), beside) as checkpoints:
            restored, _ = checkpoints.restore(target_of(state_of(0)))
            assert restored.step == 2
            checkpoints.save(3, state_of(3), {}, {})
            time.sleep(0.5)
            saving.set()
            checkpoints.wait()
    assert CheckpointReader(str(tmp_path), beside).steps() == [1]


def test_a_save_that_fails_after_the_lease_was_lost_removes_nothing(tmp_path, monkeypatch):
    """The step belongs to the other writer."""

    def lost(folder, state, **options):
        (tmp_path / "checkpoints" / "lease.json").write_text('{"nonce": "another", "pid": 1, "host": "elsewhere"}')
        (folder / manifest.NAME).write_text("theirs")
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(arrays, "write", lost)
    with pytest.raises((OSError, UserError)):
        with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
            checkpoints.save(1, state_of(1), {}, {})
    assert (tmp_path / "checkpoints" / "1" / manifest.NAME).read_text() == "theirs"


def test_verification_beside_training_stops_it(tmp_path):
    beside = Checkpointing(verify="background")
    with Checkpoints(str(tmp_path), beside) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state_of(step), {}, {})
    _damage(tmp_path / "checkpoints" / "2", "truncated")
    with pytest.raises(
        RestoredFromCorruption, match="checkpoints/2, from which this run was restored, is corrupted: .*again"
    ):
        with Checkpoints(str(tmp_path), beside) as checkpoints:
            assert checkpoints.verified_step() == 2
    with Checkpoints(str(tmp_path), beside) as checkpoints:
        assert checkpoints.verified_step() == 1
    with Checkpoints(str(tmp_path), Checkpointing(verify="off")) as checkpoints:
        assert checkpoints.verified_step() == 1


def test_a_state_that_holds_no_numbers_is_not_saved(tmp_path):
    state = state_of(2)
    poisoned = dataclasses.replace(state, params=jax.tree.map(lambda x: x.at[0].set(jnp.nan), state.params))
    with pytest.raises(UserError, match=r"params/layer/bias is not finite at step 2, not saved"):
        with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
            checkpoints.save(1, state_of(1), {}, {})
            checkpoints.save(2, poisoned, {}, {})
    assert checkpoints.steps() == [1]


def test_steps_are_saved_once_and_in_order(tmp_path):
    with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
        checkpoints.save(5, state_of(5), {}, {})
        for step in (5, 4):
            with pytest.raises(UserError, match=f"step {step} cannot be saved: .*checkpoints holds step 5 already"):
                checkpoints.save(step, state_of(step), {}, {})


def test_the_manifest_names_arrays_and_hashes_what_was_meant(tmp_path):
    with Checkpoints(str(tmp_path), Checkpointing(), about={"config": "a = 1"}) as checkpoints:
        checkpoints.save(5, state_of(5), {}, {}, score=1.5)
    folder = epath.Path(tmp_path / "checkpoints" / "5")
    found = manifest.read(folder)
    assert len(found.about["data"]) == 32
    assert (found.about["config"], found.about["score"], found.about["parent"]) == ("a = 1", 1.5, None)
    [kernel] = [file for file in found.files if file.array == "params/layer/kernel"]
    content = np.asarray(state_of(5).params["layer"]["kernel"]).tobytes()
    assert (kernel.size, kernel.chunk, kernel.xxh128) == (128, (0, 0), xxhash.xxh3_128(content).hexdigest())
    assert (folder / kernel.path).read_bytes() == content
    for file in found.files:
        assert file.xxh128 == xxhash.xxh3_128((folder / file.path).read_bytes()).hexdigest()


def test_the_best_and_milestones_are_kept(tmp_path):
    with Checkpoints(str(tmp_path), Checkpointing(keep=1, keep_best=1, milestones=(10,))) as checkpoints:
        for step, score in ((5, 3.0), (10, 4.0), (15, 1.0), (20, 2.0), (25, None)):
            checkpoints.save(step, state_of(step), {}, {}, score=score)
    assert checkpoints.steps() == [10, 15, 25]


def test_a_device_out_of_memory_is_no_full_disk(tmp_path):
    with pytest.raises(RuntimeError, match="Out of memory"), full_disk.disk_full_explained(str(tmp_path)):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte")


def test_keep_every_is_checked():
    with pytest.raises(UserError, match="keep_every is 0, must be at least 1, or None"):
        Checkpointing(keep_every=0)


def test_a_leftover_that_goes_by_itself_is_no_fault(tmp_path, monkeypatch):
    """The thread that renews the lease has its own renames."""
    folder = stores.folder_of(str(tmp_path))
    monkeypatch.setattr(type(folder), "iterdir", lambda self: iter([self / "lease.json.partial"]))
    step_folders.remove_leftovers(folder)
