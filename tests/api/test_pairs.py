"""A reward model on preference pairs: accuracy by subset and by RewardBench's sections, and what is refused by name."""

from __future__ import annotations

import json

import pytest

import capibara as cb
from capibara import config
from capibara.cli import evaluate
from capibara.core.types import UserError
from capibara.multihost import exits

from .conftest import WORDS, save_reward

GIN = "--gin_file=evaluation/pairs.gin"
SUBSETS = ("refusals-dangerous", "refusals-offensive", "xstest-should-refuse", "xstest-should-respond", "donotanswer")


@pytest.fixture(scope="module")
def reward(folder, tmp_path_factory):
    return save_reward(folder, tmp_path_factory.mktemp("reward_of_pairs"))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    rows = [
        {"prompt": f"{a}?", "chosen": f"{b} {a}", "rejected": f"{b} {b} {a}", "subset": SUBSETS[(i + k) % 5], "id": i}
        for i, a in enumerate(WORDS)
        for k, b in enumerate(WORDS)
    ]
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:21]))
    return path


def run(*argv) -> int:
    config.reset()
    return exits.run_verb(evaluate.main, [*argv])


def expected(reward, pairs) -> dict[str, list[float]]:
    """The pairs' verdicts by subset, from `scores`."""
    scorer, result = cb.load(reward), {}
    for row in map(json.loads, pairs.read_text().splitlines()):
        chosen, rejected = scorer.scores(row["prompt"], [row["chosen"], row["rejected"]])
        result.setdefault(row["subset"], []).append(float(chosen > rejected))
    return result


def test_accuracy_is_reported_by_subset_and_section(reward, pairs, tmp_path, capsys):
    out, answers = tmp_path / "results.json", tmp_path / "answers.jsonl"
    flags = (f"--model_dir={reward}", GIN, f"--gin.PAIRS=('{pairs}',)", f"--out={out}", f"--predictions={answers}")
    assert run(*flags) == 0
    task = json.loads(out.read_text())["tasks"]["pairs"]
    verdicts = expected(reward, pairs)
    mean = lambda values: sum(values) / len(values)  # noqa: E731
    every = [value for values in verdicts.values() for value in values]
    assert 0 < mean(every) < 1
    assert task["metrics"]["accuracy"]["value"] == pytest.approx(mean(every))
    groups = task["groups"]
    assert groups["by"] == "subset"
    assert {name: item["metrics"]["accuracy"]["value"] for name, item in groups["of"].items()} == pytest.approx(
        {name: mean(values) for name, values in verdicts.items()}
    )
    assert {name: item["examples"] for name, item in groups["of"].items()} == {
        name: len(values) for name, values in verdicts.items()
    }
    assert groups["mean"] == {"accuracy": pytest.approx(mean([mean(values) for values in verdicts.values()]))}
    assert groups["sections"] == {"accuracy": {"Safety": pytest.approx(mean(every))}}
    printed = capsys.readouterr().out
    assert all(f"pairs, subset {name}" in printed for name in SUBSETS)
    assert "pairs, mean" in printed and "pairs, Safety" in printed
    lines = answers.read_text().splitlines()
    answers.write_text("\n".join(lines[:5]) + "\n")  # an interrupted evaluation
    assert run(*flags) == 0
    before, after = ([json.loads(line) for line in text] for text in (lines, answers.read_text().splitlines()))
    assert [line.pop("scores", []) for line in after] == [
        pytest.approx(line.pop("scores", []), rel=1e-5, abs=1e-6) for line in before
    ]
    assert after == before
    assert json.loads(out.read_text())["tasks"]["pairs"]["groups"] == groups


def test_scores_that_were_edited_are_refused(reward, tmp_path, capsys):
    data, answers = tmp_path / "one.jsonl", tmp_path / "answers.jsonl"
    data.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c", "subset": "x"}) + "\n")
    flags = (f"--model_dir={reward}", GIN, f"--gin.PAIRS=('{data}',)", f"--predictions={answers}")
    assert run(*flags) == 0
    head, line = answers.read_text().splitlines()
    capsys.readouterr()
    for scores in (None, ["a", "b"], [1], [1, 2, 3], [float("nan"), 1.0], [True, False]):
        answers.write_text(f"{head}\n{json.dumps(json.loads(line) | {'scores': scores})}\n")
        assert run(*flags) == 2
        assert "scores of a line is" in (error := capsys.readouterr().err) and "must be 2 numbers" in error


def test_without_groups_nothing_is_added(reward, pairs, capsys):
    result = cb.evaluate(reward, {"mine": cb.EvalTask(files=(str(pairs),), pairs=True)})["tasks"]["mine"]
    assert result.keys() == {"metrics", "examples", "files", "seconds"}
    assert result["examples"] == 21
    other = cb.evaluate(reward, {"mine": cb.EvalTask(files=(str(pairs),), pairs=True, group_by="id")})["tasks"]["mine"]
    assert other["metrics"] == result["metrics"] and "sections" not in other["groups"]
    assert other["groups"]["of"]["4"]["examples"] == 1


def test_mistakes_are_named(folder, reward, pairs, tmp_path, capsys):
    task = {"mine": cb.EvalTask(files=(str(pairs),), pairs=True)}
    with pytest.raises(UserError, match=r"hf is no reward model \(its head is 'tied'\)"):
        cb.evaluate(f"{folder}/hf", task)
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "a", "chosen": "b " * 60, "rejected": "c"}) + "\n")
    with pytest.raises(UserError, match=r"mine, example 0: .* must fit Dataset.length \(128\)"):
        cb.evaluate(reward, {"mine": cb.EvalTask(files=(str(long),), pairs=True)})
    flags = (f"--model_dir={reward}", GIN, f"--gin.PAIRS=('{pairs}',)")
    steps = (
        "loss = @ProcessReward()",
        "source = @StepsJsonlSource()",
        "template = @ChatTemplate()",
        f"tokenizer = '{reward}'",
        f"files = ('{pairs}',)",
    )
    owners = ("Trainer", "Dataset", "StepsJsonlSource", "ChatTemplate", "StepsJsonlSource")
    assert run(*flags, *(f"--gin.{owner}.{binding}" for owner, binding in zip(owners, steps))) == 2
    assert "scores the steps of an answer, and EvalTask.pairs needs one score of each" in capsys.readouterr().err
    assert run(*flags, "--gin.Plan.context=2", "--gin.Plan.fsdp=4", "--gin.Plan.batch_size=8") == 2
    assert "EvalTask.pairs does not support Plan.context (2): set it to 1" in capsys.readouterr().err
