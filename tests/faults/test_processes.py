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

from capibara.checkpoints.manager import Checkpointing, CheckpointReader
from capibara.jobs.local import free_address

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
    with CheckpointReader(str(run), Checkpointing()) as reader:
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


def assert_resumes(shell, run):
    """One process of four devices resumes from the newest step of the two."""
    step = steps_of(shell.folder / run)[-1]
    flags = (*TRAIN, "--emulate=4", f"--gin.MODEL_DIR={run}", f"--gin.TRAIN_STEPS={step + 2}")
    done = shell.run(*flags)
    assert done.code == 0 and f"resuming from step {step};" in done.out, done.err
    assert "corrupted" not in done.err


@pytest.mark.heavy
@pytest.mark.fault(33, 36)
@pytest.mark.parametrize("killed", [1, 0], ids=["a peer", "the coordinator"])
def test_a_process_that_is_killed_ends_the_others(shell, killed):
    run = f"killed{killed}"
    processes = start_two(shell, run)
    processes[killed].kill()
    code = ends(processes, within_s=60)[1 - killed]
    assert code not in (None, 0)
    assert_resumes(shell, run)


@pytest.mark.heavy
@pytest.mark.fault(4, 5)
def test_one_signal_to_one_process_saves_one_step_on_all(shell):
    processes = start_two(shell, "signalled")
    for _ in range(3):  # the second and third do no harm
        processes[1].send_signal(signal.SIGTERM)
        time.sleep(0.05)
    assert ends(processes, within_s=60) == [128 + signal.SIGTERM] * 2
    with CheckpointReader(str(shell.folder / "signalled"), Checkpointing()) as reader:
        step = reader.verified_step()
        assert step == max(reader.steps()) and not reader.corrupted
    done = shell.run(*TRAIN, "--emulate=4", "--gin.MODEL_DIR=signalled", f"--gin.TRAIN_STEPS={step + 2}")
    assert done.code == 0 and f"resuming from step {step};" in done.out, done.err


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
    assert_resumes(shell, "stopped")


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
@pytest.mark.fault(36)
def test_a_process_that_loses_the_coordinator_leaves_what_that_has_committed(tmp_path):
    codes = ends(start_peers(tmp_path, "lost", 2), within_s=60)
    assert codes[1] == 1 and codes[0] not in (None, 0)
    assert steps_of(tmp_path) == [1, 2]
    assert_ended_well(start_peers(tmp_path, "read", 1), "read 2")


@pytest.mark.heavy
@pytest.mark.fault(28)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_other_processes_read_the_same_bits(tmp_path, before, after):
    assert_ended_well(start_peers(tmp_path, "save", before), "saved 1")
    files = json.loads((tmp_path / "checkpoints" / "1" / "manifest.json").read_text())["files"]
    assert not [file for file in files if file["path"].startswith("word.")]
    kernel = [file["chunk"] for file in files if file.get("array") == "params/layer/kernel"]
    assert sorted(kernel) == [[shard, 0] for shard in range(4)]  # hashed in memory, those of both processes
    assert_ended_well(start_peers(tmp_path, "read", after), "read 1")
    assert_ended_well(start_peers(tmp_path, "save", after), "saved 2")
    assert_ended_well(start_peers(tmp_path, "read", before), "read 2")


LEDGER = """
import hashlib, json, os
from capibara import sharding

global_batch = sharding.global_batch

def recording(place, batch):
    with open(f"{os.environ['LEDGER']}.{os.environ.get('JAX_PROCESS_ID', '0')}", "a") as file:
        print(json.dumps([hashlib.sha256(row.tobytes()).hexdigest() for row in batch["tokens"]]), file=file)
    return global_batch(place, batch)

sharding.global_batch = recording
"""


FAILING = """
import os
from capibara.checkpoints import arrays

write = arrays.write

def failing(folder, state, **options):
    if folder.name == "4" and os.environ.get("JAX_PROCESS_ID") == "1" and not os.path.exists("failed"):
        open("failed", "w").close()
        raise OSError(5, "Input/output error")
    return write(folder, state, **options)

arrays.write = failing
"""


def hooked(shell, code):
    """The environment in which all processes run this code when they start."""
    (shell.folder / "hooks").mkdir(exist_ok=True)
    (shell.folder / "hooks" / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": f"{shell.folder / 'hooks'}{os.pathsep}{HERE.parents[1]}"}


def train_in(shell, run, processes, steps):
    """Trains to `steps` with four devices; returns the rows of each batch, hashed, those of all processes in order."""
    ledger = shell.folder / f"{run}.{steps}"
    flags = ("--gin_file=tiny.gin", f"--emulate={4 // processes}", f"--gin.MODEL_DIR={run}")
    done = shell.run(
        *("launch", "local", f"--processes={processes}", "--restarts=0", "--", "train", *flags),
        *(f"--gin.TRAIN_STEPS={steps}", "--gin.Trainer.ema_decay=0.9"),
        LEDGER=str(ledger),
        **hooked(shell, LEDGER),
    )
    assert done.code == 0, done.err
    parts = [pathlib.Path(f"{ledger}.{index}").read_text().splitlines() for index in range(processes)]
    return [sum(map(json.loads, rows), []) for rows in zip(*parts, strict=True)]


@pytest.mark.heavy
@pytest.mark.fault(28)
def test_a_run_goes_on_in_two_processes_and_in_one(shell):
    """Two processes to step 3, one to 6, two to 9, against one from beginning to end."""
    whole = train_in(shell, "whole", 1, 9)
    batches = [
        rows for processes, steps in ((2, 3), (1, 6), (2, 9)) for rows in train_in(shell, "parts", processes, steps)
    ]
    assert batches == whole and len(set(map(tuple, whole))) == 9 and {len(rows) for rows in whole} == {8}
    assert steps_of(shell.folder / "parts") == [3, 6, 9]
    losses, state = {}, {}
    for run in ("whole", "parts"):
        records = [json.loads(line) for line in (shell.folder / run / "metrics.jsonl").read_text().splitlines()]
        losses[run] = {record["step"]: record["loss"] for record in records if record["kind"] == "train"}
        state[run] = json.loads((shell.folder / run / "checkpoints" / "9" / "run.json").read_text())["data"]
    assert list(losses["parts"]) == list(range(1, 10)) and losses["parts"] == pytest.approx(losses["whole"], rel=1e-5)
    assert state["parts"] == state["whole"]


@pytest.mark.heavy
@pytest.mark.fault(10)
def test_one_of_two_processes_that_cannot_write_ends_both_and_they_start_again(shell):
    """JAX's own exit would wait 5 minutes for the other, which waits for it."""
    began_s = time.monotonic()
    flags = (*TRAIN, "--emulate=2", "--gin.MODEL_DIR=failing", "--gin.TRAIN_STEPS=40")
    done = shell.run("launch", "local", "--processes=2", "--restarts=1", "--", *flags, **hooked(shell, FAILING))
    assert done.code == 0 and "exit code 1; restart 1 of 1" in done.err, done.err
    assert "OSError: [Errno 5] Input/output error" in done.err and "resuming from step 2;" in done.out
    assert steps_of(shell.folder / "failing") == [36, 38, 40] and time.monotonic() - began_s < 120


@pytest.mark.heavy
@pytest.mark.fault(25)
def test_a_second_run_of_two_processes_is_refused(shell):
    processes = start_two(shell, "first")
    refused = start_two(shell, "first")
    assert ends(refused, within_s=60) == [2, 2] and processes[0].poll() is None
    ends(processes, within_s=0)
