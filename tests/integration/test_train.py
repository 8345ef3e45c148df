"""`python -m capibara.train`: trains, stops, resumes, and answers every mistake with one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import numpy as np
import pytest

from capibara.data.text.counts import Counts
from capibara.jobs.local import free_address
from capibara.monitoring.metrics_file.loggers import read_metrics

TRAIN = ("train", "--gin_file=tiny.gin")


def losses(folder):
    return {r["step"]: r["loss"] for r in read_metrics(str(folder)) if r["kind"] == "train"}


def assert_one_line(done, *words):
    assert done.code == 2, (done.out, done.err)
    assert "Traceback" not in done.out + done.err
    lines = [line for line in done.err.splitlines() if line]
    assert len(lines) == 1 and lines[0].startswith("error: "), done.err
    for word in words:
        assert word in lines[0]


def test_train_then_again_then_with_more_steps(shell, here):
    first = shell.run(*TRAIN, "--emulate=8")
    assert (first.code, first.err) == (0, "")
    assert "compiling the train step for 8 devices" in first.out and "finished at step 6: 6 steps" in first.out
    data = json.loads((shell.folder / "run" / "manifest.json").read_text())["data"]
    for split, counts in data.items():  # what is printed is recorded
        assert f"data: {split}: {Counts(**counts)}" in first.out
    assert data["train"]["documents"] > 0 and data["train"]["held_out"] > 0
    assert "DecoderConfig.mlp_dim = 64" in (shell.folder / "run" / "config.gin").read_text()

    again = here(*TRAIN, "--emulate=8")
    assert_one_line(again, "the run is at step 6 of 6 already: raise TRAIN_STEPS")

    more = here(*TRAIN, "--emulate=8", "--gin.TRAIN_STEPS=9")
    assert (more.code, more.err) == (0, "")
    assert "resuming from step 6" in more.out and "changed since the last start" in more.out
    assert sorted(losses(shell.folder / "run")) == list(range(1, 10))


@pytest.mark.heavy  # test_loop has it in the short suite, without processes
def test_a_run_in_two_parts_has_the_losses_of_one(shell):
    for steps in (6, 9):
        assert shell.run(*TRAIN, "--emulate=8", f"--gin.TRAIN_STEPS={steps}").code == 0
    whole = shell.run(*TRAIN, "--emulate=8", "--gin.TRAIN_STEPS=9", "--gin.MODEL_DIR=whole")
    assert whole.code == 0
    assert losses(shell.folder / "run") == losses(shell.folder / "whole")


@pytest.mark.heavy  # fault 4 in the short suite
def test_sigterm_ends_with_a_checkpoint_and_the_command_resumes(shell):
    args = (*TRAIN, "--emulate=8", "--gin.MODEL_DIR=stopped")
    process = shell.start(*args, "--gin.TRAIN_STEPS=100000")
    for line in process.stdout:
        if line.startswith("step      5/"):
            break
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=100)
    assert (process.returncode, err) == (143, "")
    step = max(int(name) for name in os.listdir(shell.folder / "stopped" / "checkpoints"))
    assert step >= 5 and f"interrupted at step {step}" in out
    again = shell.run(*args, f"--gin.TRAIN_STEPS={step + 2}")
    assert again.code == 0 and f"resuming from step {step};" in again.out
    assert sorted(losses(shell.folder / "stopped")) == list(range(1, step + 3))


@pytest.mark.heavy  # tests/hosts has four in the short suite
def test_two_processes_learn_as_one_and_their_checkpoint_is_anyones(shell):
    """Two processes of 4 devices each, joined on loopback, against one of 8; then one resumes from the two."""
    common = ("--gin.Plan.tensor=2", "--gin.Evaluation.every=4", "--gin.Trainer.ema_decay=0.9")
    address = free_address()
    processes = [
        shell.start(
            *TRAIN,
            *common,
            "--emulate=4",
            "--gin.MODEL_DIR=two",
            "--gin.SampleText.prompts=('river',)",
            "--gin.Sampling.max_new_tokens=4",
            JAX_COORDINATOR_ADDRESS=address,
            JAX_NUM_PROCESSES="2",
            JAX_PROCESS_ID=str(index),
        )
        for index in range(2)
    ]
    ends = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ends
    assert "on 8 x cpu" in ends[0][0] and "loss" not in ends[1][0]
    one = shell.run(*TRAIN, *common, "--emulate=8", "--gin.MODEL_DIR=one", "--gin.TRAIN_STEPS=8")
    again = shell.run(*TRAIN, *common, "--emulate=8", "--gin.MODEL_DIR=two", "--gin.TRAIN_STEPS=8")
    assert (one.code, again.code) == (0, 0) and "resuming from step 6" in again.out
    together, alone = losses(shell.folder / "two"), losses(shell.folder / "one")
    assert sorted(together) == sorted(alone) == list(range(1, 9))
    np.testing.assert_allclose(list(together.values()), list(alone.values()), rtol=1e-5)
    evaluations = [
        {r["step"]: r["loss"] for r in read_metrics(str(shell.folder / name)) if r["kind"] == "eval"}
        for name in ("two", "one")
    ]
    assert evaluations[0][4] == pytest.approx(evaluations[1][4], rel=1e-5)


@pytest.mark.parametrize(
    "args, words",
    [
        (["--gin.Trainer.step=3"], ["Trainer has no parameter step", "did you mean steps?"]),
        (["--gin.Trainr.steps=3"], ["did you mean Trainer?"]),
        (["--gin.TRAIN_STEP=3"], ["TRAIN_STEP", "did you mean TRAIN_STEPS?"]),
        (["--gin.TRAIN_STEPS=many"], ["Trainer.steps", "many", "TRAIN_STEPS"]),
        (["--gin.MODEL_DIR=%gin.REQUIRED"], ["Trainer.model_dir has no value", "--gin.MODEL_DIR="]),
        (["--gin.MODEL_DIR=''"], ["Trainer.model_dir is empty"]),
        (["--gin.FILES=('empty.jsonl',)"], ["empty.jsonl", "the corpus is empty"]),
        (["--gin.FILES=('none-*.jsonl',)"], ["none-*.jsonl", "matches no file"]),
        (["--gin.FILES=('bad.jsonl',)"], ["bad.jsonl:3 is not JSON", "not json"]),
        (["--gin.TEXT_FIELD=content"], ["corpus.jsonl:1", "no field 'content'"]),
        (["--gin.BATCH_SIZE=12"], ["Plan.batch_size (12) must be a multiple of 8", "try 16"]),
        (
            ["--gin.Evaluation.batch_size=12", "--gin.Evaluation.every=2"],
            ["Evaluation.batch_size (12) must be a multiple of 8", "try 16"],
        ),
        (["--gin.Plan.tensor=3"], ["tensor=3", "must divide the 8 devices", "try 2"]),
        (
            ["--gin.DecoderConfig.num_heads=3", "--gin.DecoderConfig.head_dim=8", "--gin.Plan.tensor=2"],
            ["(3)", "tensor=2"],
        ),
        (["--gin.DecoderConfig.vocab_size=256"], ["vocab_size (256)", "vocabulary's size (384)", "try 384"]),
        (["--gin.DecoderConfig.max_length=32"], ["Dataset.length (64)", "max_length (32)"]),
        (["--emulate=0"], ["--emulate is 0, must be from 1 to 64"]),
        (["--emulate=65"], ["--emulate is 65, must be from 1 to 64"]),
        (["--emulate=x"], ["--emulate", "'x'"]),
        (["--emulat=8"], ["unknown flag --emulat", "--emulate"]),
        (["--gin.MODEL_DIR=corpus.jsonl"], ["corpus.jsonl/checkpoints cannot be written", "MODEL_DIR"]),
        (["--gin.MODEL_DIR=/proc/none/run"], ["/proc/none", "cannot be written", "MODEL_DIR"]),
    ],
    ids=lambda value: value[0] if value[0].startswith("--") else "",
)
def test_a_mistake_is_one_line(here, shell, args, words):
    (shell.folder / "empty.jsonl").write_text("")
    (shell.folder / "bad.jsonl").write_text('{"text": "a"}\n{"text": "b"}\nnot json\n{"text": "c"}\n')
    assert_one_line(here(*TRAIN, "--gin.MODEL_DIR=mistake", *args), *words)
    assert not (shell.folder / "mistake" / "config.gin").exists()


def test_a_missing_gin_file_is_one_line(here):
    assert_one_line(here("train", "--gin_file=tinny.gin"), "tinny.gin", "tiny.gin")
    assert_one_line(here("train"), "--gin_file has no value")


def test_a_mistake_is_one_line_from_a_process_of_its_own(shell):
    assert_one_line(shell.run(*TRAIN, "--emulate=8", "--gin.BATCH_SIZE=12"), "try 16")


def test_another_model_shape_is_one_line(here, shell):
    if not (shell.folder / "run" / "checkpoints").exists():
        assert shell.run(*TRAIN, "--emulate=8").code == 0
    before = (shell.folder / "run" / "config.gin").read_text()
    done = here(*TRAIN, "--gin.TRAIN_STEPS=20", "--gin.DecoderConfig.mlp_dim=96")
    assert_one_line(done, "holds another model", "params/layers/mlp", "float32[2,", "MODEL_DIR")
    assert_one_line(here(*TRAIN, "--gin.TRAIN_STEPS=20", "--gin.LENGTH=32"), "length was 64, is 32")
    assert (shell.folder / "run" / "config.gin").read_text() == before


@pytest.mark.heavy  # tests/faults/test_disk.py fills a disk in the short suite
def test_a_full_disk_is_one_line_and_the_run_resumes_once_there_is_room(shell):
    disk = shell.folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        args = (*TRAIN, "--emulate=8", "--gin.MODEL_DIR=disk/run", "--gin.TRAIN_STEPS=12")
        args += ("--gin.Checkpointing.every=2",)
        full = shell.run(*args)
        assert_one_line(full, "disk full while saving to", "disk/run", "make room")
        # A write that was under way when the save failed may make its folder anew: without a manifest that is no step.
        saved = [int(path.parent.name) for path in (disk / "run" / "checkpoints").glob("*/manifest.json")]
        assert saved, full
        subprocess.run(["mount", "-o", "remount,size=20m", disk], check=True)
        again = shell.run(*args)
        assert (again.code, again.err) == (0, "") and f"resuming from step {max(saved)};" in again.out
        assert sorted(losses(disk / "run")) == list(range(1, 13))
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_metrics_are_json_lines(shell):
    if not (shell.folder / "run" / "metrics.jsonl").exists():
        assert shell.run(*TRAIN, "--emulate=8").code == 0
    records = [json.loads(line) for line in (shell.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {"train", "event"} <= {record["kind"] for record in records}
