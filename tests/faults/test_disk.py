"""Disks that are full, that fail, that forget; clocks that go back; two writers."""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from etils import epath

from capibara.checkpoints import lease, manifest, saving
from capibara.checkpoints import manager as module
from capibara.checkpoints.manager import Checkpointing, CheckpointReader, Checkpoints
from capibara.core.types import UserError
from capibara.storage.disk import DiskStore

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))
import saver  # noqa: E402


def fill(folder, leave=0):
    found = os.statvfs(folder)
    (folder / "filler").write_bytes(b"x" * max(0, found.f_bavail * found.f_frsize - leave))


def read(checkpoints, step, width=64):
    target = saver.target_of(saver.state_of(0, width))
    return checkpoints.restore_state(checkpoints.restore_progress(step), target)


@pytest.mark.fault(8)
@pytest.mark.parametrize("room", [0, 80_000, 200_000])
def test_a_full_disk(small_disk, room, monkeypatch):
    """That there is no room is found out by the write itself."""
    monkeypatch.setattr(module, "check_room", lambda folder, size: None)
    width = 16_384
    with Checkpoints(str(small_disk), Checkpointing()) as checkpoints:
        checkpoints.save(1, saver.state_of(1, width), {}, {})
        checkpoints.wait()
        fill(small_disk, room)
        with pytest.raises(UserError, match=rf"disk full while saving to {small_disk}"):
            checkpoints.save(2, saver.state_of(2, width), {}, {})
            checkpoints.wait()
        assert checkpoints.steps() == [1]
        (small_disk / "filler").unlink()
        checkpoints.save(3, saver.state_of(3, width), {}, {})
        checkpoints.wait()
        # Only now: where the machine is busy enough, a write of the failed save may still come after its removal.
        assert not list((small_disk / "checkpoints").glob("2*"))
    with Checkpoints(str(small_disk), Checkpointing()) as checkpoints:
        for step in (1, 3):
            manifest.verify(epath.Path(small_disk) / "checkpoints" / str(step))
            jax.tree.map(np.testing.assert_array_equal, read(checkpoints, step, width), saver.state_of(step, width))


@pytest.mark.fault(9)
def test_a_disk_that_is_full_at_the_manifest(small_disk, monkeypatch):
    commit = manifest.write
    with Checkpoints(str(small_disk), Checkpointing()) as checkpoints:
        checkpoints.save(1, saver.state_of(1), {}, {})
        checkpoints.wait()
        monkeypatch.setattr(manifest, "write", lambda *args: (fill(small_disk), commit(*args)))
        with pytest.raises(UserError, match="disk full"):
            checkpoints.save(2, saver.state_of(2), {}, {})
            checkpoints.wait()
        monkeypatch.setattr(manifest, "write", commit)
        (small_disk / "filler").unlink()
        assert checkpoints.steps() == [1]
        checkpoints.save(2, saver.state_of(2), {}, {})
    assert checkpoints.steps() == [1, 2]


PRELOADED = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
/* What is done to the files below FAULTY_FOLDER takes SLOW_MS each time, one after the other, as a disk would; of the
   writes FAULTY_COUNT fail with EIO, from the FAULTY_FROM-th on. */
static int number(const char *name) { return getenv(name) ? atoi(getenv(name)) : 0; }
static int meant(int fd) {
  static pthread_mutex_t disk = PTHREAD_MUTEX_INITIALIZER;
  char link[64], path[4096];
  const char *folder = getenv("FAULTY_FOLDER");
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  if (!folder || n < 0) return 0;
  path[n] = 0;
  if (!strstr(path, folder)) return 0;
  if (number("SLOW_MS")) {
    pthread_mutex_lock(&disk);
    usleep(1000 * number("SLOW_MS"));
    pthread_mutex_unlock(&disk);
  }
  return 1;
}
static int faulty(int fd) {
  static int seen = 0;
  if (!meant(fd)) return 0;
  int index = __sync_fetch_and_add(&seen, 1) - number("FAULTY_FROM");
  return index >= 0 && index < number("FAULTY_COUNT");
}
#define CALL(type, name, params, args, fails) \
  type name params { \
    static type (*real) params; \
    if (!real) real = dlsym(RTLD_NEXT, #name); \
    if (fails) { errno = EIO; return -1; } \
    return real args; \
  }
CALL(ssize_t, write, (int fd, const void *data, size_t size), (fd, data, size), faulty(fd))
CALL(ssize_t, pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at), faulty(fd))
CALL(ssize_t, pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at), faulty(fd))
CALL(int, fsync, (int fd), (fd), meant(fd) < 0)
"""


@pytest.fixture(scope="module")
def faulty_library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faulty")
    (folder / "faulty.c").write_text(PRELOADED)
    try:
        command = ["cc", "-shared", "-fPIC", "-o", folder / "faulty.so", folder / "faulty.c", "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"no C compiler: {error}")
    if done.returncode:
        pytest.skip(f"cc: {done.stderr.strip().splitlines()[-1]}")
    return folder / "faulty.so"


@pytest.mark.fault(10)
@pytest.mark.parametrize(("count", "lost"), [(1, False), pytest.param(10_000, True, marks=pytest.mark.heavy)])
def test_writes_that_fail(tmp_path, faulty_library, count, lost):
    """One failure is tried again; where all fail there is an error and no step."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "LD_PRELOAD": str(faulty_library)}
    environment |= {"FAULTY_FOLDER": "/checkpoints/2/state", "FAULTY_FROM": "3", "FAULTY_COUNT": str(count)}
    command = [sys.executable, str(HERE / "saver.py"), str(tmp_path), "return"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    with CheckpointReader(str(tmp_path), Checkpointing()) as reader:
        assert reader.verified_step() == (1 if lost else 2)
    if lost:
        assert done.returncode == 1 and "error: " in done.stderr and "nput/output error" in done.stderr
    else:
        assert done.returncode == 0 and "saving step 2 failed" in done.stderr


@pytest.mark.fault(11)
def test_a_disk_that_cannot_sync(tmp_path, monkeypatch):
    sync = os.fsync

    def failing(descriptor):
        if "/2/state/" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(5, "Input/output error")
        return sync(descriptor)

    monkeypatch.setattr(saving, "_PAUSE_S", 0.0)
    with pytest.raises(OSError, match="Input/output error"):
        with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
            checkpoints.save(1, saver.state_of(1), {}, {})
            checkpoints.wait()
            monkeypatch.setattr(os, "fsync", failing)
            checkpoints.save(2, saver.state_of(2), {}, {})
    assert checkpoints.steps() == [1] and not (tmp_path / "checkpoints" / "2").exists()


@pytest.mark.heavy
@pytest.mark.fault(37)
def test_a_slow_disk(shell, faulty_library):
    """One save may be under way: the steps beside it take as long as before, the next save waits for it, and says so."""
    access_ms = 20  # a save without moments has some 170 accesses
    flags = ("--gin_file=tiny.gin", "--emulate=1", "--gin.Checkpointing.every=30", "--gin.TRAIN_STEPS=61")
    flags += ("--gin.Optimizer.name='sgd'",)
    disk = {"FAULTY_FOLDER": "/checkpoints/", "SLOW_MS": str(access_ms)}
    done = shell.run("train", *flags, LD_PRELOAD=str(faulty_library), **disk)
    assert (done.code, done.err) == (0, "")
    records = [json.loads(line) for line in (shell.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    found = {record["step"]: record for record in records if record["kind"] == "train"}
    assert [step for step, record in found.items() if "save_s" in record] == [31, 61]
    before, meanwhile = ([found[step]["step_s"] for step in range(first, first + 30)] for first in (1, 31))
    handed_over_s, waited_s = found[31]["save_s"], found[61]["save_s"]
    assert waited_s > 1  # so the first save was under way during all of these steps
    assert handed_over_s < waited_s / 2 and sum(meanwhile) < waited_s  # they took less than half of its time
    # With one access a step it would be more; the half is for the save's own work on the same processors.
    assert statistics.median(meanwhile) < 1.5 * statistics.median(before) + access_ms / 2000
    with CheckpointReader(str(shell.folder / "run"), Checkpointing()) as reader:
        assert reader.steps() == [30, 60, 61] and reader.verified_step() == 61


@pytest.mark.fault(12)
@pytest.mark.parametrize("synced", [True, False])
def test_a_power_cut_right_after_the_commit(tmp_path, monkeypatch, synced):
    """What was not synced when the manifest came into place is lost: zeros for its bytes, as ext4 leaves them."""
    on_disk, at_commit = set(), []
    sync, replace = os.fsync, os.replace

    def recording(descriptor):
        on_disk.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        return sync(descriptor)

    def commit(source, target):
        if os.fspath(target).endswith("2/manifest.json"):
            at_commit.append(set(on_disk))
        return replace(source, target)

    with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
        checkpoints.save(1, saver.state_of(1), {}, {})
        checkpoints.wait()
        monkeypatch.setattr(os, "fsync", recording)
        monkeypatch.setattr(os, "replace", commit)
        if not synced:
            monkeypatch.setattr(DiskStore, "sync", lambda store, folder: None)
        checkpoints.save(2, saver.state_of(2), {}, {})
        checkpoints.wait()
        step = tmp_path / "checkpoints" / "2"
        [kept] = at_commit
        lost = [path for path in step.rglob("*") if path.is_file() and str(path) not in kept]
        lost = [path for path in lost if path.name != "manifest.json"]
        folders = {str(path) for path in (step, *step.rglob("*")) if path.is_dir()} | {str(step.parent)}
        assert (not lost and folders <= kept) == synced
        assert str(step) in on_disk  # after the manifest's rename
        for path in lost:
            path.write_bytes(bytes(path.stat().st_size))
        assert checkpoints.verified_step() == (2 if synced else 1)


@pytest.mark.fault(24)
def test_a_step_is_saved_once_and_none_before_it(tmp_path):
    with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
        checkpoints.save(5, saver.state_of(5), {}, {})
        for step in (5, 4):
            with pytest.raises(UserError, match=f"step {step} cannot be saved: .*holds step 5 already"):
                checkpoints.save(step, saver.state_of(9), {}, {})
        jax.tree.map(np.testing.assert_array_equal, read(checkpoints, 5), saver.state_of(5))


@pytest.mark.fault(25)
def test_a_second_writer_is_refused(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, str(HERE / "saver.py"), str(tmp_path), "return"]
    with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
        assert done.returncode == 1
        assert f"is being written by process {os.getpid()} on" in done.stderr.splitlines()[-1]
        checkpoints.save(1, saver.state_of(1), {}, {})
    assert checkpoints.steps() == [1]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert checkpoints.steps() == [1, 2, 3]


@pytest.mark.fault(25)
def test_a_writer_whose_lease_was_taken_over_commits_nothing(tmp_path):
    with pytest.raises(UserError, match="was taken over by process 1 on elsewhere meanwhile"):
        with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
            checkpoints.save(1, saver.state_of(1), {}, {})
            checkpoints.wait()
            (tmp_path / "checkpoints" / lease.NAME).write_text('{"pid": 1, "host": "elsewhere", "nonce": "other"}')
            checkpoints.save(2, saver.state_of(2), {}, {})
    assert checkpoints.steps() == [1]


@pytest.mark.fault(48)
def test_a_clock_that_goes_back(tmp_path, monkeypatch):
    now = time.time
    with Checkpoints(str(tmp_path), Checkpointing(keep=2)) as checkpoints:
        for step, hours in ((1, 0), (2, -5), (3, -90_000), (4, 3), (5, -1)):
            monkeypatch.setattr(time, "time", lambda hours=hours: now() + 3600 * hours)
            checkpoints.save(step, saver.state_of(step), {}, {})
            checkpoints.wait()
            for path in (tmp_path / "checkpoints" / str(step)).rglob("*"):
                os.utime(path, (time.time(), time.time()))
        assert checkpoints.steps() == [4, 5] and checkpoints.verified_step() == 5
        with pytest.raises(UserError, match="is being written by process"):
            Checkpoints(str(tmp_path), Checkpointing())
    jax.tree.map(np.testing.assert_array_equal, read(checkpoints, 5), saver.state_of(5))
