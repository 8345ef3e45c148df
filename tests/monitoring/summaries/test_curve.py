"""The loss curve, in the PNG and in the terminal."""

import dataclasses
import io
import math

import numpy as np
import pytest
from rich.console import Console

from capibara.core.types import UserError
from capibara.monitoring.metrics_file.loggers import MetricsFile
from capibara.monitoring.summaries import chart, curve
from capibara.monitoring.summaries.curve import LossCurve
from capibara.training.base.callbacks import Callbacks, RunInfo

RUN = RunInfo(
    model_dir="",
    start_step=0,
    total_steps=100,
    param_count=1_240_000,
    tokens_per_step=64,
    flops_per_step=1.0,
    device_count=1,
    device_kind="cpu",
    peak_flops=None,
    config="",
)


def train(run, steps, callbacks, offset=0.0):
    callbacks = Callbacks(callbacks)
    callbacks.on_train_begin(run)
    for step in steps:
        callbacks.on_step(step, {"loss": math.nan if step == 7 else offset + 5.0 / step})
        if step % 20 == 0:
            loss = offset + 5.2 / step
            callbacks.on_evaluate(step, {"loss": loss, "bits_per_byte": loss * 0.5})
    callbacks.on_train_end(steps[-1], "finished")


@pytest.fixture
def run(tmp_path):
    return dataclasses.replace(RUN, model_dir=str(tmp_path))


class TestLossCurve:
    def test_resumed_run_shows_the_whole_curve(self, run, tmp_path):
        output = io.StringIO()
        console = Console(file=output, width=80)
        train(run, range(1, 51), [MetricsFile(), LossCurve(console=console)])
        resumed = dataclasses.replace(run, start_step=40)
        train(resumed, range(41, 101), [MetricsFile(), LossCurve(console=console, baseline_bits_per_byte=2.0)])
        curves = curve.read_curves(str(tmp_path), 2.0)
        assert curves.train_steps.tolist() == [s for s in range(1, 101) if s != 7]
        assert curves.eval_steps.tolist() == [20, 40, 60, 80, 100]
        assert curves.bits_per_byte == pytest.approx(0.026) and curves.baseline == pytest.approx(4.0)
        assert curves.resumed == (40,) and curves.tokens == 6400
        picture = (tmp_path / "loss_curve.png").read_bytes()
        assert picture.startswith(b"\x89PNG") and not (tmp_path / "loss_curve.png.part").exists()
        last = output.getvalue().splitlines()[-16:]
        assert last[0] == "loss, nats per token:  ⠤⠤ training  ● validation  ⠒ ⠒ unigram"
        assert last[-1] == "validation: 0.0260 bits per byte (unigram: 2.0000)"
        assert last[-2].endswith(" step") and sum(row.count("●") for row in last[1:-1]) == 5
        assert max(map(len, last)) <= 80

    @pytest.mark.parametrize(
        ("again", "resumed"),
        [
            (["start 0", "start 40", "start 60", "start 30"], (30,)),
            (["start 0", "start 50", "start 50"], (50,)),
            (["start 0", "start 50", "roll_back 50"], (50,)),
            (["start 0", "start 50", "roll_back 40"], ()),
            (["start 0", "start 40", "start 60"], (40, 60)),
        ],
    )
    def test_resumptions_that_later_ones_made_void_are_not_marked(self, run, tmp_path, again, resumed):
        callback = MetricsFile()
        for event, step in map(str.split, again):
            if event == "start":
                callback = MetricsFile()
                callback.on_train_begin(dataclasses.replace(run, start_step=int(step)))
            else:
                callback.on_roll_back(int(step))
            callback.on_step(int(step) + 1, {"loss": 1.0})
        assert curve.read_curves(str(tmp_path)).resumed == resumed

    def test_many_events_drop_no_resumption(self, run, tmp_path):
        for start in (0, 10):
            callback = MetricsFile()
            callback.on_train_begin(dataclasses.replace(run, start_step=start))
            for _ in range(6_000):
                callback.on_checkpoint(start + 1)
        assert curve.read_curves(str(tmp_path)).resumed == (10,)

    def test_unigram_from_the_evaluations(self, run, tmp_path):
        callback = MetricsFile()
        callback.on_train_begin(run)
        callback.on_evaluate(1, {"loss": 2.0, "bits_per_byte": 4.0, "unigram_bits_per_byte": 6.0})
        assert curve.read_curves(str(tmp_path)).baseline == pytest.approx(3.0)

    def test_a_loss_on_rewards_is_not_said_to_be_of_tokens(self, run, tmp_path):
        callback = MetricsFile()
        callback.on_train_begin(run)
        callback.on_step(1, {"loss": 0.6})
        assert curve.read_curves(str(tmp_path)).unit == ", nats per token"
        callback.on_step(2, {"loss": 0.6, "reward_margin": 0.1})
        assert curve.read_curves(str(tmp_path)).unit == ""

    def test_nothing_recorded_draws_nothing(self, run, tmp_path):
        train_callbacks = Callbacks([MetricsFile(), LossCurve()])
        train_callbacks.on_train_begin(run)
        train_callbacks.on_train_end(0, "interrupted")
        assert not (tmp_path / "loss_curve.png").exists()

    @pytest.mark.parametrize("steps", [[1], [1, 2]])
    @pytest.mark.parametrize("kinds", ["train", "eval", "both"])
    def test_very_few_points(self, run, tmp_path, steps, kinds):
        callbacks = Callbacks([MetricsFile(), LossCurve(console=Console(file=io.StringIO()))])
        callbacks.on_train_begin(run)
        for step in steps:
            if kinds != "eval":
                callbacks.on_step(step, {"loss": 2.0})
            if kinds != "train":
                callbacks.on_evaluate(step, {"loss": 2.0})
        callbacks.on_train_end(steps[-1], "finished")
        assert (tmp_path / "loss_curve.png").exists()

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("start", [0, 999, 1000])
    def test_one_point_and_a_resumption_warn_of_nothing(self, run, tmp_path, start):
        callbacks = Callbacks([MetricsFile(), LossCurve(console=Console(file=io.StringIO()))])
        callbacks.on_train_begin(dataclasses.replace(run, start_step=start))
        callbacks.on_step(1000, {"loss": 2.0})
        callbacks.on_train_end(1000, "finished")
        assert (tmp_path / "loss_curve.png").exists()

    def test_a_folder_has_the_name(self, run, tmp_path):
        """Said before the first step; where it appears during the run, at its end."""
        (tmp_path / "loss_curve.png").mkdir()
        with pytest.raises(UserError, match="loss_curve.png is a folder, must be a file"):
            LossCurve().on_train_begin(run)
        (tmp_path / "loss_curve.png").rmdir()
        callbacks = Callbacks([MetricsFile(), LossCurve(terminal=False)])
        callbacks.on_train_begin(run)
        callbacks.on_step(1, {"loss": 2.0})
        (tmp_path / "loss_curve.png").mkdir()
        with pytest.raises(UserError, match="loss_curve.png is a folder, must be a file") as error:
            callbacks.on_train_end(1, "finished")
        assert "\n" not in str(error.value)

    def test_without_a_metrics_file(self, run):
        callback = LossCurve()
        callback.on_train_begin(run)
        with pytest.raises(UserError, match=r"needs MetricsFile\(\) among the callbacks, before LossCurve\(\)"):
            callback.on_train_end(1, "finished")

    def test_bad_baseline(self):
        with pytest.raises(UserError, match="baseline_bits_per_byte is 0.0, must be above 0"):
            LossCurve(baseline_bits_per_byte=0.0)


class TestSmooth:
    def test_a_straight_line_stays(self):
        line = np.linspace(9.0, 2.0, 200)
        np.testing.assert_allclose(curve.smooth(line), line, rtol=1e-12)

    def test_noise_shrinks(self):
        noise = np.random.default_rng(0).normal(size=1200)
        assert curve.smooth(noise)[50:-50].std() < 0.25

    @pytest.mark.parametrize("count", [0, 1, 2, 3])
    def test_short(self, count):
        assert len(curve.smooth(np.ones(count))) == count


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([], []),
        ([0.5], [0.5]),
        ([0.1, 0.9], [0.1, 0.9]),
        ([0.5, 0.5], [0.45, 0.55]),
        ([0.52, 0.5], [0.56, 0.46]),
        ([0.5, 0.51, 0.52], [0.41, 0.51, 0.61]),
    ],
)
def test_labels_are_spread(places, expected):
    assert curve.spread(places, gap=0.1) == pytest.approx(expected)


class TestChart:
    def test_a_falling_line(self):
        """Eight by eight dots, a diagonal."""
        rows = chart.draw(([0, 10], [10.0, 0.0]), width=4, height=2)
        assert rows == ["10 ┤⠑⢄", " 0 ┤  ⠑⢄", "   └────", "    0 5"]

    def test_marks_and_level(self):
        rows = chart.draw(([0, 100], [4.0, 1.0]), ([50, 100], [3.0, 2.0]), level=5.0, width=40, height=8)
        assert rows[0] == "  │" + "⠉⠉  " * 9 + "⠉⠉"
        assert sum(row.count("●") for row in rows) == 2
        assert [row[0] for row in rows if "┤" in row] == ["4", "2"]
        assert rows[-1].split() == ["0", "50", "100"] and len(rows[-1]) == len(rows[-2])

    def test_flat_and_single(self):
        assert chart.draw(([3], [2.0]), width=10, height=3)
        flat = chart.draw(([0, 9], [2.0, 2.0]), width=10, height=3)
        assert [row for row in flat[:-1] if "⠒" * 10 in row or "⠤" * 10 in row] == [flat[1]]

    def test_nothing(self):
        assert chart.draw(([], [])) == []

    @pytest.mark.parametrize(
        ("low", "high", "expected"),
        [(0, 10, [0, 2, 4, 6, 8, 10]), (1.3, 5.9, [2, 3, 4, 5]), (0, 0.04, [0, 0.01, 0.02, 0.03, 0.04]), (3, 3, [3])],
    )
    def test_ticks(self, low, high, expected):
        assert chart.ticks(low, high, 5) == pytest.approx(expected)
