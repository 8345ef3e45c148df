"""Online DPO: gradients against the formula, answer by answer, which answers are a pair, whole runs, and mistakes."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.sampling.sampling import Sampling
from capibara.models import api
from capibara.objectives.base import log_probabilities
from capibara.objectives.preference import Dpo
from capibara.optim import Optimizer, Schedule
from capibara.sharding import Plan
from capibara.strategies import generating
from capibara.strategies.answering import Answer, Answerer
from capibara.strategies.grpo import Grpo
from capibara.strategies.online_dpo import OnlineDpo
from capibara.strategies.rewards.functions import exact_answer
from capibara.strategies.rows import text_rows
from tests.strategies.test_grpo import has_digit, make_trainer, same, train

__all__ = ["make_trainer", "train"]  # fixtures

LENGTH, NEW, PAIRS = 48, 8, 4


def online(**options):
    return OnlineDpo(rewards=(has_digit,), sampling=Sampling(max_new_tokens=NEW, temperature=1.0), **options)


def answer(tokens, *, truncated=False):
    return Answer([5, 6, 7], tokens, [-1.0] * len(tokens), 0.0, (0.0,), truncated)


@pytest.fixture
def trainer_of(make_trainer):
    """Options of the loss and the run -> a run of four pairs a step."""
    base = make_trainer()

    def make(loss=(), name="run", **changes):
        options = {"engine": EngineConfig(slots=8, prefix_cache_mib=0)} | dict(loss)
        dataset = dataclasses.replace(base.dataset, length=LENGTH)
        changes = {"plan": Plan(batch_size=PAIRS), "dataset": dataset} | changes
        return dataclasses.replace(base, model_dir=f"{base.model_dir}_{name}", loss=online(**options), **changes)

    return make


@pytest.fixture
def given(monkeypatch):
    """Answers without an engine, of which the last one is best, and those of every third prompt are equal."""

    def answers(self, split, prompts, samplings, what):
        return [[one(prompt, k) for k in range(len(samplings(prompt.row)))] for prompt in prompts]

    def one(prompt, k):
        tokens = [4 + (prompt.number * (k + 2) + j) % 90 for j in range(2 + (prompt.number + k) % 5)]
        reward = float(k * (prompt.number % 3 > 0))
        return Answer(prompt.ids, tokens, [-5.9] * len(tokens), reward, (reward,), False)

    monkeypatch.setattr(Answerer, "load", lambda self, params: None)
    monkeypatch.setattr(Answerer, "answers", answers)


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_the_gradient_is_that_of_the_formula_with_each_answer_in_a_row_of_its_own(trainer_of, kind):
    trainer, rng = trainer_of({"preference": Dpo(kind=kind, beta=0.3)}), np.random.default_rng(0)
    loss, model, dataset = trainer.loss, api.build(trainer.model), trainer.dataset
    texts = [rng.integers(4, 90, rng.integers(2, NEW)).tolist() for _ in range(2 * PAIRS)]
    groups = [[answer(texts[2 * i]), answer(texts[2 * i + 1])] for i in range(PAIRS)]
    params, reference = (model.init(jax.random.key(seed)) for seed in (0, 1))
    rewards_PG = np.array([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5], [-1.0, 2.0]])
    chosen = [0, 3, 4, 7]
    single = text_rows([[([5, 6, 7], tokens)] for tokens in texts], dataset)

    def log_p_of(params, batch):
        return log_probabilities(model, params, batch)[0] * batch["weights"]

    def formula(params):
        gain = jnp.sum(log_p_of(params, single) - log_p_of(reference, single), axis=1).reshape(PAIRS, 2)
        sign = jnp.array([1.0 if 2 * i in chosen else -1.0 for i in range(PAIRS)])
        margin = sign * (gain[:, 0] - gain[:, 1])
        return jnp.sum(-jnp.log(jax.nn.sigmoid(0.3 * margin)) if kind == "sigmoid" else (margin - 1 / 0.6) ** 2)

    rows = loss.rows(groups, rewards_PG, dataset)
    batch = rows | {"reference": np.asarray(log_p_of(reference, rows))}
    sums = loss.objective(model, dataset).sums
    (got, totals), gradient = jax.value_and_grad(lambda p: sums(p, batch, None, None)[:2], has_aux=True)(params)
    want, want_gradient = jax.value_and_grad(formula)(params)
    assert float(got) == pytest.approx(float(want), rel=1e-5) and float(totals.weight) == PAIRS
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(want_gradient))
    assert scale > 1e-2
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * scale), gradient, want_gradient)


@pytest.mark.parametrize(
    ("rewards", "chosen", "rejected"),
    [
        ([0.0, 3.0, 1.0, -2.0], 1, 3),
        ([1.0, 1.0, 1.0, 1.0], 0, 3),
        ([0.0, 1.0, 0.0, 1.0], 1, 2),
        ([0.5, 0.5, 0.5, 0.7], 3, 2),
    ],
)
def test_a_pair_is_the_first_of_the_best_and_the_last_of_the_worst(make_trainer, rewards, chosen, rejected):
    dataset = dataclasses.replace(make_trainer().dataset, length=LENGTH)
    group = [answer([11 + k] * (k + 1)) for k in range(4)]
    rows = online(group=4).rows([group], np.array([rewards]), dataset)
    written = rows["targets"][0][rows["weights"][0] > 0].tolist()
    assert written == [11 + chosen] * (chosen + 1) + [11 + rejected] * (rejected + 1)
    segments, second = rows["segment_ids"][0], 2 + chosen + 1
    assert segments[:second].tolist() == [1] * second and segments[second] == 2 == segments.max()
    assert rows["positions"][0][second] == 0 and rows["tokens"][0][second : second + 3].tolist() == [5, 6, 7]


def test_a_pair_with_an_answer_that_was_cut_off_is_masked(make_trainer):
    dataset = dataclasses.replace(make_trainer().dataset, length=LENGTH)
    groups = [[answer([11, 12]), answer([13, 14], truncated=i == 1)] for i in range(2)]
    rewards_PG = np.array([[1.0, 0.0], [1.0, 0.0]])
    whole, masked = (online(mask_truncated=masks).rows(groups, rewards_PG, dataset) for masks in (False, True))
    assert whole["weights"].sum(1).tolist() == [4, 4] and masked["weights"].sum(1).tolist() == [4, 0]
    ones = jnp.ones(masked["weights"].shape)
    _, totals = Dpo().totals(ones, masked | {"reference": ones}, 1)
    assert float(totals.weight) == 1


def test_answers_without_an_end_lose_reward():
    penalties = online(missing_end_penalty=0.5).penalties(np.ones((1, 2)), np.array([[True, False]]))
    assert penalties["missing_end_penalty"].tolist() == [[-0.5, 0.0]] and online().penalties(None, None) == {}


def test_a_rollout_is_used_again_and_resumed_against_the_initial_weights(trainer_of, train, given):
    """Four steps have one rollout of two batches; a run that stops within it goes on as if it had not."""
    options = {"mini_batches": 2, "updates": 2, "group": 3}
    whole = train(trainer_of(options, "whole", steps=5))
    same(whole.batches[1], whole.batches[3])
    assert not np.array_equal(whole.batches[1]["targets"], whole.batches[2]["targets"])
    first, third = whole.metrics[1], whole.metrics[3]
    assert first["reward_margin"] == pytest.approx(0.0, abs=1e-4) and first["loss"] == pytest.approx(
        np.log(2), abs=1e-4
    )
    assert third["reward_margin"] > 1e-2 and third["loss"] < first["loss"] and first["pairs"] == PAIRS
    assert {"reward", "groups_without_signal", "answer_length"} <= first.keys()
    train(trainer_of(options, steps=3))
    resumed = train(trainer_of(options, steps=5))
    assert sorted(resumed.batches) == [4, 5]
    same(resumed.batches[5], whole.batches[5])
    same(resumed.state.params, whole.state.params)


def test_prompts_of_equal_rewards_are_drawn_again(trainer_of, train, given):
    def equal(seen):
        return seen.metrics[1]["groups_without_signal"]

    once, again = train(trainer_of(steps=1)), train(trainer_of({"resample": 3}, "again", steps=1))
    assert equal(again) == 0 < equal(once) and again.metrics[1]["groups_drawn"] > PAIRS


def test_drawn_beside_training_without_staleness_it_trains_as_drawn_in_turn(trainer_of, train):
    turns = train(trainer_of(name="turns", steps=2), devices=1)
    apart = train(trainer_of({"rollout_devices": 1, "max_staleness": 0}, "apart", steps=2))
    same(turns.batches, apart.batches)
    same(turns.state, apart.state)


def test_the_engine_of_a_run_has_rows_of_one_answer(trainer_of, train, monkeypatch):
    lengths = []

    class Watched(Engine):
        def __init__(self, model, params, vocabulary, length, *args, **options):
            lengths.append(length)
            super().__init__(model, params, vocabulary, length, *args, **options)

    monkeypatch.setattr(generating, "Engine", Watched)
    train(trainer_of(steps=1), devices=1)
    assert lengths == [LENGTH // 2]


def test_the_engine_has_room_for_one_answer_and_a_row_for_two(trainer_of):
    trainer = trainer_of()
    model, loss = api.build(trainer.model), trainer.loss
    group = Grpo(rewards=loss.rewards, sampling=loss.sampling, engine=loss.engine)
    half = dataclasses.replace(trainer.dataset, length=LENGTH // 2)
    cache, of_group = (item.resident_arrays(model, data)[-1] for item, data in ((loss, trainer.dataset), (group, half)))
    assert cache == of_group and loss.prompt_length(trainer.dataset) == LENGTH // 2 - NEW
    assert [item.name for item in loss.resident_arrays(model, trainer.dataset)][0] == "reference"
    assert loss.batch_spec(trainer.dataset, PAIRS)["reference"][0] == (PAIRS, LENGTH)


@pytest.mark.heavy
def test_the_reward_rises(trainer_of, train):
    schedule = Schedule(kind="rsqrt", learning_rate=3e-2, warmup_steps=1)
    optimizer = Optimizer(schedule=schedule, weight_decay=0.0)
    seen = train(trainer_of({"group": 8}, steps=24, plan=Plan(batch_size=8), optimizer=optimizer))
    first, last = (np.mean([seen.metrics[step]["reward"] for step in steps]) for steps in (range(1, 4), range(22, 25)))
    assert first < 0.4 and last > first + 0.4, (first, last)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: online(group=1), "OnlineDpo.group is 1, must be at least 2, of which two are a pair: try 2"),
        (lambda: online(resample=-1), "OnlineDpo.resample is -1, must be at least 0 (0: never)"),
        (lambda: online(missing_end_penalty=0.0), "OnlineDpo.missing_end_penalty is 0.0, must be above 0, or None: try 1.0"),
        (lambda: online(preference=Dpo(beta=0.0)), "Dpo.beta is 0.0, must be above 0"),
        (lambda: OnlineDpo(rewards=()), "OnlineDpo.rewards is empty"),
        (
            lambda: OnlineDpo(rewards=(exact_answer,), sampling=Sampling(temperature=0.0)),
            "OnlineDpo's Sampling.temperature is 0.0, must be finite and above 0",
        ),
        (
            lambda: online(rollout_devices=2, mini_batches=2, max_staleness=3),
            "OnlineDpo.max_staleness is 3, must be a multiple of the 2 steps of a rollout",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_named_in_a_line(make, said):
    with pytest.raises(UserError, match=re.escape(said)) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"sampling": Sampling(max_new_tokens=LENGTH // 2, temperature=1.0)},
            f"Dataset.length ({LENGTH}) leaves prompts no room beside Sampling.max_new_tokens (24): try 96",
        ),
        ({"engine": EngineConfig(page_size=8, pages=2)}, "set EngineConfig.pages = 3 or more"),
    ],
)
def test_mistakes_in_lengths_are_named(trainer_of, options, said):
    with pytest.raises(UserError, match=re.escape(said)):
        dataclasses.replace(trainer_of(), loss=dataclasses.replace(online(), **options))
