"""The report: one file without scripts or anything from elsewhere; what a run wrote is only text in it."""

from __future__ import annotations

import html.parser
import json
import os
import pathlib

import pytest

from capibara.cli import report as verb
from capibara.core.types import UserError
from capibara.monitoring.reading import parsing
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
    kept = figures._thinned(figures.np.array(values), 2000)
    assert len(kept) <= 2000 and max(values[at] for at in kept) == 100.0 and 15_000 in [steps[at] for at in kept]
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


def test_a_run_that_was_resumed_has_not_ended(tmp_path):
    run = pathlib.Path(write_run(tmp_path / "one"))
    assert facts.read(str(run)).ended == "finished"
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"kind": "event", "step": 20, "time": 9e3, "event": "start", "total_steps": 40}) + "\n")
    found = facts.read(str(run))
    assert found.ended is None and found.starts == 2
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


ODD_LINES = [
    '{"kind": "train", "step": 21, "time": 5000.0, "loss": 1' + "0" * 400 + "}",
    '{"kind": "train", "step": 1' + "0" * 400 + ', "time": 5000.0, "loss": 1}',
    '{"kind": "train", "step": 22, "loss": 2.0}',
    '{"kind": "train", "step": 23, "time": "now", "loss": 2.0}',
    '{"kind": "train", "step": 24, "time": NaN, "loss": 2.0}',
    '{"kind": "train", "step": 25, "time": 5000.0, "loss": 1e308, "step_s": 1e308, "data_wait_s": -1e308}',
    '{"kind": "train", "step": 26, "time": 5000.0, "loss": -1e308, "step_s": "x", "data_wait_s": [1], "save_s": {}}',
    '{"kind": "train", "step": true, "time": 5000.0, "loss": 2.0}',
    '{"kind": "event", "step": 26, "time": 5000.0, "event": ["end"]}',
    '{"kind": "sample", "step": 26, "time": 5000.0, "prompt": [1], "text": {}}',
    '{"kind": "sample", "step": 26, "time": 5000.0, "prompt": "\\udc80\\u0000\\u202e", "text": "\\ud800"}',
    '{"kind": "eval", "step": 26, "time": 5000.0, "\\udc80": 1.0, "loss": 2.0}',
    "[" * 100_000,
    '"text"',
    "\x00\x1b",
]


def test_lines_that_make_no_sense_are_skipped_or_shown(tmp_path, capsys):
    run = pathlib.Path(write_run(tmp_path / "one"))
    with open(run / "metrics.jsonl", "a") as file:
        file.writelines(f"{line}\n" for line in ODD_LINES)
    start = {"kind": "event", "event": "start", "step": 0, "time": 1000.0, "device_kind": [1], "device_count": {}}
    lines = (run / "metrics.jsonl").read_text()
    big = json.dumps({**start, "step": 26, "total_steps": 10**18, "param_count": 10**400, "tokens_per_step": 1e308})
    (run / "metrics.jsonl").write_text(f"{json.dumps(start)}\n{lines}{big}\n")
    out = tmp_path / "r.html"
    assert verb.main([str(run), f"--output={out}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))["runs"][0]
    assert found["param_count"] is None and found["total_steps"] == 10**18 and found["devices"] is None
    assert "\\udc80" in out.read_text()


@pytest.mark.parametrize("value", [1e308, -1e308, 5e-324, 0.0])
def test_any_finite_number_can_be_drawn(tmp_path, value):
    run = pathlib.Path(write_run(tmp_path / "one"))
    with open(run / "metrics.jsonl", "a") as file:
        line = {"kind": "train", "step": 30, "time": 9e3, "loss": value, "grad_norm": value}
        file.write(json.dumps(line) + "\n")
    assert made(tmp_path, str(run)).count("<svg") == 2


def test_runs_without_metrics_and_with_one_point(tmp_path):
    empty, one = (pathlib.Path(write_run(tmp_path / name, steps=2)) for name in ("empty", "one"))
    lines = (empty / "metrics.jsonl").read_text().splitlines()
    (empty / "metrics.jsonl").write_text(lines[0] + "\n")
    (one / "metrics.jsonl").write_text("\n".join(lines[:3]) + "\n")
    assert "No metrics were logged." in made(tmp_path, str(empty))
    text = made(tmp_path, str(one))
    assert text.count("<svg") == 2 and "<use" in text  # a dot


def test_twenty_runs_have_twenty_names_and_colours(tmp_path):
    runs = [write_run(tmp_path / str(number) / "run", steps=400) for number in range(19)]
    found = facts.distinct([facts.read(run) for run in [*runs, runs[0]]])
    assert [run.name for run in found[:2]] == ["0/run", "1/run"] and found[-1].name == "0/run (2)"
    assert len({run.name for run in found}) == 20 and len({*map(figures.colour_of, range(20))}) == 20
    assert len(made(tmp_path, *runs)) < 3_000_000


def test_a_report_holds_no_secrets(tmp_path):
    token, hook = "hf_" + "aB3" * 11, "https://hooks.slack.com/services/T00/B00/abcDEF"
    run = pathlib.Path(write_run(tmp_path / "one"))
    with open(run / "metrics.jsonl", "a") as file:
        file.write(
            json.dumps({"kind": "sample", "step": 20, "time": 9e3, "prompt": token, "text": f"x {token}"}) + "\n"
        )
    (run / "config.gin").write_text(f"Dataset.token = 'hunter2plain'\nDashboardConfig.webhooks = ('{hook}',)\n")
    other = write_run(tmp_path / "two")
    text = made(tmp_path, str(run), other)
    assert not [secret for secret in (token, "hunter2plain", "abcDEF") if secret in text]
    assert "[hidden]" in text and "Dataset.token" in text


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.gin"])
def test_a_report_replaces_no_file_of_its_runs(tmp_path, name):
    run = pathlib.Path(write_run(tmp_path / "one"))
    before = (run / name).read_text()
    with pytest.raises(UserError, match="is an input|Gin file"):
        verb.main([str(run), f"--output={run / name}"])
    assert (run / name).read_text() == before


def test_what_is_no_run_folder_is_one_line(tmp_path):
    run = pathlib.Path(write_run(tmp_path / "one"))
    with pytest.raises(UserError, match="does not exist"):
        verb.main([str(run / "metrics.jsonl"), f"--output={tmp_path / 'r.html'}"])
    os.mkfifo(tmp_path / "empty")
    (run / "metrics.jsonl").unlink()
    (tmp_path / "empty").rename(run / "metrics.jsonl")
    with pytest.raises(UserError, match="cannot be read"):
        verb.main([str(run), f"--output={tmp_path / 'r.html'}"])


def test_the_best_evaluation_behind_one_without_a_loss(tmp_path):
    run = pathlib.Path(write_run(tmp_path / "one"))
    with open(run / "metrics.jsonl", "a") as file:
        for step, loss, task in ((30, None, 1.0), (40, 2.0, 2.0), (50, 2.5, 3.0)):
            line = {"kind": "eval", "step": step, "time": 9e3, "loss": loss, "task": task}
            file.write(json.dumps(line) + "\n")
    assert facts.read(str(run)).best == {"loss": 2.0, "task": 2.0}


def test_samples_far_into_a_file_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(parsing, "BLOCK_BYTES", 500)
    (sample,) = facts.read(write_run(tmp_path / "one")).samples
    assert sample == {"step": 20, "prompt": "def ", "text": "main"}


def test_a_folder_that_ends_with_a_slash_has_a_name(tmp_path):
    assert facts.read(write_run(tmp_path / "one") + "/").name == "one"


def test_a_last_line_without_an_end_counts(tmp_path):
    run = pathlib.Path(write_run(tmp_path / "one"))
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[:-1]))
    assert "main" in made(tmp_path, str(run)) and facts.read(str(run)).samples[0]["text"] == "main"


def test_the_step_is_that_of_the_newest_start(tmp_path):
    run = pathlib.Path(write_run(tmp_path / "one"))
    with open(run / "metrics.jsonl", "a") as file:
        for step in (5000, 4000):
            file.write(json.dumps({"kind": "event", "step": step, "time": 9e3, "event": "start"}) + "\n")
        file.write(json.dumps({"kind": "train", "step": 4001, "time": 9e3, "loss": 1.0}) + "\n")
    assert facts.read(str(run)).step == 4001


@pytest.mark.parametrize("has_pyarrow", [True, False])
def test_evaluations_are_sorted_with_the_loss_first(tmp_path, monkeypatch, has_pyarrow):
    monkeypatch.setattr(parsing, "_has_pyarrow", lambda: has_pyarrow)
    run = pathlib.Path(write_run(tmp_path / "one"))
    with open(run / "metrics.jsonl", "a") as file:
        for step in range(21, 60):
            values = {"zeta": 1.0, "loss": 2.0, "alpha": 3.0} if step > 21 else {"rare": 1.0}
            file.write(json.dumps({"kind": "eval", "step": step, "time": 9e3, **values}) + "\n")
    assert facts.read(str(run)).metrics("eval") == ["loss", "alpha", "rare", "task", "zeta"]


def test_the_step_may_be_that_of_a_sample(tmp_path):
    run = pathlib.Path(write_run(tmp_path / "one"))
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"kind": "sample", "step": 25, "time": 9e3, "prompt": "def ", "text": "x"}) + "\n")
    assert facts.read(str(run)).step == 25
