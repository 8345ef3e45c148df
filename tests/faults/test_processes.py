"""Runs of two processes of which one is killed or stopped, and of other numbers of processes than before."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from capibara.jobs.local import free_address
from capibara.training.checkpoints import Checkpointing, Checkpoints

HERE = pathlib.Path(__file__).parent
TRAIN = ("train", "--gin_file=tiny.gin", "--gin.Trainer.heartbeat_s=10", "--gin.Checkpointing.every=2")


def joined(address, index, count=2):
    return {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count), "JAX_PROCESS_ID": str(index)}


def start_two(shell, run, *args):
    """Two processes of a run that does not end by itself, past their second checkpoint."""
    address = free_address()
    flags = (*TRAIN, "--emulate=2", f"--gin.MODEL_DIR={run}", "--gin.TRAIN_STEPS=100000", *args)
    processes = [shell.start(*flags, **joined(address, index)) for index in range(2)]
    for _ in range(1200):
        if len(steps_of(shell.folder / run)) > 1 or any(process.poll() is not None for process in processes):
            break
        time.sleep(0.1)
    return processes


def steps_of(run):
    with Checkpoints(str(run), Checkpointing(), read_only=True) as reader:
        return reader.steps()


def ends(processes, within_s):
    """The exit codes of processes that end by themselves; the others are killed, and have none."""
    limit_s = time.monotonic() + within_s
    while time.monotonic() < limit_s and any(process.poll() is None for process in processes):
        time.sleep(0.1)
    codes = [process.poll() for process in processes]
    for process in processes:
        process.kill()
        process.communicate()
    return codes


def assert_carries_on(shell, run):
    """One process of four devices carries on from the newest step of the two."""
    step = steps_of(shell.folder / run)[-1]
    flags = (*TRAIN, "--emulate=4", f"--gin.MODEL_DIR={run}", f"--gin.TRAIN_STEPS={step + 2}")
    done = shell.run(*flags)
    assert done.code == 0 and f"carrying on from step {step};" in done.out, done.err
    assert "damaged" not in done.err


@pytest.mark.heavy
@pytest.mark.fault(33, 36)
@pytest.mark.parametrize("killed", [1, 0], ids=["a peer", "the coordinator"])
def test_a_process_that_is_killed_ends_the_others(shell, killed):
    run = f"killed{killed}"
    processes = start_two(shell, run)
    processes[killed].kill()
    code = ends(processes, within_s=60)[1 - killed]
    assert code not in (None, 0)
    assert_carries_on(shell, run)


@pytest.mark.heavy
@pytest.mark.fault(35)
def test_a_process_that_is_stopped_ends_the_others(shell):
    """It neither answers nor closes its connections: the heartbeat or the watchdog, whichever comes first."""
    processes = start_two(shell, "stopped", "--gin.Trainer.watch=@Watch()", "--gin.Watch.at_least_s=4")
    processes[1].send_signal(signal.SIGSTOP)
    limit_s = time.monotonic() + 60
    while time.monotonic() < limit_s and processes[0].poll() is None:
        time.sleep(0.1)
    assert processes[0].poll() not in (None, 0)
    errors = processes[0].stderr.read()
    processes[1].kill()
    if processes[0].returncode == 75:
        assert "this run hangs and ends" in errors and "Thread 0x" in errors
    assert_carries_on(shell, "stopped")


def start_peers(folder, scenario, count):
    """Processes of peers.py, four devices together."""
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "XLA_FLAGS": flags}
    command, address = [sys.executable, str(HERE / "peers.py"), str(folder), scenario], free_address()
    return [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment | joined(address, index, count),
        )
        for index in range(count)
    ]


def assert_ended_well(processes, said):
    for process in processes:
        out, err = process.communicate(timeout=120)
        # Not the whole of it: Gloo says on stdout, too, whom it is connected to.
        assert process.returncode == 0 and said in out, (out, err)


@pytest.mark.heavy
@pytest.mark.fault(34)
def test_a_peer_that_is_killed_in_a_save_leaves_no_step(tmp_path):
    assert_ended_well(start_peers(tmp_path, "save", 2), "saved 1")
    processes = start_peers(tmp_path, "killed", 2)
    codes = ends(processes, within_s=60)
    assert codes[1] == -signal.SIGKILL and codes[0] not in (None, 0)
    assert steps_of(tmp_path) == [1, 2]
    assert_ended_well(start_peers(tmp_path, "read", 2), "read 2")
    left = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert left == {"1", "2"}


@pytest.mark.heavy
@pytest.mark.fault(28)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_other_processes_read_the_same_bits(tmp_path, before, after):
    assert_ended_well(start_peers(tmp_path, "save", before), "saved 1")
    files = json.loads((tmp_path / "checkpoints" / "1" / "manifest.json").read_text())["files"]
    assert not [file for file in files if file["path"].startswith("hashes.")]
    kernel = [file["chunk"] for file in files if file.get("array") == "params/layer/kernel"]
    assert sorted(kernel) == [[shard, 0] for shard in range(4)]  # hashed in memory, those of both processes
    assert_ended_well(start_peers(tmp_path, "read", after), "read 1")
    assert_ended_well(start_peers(tmp_path, "save", after), "saved 2")
    assert_ended_well(start_peers(tmp_path, "read", before), "read 2")
