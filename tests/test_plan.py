"""The verb `plan`, as a user calls it."""

import json

import pytest

from capibara import cli, plan

MODEL = "--gin_file=models/capibara_1b.gin"


def run(*argv):
    return cli.run_verb(plan.main, list(argv))


def test_a_model_on_a_slice(capsys, tmp_path):
    out = tmp_path / "new" / "folder" / "plan.json"
    gin, page = tmp_path / "plan.gin", tmp_path / "plan.html"
    files = [f"--json={out}", f"--output={gin}", f"--html={page}"]
    assert run(MODEL, "--slice=v5e-64", "--batch_size=256", "--explain", *files) == 0
    text = capsys.readouterr().out
    assert "predicted" in text and "measured" not in text and "on the torus" in text and "HBM GiB" in text
    plans = json.loads(out.read_text())["plans"]
    assert plans[0]["batch_size"] == 256 and plans[0]["fits"]
    steps = [p["predicted"]["step_s"] for p in plans]
    assert all(after > 0.98 * before for before, after in zip(steps, steps[1:]))
    assert "Plan.batch_size = 256" in gin.read_text()
    text = page.read_text()
    assert text.count("<svg") == text.count("</svg>") == 3 and "Predictions of the cost model" in text
    assert "http" not in text and "<script" not in text  # nothing from elsewhere


def test_a_run_brings_its_slice_length_and_batch(capsys):
    assert run("--gin_file=base_v5e64.gin") == 0
    assert capsys.readouterr().out.startswith("v5e-64: ")


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "--gin_file has no value"),
        ([MODEL], "--slice has no value and Plan.slice is not bound"),
        ([MODEL, "--slice=v5e-63"], "try v5e-64"),
        ([MODEL, "--slice=v5e-64", "--axis=tensr=2"], "did you mean tensor"),
        ([MODEL, "--slice=v5e-64", "--axis=tensor=two"], "must be like tensor=4"),
        ([MODEL, "--slice=v5e-64", "--headroom=1.5"], "headroom is 1.5, must be from 0 to below 1"),
        (["--gin_file=models/capibara_120b.gin", "--slice=v5e-16"], "no plan fits v5e-16"),
        ([MODEL, "--slice=v5e-64", "--json=/dev/null/plan.json"], "/dev/null/plan.json cannot be written"),
        (["--gin_file=tasks/text.gin", "--slice=v5e-16"], "configures no model"),
    ],
)
def test_mistakes_are_one_line(argv, message, capsys):
    assert run(*argv) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and message in captured.err
