"""A trial's metric, from the metrics.jsonl of its run."""

import json
import math

import pytest

from capibara.core.types import UserError
from capibara.jobs.sweeps.metrics import Metric
from capibara.monitoring.metrics_file import loggers
from capibara.training.base.callbacks import RunInfo

LOSS = Metric.parse("eval/loss")
RUN = dict(start_step=0, total_steps=4, param_count=1, tokens_per_step=1, flops_per_step=1.0, device_count=1)


def run_of(folder, start=0):
    file = loggers.MetricsFile()
    about = RunInfo(model_dir=str(folder), **{**RUN, "start_step": start}, device_kind="", peak_flops=None, config="")
    file.on_train_begin(about)
    return file


def test_it_reads_what_a_run_writes(tmp_path):
    assert LOSS.read(str(tmp_path)).points == () and LOSS.read(str(tmp_path)).reason is None
    file = run_of(tmp_path)
    for step in (1, 2):
        file.on_step(step, {"loss": 9.0 - step, "step_s": 1.0})
        file.on_evaluate(step, {"loss": 8.0 - step, "mnli/accuracy": 0.1 * step})
    report = LOSS.read(str(tmp_path))
    assert report.points == ((1, 7.0), (2, 6.0)) and report.reason is None
    assert Metric.parse("train/loss").read(str(tmp_path)).points == ((1, 8.0), (2, 7.0))
    assert Metric.parse("eval/mnli/accuracy").read(str(tmp_path)).points == ((1, 0.1), (2, 0.2))
    file.on_train_end(2, "finished")
    assert LOSS.read(str(tmp_path)).reason == "finished"


def test_steps_that_are_repeated_count_once(tmp_path):
    """As monitoring reads them."""
    first = run_of(tmp_path)
    for step, loss in ((1, 5.0), (2, 4.0), (3, 3.0)):
        first.on_evaluate(step, {"loss": loss})
    first.on_train_end(3, "interrupted")
    assert LOSS.read(str(tmp_path)).reason is None
    again = run_of(tmp_path, start=1)
    again.on_evaluate(2, {"loss": 4.5})
    again.on_roll_back(1)
    again.on_evaluate(2, {"loss": 4.25})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "eval", "step": 9, "lo')  # killed in the middle
    kept = [(one["step"], one["loss"]) for one in loggers.read_metrics(str(tmp_path)) if one["kind"] == "eval"]
    assert list(LOSS.read(str(tmp_path)).points) == kept == [(1, 5.0), (2, 4.25)]


def test_a_value_that_is_not_finite(tmp_path):
    file = run_of(tmp_path)
    file.on_step(1, {"loss": math.nan})  # a skipped update
    file.on_step(2, {"loss": 1.0})
    file.on_evaluate(2, {"loss": math.inf})
    assert Metric.parse("train/loss").read(str(tmp_path)).points == ((2, 1.0),)
    report = LOSS.read(str(tmp_path))
    assert math.isnan(report.points[0][1]) and LOSS.missing(report) == "eval/loss is not finite at step 2"


def test_a_metric_that_is_missing_is_named_with_its_nearest(tmp_path):
    run_of(tmp_path).on_evaluate(1, {"loss": 1.0, "perplexity": 2.0})
    accuracy = Metric.parse("eval/perplexty")
    assert accuracy.missing(accuracy.read(str(tmp_path))) == (
        "the run has not reported eval/perplexty: did you mean eval/perplexity?"
    )
    assert LOSS.missing(LOSS.of_text("")) == "the run has not reported eval/loss: there are no metrics at all"


@pytest.mark.parametrize("line", ["[1]", "3", '{"kind": 1, "step": 2}', '{"kind": "eval", "step": "2"}', "{", "\x00"])
def test_a_line_that_is_no_record_is_skipped(line):
    good = json.dumps({"kind": "eval", "step": 2, "loss": 1.5})
    assert LOSS.of_text(f"{line}\n{good}\n").points == ((2, 1.5),)


@pytest.mark.parametrize("text", ["loss", "eval/", "test/loss", "eval/a b", "eval/step", ""])
def test_a_metric_that_is_none(text):
    with pytest.raises(UserError, match="must be eval/NAME or train/NAME"):
        Metric.parse(text)
