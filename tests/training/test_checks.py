"""What a run is told before its step is compiled: a schedule that other steps stretch, and what `--check` says."""

from __future__ import annotations

import pytest

from capibara.core.types import UserError
from capibara.optim import Optimizer, Schedule
from capibara.training import checks, run_folder, setup
from capibara.training.base.options import Evaluation


@pytest.mark.parametrize(
    ("schedule", "before", "now", "step", "words"),
    [
        # (1 - 0.9 * 6 / 6) * 1e-2 and (1 - 0.9 * 6 / 12) * 1e-2
        (Schedule(kind="linear", learning_rate=1e-2), 6, 12, 6, "stretches the schedule: the learning rate of step 7 was 0.001, is 0.0055"),
        (Schedule(kind="linear", learning_rate=1e-2), 12, 6, 3, "shortens the schedule: the learning rate of step 4 was 0.00775, is 0.0055"),
        # the decay has not begun at step 4: its last step is 1 - 0.9 * 3 / 4 of 1e-2
        (Schedule(kind="wsd", learning_rate=1e-2, decay_steps=4), 10, 20, 4, "the learning rate of step 10 was 0.00325, is 0.01"),
        (Schedule(kind="constant", learning_rate=1e-2), 6, 12, 6, None),
        (Schedule(kind="rsqrt", learning_rate=1e-2, warmup_steps=2), 6, 12, 6, None),
        (Schedule(kind="cosine", learning_rate=1e-2, decay_steps=5), 6, 12, 6, None),
    ],
)  # fmt: skip
def test_other_steps_stretch_a_schedule(make_trainer, monkeypatch, schedule, before, now, step, words):
    monkeypatch.setattr(run_folder, "recorded_steps", lambda model_dir: before)
    notes = checks._stretched(make_trainer(steps=now, optimizer=Optimizer(schedule=schedule)), step)
    assert bool(notes) == (words is not None) and all(words in note for note in notes)
    assert all(note.startswith(f"Trainer.steps was {before}, is {now}, which ") for note in notes)


def test_a_check_writes_and_compiles_nothing(make_trainer, tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "lower_step", None)
    trainer = make_trainer(evaluation=Evaluation(every=2))
    lines = setup.check(trainer)
    names = ["mesh", "model", "initial weights", "data", "data", "data", "run folder"]
    assert [line.partition(":")[0] for line in lines] == names
    train, validation = (trainer.dataset.documents(split).counts for split in ("train", "validation"))
    assert lines[4:6] == [f"data: train: {train}", f"data: validation: {validation}"]
    assert f"{len(trainer.dataset.documents('validation')):,} held out" in lines[4]
    assert "fsdp=4 x tensor=2, 8 rows of 64" in lines[0] and lines[-1].endswith("a new run")
    assert not (tmp_path / "run").exists()


def test_the_steps_of_the_last_start_are_recorded(tmp_path):
    assert run_folder.recorded_steps(str(tmp_path)) is None
    (tmp_path / run_folder.CONFIG).write_text("TRAIN_STEPS = 350\nTrainer.steps = %TRAIN_STEPS\n")
    assert run_folder.recorded_steps(str(tmp_path)) == 350


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    checks.folder(str(tmp_path / "a" / "b"))
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run", "/proc/none/run"):
        with pytest.raises(UserError, match="cannot be written .*MODEL_DIR"):
            checks.folder(str(path))
