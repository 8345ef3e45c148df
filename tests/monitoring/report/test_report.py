"""The report: one file without scripts or anything from elsewhere; what a run wrote is only text in it."""

from __future__ import annotations

import html.parser
import json
import pathlib

import pytest

from capibara.cli import report as verb
from capibara.core.types import UserError
from capibara.monitoring.report import facts, figures, page

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"


def write_run(
    folder: pathlib.Path, *, steps: int = 20, seed: int = 0, kind: str = "TPU v5 lite", evil: str = ""
) -> str:
    start = {
        "kind": "event",
        "step": 0,
        "time": 1000.0,
        "event": "start",
        "total_steps": steps,
        "param_count": 1_000_000,
    }
    start |= {
        "tokens_per_step": 4096,
        "flops_per_step": 1e9,
        "device_count": 4,
        "device_kind": kind,
        "peak_flops": None,
    }
    lines = [start, {"kind": "event", "step": 0, "time": 1000.0, "event": "spent", "start": 100.0, "set_up": 200.0}]
    for step in range(1, steps + 1):
        loss = 100.0 if step == steps // 2 else 4 - step / steps
        lines.append(
            {
                "kind": "train",
                "step": step,
                "time": 1000.0 + 180 * step,
                "loss": loss,
                "grad_norm": 1.0,
                "step_s": 170.0,
            }
        )
    for step in (steps // 2, steps):
        loss = 3.0 if step < steps else 3.5
        lines.append(
            {"kind": "eval", "step": step, "time": 1000.0 + 180 * step, "loss": loss, f"task{evil}": 0.25, "gone": None}
        )
    lines.append(
        {"kind": "sample", "step": steps, "time": 1000.0 + 180 * steps, "prompt": f"def {evil}", "text": f"main{evil}"}
    )
    lines.append({"kind": "event", "step": steps, "time": 1000.0 + 180 * steps, "event": "end", "reason": "finished"})
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.gin").write_text(
        f"Trainer.seed = {seed}\nTrainer.steps = {steps}\nOptimizer.kind = {f'x{evil}'!r}\n"
    )
    return str(folder)


class Tags(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found, self.words = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)


def made(tmp_path, *args):
    out = tmp_path / "out" / "report.html"
    assert verb.main([*args, f"--output={out}"]) == 0
    return out.read_text()


def test_a_report_shows_figures_cost_and_time(tmp_path, capsys):
    run = write_run(tmp_path / "one")
    text = made(tmp_path, run)
    words = " ".join(Tags(text).words)
    for expected in ("1,000,000", "4 x TPU v5 lite", "81,920", "3.5 (3)", "finished", "list price of v5e"):
        assert expected in words, expected
    capsys.readouterr()
    assert verb.main([run, "--json", "--usd=2", f"--output={tmp_path / 'r.html'}"]) == 0
    found = json.loads(capsys.readouterr().out)["runs"][0]
    hours = (300 + 20 * 180) / 3600  # set-up, then 20 logs of 180 s
    assert found["device_hours"] == pytest.approx(4 * hours) and found["usd"] == pytest.approx(8 * hours)
    assert found["goodput"] == pytest.approx(20 * 170 / (300 + 20 * 180))
    assert (found["mfu"], found["best_eval_loss"], found["eval_loss"]) == (None, 3.0, 3.5)
    assert found["evaluation"] == {"loss": 3.5, "task": 0.25}


def test_several_runs_are_compared_by_what_differs(tmp_path):
    text = made(tmp_path, write_run(tmp_path / "one"), write_run(tmp_path / "two", seed=7, kind="cpu"))
    words = Tags(text).words
    assert "Trainer.seed" in words and "7" in words and "Trainer.steps" not in words
    assert any("2 parameters are the same" in one for one in words) and "unavailable" in words
    assert text.count("<svg") == 2  # loss and gradient norm


def test_what_a_run_wrote_is_text_only(tmp_path):
    text = made(tmp_path, write_run(tmp_path / f"run{EVIL.replace('/', '')}", evil=EVIL), "--title", EVIL)
    tags = Tags(text)
    assert not [tag for tag, _ in tags.found if tag in ("script", "img", "iframe", "object", "link")]
    assert not [name for _, attrs in tags.found for name in attrs if name.startswith("on")]
    outside = [
        value for tag, attrs in tags.found for name, value in attrs.items() if name in ("src", "href", "xlink:href")
    ]
    assert all(value.startswith("#") for value in outside)
    assert EVIL in "".join(tags.words)


def test_the_same_runs_make_the_same_file(tmp_path):
    run = write_run(tmp_path / "one")
    assert made(tmp_path, run) == made(tmp_path, run)


def test_a_spike_survives_thinning(tmp_path):
    run = facts.read(write_run(tmp_path / "one", steps=30_000))
    steps, values = run.points("train", "loss")
    x, y = figures._thinned(figures.np.array(steps), figures.np.array(values))
    assert len(x) <= 2000 and y.max() == 100.0 and (x[y.argmax()] == 15_000)
    ((title, svg), *_) = figures.pictures([run])
    assert title == "Loss" and len(svg) < 300_000


@pytest.mark.parametrize("config", ["", "Trainer.seed = ", "import os\nTrainer.seed = @evil()\n", "\x00" * 50])
def test_a_run_without_a_usable_configuration_is_still_shown(tmp_path, config):
    run = pathlib.Path(write_run(tmp_path / "one"))
    (run / "config.gin").write_text(config)
    assert "3.5 (3)" in made(tmp_path, str(run))


def test_a_run_that_was_killed_has_not_ended(tmp_path):
    run = pathlib.Path(write_run(tmp_path / "one"))
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([*lines[:-2], '{"kind": "tra']))
    found = facts.read(str(run))
    assert found.ended is None and found.samples == []
    assert page.as_json([found], lambda run: None)["runs"][0]["status"] == "running, or killed"


@pytest.mark.parametrize(
    ("args", "fault"),
    [
        (["nowhere"], "does not exist"),
        (["empty"], "no start of a run"),
        (["one", "--usd=-1"], r"--usd \(-1.0\) must be"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, args, fault):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "one")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match=fault):
        verb.main(args)
    assert not (tmp_path / "report.html").exists()
