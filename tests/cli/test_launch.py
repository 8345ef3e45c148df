"""The verb `launch`, as a user calls it; tests/jobs has what it runs."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from capibara.cli import launch
from capibara.multihost import exits

GKE = ("gke", "run.gin", "--storage=gs://bucket", "--image=i", "--dry-run")
RUN = """
include "runs/pretrain.gin"
include "models/tiny.gin"
include "tasks/stdlib.gin"
MODEL_DIR = "runs/mine"
TRAIN_STEPS = 3
BATCH_SIZE = 4
LENGTH = 64
LEARNING_RATE = 1e-3
"""


@pytest.fixture(autouse=True)
def cwd(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.gin").write_text(RUN)
    return tmp_path


def run(*argv):
    return exits.run_verb(launch.main, list(argv))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ("moon", "run.gin"),
            "launch has no 'moon': words are cancel, gce, gke, list, local, logs, manage, recover, resume, slurm, ssh",
        ),
        (("gek", "run.gin"), "did you mean gke or gce?"),
        ((*GKE, "--stage"), "--dry-run, --stage and --detach exclude each other"),
        ((*GKE, "--detach"), "--dry-run, --stage and --detach exclude each other"),
        ((*GKE,), "--slice is not set, and neither is Plan.slice"),
        ((*GKE, "--slice=v5e-65"), "v5e has the sizes"),
        (("gke", "run.gin", "--image=i", "--slice=v5e-8", "--dry-run"), "--storage is not set"),
        (("gke", "no.gin", "--storage=gs://b", "--image=i", "--dry-run"), "no Gin file no.gin"),
        ((*GKE, "--slice=v5e-8", "--zone=us-west4-a"), "unknown flag --zone"),
        ((*GKE, "--slice=v5e-8", "--env=A"), "--env must be --env=NAME=VALUE"),
        ((*GKE, "--slice=v5e-8", "--label=a=b", "--label=a=c"), "--label=a=... is there twice"),
        ((*GKE, "--slice=v5e-8", "--secret=A=hf_value"), "must be a reference, not a value"),
        ((*GKE, "--slice=v5e-8", "--gin.Trainer.sead=1"), "sead"),
        ((*GKE, "--slice=v5e-8", "--gin.TRAIN_STEPS=-1"), "must be"),
        (
            ("gke", "run.gin", "--storage=/here", "--image=i", "--slice=v5e-8", "--dry-run"),
            "--storage=/here is on this machine",
        ),
        ((*GKE[:2], "--storage=ftp://b", *GKE[3:], "--slice=v5e-8"), "--storage=ftp://... must be in gs:// or s3://"),
        ((*GKE, "--slice=v5e-8", "--verb=evaluate"), "unknown flag --verb"),
        ((*GKE, "--slice=v5e-8", "--env=hf_value"), "--env must be --env=NAME=VALUE"),
        (
            (
                "gce",
                "run.gin",
                "--project=my-project",
                "--zone=us-west4-a",
                *GKE[2:4],
                "--slice=v5e-8",
                "--budget_usd=96",
                "--detach",
            ),
            "--budget_usd=96 has no effect with launch gce unless a manager watches the job",
        ),
        (("staged", "--url=x", "--sha256=y", "--", "launch"), "unknown verb 'launch'"),
        (("local", "--", "trian"), "did you mean train?"),
    ],
)
def test_mistakes_are_one_line_and_stage_nothing(cwd, capsys, argv, message):
    assert run(*argv) == exits.EXIT_USER_ERROR
    shown = capsys.readouterr()
    assert message in shown.err and shown.err.count("\n") == 1 and shown.out == "" and "hf_value" not in shown.err
    assert [*cwd.iterdir()] == [cwd / "run.gin"]


def test_a_relative_model_dir_lies_in_the_storage(capsys):
    assert run(*GKE, "--slice=v5e-8", "--gin.TRAIN_STEPS=7") == 0
    out = capsys.readouterr().out
    for binding in ("TRAIN_STEPS = 7", 'Plan.slice = "v5e-8"', 'Trainer.model_dir = "gs://bucket/runs/mine"'):
        assert f"--gin_bindings={binding}" in out
    assert run(*GKE, "--slice=v5e-8", "--gin.MODEL_DIR='runs/a\"b'") == 0
    assert 'Trainer.model_dir = "gs://bucket/runs/a\\"b"' in capsys.readouterr().out
    assert run(*GKE, "--slice=v5e-8", "--gin.MODEL_DIR=gs://other/run") == 0
    assert "Trainer.model_dir" not in capsys.readouterr().out


def test_the_place_may_stand_in_a_gin_file(cwd, capsys):
    (cwd / "cluster.gin").write_text('Gke.namespace = "ml"\nGke.queue = "q"\n')
    assert run(*GKE, "--slice=v5e-8", "--place=cluster.gin", "--queue=other") == 0
    out = capsys.readouterr().out
    assert "namespace: ml" in out and "kueue.x-k8s.io/queue-name: other" in out and "cluster.gin" not in out


def test_facts_of_the_planner(capsys):
    assert run(*GKE, "--slice=v5e-8", "--budget_usd=96") == 0
    job, price, budget, _, time = capsys.readouterr().err.splitlines()
    assert job == "job run: v5e-8, 8 v5e chips on 1 host (ct5lp-hightpu-8t)"
    assert re.fullmatch(r"price: 9\.60 USD an hour \(list price of 2025-02, \d+ months old\)", price)
    assert budget == "budget: 96.00 USD, which ends the job after 10.00 hours of a start"
    assert re.fullmatch(r"predicted: [\d,]+ steps in [\d.e-]+ hours, 0\.00 USD, without interruptions", time)


def test_days_and_price_are_those_of_the_planner(capsys):
    flags = ("--slice=v5e-8", "--usd_per_chip_hour=2", "--gin.TRAIN_STEPS=2_000_000_000")
    assert run(*GKE, *flags) == 0
    found = re.search(r"2,000,000,000 steps in (.*) days, (.*) USD", capsys.readouterr().err)
    days, usd = (float(text.replace(",", "")) for text in found.groups())
    assert days > 1 and usd == pytest.approx(8 * 2 * 24 * days, rel=0.05)


def test_what_was_staged_runs_on_a_host(cwd, tmp_path_factory, capsys):
    """The command of a Slurm job, in another folder: it finds the user's own files, and the run's folder."""
    storage = tmp_path_factory.mktemp("storage")
    (cwd / "sub").mkdir()
    (cwd / "sub" / "own.gin").write_text('include "models/tiny.gin"\n')
    (cwd / "run.gin").write_text(RUN.replace("models/tiny.gin", "sub/own.gin"))
    small = ("--gin.TRAIN_STEPS=1", "--gin.DecoderConfig.num_layers=1", "--gin.Evaluation.every=0")
    flags = ("--slice=cpu-1", f"--storage={storage}", f"--python={sys.executable}", *small, "--stage")
    assert run("slurm", "run.gin", *flags) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "srun " in line and "launch staged" in line]
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    command = line.partition("srun --kill-on-bad-exit=0 ")[2].partition(" >&4")[0]
    checkout = pathlib.Path(launch.__file__).parents[2]
    ended = subprocess.run(
        ["bash", "-c", f"PYTHONPATH={checkout} JAX_PLATFORMS=cpu {command}"],
        cwd=elsewhere,
        env={
            **os.environ,
            "XLA_FLAGS": re.sub("--xla_force_host_platform_device_count=8", "", os.environ["XLA_FLAGS"]),
        },
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ended.returncode == 0, ended.stderr
    assert (storage / "runs" / "mine" / "metrics.jsonl").exists() and [*elsewhere.iterdir()] == []


def test_local_takes_its_files_before_and_after_flags(capsys):
    for argv in (("run.gin", "--restarts=1"), ("--restarts=1", "run.gin")):
        assert run("local", *argv, "--emulate=2", "--gin_file", "other.gin", "--dry-run") == 0
        command = capsys.readouterr().out.partition("capibara.train ")[2]
        assert command == "--gin_file=run.gin --emulate=2 --gin_file other.gin\n"
