"""All metrics of a run at once: the same figures as of its records, with and without pyarrow."""

import json
import math

import pytest

from capibara.core.types import UserError
from capibara.monitoring.metrics_file import goodput
from capibara.monitoring.metrics_file.loggers import all_records, metrics_path, read_metrics
from capibara.monitoring.reading import parsing
from capibara.monitoring.reading.whole import whole


@pytest.fixture(params=[True, False], ids=["pyarrow", "plain"])
def pyarrow(request, monkeypatch):
    monkeypatch.setattr(parsing, "_has_pyarrow", lambda: request.param)


@pytest.mark.parametrize("block_bytes", [200, 1 << 20])
def test_the_columns_are_those_of_the_records(tmp_path, demo, pyarrow, monkeypatch, block_bytes):
    """A run with a start that repeats steps, a roll-back, samples, evaluations and numbers that are not finite."""
    monkeypatch.setattr(parsing, "BLOCK_BYTES", block_bytes)
    run = demo.Demo(tmp_path / "run", log_every=1)
    run.start()
    run.run(0, 120)
    run.start(100)
    run.run(100, 150)
    run.write("event", 130, event="roll_back")
    run.run(130, 160)
    run.write("train", 161, loss=None, grad_norm=1.0)
    found, records = whole(str(tmp_path / "run")), read_metrics(str(tmp_path / "run"))
    for kind in ("train", "eval"):
        expected = [record for record in records if record["kind"] == kind]
        assert len(expected) == len(found.view(kind))
        for name in {name for record in expected for name in record} - {"kind", "step", "time"}:
            pairs = [(one["step"], one[name]) for one in expected if isinstance(one.get(name), (int, float))]
            steps, values = found.view(kind).points(name)
            assert list(zip(steps.tolist(), values.tolist())) == [
                (step, value) for step, value in pairs if math.isfinite(value)
            ], name
    assert found.goodput() == pytest.approx(goodput.account(all_records(metrics_path(str(tmp_path / "run")))))
    assert {(one.step, one.prompt) for one in found.samples.values()} == {
        (one["step"], one["prompt"]) for one in records if one["kind"] == "sample"
    }
    assert found.attempts.starts == 2 and found.view("train").points("no_such")[0].size == 0


def test_pyarrow_is_not_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(parsing, "_has_pyarrow", lambda: False)
    monkeypatch.setattr(parsing, "_from_csv", lambda *_: pytest.fail("it was used"))
    start = {"kind": "event", "step": 0, "time": 1.0, "event": "start"}
    lines = [start, *({"kind": "train", "step": step, "time": 2.0, "loss": 1 / step} for step in range(1, 200))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert whole(str(tmp_path)).view("train").points("loss")[1].tolist() == [1 / step for step in range(1, 200)]


def test_what_is_no_file_is_one_line(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        whole(str(tmp_path))
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match="is a folder, must be a file"):
        whole(str(tmp_path))
