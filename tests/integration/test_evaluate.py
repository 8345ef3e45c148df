"""`python -m capibara.evaluate` on a run of `capibara.train`."""

from __future__ import annotations

import json
import math

import pytest

from capibara.monitoring.metrics_file.loggers import read_metrics

RUN = "--model_dir=run"
TASKS = """
import my_metrics
qa/EvalTask.files = ("qa.jsonl",)
qa/EvalTask.metrics = (@exact_match, @lengths)
mc/EvalTask.files = ("mc.jsonl",)
mc/EvalTask.prompt = "{prompt}"
mc/EvalTask.choices = "choices"
EvalTask.sampling = @Sampling()
Sampling.temperature = 0.0
Sampling.max_new_tokens = 5
"""
METRIC = """
from capibara.config import configurable

@configurable
def lengths(targets, predictions, scale=1):
    return {"length": [scale * len(text) for text in predictions], "count": len(targets)}
"""


@pytest.fixture(scope="module")
def trained(shell, made_here):
    made_here(
        "train", "--gin_file=tiny.gin", "--emulate=8", "--gin.TRAIN_STEPS=40", "--gin.Trainer.ema_decay=0.5",
        "--gin.Evaluation.every=20", "--gin.Checkpointing.every=20", "--gin.Checkpointing.keep=5",
    )  # fmt: skip
    (shell.folder / "my_metrics.py").write_text(METRIC)
    (shell.folder / "tasks.gin").write_text(TASKS)
    qa = [{"prompt": "river gr", "target": "x"}, {"prompt": "grass ", "target": ["y", "z"]}]
    mc = [{"prompt": "river ", "choices": ["zzzz", "river"], "target": 1}]
    for name, lines in (("qa", qa), ("mc", mc)):
        (shell.folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return shell


def results(shell, name="out.json"):
    return json.loads((shell.folder / name).read_text())


def values(result, task):
    return {name: one["value"] for name, one in result["tasks"][task]["metrics"].items()}


def test_the_validation_split_is_as_in_training(here, trained):
    told = {r["step"]: r for r in read_metrics(str(trained.folder / "run")) if r["kind"] == "eval"}
    for args, step in (([], 40), (["--step=20"], 20)):
        done = here("evaluate", RUN, "--out=out.json", *args)
        assert done.code == 0, done.err
        found = results(trained)
        assert (found["step"], found["weights"]) == (step, "ema")
        got = values(found, "validation")
        for name in ("loss", "perplexity", "bits_per_byte", "token_accuracy"):
            assert got[name] == pytest.approx(told[step][name], rel=1e-5), name
        error = found["tasks"]["validation"]["metrics"]["loss"]["standard_error"]
        assert error is None or 0 < error < 1
    raw = here("evaluate", RUN, "--weights=raw", "--out=raw.json")
    assert raw.code == 0 and results(trained, "raw.json")["weights"] == "raw"
    assert values(results(trained, "raw.json"), "validation")["loss"] != got["loss"]


def test_it_scores_tasks_goes_on_and_takes_a_metric_of_ones_own(here, trained):
    asked = ("evaluate", RUN, "--gin_file=tasks.gin", "--out=out.json", "--predictions=p.jsonl")
    done = here(*asked, "--gin.qa/lengths.scale=2")
    assert done.code == 0, done.err
    assert [line.split()[:2] for line in done.out.splitlines()] == [
        ["task", "metric"], ["qa", "exact_match"], ["qa", "length"], ["qa", "count"], ["mc", "accuracy"],
        ["mc", "accuracy_per_byte"], ["mc", "accuracy_per_token"],
    ]  # fmt: skip
    found, lines = results(trained), (trained.folder / "p.jsonl").read_text().splitlines()
    assert found["tasks"]["qa"]["sampling"] == {"temperature": 0.0, "max_new_tokens": 5}
    texts = [json.loads(line)["prediction"] for line in lines[1:3]]
    assert values(found, "qa") == {"exact_match": 0, "length": sum(map(len, texts)), "count": 2}
    assert len(lines) == 4
    infer = here("infer", RUN, "--prompt=river gr", "--gin.Sampling.temperature=0", "--gin.Sampling.max_new_tokens=5")
    assert infer.out == f"river gr{texts[0]}\n"
    (trained.folder / "p.jsonl").write_text("\n".join(lines[:2]) + "\n")
    again = here(*asked, "--gin.qa/lengths.scale=2")
    assert again.code == 0 and again.out == done.out
    assert (trained.folder / "p.jsonl").read_text().splitlines() == lines
    assert "of another model" in mistake(here(*asked, "--weights=raw"))
    one = here("evaluate", RUN, "--gin_file=tasks.gin", "--task=mc,validation", "--limit=1", "--out=out.json")
    assert one.code == 0 and list(results(trained)["tasks"]) == ["mc", "validation"]
    assert results(trained)["tasks"]["validation"]["batches"] == 1


@pytest.mark.heavy
def test_a_process_of_its_own_takes_any_number_of_devices(here, trained):
    assert here("evaluate", RUN, "--out=out.json").code == 0
    done = trained.run("evaluate", RUN, "--emulate=4", "--out=four.json")
    assert done.code == 0 and "validation" in done.out, done.err
    one, other = (values(results(trained, name), "validation") for name in ("out.json", "four.json"))
    assert one["tokens"] == other["tokens"] and math.isclose(one["loss"], other["loss"], rel_tol=1e-5)


def mistake(done):
    lines = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert done.code == 2 and len(lines) == 1 and "Traceback" not in done.err, (done.out, done.err)
    return lines[0]


def test_mistakes_are_one_line(here, trained):
    assert "pass one of --model_dir" in mistake(here("evaluate"))
    assert "pass one of --model_dir" in mistake(here("evaluate", RUN, "--model=x"))
    assert "has no checkpoint of step 7: there are 20, 40" in mistake(here("evaluate", RUN, "--step=7"))
    assert "--task=qa is not bound" in mistake(here("evaluate", RUN, "--task=qa"))
    assert "x does not exist" in mistake(here("evaluate", "--model=x"))
    assert "--limit=0 must be" in mistake(here("evaluate", RUN, "--limit=0"))
    tasks = (RUN, "--gin_file=tasks.gin", "--out=qa.jsonl")
    before = (trained.folder / "qa.jsonl").read_text()
    assert "qa.jsonl is an input" in mistake(here("evaluate", *tasks))
    assert "is named for two outputs" in mistake(here("evaluate", *tasks, "--predictions=./qa.jsonl"))
    assert (trained.folder / "qa.jsonl").read_text() == before
    assert "--harness excludes --task" in mistake(here("evaluate", RUN, "--harness=x", "--task=y"))
    wrong = here("evaluate", RUN, "--gin_file=tasks.gin", "--gin.qa/EvalTask.metrics=(@exact_mach,)")
    assert "did you mean exact_match?" in mistake(wrong)
    (trained.folder / "empty.jsonl").write_text("")
    assert "have no lines" in mistake(
        here("evaluate", RUN, "--gin_file=tasks.gin", "--gin.qa/EvalTask.files=('empty.jsonl',)")
    )
    missing = here("evaluate", RUN, "--gin_file=tasks.gin", "--gin.qa/EvalTask.target='answer'")
    assert "qa.jsonl:1 has no 'answer'" in mistake(missing)


@pytest.mark.parametrize("count", ["0", "-1", "65"])
def test_devices_that_cannot_be_are_refused_before_a_model_is_looked_at(here, count):
    done = here("evaluate", "--model_dir=none", f"--emulate={count}")
    assert (done.code, done.err) == (2, f"error: --emulate is {count}, must be from 1 to 64\n")
