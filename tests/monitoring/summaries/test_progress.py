"""What a run shows: plain lines in a log, one live line in a terminal."""

import dataclasses
import io
import os
import re
import subprocess
import sys

import pytest
from rich.console import Console

from capibara.monitoring.summaries import progress
from capibara.monitoring.summaries.progress import ProgressLine
from capibara.training.base.callbacks import RunInfo

RUN = RunInfo(
    model_dir="/runs/[bold]mine",
    start_step=0,
    total_steps=1000,
    param_count=1_240_000,
    tokens_per_step=16384,
    flops_per_step=6e12,
    device_count=8,
    device_kind="cpu",
    peak_flops=2e12,
    config="",
)
METRICS = {
    "loss": 3.14159,
    "learning_rate": 3e-4,
    "grad_norm": 0.8,
    "tokens_per_s": 41234.0,
    "step_s": 0.75,
    "data_wait_s": 0.03,
}


def show(run=RUN, terminal=False, metrics=METRICS, **fields):
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=200, highlight=False)
    callback = ProgressLine(console=console, **fields)
    callback.on_train_begin(run)
    callback.on_step(run.start_step + 10, metrics)
    callback.on_evaluate(run.start_step + 10, {"loss": 3.0, "perplexity": 20.1, "bits_per_byte": 1.5})
    callback.on_sample(run.start_step + 10, "def ", "main():\n\x1b[31m[red]pass" + "x" * 1000)
    callback.on_checkpoint(run.start_step + 10)
    callback.on_train_end(run.start_step + 10, "interrupted")
    return output.getvalue()


def test_plain_lines():
    lines = show().splitlines()
    assert lines[0] == "1.24M parameters on 8 x cpu; 1000 steps of 16.4k tokens"
    assert lines[1].startswith("step   10/1000  loss 3.1416  lr 3.00e-04  grad 0.8  41.2k tokens/s  MFU 50.0%")
    assert "data wait 4%" in lines[1] and re.search(r"ETA \d+s$", lines[1])
    assert lines[2] == "step 10 evaluation: loss 3.0000, perplexity 20.10, 1.5000 bits per byte"
    assert lines[3:5] == ["step 10 sample:", "  | def main():"]
    assert lines[5].startswith(r"  | \x1b[31m[red]passxxx") and lines[5].endswith("x ...")
    assert lines[6] == "step 10 saving"
    assert re.fullmatch(r"interrupted at step 10: 10 steps in \d+s; run folder /runs/\[bold\]mine", lines[7])
    assert len(lines) == 8 and "\x1b" not in show()


def test_resumed_run_says_so():
    lines = show(dataclasses.replace(RUN, start_step=200)).splitlines()
    assert lines[0].startswith("resuming from step 200; ") and "steps 200 to 1000" in lines[0]
    assert "interrupted at step 210: 10 steps" in lines[-1]


def test_what_is_not_known_is_left_out():
    line = show(dataclasses.replace(RUN, peak_flops=None), metrics={"loss": 1.0}).splitlines()[1]
    assert re.fullmatch(r"step   10/1000  loss 1\.0000  ETA \d+s", line)


def test_unigram_is_printed_beside_the_evaluation():
    output = io.StringIO()
    callback = ProgressLine(console=Console(file=output, width=200))
    callback.on_train_begin(RUN)
    callback.on_evaluate(5, {"bits_per_byte": 1.5, "unigram_bits_per_byte": 4.6})
    assert "evaluation: 1.5000 bits per byte, unigram 4.6000 bits per byte" in output.getvalue()


def test_terminal_has_one_live_line_and_gets_its_cursor_back():
    output = show(terminal=True)
    assert "\x1b[?25l" in output and output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")
    assert "█" in output or "·" in output
    assert "\x1b[31m[red]" not in output
    assert "step 10 evaluation" in output


@pytest.mark.parametrize("terminal", [False, True])
def test_what_takes_long_is_told_of_and_not_too_often(monkeypatch, terminal):
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    output = io.StringIO()
    callback = ProgressLine(console=Console(file=output, force_terminal=terminal, width=200))
    callback.on_train_begin(RUN)
    for done in range(100):  # of 0.5 s each
        now[0] += 0.5
        callback.on_progress(f"evaluating: {done} of 100 batches")
    callback.on_step(10, METRICS)
    callback.on_progress("evaluating: 0 of 2 batches")
    callback.on_progress("")  # the line of the step is back
    if terminal:
        assert re.search(r"[^\n]*loss 3.1416[^\n]*$", output.getvalue())
    callback.on_train_end(0, "interrupted")
    told = re.findall(r"evaluating: (\d+) of", output.getvalue().split("loss 3.1416")[0])
    assert list(map(int, dict.fromkeys(told))) == (list(range(100)) if terminal else [60])


def test_nothing_is_lost_or_won_by_a_zero_below_zero():
    line = show(metrics={"loss": -1e-9, "reward": -0.0}).splitlines()[1]
    assert "loss 0.0000  reward 0.000" in line


def test_time_left_follows_the_clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    output = io.StringIO()
    callback = ProgressLine(console=Console(file=output, width=200))
    callback.on_train_begin(RUN)
    for step in (10, 20):
        now[0] += 20.0  # 2 s a step
        callback.on_step(step, METRICS)
    now[0] += 120.0  # an evaluation in between: 12 s a step, which counts for a fifth
    callback.on_step(30, METRICS)
    etas = re.findall(r"ETA (\S+)", output.getvalue())
    assert etas == ["33m00s", "32m40s", progress.duration(970 * (0.8 * 2 + 0.2 * 12))]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (7, "7"), (950.4, "950"), (3.14159, "3.14"), (999.7, "1k"), (1000, "1k"), (41234, "41.2k"),
        (999_400, "999k"), (999_600, "1M"), (1_240_000, "1.24M"), (135e6, "135M"), (7.1e9, "7.1B"), (3e12, "3T"),
    ],
)  # fmt: skip
def test_quantity(value, text):
    assert progress.quantity(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0s"), (0.4, "0s"), (59.4, "59s"), (59.6, "1m00s"), (185, "3m05s"), (7800, "2h10m"), (273_600, "3d04h")],
)
def test_duration(seconds, text):
    assert progress.duration(seconds) == text


@pytest.mark.parametrize(("share", "text"), [(0, "····"), (0.5, "██··"), (0.53125, "██▏·"), (1, "████"), (2, "████")])
def test_progress_bar(share, text):
    assert progress.progress_bar(share, 4) == text


def test_output_that_has_no_such_characters():
    """An ASCII terminal shows a sample's other characters escaped, and the run goes on."""
    code = (
        "from capibara.monitoring.summaries.progress import ProgressLine\n"
        "from capibara.training.base.callbacks import RunInfo\n"
        f"c = ProgressLine(); c.on_train_begin({RUN!r}); c.on_sample(1, '', 'caf\\u00e9')\n"
        "c.on_train_end(1, 'finished')\n"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert r"caf\xe9" in result.stdout
