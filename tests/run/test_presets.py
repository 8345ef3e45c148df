"""Every Gin file that capibara ships is a run that its own text describes: both doors lead to one value, and one program."""

from __future__ import annotations

import hashlib
import pathlib
import re

import jax
import pytest

from capibara import config, sharding
from capibara.cli.composition import training_run
from capibara.config import written
from capibara.core.types import UserError
from capibara.evaluation.tasks import EvalTask
from capibara.models import api
from capibara.run.run import Run, emulated
from capibara.strategies.group.coordinator import Coordinator
from capibara.training.setup import lower_step
from capibara.training.trainer import Trainer

GIN = pathlib.Path(__file__).resolve().parents[2] / "gin"
FILES = sorted(str(path.relative_to(GIN)) for path in GIN.rglob("*.gin"))
# What the files leave to the user.
GIVEN = {
    "MODEL_DIR": "'run'", "TRAIN_STEPS": "100", "INIT_FROM": "'start'", "FILES": "('a.jsonl',)", "FOLDER": "'set'",
    "TOKENIZER": "'model'", "DATASET_PATH": "'set'", "MODELS": "('a', 'b')", "EXCHANGE": "'exchange'",
    "REWARDS": "(@exact_answer,)", "NAME": "'a'", "CHOICES": "('a.jsonl',)", "QUESTIONS": "('a.jsonl',)",
    "PROBLEMS": "('a.jsonl',)", "TEXTS": "('a.jsonl',)", "RULER": "('a.jsonl',)", "PAIRS": "('a.jsonl',)", "INDEX": "'index'",
}  # fmt: skip


TASKS = {
    **dict.fromkeys(
        (f"runs/{name}.gin" for name in ("reward", "orpo", "simpo", "cpo", "dpo")), "tasks/preferences.gin"
    ),
    "runs/kto.gin": "tasks/unpaired.gin",
    "runs/process_reward.gin": "tasks/steps.gin",
    **dict.fromkeys(
        (
            f"runs/{name}.gin"
            for name in (
                "online_dpo",
                "ppo",
                "reinforce_pp",
                "rloo",
                "sapo",
                "cispo",
                "gspo",
                "dapo",
                "dr_grpo",
                "grpo",
                "memory",
            )
        ),
        "tasks/prompts.gin",
    ),
}


def files_of(name: str) -> list[str]:
    """A file with what it is used beside: a run, a model and a task."""
    text = (GIN / name).read_text(encoding="utf-8")
    kind, beside = name.partition("/")[0], {"runs": "runs/pretrain.gin", "models": "models/tiny.gin"}
    beside["tasks"] = "tasks/text.gin"
    if kind in ("models", "slices"):
        model = text if kind == "models" else (GIN / re.search(r'include "(models/\S+)"', text)[1]).read_text("utf-8")
        for config_of, run in (
            ("EncoderDecoderConfig", "runs/pretrain_t5.gin"),
            ("EncoderConfig", "runs/pretrain_bert.gin"),
        ):
            if re.search(rf"\b{config_of}\b", model):
                beside["runs"] = run
        if kind == "slices":
            return [beside["runs"], name, beside["tasks"]]
    if kind == "runs" and name != "runs/pretrain.gin":
        for run, model in (("t5", "models/t5_small.gin"), ("bert", "models/bert_base.gin")):
            if run in name:
                beside["models"] = model
        beside["tasks"] = TASKS.get(name, beside["tasks"])
    if kind == "tasks":
        beside["runs"] = {task: run for run, task in TASKS.items()}.get(name, beside["runs"])
    return [name] if kind not in beside else [*(beside | {kind: name}).values()]


def parse(files: list[str]) -> None:
    """Parses files with what they leave open."""
    given = dict(GIVEN)
    if any("gemma3n" in file for file in files):
        given["Trainer.model"] = "@Gemma3nConfig()"  # as the files say
    if any("deepseek_v4" in file for file in files):
        given["Trainer.model"] = "@DeepseekV4Config()"
    if "runs/distill.gin" in files:
        given["Distillation.stored"] = "'teacher'"  # or a TEACHER, which the verbs read
    if files == ["finetune_smollm2.gin"]:
        given["Dataset.vocabulary"] = "@ByteVocabulary()"  # the base model's folder has one
    while True:
        try:
            return config.parse(files, [f"{name} = {value}" for name, value in given.items()])
        except UserError as error:
            if not (unused := re.search(r"no Gin file uses (\w+)", str(error))):
                raise
            del given[unused[1]]


def parts(run: Run) -> list:
    return [run.trainer, run.samples, run.monitoring, run.system, run.tracking]


def through_text(run: Run) -> Run:
    """What Python's door makes of a run."""
    config.parse((), written.text_of(*parts(run)).split("\n"))
    return Run(**training_run.parts_of(config.build(Trainer)))


def is_run(name: str) -> bool:
    return not name.startswith("evaluation/") and name not in ("runs/coordinate.gin", "tasks/routing.gin")


@pytest.mark.parametrize("name", list(filter(is_run, FILES)))
def test_a_run_is_what_its_text_describes(name):
    parse(files_of(name))
    run = Run(**training_run.parts_of(config.build(Trainer)))
    again = through_text(run)
    for part, other in zip(parts(run), parts(again), strict=True):
        written.check_same(other, part)
    assert written.differences(run.trainer, again.trainer) == [] and run.trainer == again.trainer


@pytest.mark.parametrize("name", [name for name in FILES if not is_run(name) and name != "tasks/routing.gin"])
def test_so_are_a_task_and_a_coordinator(name):
    """The SeqIO task of a routing set needs a set that was built: tests/data/tasks/test_routing.py has such a run."""
    parse([name])
    scopes = [scope for scope in config.scopes("EvalTask") if scope]
    with config.in_scope(scopes[0] if scopes else None):
        value = config.build(EvalTask if scopes else Coordinator)
    read = written.read(type(value), written.text_of(value).split("\n"))
    written.check_same(read, value)


def program(run: Run) -> str:
    """The hash of the lowered train step, on emulated devices."""
    small, _ = emulated(run, jax.device_count())
    mesh = sharding.make_mesh(small.trainer.plan)
    lowered = lower_step(small.trainer, api.build(small.trainer.model), mesh)
    return hashlib.sha256(lowered.as_text().encode()).hexdigest()


# One of each kind of model, loss and strategy; make test-heavy lowers all that fit emulated devices.
FEW = {"base_v5e64.gin", "runs/lora.gin", "runs/consensus.gin", "models/t5_small.gin", "models/moe_tiny.gin"}
# The step of runs/distill.gin is made for the files of a teacher, which no preset has.
LOWERED = [name for name in FILES if is_run(name) and not name.startswith(("slices/", "tasks/", "runs/distill"))]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FEW else pytest.mark.heavy) for n in LOWERED])
def test_both_doors_lower_one_program(name):
    parse(files_of(name))
    run = Run(**training_run.parts_of(config.build(Trainer)))
    assert program(run) == program(through_text(run))
