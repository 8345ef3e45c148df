"""Runs of two processes of which one is killed or stopped, and of other numbers of processes than before."""

from __future__ import annotations

import json
import os
import pathlib
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


PEERS = """
import os, sys, signal
sys.path.insert(0, sys.argv[1])
import jax
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(heartbeat_timeout_seconds=10, num_processes=2, process_id=int(os.environ["JAX_PROCESS_ID"]))
import saver
from capibara.training import array_files
from capibara.training.checkpoints import Checkpointing, Checkpoints
checkpoints = Checkpoints(sys.argv[2], Checkpointing())
for step in (1, 2):
    checkpoints.save(step, saver.sharded(saver.state_of(step), 4), {}, {})
    checkpoints.wait()
print("saved", flush=True)
if jax.process_index() == 1:
    array_files.write = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
checkpoints.save(3, saver.sharded(saver.state_of(3), 4), {}, {})
checkpoints.wait()
"""


@pytest.mark.heavy
@pytest.mark.fault(28, 34)
def test_a_peer_that_is_killed_in_a_save_leaves_no_step(tmp_path):
    address = free_address()
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "XLA_FLAGS": ""}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PEERS, str(HERE), str(tmp_path)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment | joined(address, index),
        )
        for index in range(2)
    ]  # fmt: skip
    for process in processes:
        line = process.stdout.readline()
        assert line == "saved\n", process.stderr.read()
    codes = ends(processes, within_s=60)
    assert codes[1] == -signal.SIGKILL and codes[0] not in (None, 0)
    assert steps_of(tmp_path) == [1, 2]
    with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
        assert checkpoints.verified_step() == 2
        files = json.loads((tmp_path / "checkpoints" / "2" / "manifest.json").read_text())["files"]
        assert not [file for file in files if file["path"].startswith("hashes.")]
        assert any(file.get("array") == "params/layer/kernel" for file in files)
