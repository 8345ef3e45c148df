"""`capibara launch xmanager`: which command it becomes, and what it shows without XManager."""

import os
import pathlib
import sys

import pytest

from capibara.cli import launch
from capibara.multihost import exits

RUN = ("xmanager", "quickstart.gin", "base.gin", "--where=local", "--emulate=2", "--sweep=TRAIN_STEPS=1,2")


def run(*argv):
    return exits.run_verb(launch.main, [*argv])


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """Of a python in whose folder programs can be put, and nowhere else."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "")
    return tmp_path


@pytest.mark.parametrize("by", ["executable", "PATH"])
def test_xmanager_runs_the_script(environment, monkeypatch, tmp_path_factory, by):
    folder = environment if by == "executable" else tmp_path_factory.mktemp("bin")
    (folder / "xmanager").write_text("#!/bin/sh\n")
    (folder / "xmanager").chmod(0o755)
    monkeypatch.setenv("PATH", "" if by == "executable" else str(folder))
    calls = []
    monkeypatch.setattr(os, "execv", lambda *call: calls.append(call))
    run(*RUN)
    ((path, (name, word, script, dashes, *flags)),) = calls
    assert (path, name, word, dashes) == (str(folder / "xmanager"), path, "launch", "--")
    assert "app.run(main)" in pathlib.Path(script).read_text()
    assert flags == ["--gin_file=quickstart.gin", "--gin_file=base.gin", *RUN[3:]]


def test_without_xmanager(environment, capsys):
    assert run(*RUN) == 2
    assert capsys.readouterr().err.startswith("error: launch xmanager needs XManager: pip install xmanager")


def test_a_dry_run_shows_each_work_unit_and_what_it_starts(capfd, tmp_path):
    assert run(*RUN, f"--model_dir={tmp_path}/runs", "--dry-run") == 0
    shown = capfd.readouterr().out.replace(sys.executable, "python").splitlines()
    assert len(shown) == 4
    for number, (unit, starts) in enumerate(zip(shown[::2], shown[1::2]), 1):
        assert unit.startswith("# python -m capibara.launch local quickstart.gin base.gin ")
        assert starts.startswith("python -m capibara.train --gin_file=quickstart.gin --gin_file=base.gin --emulate=2")
        assert f"--gin.TRAIN_STEPS={number}" in starts and f'/runs/quickstart-{number}"' in starts
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--where=moon",), "--where=moon must be one of local"),
        (("--where=gke", "--image=i", "--slice=v5e-8"), "--storage is not set"),
        (("--tpu_cores=8",), "--tpu_cores is not supported"),
    ],
)
def test_mistakes(capfd, flags, message):
    assert run("xmanager", "quickstart.gin", *flags, "--dry-run") == 2
    assert message in capfd.readouterr().err


def test_help(capsys):
    assert run("xmanager") == run("xmanager", "--help") == 0
    assert "--dry-run" in capsys.readouterr().out
