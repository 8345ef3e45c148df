"""The meter between two logs, the numbers of an evaluation, and early stopping."""

from __future__ import annotations

import math

import jax.numpy as jnp
import pytest

from capibara.kernels.cross_entropy.terms import LossSums
from capibara.training import metrics as module
from capibara.training.metrics import EarlyStopping, Meter, evaluation_metrics


def step_metrics(loss, tokens, grad_norm=1.0):
    values = {"loss": loss, "z_loss": loss / 10, "token_accuracy": loss / 8, "grad_norm": grad_norm, "tokens": tokens}
    return {name: jnp.float32(value) for name, value in {**values, "learning_rate": grad_norm / 100}.items()}


@pytest.fixture
def pass_time(monkeypatch):
    """Makes the meter's clock go on by so many seconds; by itself it stands still."""
    now_s = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now_s[0])

    def go_on(seconds):
        now_s[0] += seconds

    return go_on


def test_the_meter_weighs_losses_by_tokens_and_starts_anew_after_each_read(pass_time):
    meter = Meter(tokens_per_step=100)
    for metrics in (step_metrics(4.0, 10, 1.0), step_metrics(2.0, 30, 3.0)):
        with meter.waiting():
            pass_time(0.1)
        pass_time(0.4)
        meter.add(metrics)
    read = meter.read()
    assert read["loss"] == pytest.approx(2.5) and read["z_loss"] == pytest.approx(0.25)
    assert read["token_accuracy"] == pytest.approx(2.5 / 8)
    assert (read["tokens"], read["grad_norm"]) == (40.0, 2.0) and read["data_wait_s"] == pytest.approx(0.1)
    assert read["learning_rate"] == pytest.approx(0.03)  # of the last step
    assert read["step_s"] == pytest.approx(0.5) and read["tokens_per_s"] == pytest.approx(200)
    assert all(type(value) is float for value in read.values())

    pass_time(0.1)
    meter.add(step_metrics(7.0, 5))
    assert meter.read()["loss"] == 7.0


def test_a_meter_without_any_token_gives_no_nan():
    meter = Meter(100)
    meter.add(step_metrics(0.0, 0))
    assert meter.read()["loss"] == 0.0


def test_the_clock_can_leave_out_an_evaluation(pass_time):
    """Between two logs: one step before the pause, one after; only their own time counts, for both of them."""
    meter = Meter(100)
    step = step_metrics(1.0, 100)
    pass_time(0.05)
    meter.add(step)
    with meter.paused("save"):
        pass_time(0.3)
    pass_time(0.05)
    meter.add(step)
    read = meter.read()
    assert read["step_s"] == pytest.approx(0.05) and read["tokens_per_s"] == pytest.approx(2000)


def test_skipped_updates_are_counted():
    meter = Meter(100)
    for skipped in (1.0, 1.0, 0.0):
        meter.add(step_metrics(1.0, 100) | {"skipped": skipped})
    assert meter.read()["skipped"] == 2.0
    meter.add(step_metrics(1.0, 100))
    assert "skipped" not in meter.read()


def test_a_step_that_was_left_out_has_no_part_in_the_means():
    """Also where its weights, and with them its tokens, are no numbers."""
    meter, nan = Meter(100), float("nan")
    for loss, tokens, skipped in ((4.0, 10, 0.0), (nan, nan, 1.0), (2.0, 30, 0.0), (9.0, 50, 1.0)):
        spike = {"skipped": skipped, "loss_spikes": float(loss == 9.0)}
        meter.add(step_metrics(loss, tokens, grad_norm=loss) | spike)
    read = meter.read()
    assert (read["loss"], read["grad_norm"], read["z_loss"]) == (2.5, 3.0, pytest.approx(0.25))
    assert (read["skipped"], read["loss_spikes"], read["tokens"]) == (2.0, 1.0, 90.0)
    meter.add(step_metrics(nan, 10) | {"skipped": 1.0})
    assert math.isnan(meter.read()["loss"])


def test_a_metric_of_a_part_is_of_the_last_step_that_has_it():
    """Such as the accuracy of a domain, which is NaN without tokens of the domain; a NaN loss stays one."""
    meter, nan = Meter(100), float("nan")
    for python, sql, api in ((0.1, 0.2, nan), (0.3, nan, nan), (nan, 0.4, nan)):
        found = {"hint_accuracy/python": python, "hint_accuracy/sql": sql, "hint_accuracy/api": api}
        meter.add(step_metrics(nan, 10) | {name: jnp.float32(value) for name, value in found.items()})
    read = meter.read()
    found = {name: read[name] for name in read if "/" in name}
    assert found == pytest.approx({"hint_accuracy/python": 0.3, "hint_accuracy/sql": 0.4})
    assert math.isnan(read["loss"])


def test_evaluation_metrics():
    metrics = evaluation_metrics(LossSums(nll=20.0, z=0.0, correct=5.0, weight=10.0), target_bytes=40)
    assert metrics == {
        "loss": 2.0,
        "perplexity": pytest.approx(math.exp(2)),
        "token_accuracy": 0.5,
        "tokens": 10.0,
        "bits_per_byte": pytest.approx(20 / math.log(2) / 40),
    }
    assert "bits_per_byte" not in evaluation_metrics(LossSums(20.0, 0.0, 5.0, 10.0), target_bytes=0)
    assert math.isfinite(evaluation_metrics(LossSums(1e6, 0.0, 0.0, 1.0), 1)["perplexity"])


def test_early_stopping_counts_evaluations_without_a_better_loss():
    early = EarlyStopping(2)
    stops = []
    for loss in [3.0, 2.0, 2.0, 1.9, 2.5, float("nan")]:  # an equal loss is not better, nor is one that is no number
        early.update(loss)
        stops.append(early.stop)
    assert stops == [False, False, False, False, False, True]
    again = EarlyStopping(2, early.state())
    assert again.stop and again.state() == {"best": 1.9, "bad": 2}


def test_without_patience_nothing_stops():
    early = EarlyStopping(None)
    assert early.state() == {"best": None, "bad": 0}
    for _ in range(100):
        early.update(1.0)
    assert not early.stop
    assert EarlyStopping(None, EarlyStopping(None).state()).state()["best"] is None


def test_metrics_of_pairs_are_weighted_by_pairs():
    meter = Meter(64, ("reward_margin",))
    for loss, margin, pairs in ((1.0, 4.0, 1.0), (2.0, 8.0, 3.0)):
        numbers = {"loss": loss, "reward_margin": margin, "pairs": pairs, "tokens": 10.0, "grad_norm": 1.0, "kl": loss}
        meter.add({name: jnp.asarray(number) for name, number in numbers.items()})
    read = meter.read()
    assert (read["loss"], read["reward_margin"], read["pairs"], read["tokens"]) == (1.75, 7.0, 4.0, 20.0)
    assert read["kl"] == 2.0 and "z_loss" not in read  # of the last step
