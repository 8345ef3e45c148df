"""Answers drawn beside training: equal to those drawn in turn, the policies that wrote them, and that no prompt is lost."""

from __future__ import annotations

import dataclasses
import signal
import time

import jax
import numpy as np
import pytest

from capibara.checkpoints.manager import Checkpointing
from capibara.core.types import UserError
from capibara.objectives.base import log_probabilities
from capibara.optim import Optimizer, Schedule
from capibara.planner.report import halves
from capibara.planner.search import automatic
from capibara.sharding import Plan
from capibara.strategies.ahead import AheadDrawer
from capibara.strategies.rollouts import Rollouts
from capibara.training.base.options import Evaluation
from capibara.training.feed import BatchFeed
from capibara.training.recovery import Recovery
from capibara.training.stability.anomalies import Anomalies
from tests.strategies.test_grpo import make_trainer, same, train

__all__ = ["make_trainer", "train"]  # fixtures

APART = {"rollout_devices": 2}
FAST = Optimizer(schedule=Schedule(kind="constant", learning_rate=0.05, warmup_steps=0), weight_decay=0.0)


def prompts_of(batch):
    """The prompts of a batch's rows."""
    rows = zip(batch["tokens"], batch["weights"])
    return [tuple(tokens[: np.flatnonzero(weights)[0] + 1]) for tokens, weights in rows]


@pytest.fixture
def draws(monkeypatch):
    """First step of each rollout that training has had -> steps of the policy that wrote it."""
    result, draw = {}, AheadDrawer.draw

    def recorded(self, step, params):
        item = draw(self, step, params)
        result[step] = item.policy_step
        devices = {device for x in jax.tree.leaves(self._weights.params) for device in x.devices()}
        assert devices == {jax.devices()[2]} and not devices & {*jax.tree.leaves(params)[0].devices()}
        return item

    monkeypatch.setattr(AheadDrawer, "draw", recorded)
    return result


@pytest.mark.parametrize("options", [{}, {"updates": 2, "kl": 0.1}], ids=["plain", "updates"])
def test_without_staleness_losses_and_parameters_are_those_of_drawing_in_turn(
    make_trainer, train, draws, options, monkeypatch
):
    evaluation, positions, next_batch = Evaluation(every=2), [], BatchFeed.next_batch

    def recorded(self, step, params):
        batch = next_batch(self, step, params)
        positions.append(self.position)  # of the data, which a roll-back goes past
        return batch

    monkeypatch.setattr(BatchFeed, "next_batch", recorded)
    turns = train(make_trainer(options, steps=3, evaluation=evaluation, model_dir=make_trainer().model_dir + "_turns"))
    apart = train(make_trainer(options | APART | {"max_staleness": 0}, steps=3, evaluation=evaluation), devices=4)
    assert draws == ({1: 0, 3: 2} if options else {1: 0, 2: 1, 3: 2})
    for step, batch in turns.batches.items():
        same(batch, apart.batches[step])
        assert turns.metrics[step]["loss"] == apart.metrics[step]["loss"]
    same(turns.state, apart.state)
    assert positions[:3] == positions[3:] and len(positions) == 6
    assert turns.evaluations == apart.evaluations and [*turns.evaluations] == [2, 3]
    assert apart.metrics[3]["staleness"] == apart.metrics[3]["staleness_max"] == 0


@pytest.mark.parametrize("bound", [1, 2])
def test_each_token_is_weighed_by_the_policy_that_wrote_it(make_trainer, train, draws, bound):
    """Its log-probability is that of the parameters of the recorded step, and of those of no other step."""
    trainer = make_trainer(APART | {"max_staleness": bound, "importance_cap": 1.5}, steps=5, optimizer=FAST)
    seen = train(trainer, devices=4)
    model, loss = seen.run.model, trainer.loss
    log_p = jax.jit(
        lambda params, batch: log_probabilities(model, params, batch, **loss.drawn_from(model, trainer.dataset))[0]
    )
    assert draws[1] == 0 and draws[2] == 0
    for step, batch in seen.batches.items():
        staleness, weights = step - 1 - draws[step], batch["weights"]
        assert 0 <= staleness <= bound and seen.metrics[step]["staleness"] == staleness
        apart = {at: np.abs(log_p(params, batch) - batch["drawn"])[weights > 0] for at, params in seen.params.items()}
        assert apart[draws[step]].max() < 1e-5
        assert all(differences.max() > 1e-3 for at, differences in apart.items() if at != draws[step])
        ratio = np.exp(log_p(seen.params[step - 1], batch) - log_p(seen.params[draws[step]], batch))
        of_answers = [np.mean(row[mask > 0]) for row, mask in zip(np.asarray(ratio), weights)]
        assert seen.metrics[step]["drawn_ratio"] == pytest.approx(np.mean(of_answers), rel=1e-4)
        beyond = [np.mean(row[mask > 0] > 1.5) for row, mask in zip(np.asarray(ratio), weights)]
        assert seen.metrics[step]["importance_capped"] == pytest.approx(np.mean(beyond), abs=1e-6)
    assert max(seen.metrics[step]["staleness"] for step in (3, 4, 5)) > 0
    assert all(0 <= seen.metrics[5][name] <= 1 for name in ("training_idle", "rollout_idle"))


@pytest.mark.parametrize("bound", [1, 2])
def test_fast_drawing_is_ahead_by_the_bound_and_no_more(make_trainer, train, draws, monkeypatch, bound):
    """Each step begins when so many rollouts are drawn."""
    next_batch = Rollouts.next_batch

    def patient(self, step, params):
        batch = next_batch(self, step, params)
        end_s = time.monotonic() + 60
        while len(self._drawer._draws) < bound:
            assert time.monotonic() < end_s, "a rollout was not drawn"
            time.sleep(0.01)
        return batch

    monkeypatch.setattr(Rollouts, "next_batch", patient)
    seen = train(make_trainer(APART | {"max_staleness": bound}, steps=5), devices=4)
    assert draws == {step: max(0, step - 1 - bound) for step in range(1, 6)}
    assert seen.metrics[5]["staleness"] == bound and seen.metrics[5]["rollout_idle"] > 0


def test_a_rollout_waits_for_weights_within_the_bound(make_trainer, train, draws):
    """Of several steps: weights are those of its first step, or of the first one of the rollout before."""
    seen = train(make_trainer(APART | {"mini_batches": 2}, steps=6), devices=4)
    assert draws == {1: 0, 3: 0, 5: 2}
    assert "staleness" not in seen.metrics[4] and seen.metrics[5]["staleness_max"] == 2


def test_no_prompt_is_lost_or_used_twice_when_a_run_resumes(make_trainer, train):
    whole = train(make_trainer(steps=5, model_dir=make_trainer().model_dir + "_turns"))
    options = APART | {"max_staleness": 2}
    first = train(make_trainer(options, steps=2), devices=4)
    resumed = train(make_trainer(options, steps=5), devices=4)
    assert sorted(first.batches) == [1, 2] and sorted(resumed.batches) == [3, 4, 5]
    for step, batch in (first.batches | resumed.batches).items():
        assert prompts_of(batch) == prompts_of(whole.batches[step])


def test_a_signal_ends_a_rollout_that_training_waits_for(make_trainer, train):
    whole = train(make_trainer(steps=3, model_dir=make_trainer().model_dir + "_turns"))
    options = APART | {"max_staleness": 0}
    stopped = train(make_trainer(options), devices=4, signal_at="rollout for step 3")
    assert dataclasses.astuple(stopped.outcome) == (2, "interrupted", signal.SIGTERM)
    resumed = train(make_trainer(options, steps=3), devices=4)
    same(resumed.batches[3], whole.batches[3])
    same(resumed.state.params, whole.state.params)


def test_the_planner_knows_the_bytes_of_both_halves(make_trainer, train):
    trainer = make_trainer(APART | {"kl": 0.1}, steps=2)
    seen = train(trainer, devices=4)
    model, dataset, engine = seen.run.model, trainer.dataset, seen.provider._drawer.answerer._generator._engine.core
    parameters, state = (
        sum(x.nbytes for x in jax.tree.leaves(part)) for part in (engine.params.current, engine.runner.state)
    )
    assert [item.name for item in trainer.loss.resident_arrays(model, dataset)] == ["reference"]
    held = {item.name: item.bytes for item in trainer.loss.rollout_arrays(model, dataset)}
    assert held["engine's parameters"] == parameters and held["next parameters"] == 2 * parameters
    assert held["engine's keys and values"] == state + trainer.loss.engine.prefix_cache_mib * 2**20
    (line,) = halves.engine_lines(trainer)
    assert line.startswith(
        "  on each of the 2 that draw answers 0.00 GiB: engine's parameters 0.00, next parameters 0.00, "
    )
    assert halves.engine_lines(make_trainer()) == []


@pytest.mark.parametrize("devices", [-1, 2])
def test_a_run_trains_with_the_split_that_the_planner_chose(make_trainer, train, devices):
    trainer = make_trainer({"rollout_devices": devices}, steps=2, plan=Plan(batch_size=32, slice="cpu-4"))
    planned, line = automatic.planned(trainer)
    count, mesh = planned.loss.rollout_devices, planned.loss.mesh
    assert f"{count} of the devices draw, tensor={mesh.tensor} x data={mesh.data}" in line
    seen = train(planned, devices=4)
    assert seen.run.mesh.size == 4 - count and seen.metrics[2]["staleness"] <= 1
    engine = seen.provider._drawer.answerer._generator._engine.core
    drawing = {device for x in jax.tree.leaves(engine.params.current) for device in x.devices()}
    assert len(drawing) == mesh.tensor * mesh.data and not drawing & {*seen.run.mesh.devices.flat}


def test_stale_answers_need_importance_weights(make_trainer):
    with pytest.raises(UserError, match="Grpo.importance_cap is None, and answers of up to 1 steps ago"):
        make_trainer(APART | {"importance_cap": None})
    make_trainer(APART | {"importance_cap": None, "max_staleness": 0})


def test_an_error_of_a_reward_ends_the_run(make_trainer, train):
    calls = []

    def no_number(prompt, answer, record):
        calls.append(answer)
        return 1.0 if len(calls) <= 32 else None

    with pytest.raises(UserError, match="no_number returned None"):
        train(make_trainer(APART | {"rewards": (no_number,)}), devices=4)
    assert 32 < len(calls) <= 64


def test_after_a_roll_back_training_goes_on_with_the_prompts_that_nobody_has_had(make_trainer, train, monkeypatch):
    """Step 3 is a spike: its prompts, the third ones, are not drawn again; those that were drawn ahead of it are."""
    whole = train(make_trainer(steps=4, model_dir=make_trainer().model_dir + "_turns"))
    spikes = iter([None, None, 3])
    monkeypatch.setattr(Recovery, "spike", lambda self: next(spikes, None))
    rolled_back = Anomalies(on_spike="roll_back", roll_back_steps=1, skip_batches=1)
    options = APART | {"max_staleness": 2}
    seen = train(make_trainer(options, steps=3, anomalies=rolled_back, checkpointing=Checkpointing(every=1)), devices=4)
    assert seen.outcome.step == 3 and seen.roll_backs == [2]
    assert prompts_of(seen.batches[3]) == prompts_of(whole.batches[4])
