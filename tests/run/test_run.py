"""A run is a value: what changes it makes another, and its record reads as the one that was trained."""

from __future__ import annotations

import dataclasses

import pytest

from capibara import config
from capibara.cli import train
from capibara.cli.composition import training_run
from capibara.config import registry, written
from capibara.core.types import UserError
from capibara.run.run import Run, emulated, with_plan
from capibara.sharding import Plan
from capibara.training.trainer import Trainer

GIVEN = ['MODEL_DIR = "run"', "TRAIN_STEPS = 2"]
RUNS = {
    "decoder": (["base_v5e64.gin"], []),
    "a scope": (["base_v5e64.gin"], ["Trainer.model = @wide/DecoderConfig()", "wide/DecoderConfig.embed_dim = 1536"]),
    "experts": (
        ["runs/pretrain.gin", "models/qwen3_8b.gin", "tasks/stdlib.gin"],
        ["DecoderConfig.moe = @Moe()", "Moe.num_experts = 8", "Moe.expert_dim = 1536", *GIVEN],
    ),
    "experts of a macro": (
        ["runs/pretrain.gin", "models/qwen3_8b.gin", "tasks/stdlib.gin"],
        ["MODEL = @DecoderConfig()", "Trainer.model = %MODEL", "DecoderConfig.moe = @Moe()", "Moe.num_experts = 8"]
        + ["Moe.expert_dim = 1536", "MODEL/Moe.shared_experts = 1", *GIVEN],
    ),
    "encoder-decoder": (["runs/pretrain_t5.gin", "models/t5_1_1_xl.gin", "tasks/stdlib.gin"], GIVEN),
    "a macro": (["base_v5e64.gin"], ["MODEL = @DecoderConfig()", "Trainer.model = %MODEL"]),
    "macros": (
        ["base_v5e64.gin"],
        [
            "INNER = @wide/DecoderConfig()",
            "MODEL = %INNER",
            "Trainer.model = %MODEL",
            "wide/DecoderConfig.embed_dim = 1536",
        ],
    ),
    "windows": (["runs/pretrain.gin", "models/gemma3_4b.gin", "tasks/stdlib.gin"], ["LENGTH = 8192", *GIVEN]),
}
OPEN = (["runs/pretrain.gin", "models/capibara_1b.gin", "tasks/stdlib.gin"], [*GIVEN, "BATCH_SIZE = 128"])


def read(files, bindings) -> Run:
    config.parse(files, bindings)
    return Run(**training_run.parts_of(config.build(Trainer)))


def recorded(run: Run, changed: Run) -> tuple[str, Trainer]:
    """The record of a run that was changed after it was read, and the trainer that it reads as."""
    text = config.operative(written.differences(run.trainer, changed.trainer))
    config.parse((), (), (), config.Recorded(text, "config.gin"))
    return text, config.build(Trainer)


@pytest.mark.parametrize("name", RUNS)
def test_the_record_of_an_emulated_run_is_what_was_trained(name):
    run = read(*RUNS[name])
    small, line = emulated(run, 8)
    assert small.trainer.model.embed_dim == 128 < run.trainer.model.embed_dim and line.startswith("--emulate=8: ")
    text, trainer = recorded(run, small)
    written.check_same(trainer, small.trainer)
    assert ("wide/DecoderConfig.embed_dim = 128" in text) == (name in ("a scope", "macros"))
    assert emulated(small, 8) == (small, "")


def test_macros_that_nothing_uses_any_more_are_not_recorded():
    files, bindings = RUNS["windows"]
    run = read(files, ["LONG = 8192", *bindings, "LENGTH = %LONG"])
    small, _ = emulated(run, 8)
    assert "LENGTH = %LONG" in config.operative()
    text, _ = recorded(run, small)
    assert "LONG" not in text and "LENGTH" not in text
    assert "TRAIN_STEPS = 2" in text and "Dataset.length = 128" in text


def test_an_object_that_a_function_makes_cannot_be_changed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_models_of_functions.py").write_text(
        "import capibara as cb\nfrom capibara.config import configurable\n\n@configurable\ndef my_model(layers=6):\n"
        "    return cb.DecoderConfig(vocab_size=384, embed_dim=512, num_layers=layers, num_heads=4, mlp_dim=512)\n"
    )
    (tmp_path / "mine.gin").write_text(
        'include "base_v5e64.gin"\nimport my_models_of_functions\nTrainer.model = @my_model()\n'
    )
    run = read(["mine.gin"], [])
    small, _ = emulated(run, 8)
    with pytest.raises(
        UserError, match=r"^Trainer.model is made by my_model\(\), so that neither --emulate nor the planner can"
    ):
        config.operative(written.differences(run.trainer, small.trainer))


def test_a_plan_of_a_macro_is_planned():
    run = read(OPEN[0], [*OPEN[1], "Plan.slice = 'v5e-64'", "PLAN = @Plan()", "Trainer.plan = %PLAN"])
    planned, _ = with_plan(run)
    text, trainer = recorded(run, planned)
    written.check_same(trainer, planned.trainer)
    assert "PLAN/Plan.fsdp" in text


def test_the_record_of_a_planned_run_is_what_was_trained():
    run = read(OPEN[0], [*OPEN[1], "Plan.slice = 'v5e-64'"])
    planned, line = with_plan(run)
    assert line.startswith("plan for v5e-64: ") and planned.trainer.plan.has_mesh
    text, trainer = recorded(run, planned)
    written.check_same(trainer, planned.trainer)
    assert f"Plan.fsdp = {planned.trainer.plan.fsdp}\n" in text
    assert with_plan(planned) == (planned, "")


def test_a_run_without_a_slice_is_the_same_run():
    run = read(*OPEN)
    assert with_plan(run) == (run, "")


def test_origins_name_the_file_and_line_the_flag_or_what_has_changed_a_value(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.gin").write_text(
        'include "base_v5e64.gin"\nTrainer.model = @wide/DecoderConfig()\nwide/DecoderConfig.embed_dim = 1536\n'
    )
    run = read(["mine.gin"], ["Trainer.seed = 3", "TRAIN_STEPS = 7", "Plan.slice = None"])
    small, _ = emulated(run, 8)
    changed = written.differences(run.trainer, small.trainer)
    config.operative(changed)
    found = config.origins(changed, "--emulate=8")
    assert found["Trainer.model"] == ("@wide/DecoderConfig()", "mine.gin:2")
    assert found["wide/DecoderConfig.embed_dim"] == ("128", "--emulate=8 (was set: mine.gin:3)")
    assert found["wide/DecoderConfig.num_heads"] == ("12", "models/base.gin:5")  # outside of the scope
    assert found["wide/DecoderConfig.head_dim"] == ("8", "--emulate=8")
    assert found["Trainer.steps"] == ("7", "command line")  # of a macro
    assert found["Trainer.seed"] == ("3", "command line") and found["Plan.fsdp"] == ("-1", "base_v5e64.gin:18")
    assert "Trainer.log_every" not in found  # a default


def test_the_planner_is_an_origin():
    run = read(OPEN[0], [*OPEN[1], "Plan.slice = 'v5e-64'"])
    planned, _ = with_plan(run)
    changed = written.differences(run.trainer, planned.trainer)
    config.operative(changed)
    found = config.origins(changed, "the planner")
    assert found["Plan.fsdp"] == (str(planned.trainer.plan.fsdp), "the planner")
    assert found["Plan.batch_size"] == ("128", "command line") and found["Plan.slice"] == ("'v5e-64'", "command line")


def test_train_explains_its_values(tmp_path, capsys):
    argv = ["--gin_file=base_v5e64.gin", f"--gin.MODEL_DIR={tmp_path}/run", "--emulate=8", "--check", "--explain"]
    # Not as a SeqIO task, whose TensorFlow takes long to import.
    of_source = {"mixture_or_task_name": None, "task_shards": 1, "source": "@StdlibSource()"}
    assert train.main([*argv, *(f"--gin.Dataset.{name}={value}" for name, value in of_source.items())]) == 0
    lines = capsys.readouterr().out.splitlines()
    explained = [line for line in lines if line.startswith(("Plan.", "Trainer.steps"))]
    assert [" ".join(line.split()) for line in explained][:2] == [
        "Plan.batch_size = 8 --emulate=8 (was set: base_v5e64.gin:12)",
        "Plan.fsdp = -1 base_v5e64.gin:18",
    ]
    assert any(line.split() == ["Trainer.steps", "=", "20000", "base_v5e64.gin:11"] for line in explained)


@pytest.mark.parametrize("use_cached", [False, True])
def test_tasks_are_judged_from_the_cache_if_the_data_is_read_from_it(use_cached):
    run = read(["base_v5e64.gin"], [f"Dataset.use_cached = {use_cached}", "Evaluation.task_metrics = True"])
    assert run.tasks_as_read.use_cached is use_cached and not run.tasks.use_cached


def test_differences_name_the_fields_of_one_class_and_replace_others():
    run = read(*OPEN).trainer
    other = dataclasses.replace(run, seed=7, plan=dataclasses.replace(run.plan, remat="full"), loss=None)
    found = written.differences(run, other)
    assert [one.line for one in found] == ["Plan.remat = 'full'", "Trainer.seed = 7"]
    assert found[0].path == ((Trainer, "plan"), (Plan, "remat")) and written.differences(run, run) == []


def test_each_class_of_a_run_may_be_recorded():
    run = read(["base_v5e64.gin"], ["Evaluation.task_metrics = True", "Trainer.dashboard = True"])
    kinds = {type(getattr(run, field.name)).__name__ for field in dataclasses.fields(run)} - {
        "NoneType",
        "tuple",
        "dict",
    }
    assert {"Trainer", "SeqioEvaluation", "EngineConfig", "SampleText", "Monitoring", "DashboardConfig"} <= kinds
    for kind in sorted(kinds & {name.rpartition(".")[2] for name in registry.registered}):
        config.parse((), (), (), config.Recorded(f"PART = @{kind}()\n", "config.gin"))
