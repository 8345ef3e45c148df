"""Processes that end in the middle of a save: by SIGKILL, by their own end, by an exception."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from capibara.checkpoints import saving
from capibara.checkpoints.manager import Checkpointing, Checkpoints

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))
import saver  # noqa: E402

CHECKOUT = HERE.parents[1]


def start(folder, *args):
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, str(HERE / "saver.py"), str(folder), *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def ended(process):
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def assert_goes_on(folder, possible):
    """The newest step is one of these, as it was saved, and the next can be saved and read."""
    target = saver.target_of(saver.state_of(0, saver.LARGE))
    with Checkpoints(str(folder), Checkpointing()) as checkpoints:
        step = checkpoints.verified_step()
        assert step in possible and not checkpoints.corrupted
        for listed in (*checkpoints.steps(), step + 1):
            if listed == step + 1:
                checkpoints.save(listed, saver.state_of(listed, saver.LARGE), {}, {})
            state = checkpoints.restore_state(checkpoints.restore_progress(listed), target)
            jax.tree.map(np.testing.assert_array_equal, state, saver.state_of(listed, saver.LARGE))
    left = {path.name for path in (pathlib.Path(folder) / "checkpoints").iterdir()}
    assert left == {str(listed) for listed in (*checkpoints.steps(),)}


@pytest.mark.fault(1)
@pytest.mark.parametrize(
    "delay", [0.02, *(pytest.param(0.02 * n, marks=pytest.mark.heavy) for n in (0, 2, 3, 4, 6, 8, 10, 12, 15, 18, 22))]
)
def test_a_save_that_is_killed(tmp_path, delay):
    child = start(tmp_path, "many")
    assert child.stdout.readline() == "saving 2\n"
    time.sleep(delay)
    child.kill()
    code, out, _ = ended(child)
    assert code == -signal.SIGKILL
    saved = max([1, *(int(line.split()[1]) for line in out.splitlines() if line.startswith("saved"))])
    assert_goes_on(tmp_path, (saved, saved + 1))


@pytest.mark.fault(2)
@pytest.mark.parametrize("count", [1, *(pytest.param(n, marks=pytest.mark.heavy) for n in (0, 2))])
def test_a_save_that_is_killed_at_a_rename(tmp_path, count):
    """They are: run.json, the manifest, which commits the step, and that of the run folder."""
    code, out, _ = ended(start(tmp_path, "rename", count))
    assert code == -signal.SIGKILL and "saved" not in out
    assert_goes_on(tmp_path, (1,) if count < 2 else (2,))


@pytest.mark.fault(3)
@pytest.mark.parametrize("count", [3, *(pytest.param(n, marks=pytest.mark.heavy) for n in (0, 1, 9, 17))])
def test_a_process_that_is_killed_while_it_removes_a_step(tmp_path, count):
    code, _, _ = ended(start(tmp_path, "retention", count))
    assert code == -signal.SIGKILL
    assert_goes_on(tmp_path, (2,))


@pytest.mark.fault(6)
@pytest.mark.parametrize("scenario", ["exit", pytest.param("return", marks=pytest.mark.heavy)])
def test_a_program_that_ends_without_close_has_saved(tmp_path, scenario):
    code, out, err = ended(start(tmp_path, scenario))
    assert (code, out, err) == (0, "saving 2\n", "")
    assert_goes_on(tmp_path, (2,))


@pytest.mark.fault(6)
def test_a_program_that_ends_without_close_says_what_was_lost(tmp_path):
    code, _, err = ended(start(tmp_path, "fails at its end"))
    assert code == 1 and err.endswith("error: [Errno 5] Input/output error\n")
    assert_goes_on(tmp_path, (1,))


@pytest.mark.fault(7)
def test_an_exception_beside_a_save(tmp_path):
    with pytest.raises(ZeroDivisionError) as caught:
        with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
            checkpoints.save(1, saver.state_of(1, saver.LARGE), {}, {})
            raise ZeroDivisionError("ours")
    assert str(caught.value) == "ours" and not hasattr(caught.value, "__notes__")
    assert_goes_on(tmp_path, (1,))


@pytest.mark.fault(7)
def test_an_exception_beside_a_save_that_fails_is_the_one_that_is_raised(tmp_path, monkeypatch):
    def fail(folder, arrays, **options):
        raise ValueError("the disk")

    monkeypatch.setattr(saving.array_files, "write", fail)
    monkeypatch.setattr(saving, "_PAUSE_S", 0.0)
    with pytest.raises(ZeroDivisionError) as caught:
        with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
            checkpoints.save(1, saver.state_of(1), {}, {})
            raise ZeroDivisionError("ours")
    assert caught.value.__notes__ == ["the save in flight failed too: the disk"]
    assert checkpoints.steps() == []
