"""Hosts of a slice find each other, agree, and train as one process does."""

import functools
import json
import socket
import sys
import time

import numpy as np
import pytest

hosts = sys.modules["of_hosts_conftest"]
TRAIN = ("--gin_file=tiny.gin", "--gin.TRAIN_STEPS=4")


def metrics(folder, kind):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def losses(folder):
    return {line["step"]: line["loss"] for line in metrics(folder, "train")}


@pytest.fixture(scope="module")
def alone(shell, nursery):
    """The arguments of a run of quickstart_seqio.gin -> the folder of it in one process with four devices."""
    nursery.preload("capibara.data.builtin_tasks")

    @functools.cache
    def run(*args: str):
        environment = {**hosts.plain_environment(), "TPU_SKIP_MDS_QUERY": "1"}
        folder = shell.folder / f"alone{len(args)}"
        asked = [*args, "--emulate=4", f"--gin.MODEL_DIR='{folder}'"]
        [done] = hosts.ends([nursery.start("train", asked, shell.folder, environment)])
        assert done.code == 0, done.err
        return folder

    return run


def quickstart(*settings: str) -> tuple[str, ...]:
    return ("--gin_file=quickstart_seqio.gin", *(f"--gin.{setting}" for setting in ("Trainer.log_every=1", *settings)))


QUICK = ("Evaluation.every=0", "Evaluation.unigram_batches=0", "SampleText.prompts=()", "Checkpointing.every=0")


def assert_found_and_learned_alike(done, folder, alone):
    count = len(done)
    assert [one.code for one in done] == [0] * count, [one.err[-2000:] for one in done]
    assert f"joined {count} processes on 1 host: {count} devices" in done[0].out and f"on {count} x cpu" in done[0].out
    assert [line for one in done[1:] for line in one.out.splitlines() if "[Gloo]" not in line] == []
    told = [f"{count} hosts share 1 stream(s) of SeqIO task 'python_stdlib'" in one.err for one in done]
    assert told == [True] + [False] * (count - 1) and f"set Dataset.task_shards = {count}" in done[0].err
    together, alone = [[*metrics(one, "train"), *metrics(one, "eval")] for one in (folder, alone)]
    assert [line["step"] for line in together] == [line["step"] for line in alone]
    for name in ("loss", "unigram_bits_per_byte"):
        found, wanted = [[line[name] for line in lines if name in line] for lines in (together, alone)]
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_two_processes_find_each_other_and_learn_as_one(cluster, shell, nursery):
    """By the metadata server; the processes are forked, so that they need not import what the first has."""
    joined, folders = cluster("GCE", 2), [shell.folder / name for name in ("apart", "together")]
    environment = {**hosts.plain_environment(), "TPU_SKIP_MDS_QUERY": "1"}
    asked = [*TRAIN, "--emulate=2", f"--gin.MODEL_DIR='{folders[0]}'"]
    [alone] = hosts.ends([nursery.start("train", asked, shell.folder, environment)])
    assert alone.code == 0, alone.err
    done = joined.run("train", *TRAIN, f"--gin.MODEL_DIR='{folders[1]}'")
    assert [one.code for one in done] == [0, 0], [one.err[-2000:] for one in done]
    assert "joined 2 processes on 1 host: 2 devices" in done[0].out and "on 2 x cpu" in done[0].out
    assert [line for line in done[1].out.splitlines() if "[Gloo]" not in line] == []
    assert all("agent-worker-number" in server.asked for server in joined.servers)
    apart, together = map(losses, folders)
    assert together.keys() == apart.keys() == {1, 2, 3, 4}
    np.testing.assert_allclose([together[step] for step in apart], [*apart.values()], rtol=1e-5)


@pytest.mark.heavy
@pytest.mark.parametrize("count", [2, 4])
def test_processes_find_each_other_and_learn_the_quickstart_as_one(cluster, shell, alone, count):
    """By the metadata server; the processes are forked, so that they need not import what the first has.

    Of the quickstart's model and rows these are small: all processes compile it at once.
    """
    args = quickstart(*QUICK, "TRAIN_STEPS=2", "LENGTH=64", "BATCH_SIZE=8", "DecoderConfig.num_layers=1")
    whole, joined = alone(*args), cluster("GCE", count)
    done = joined.run("train", *args, f"--gin.MODEL_DIR=forked{count}")
    assert_found_and_learned_alike(done, shell.folder / f"forked{count}", whole)
    assert all("agent-worker-number" in server.asked for server in joined.servers)


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["GCE", "GKE", "Slurm", "Open MPI", "flags"])
def test_four_new_interpreters_find_each_other_and_learn_the_quickstart_as_one(cluster, shell, alone, kind):
    args = quickstart("TRAIN_STEPS=6")  # with its evaluation and its samples
    done = cluster(kind, 4, fresh=True).run("train", *args, f"--gin.MODEL_DIR='{kind}'", timeout_s=480)
    assert_found_and_learned_alike(done, shell.folder / kind, alone(*args))


@pytest.mark.fault(65)
def test_a_mistake_on_one_host_ends_all_with_its_name(cluster, shell):
    """Its disk lacks a file that is read only when all have joined."""
    texts = (shell.folder / "corpus.jsonl").read_text()
    other, mistaken = _ends_with_disks_of_their_own(cluster, shell, "lacking", texts, None)
    assert mistaken.code == other.code == 2, (mistaken, other)
    assert mistaken.err.startswith("error: ") and "corpus.jsonl" in mistaken.err and mistaken.err.count("\n") == 1
    [line] = other.err.splitlines()
    assert line.startswith(f"error: process 1 on {socket.gethostname()} ended: ") and "corpus.jsonl" in line


@pytest.mark.heavy
def test_hosts_whose_disks_hold_different_data_end_before_the_first_step(cluster, shell):
    texts = (shell.folder / "corpus.jsonl").read_text()
    for end in _ends_with_disks_of_their_own(cluster, shell, "differing", texts, texts + texts.splitlines()[0] + "\n"):
        assert end.code == 2 and "the hosts do not read the same data: " in end.err, end
        assert end.err.count("\n") == 1 and "on host 0" in end.err and "on host 1" in end.err
        assert "step 1" not in end.out


def _ends_with_disks_of_their_own(cluster, shell, name: str, *texts: str | None):
    """The ends of two hosts, each with its corpus; None: it has none."""
    two, processes = cluster("flags", 2), []
    for index, own in enumerate(texts):
        two.folder = shell.folder / f"{name}{index}"
        two.folder.mkdir()
        (two.folder / "tiny.gin").write_text((shell.folder / "tiny.gin").read_text())
        if own is not None:
            (two.folder / "corpus.jsonl").write_text(own)
        processes.append(two.start(index, "train", *TRAIN, f"--gin.MODEL_DIR='{shell.folder / name}'"))
    return hosts.ends(processes)


SMALL_TASK = quickstart(
    *QUICK[:-1],
    "Schedule.kind='rsqrt'",
    "Schedule.warmup_fraction=0.0",
    "Dataset.task_shards=4",
    "LENGTH=64",
    "DecoderConfig.num_layers=1",
)


@pytest.mark.heavy
@pytest.mark.fault(28, 33)
@pytest.mark.parametrize("data", [("--gin_file=tiny.gin",), SMALL_TASK], ids=["source", "task"])
def test_one_of_two_is_killed_and_four_and_then_one_go_on(cluster, shell, data):
    """2 -> 4 -> 1 processes of four devices in all, against one from beginning to end."""
    name = f"killed{len(data)}"
    run = shell.folder / name
    flags = (*data, "--gin.Checkpointing.every=2", f"--gin.MODEL_DIR={name}")
    two = cluster("flags", 2)
    processes = [two.start(i, "train", *flags, "--emulate=2", "--gin.TRAIN_STEPS=100000") for i in range(2)]
    end_s = time.monotonic() + 120
    while time.monotonic() < end_s and not [name for name in committed(run) if name >= 4]:
        time.sleep(0.05)
    processes[1].kill()
    left, _ = hosts.ends(processes)
    assert left.code == 75 and f"error: process 1 on {socket.gethostname()} is gone: " in left.err, left.err
    assert (step := max(committed(run))) >= 4
    for count, steps in ((4, step + 4), (1, step + 8)):
        joined = cluster("flags", count) if count > 1 else None
        more = (*flags, f"--emulate={4 // count}", f"--gin.TRAIN_STEPS={steps}")
        done = joined.run("train", *more) if joined else [shell.run("train", *more)]
        assert [one.code for one in done] == [0] * count, [one.err[-2000:] for one in done]
        assert f"resuming from step {steps - 4};" in done[0].out
    whole = shell.run("train", *flags, "--emulate=4", f"--gin.TRAIN_STEPS={step + 8}", f"--gin.MODEL_DIR={name}_whole")
    assert whole.code == 0, whole.err
    parts, whole = losses(run), losses(shell.folder / f"{name}_whole")
    assert parts.keys() == whole.keys() == set(range(1, step + 9))
    np.testing.assert_allclose([parts[k] for k in whole], list(whole.values()), rtol=1e-5)


def committed(run):
    return sorted(
        int(path.parent.name) for path in run.glob("checkpoints/*/manifest.json") if path.parent.name.isdigit()
    )


@pytest.mark.fault(33, 36)
@pytest.mark.parametrize("killed", [1, pytest.param(0, marks=pytest.mark.heavy)])
def test_one_that_is_killed_is_named_within_seconds(cluster, shell, killed):
    """JAX's heartbeat would take 100 s, and end the other with a stack trace."""
    two = cluster("flags", 2)
    flags = ("--gin_file=tiny.gin", "--emulate=1", "--gin.TRAIN_STEPS=100000", f"--gin.MODEL_DIR=gone{killed}")
    processes = [two.start(index, "train", *flags) for index in range(2)]
    end_s = time.monotonic() + 100
    while "step      2/" not in processes[0].said():
        assert time.monotonic() < end_s and processes[0].poll() is None, hosts.ends(processes, 5)
        time.sleep(0.02)
    processes[killed].kill()
    began_s = time.monotonic()
    left = hosts.ends(processes)[1 - killed]
    line = f"error: process {killed} on {socket.gethostname()} is gone: start the command again on every host\n"
    assert time.monotonic() - began_s < 30
    if killed:
        assert (left.code, left.err) == (75, line)
    else:  # it coordinates: what JAX's client says of it may stand beside the line
        assert left.code == 75 and left.err.count(line) == 1, left


@pytest.mark.fault(65)
def test_what_is_wrong_with_a_host_is_one_line_on_every_host(cluster, shell):
    two = cluster("flags", 2)
    seeds = [
        two.start(index, "train", *TRAIN, f"--gin.Trainer.seed={index}", "--gin.MODEL_DIR=no") for index in range(2)
    ]
    missing = cluster("flags", 3)
    absent = [missing.start(index, "train", *TRAIN, "--join_timeout=4", "--gin.MODEL_DIR=no") for index in (0, 2)]
    for one in hosts.ends(seeds):
        assert one.code == 2 and one.err.count("\n") == 1, one.err
        assert "has another configuration than process 0" in one.err and "'Trainer.seed = 1'" in one.err
    for one in hosts.ends(absent):
        assert one.code == 75 and one.err.count("\n") == 1, one.err
        assert "process 1 of 3 did not connect within 4 s" in one.err
    assert not (shell.folder / "no").exists()
