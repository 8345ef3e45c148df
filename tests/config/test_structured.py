"""YAML, JSON and TOML are read as the Gin files that they stand for."""

from __future__ import annotations

import json

import pytest

from capibara import config
from capibara.core.types import UserError
from capibara.training.trainer import Trainer

GIN = """
include "runs/pretrain.gin"
include "models/tiny.gin"
include "tasks/stdlib.gin"
MODEL_DIR = "runs/x"
TRAIN_STEPS = 3
LEARNING_RATE = 1e-3
Schedule.kind = "cosine"
Trainer.ema_decay = None
Trainer.evaluation = @Evaluation()
Evaluation.every = %TRAIN_STEPS
SampleText.prompts = ("def ", "1e-3", "@ home", "%")
qa/EvalTask.files = ("a.jsonl",)
qa/EvalTask.metrics = (@exact_match,)
"""
YAML = """
# A comment.
include: [runs/pretrain.gin, models/tiny.gin, tasks/stdlib.gin]
MODEL_DIR: runs/x
TRAIN_STEPS: 3
LEARNING_RATE: 1e-3

Schedule:
  kind: cosine
Trainer: {ema_decay: null, evaluation: "@Evaluation()"}
Evaluation:
  every: "%TRAIN_STEPS"
SampleText:
  prompts: ["def ", "1e-3", "@ home", "%"]
qa/EvalTask:
  files:
    - a.jsonl
  metrics: ["@exact_match"]
"""
VALUES = {
    "include": ["runs/pretrain.gin", "models/tiny.gin", "tasks/stdlib.gin"],
    "MODEL_DIR": "runs/x",
    "TRAIN_STEPS": 3,
    "LEARNING_RATE": 1e-3,
    "Schedule": {"kind": "cosine"},
    "Trainer": {"ema_decay": None, "evaluation": "@Evaluation()"},
    "Evaluation": {"every": "%TRAIN_STEPS"},
    "SampleText": {"prompts": ["def ", "1e-3", "@ home", "%"]},
    "qa/EvalTask": {"files": ["a.jsonl"], "metrics": ["@exact_match"]},
}
TOML = """
include = ["runs/pretrain.gin", "models/tiny.gin", "tasks/stdlib.gin"]
MODEL_DIR = "runs/x"
TRAIN_STEPS = 3
LEARNING_RATE = 1e-3
[Schedule]
kind = "cosine"
[Trainer]
evaluation = "@Evaluation()"
[Evaluation]
every = "%TRAIN_STEPS"
[SampleText]
prompts = ["def ", "1e-3", "@ home", "%"]
["qa/EvalTask"]
files = ["a.jsonl"]
metrics = ["@exact_match"]
"""


def read(folder, name, text):
    from capibara.evaluation.tasks import EvalTask
    from capibara.inference.sample import SampleText

    (folder / name).write_text(text)
    config.parse([str(folder / name)])
    with config.in_scope("qa"):
        task = config.build(EvalTask)
    return config.build(Trainer), config.build(SampleText), task


@pytest.mark.parametrize(
    ("name", "text"), [("x.yaml", YAML), ("x.yml", YAML), ("x.json", json.dumps(VALUES, indent=1)), ("x.toml", TOML)]
)
def test_it_is_the_gin_file(tmp_path, name, text):
    found = read(tmp_path, name, text)
    assert found == read(tmp_path, "x.gin", GIN)
    assert found[0].optimizer.schedule.learning_rate == 1e-3 and found[1].prompts[1:] == ("1e-3", "@ home", "%")


def test_places_are_lines_of_the_file(tmp_path):
    read(tmp_path, "x.yaml", YAML)
    assert config.given_at("Schedule.kind") == f"{tmp_path}/x.yaml:9"
    assert config.given_at("Trainer.steps") == f"{tmp_path}/x.yaml:5"


def test_gin_files_include_it(tmp_path):
    (tmp_path / "inner.yaml").write_text("Schedule: {learning_rate: 0.5}\n")
    (tmp_path / "outer.gin").write_text('include "inner.yaml"\n')
    config.parse([str(tmp_path / "outer.gin")])
    assert config.values_of("Schedule.learning_rate") == [0.5]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("x.yaml", "Trainer:\n  seeed: 1\n", "x.yaml:2: Trainer has no parameter seeed: did you mean seed?"),
        ("x.yaml", "A: 1\nA: 2\n", "x.yaml:2: 'A' is there twice"),
        ("x.yaml", "Trainer: {seed: 1, seed: 2}\n", "'seed' is there twice"),
        ("x.yaml", "- 1\n", "x.yaml:1 is no mapping"),
        ("x.yaml", "a b: 1\n", "x.yaml:1: 'a b' is no name of a macro"),
        ("x.yaml", "a b: {c: 1}\n", "'a b' is no name of a class"),
        ("x.yaml", 'Trainer: {"seed = 1\\nimport os": 1}\n', "is no name of a field of Trainer"),
        ("x.yaml", 'import: "os\\nimport sys"\n', "must name modules"),
        ("x.yaml", "include: 3\n", "must be a name or a list of names"),
        ("x.yaml", "a: [1\n", "x.yaml cannot be read"),
        ("x.yaml", "a: !!python/object/apply:os.system [ls]\nTrainer: {seed: 1}\n", ""),  # a list: tags mean nothing
        ("x.yaml", "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
            f"{y}: &{y} [{', '.join([f'*{x}'] * 9)}]\n" for x, y in zip("abcdef", "bcdefg")), "more than 10,000 values"),
        ("x.json", '{"Trainer": {"seed": }}', "x.json cannot be read"),
        ("x.toml", "a = 1979-05-27\n", "which Gin does not have"),
        ("x.json", '{"a": 1, "a": 2}', "'a' is there twice"),
        ("x.json", "[1]", "is no object"),
        ("x.toml", "a = \n", "x.toml cannot be read"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    if not said:
        config.parse([str(tmp_path / name)])
        assert config.macro("a") == ["ls"]
        return
    with pytest.raises(UserError) as caught:
        config.parse([str(tmp_path / name)])
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("written", "value"),
    [("1e-3", 1e-3), ("0x10", 16), ("yes", "yes"), ("True", True), ("~", None), ("(1, 2)", "(1, 2)"), ("1979-05-27", "1979-05-27")],
)  # fmt: skip
def test_a_value_without_quotes_is_a_number_a_constant_or_a_text(tmp_path, written, value):
    (tmp_path / "x.yaml").write_text(f"A: {written}\n")
    config.parse([str(tmp_path / "x.yaml")])
    assert config.macro("A") == value and type(config.macro("A")) is type(value)


def test_an_empty_file_binds_nothing(tmp_path):
    (tmp_path / "x.yaml").write_text("# nothing\n")
    assert config.parse([str(tmp_path / "x.yaml")]) == [tmp_path / "x.yaml"]
