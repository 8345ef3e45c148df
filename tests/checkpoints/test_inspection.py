"""Listing and pruning a run's checkpoints from outside the run."""

import json
import os

import jax.numpy as jnp
import pytest

from capibara.checkpoints import run_manifest
from capibara.checkpoints.manager import Checkpointing, Checkpoints
from capibara.cli import convert
from capibara.multihost import exits
from capibara.training.base.state import TrainState


def run(*argv):
    return exits.run_verb(convert.main, [str(arg) for arg in argv])


@pytest.fixture
def model_dir(tmp_path):
    with Checkpoints(
        str(tmp_path), Checkpointing(), about={"commit": "0123456789abcdef", "capibara": "9"}
    ) as checkpoints:
        for step in (1, 2, 3):
            state = TrainState(jnp.int32(step), {"w": jnp.arange(100.0) + step}, (), None)
            checkpoints.save(step, state, {}, {}, score=3.0 / step if step > 1 else None)
    return tmp_path


def damage(model_dir, step):
    path = model_dir / "checkpoints" / str(step) / "state" / "params.w" / "0"
    os.truncate(path, 7)


def test_steps_are_listed_with_what_they_are(model_dir, capsys):
    damage(model_dir, 2)  # list reads no arrays
    assert run("list", model_dir, f"--json={model_dir / 'out.json'}") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2", "3"]
    assert "loss" not in lines[0] and lines[2].endswith(", loss 1.0000, commit 0123456789ab")
    rows = json.loads((model_dir / "out.json").read_text())
    assert rows[1]["step"] == 2 and rows[1]["parent"] == 1 and rows[1]["bytes"] > 400 and rows[1]["faults"] == []


def test_what_was_quarantined_is_listed_and_goes_when_asked(model_dir, capsys):
    folder = model_dir / "checkpoints"
    (folder / "3").rename(folder / "3.rolled_back")
    (folder / "2").rename(folder / "2.corrupted")
    assert run("list", model_dir) == 0
    out = capsys.readouterr().out
    assert "2.corrupted  quarantined by a run that found it corrupted" in out
    assert "3.rolled_back  quarantined by a run that rolled back before it" in out
    assert run("prune", model_dir, "--keep=1", "--corrupted") == 0
    assert [path.name for path in folder.iterdir()] == ["1"]


def test_the_names_that_were_before_are_known_for_one_version(model_dir, capsys):
    folder = model_dir / "checkpoints"
    (folder / "3").rename(folder / "3.damaged")
    assert run("list", model_dir) == 0
    assert "3.damaged  quarantined by a run that found it corrupted" in capsys.readouterr().out
    assert run("prune", model_dir, "--keep=2", "--damaged") == 0
    assert capsys.readouterr().err.startswith("--damaged is now --corrupted: ")
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]


def test_what_a_step_names_and_the_run_no_longer_does_is_told(tmp_path, capsys):
    """The run's manifest was rewritten without its configuration: the step's manifest has it."""
    folder = run_manifest.folder_of(tmp_path)
    run_manifest.replace(folder, {"config.gin": b"A = 1\n", "tokenizer/tokenizer.json": b"{}"})
    with Checkpoints(str(tmp_path), Checkpointing()) as checkpoints:
        checkpoints.save(1, TrainState(jnp.int32(1), {"w": jnp.arange(4.0)}, (), None), {}, {})
    assert run("verify", tmp_path) == 0
    (tmp_path / "tokenizer" / "tokenizer.json").unlink()
    run_manifest.seal(folder)
    capsys.readouterr()
    assert run("verify", tmp_path) == 1
    assert "tokenizer/tokenizer.json is named by a step, not by manifest.json" in capsys.readouterr().out


def test_every_file_is_verified(model_dir, capsys):
    assert run("verify", model_dir) == 0
    damage(model_dir, 2)
    (model_dir / "checkpoints" / "3" / "manifest.json").write_text("{}")
    capsys.readouterr()
    assert run("verify", model_dir) == 1
    text = capsys.readouterr().out
    assert "corrupted: state/params.w/0 (array params/w) has 7 bytes, not 400" in text
    assert "3  manifest.json cannot be read ('xxh128')" in text
    assert run("verify", model_dir, "--step=1") == 0
    assert capsys.readouterr().out.endswith(", whole\n") and "whole" not in text.splitlines()[-2]


def test_pruning_keeps_what_is_asked_for_and_the_last_whole_step(model_dir, capsys):
    folder = model_dir / "checkpoints"
    assert run("prune", model_dir, "--keep=1", "--dry_run") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["2", "1"] and (folder / "1").exists()
    damage(model_dir, 3)
    assert run("prune", model_dir, "--keep=1") == 2
    assert "none of the remaining steps (3) is intact: nothing is removed" in capsys.readouterr().err
    assert run("prune", model_dir, "--keep=1", "--keep_every=2") == 0
    assert sorted(p.name for p in folder.iterdir()) == ["2", "3"]
    (folder / "3").rename(folder / "3.corrupted")
    assert run("prune", model_dir, "--keep=1", "--corrupted") == 0
    assert [p.name for p in folder.iterdir()] == ["2"]
    capsys.readouterr()
    assert run("prune", model_dir, "--keep=1") == 0 and capsys.readouterr().out == "nothing to remove\n"


def test_a_run_that_is_writing_is_left_alone(model_dir, capsys):
    with Checkpoints(str(model_dir), Checkpointing()):
        assert run("prune", model_dir, "--keep=1") == 2
        assert "is being written by process" in capsys.readouterr().err
        assert run("verify", model_dir) == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["list", "nowhere"], "nowhere is no run folder"),
        (["list", ""], "RUN is empty: give it a value"),
        (["list"], "list needs RUN, a run folder: name one, e.g. runs/mine"),
        (["lst", "x"], "invalid choice: 'lst'"),
        (["prune", "x"], "prune needs --keep"),
        (["prune", "x", "--keep=0"], "--keep=0 is for prune, must be at least 1"),
        (["list", "x", "--keep=1"], "--keep=1 is for prune"),
        (["verify", "x", "--dry_run"], "--dry_run is for prune, not for verify"),
        (["prune", "x", "--keep=1", "--step=3"], "--step=3 is for list and verify"),
    ],
)
def test_mistakes_are_one_line(argv, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*argv) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and message in captured.err


def test_a_step_that_is_not_there(model_dir, capsys):
    assert run("verify", model_dir, "--step=9") == 2
    assert "--step=9 must be a step of" in capsys.readouterr().err


def test_the_manifest_keeps_the_counts_of_the_data(tmp_path):
    folder, data = run_manifest.folder_of(tmp_path), {"train": {"documents": 3, "held_out": 1}}
    run_manifest.begin(folder, {"train": {"documents": 2}})
    run_manifest.begin(folder, data)
    run_manifest.replace(folder, {run_manifest.CONFIG: b""})
    run_manifest.add_step(folder, 1)
    run_manifest.seal(folder)
    assert run_manifest.read(folder).data == data
    (folder / "manifest.json").write_text(
        (folder / "manifest.json").read_text().replace('"documents": 3', '"documents": 4')
    )
    with pytest.raises(run_manifest.Corrupted):
        run_manifest.read(folder)
    run_manifest.seal(folder)  # the user says that the folder is as it should be
    assert run_manifest.read(folder).data == {}
