"""The Gin file of a split that `capibara plan` writes trains on emulated devices, as `train` reads it."""

from __future__ import annotations

import json

import pytest

from capibara.cli import plan, train
from capibara.multihost import exits


@pytest.mark.heavy
def test_the_plan_that_was_written_trains_on_emulated_devices(toy_tokenizer, tmp_path, capsys):
    (tmp_path / "sums.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}?", "answer": "1"}) + "\n" for i in range(40))
    )
    values = {"MODEL_DIR": tmp_path / "run", "INIT_FROM": None, "TOKENIZER": toy_tokenizer, "TRAIN_STEPS": 2}
    values |= {"REWARDS": "(@exact_answer,)", "FILES": (str(tmp_path / "sums.jsonl"),), "GROUP": 2, "BATCH_SIZE": 8}
    values |= {"LENGTH": 32, "ANSWER_LENGTH": 8, "Evaluation.every": 0, "rollout/EngineConfig.slots": 4}
    flags = [f"--gin.{name}={value}" for name, value in values.items()]
    flags += [f"--gin_file={name}.gin" for name in ("models/tiny", "tasks/prompts", "runs/grpo")]
    split = tmp_path / "split.gin"
    options = ("--slice=v5e-8", "--gin.Grpo.rollout_devices=4", f"--output={split}")
    assert exits.run_verb(plan.main, [*flags, *options]) == 0
    assert "the last 4 draw answers: ServingMesh.tensor = 1, ServingMesh.data = 4" in capsys.readouterr().out
    assert exits.run_verb(train.main, [*flags, f"--gin_file={split}", "--emulate=8"]) == 0
    text = capsys.readouterr().out
    assert "parameters on 4 x cpu" in text and "finished at step 2" in text
    record = (tmp_path / "run" / "config.gin").read_text()
    assert "Grpo.rollout_devices = 4" in record and "rollout/ServingMesh.data = 4" in record
