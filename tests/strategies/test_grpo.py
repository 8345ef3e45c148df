"""Answers of the model's own, rewarded: the loss against a plain formula, rewards, and runs whose reward rises."""

from __future__ import annotations

import dataclasses
import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.checkpoints.manager import Checkpointing
from capibara.core.types import UserError
from capibara.data.chat.answers import PromptJsonlSource
from capibara.data.chat.template import ChatTemplate
from capibara.data.dataset import Dataset
from capibara.data.tokenizers.vocabulary import TokenizerJsonVocabulary
from capibara.inference.engine.engine import EngineConfig
from capibara.inference.sampling.sampling import Sampling
from capibara.models.api import DecoderConfig, Lora
from capibara.optim import Optimizer, Schedule
from capibara.sharding import Plan
from capibara.strategies.answering import Answer, Answerer
from capibara.strategies.grpo import Grpo
from capibara.strategies.policy.clipped import Clipped
from capibara.strategies.rewards import functions
from capibara.strategies.rewards.json_answer import JsonAnswer
from capibara.training import loop
from capibara.training.base.callbacks import Callback
from capibara.training.base.options import Evaluation
from capibara.training.feed import BatchFeed
from capibara.training.trainer import Trainer

LENGTH, NEW = 24, 8


def has_digit(prompt, answer, record):
    assert prompt == f"<|turn|>u:{record['prompt']}<|end|><|turn|>a:"
    return float(any(letter.isdigit() for letter in answer))


@pytest.fixture
def make_trainer(tmp_path, toy_tokenizer):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}?"}) + "\n" for i in range(40)))
    source = PromptJsonlSource(files=(str(path),), template=ChatTemplate(tokenizer=toy_tokenizer))
    base = Trainer(
        model_dir=str(tmp_path / "run"),
        steps=4,
        model=DecoderConfig(vocab_size=384, embed_dim=32, num_layers=1, num_heads=2, mlp_dim=64, dtype="float32"),
        plan=Plan(batch_size=32, fsdp=2),
        dataset=Dataset(
            source=dataclasses.replace(source, validation_fraction=0.2),
            vocabulary=TokenizerJsonVocabulary(path=toy_tokenizer),
            length=LENGTH,
            packing="none",
        ),
        optimizer=Optimizer(schedule=Schedule(kind="rsqrt", learning_rate=1e-2, warmup_steps=1), weight_decay=0.0),
        evaluation=Evaluation(every=0),
        checkpointing=Checkpointing(every=0),
        loss=Grpo(
            rewards=(has_digit,),
            group=8,
            sampling=Sampling(max_new_tokens=NEW, temperature=1.0),
            engine=EngineConfig(slots=16, prefix_cache_mib=1),
        ),
        log_every=1,
    )

    def make(grpo=(), **changes):
        return dataclasses.replace(base, loss=dataclasses.replace(base.loss, **dict(grpo)), **changes)

    return make


class Seen(Callback):
    def __init__(self, signal_at=None):
        self.metrics, self.evaluations, self.batches, self.params = {}, {}, {}, {}
        self.progress, self.signal_at, self.roll_backs = [], signal_at, []

    def on_progress(self, text):
        self.progress.append(text)
        if self.signal_at and text.startswith(self.signal_at):
            os.kill(os.getpid(), signal.SIGTERM)

    def on_step(self, step, metrics):
        self.metrics[step] = dict(metrics)

    def on_roll_back(self, step):
        self.roll_backs.append(step)

    def on_evaluate(self, step, metrics):
        self.evaluations[step] = dict(metrics)


@pytest.fixture
def train(monkeypatch):
    """(trainer, number of devices) -> metrics and batches by step, parameters by steps done, the last state.

    `signal_at`: the beginning of what is told within a rollout or an evaluation, for which the run is told to stop.
    """
    set_up = loop.set_up

    def run_it(trainer, devices=2, signal_at=None):
        seen = Seen(signal_at)

        def watched(trainer, **options):
            seen.run, initial = set_up(trainer, jax.devices()[:devices], **options)
            run = dataclasses.replace(seen.run, train_step=stepping)
            return run, initial

        def stepping(state, batch):
            number = int(state.step) + 1
            seen.batches[number], seen.params[number - 1] = jax.device_get(batch), jax.device_get(state.params)
            state, metrics = seen.run.train_step(state, batch)
            seen.state = jax.device_get(state)
            return state, metrics

        class Seeing(BatchFeed):
            def __init__(self, *args):
                super().__init__(*args)
                seen.provider = self.provider

        monkeypatch.setattr(loop, "BatchFeed", Seeing)
        monkeypatch.setattr(loop, "set_up", watched)
        seen.outcome = loop.train(trainer, seen)
        return seen

    return run_it


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


# The loss.


@pytest.mark.parametrize("token_weights, cap", [("answer", 1.2), ("max_length", 1.2), ("answer", None)])
def test_the_loss_and_its_gradient_equal_the_formula_in_float64(token_weights, cap):
    rng, (rows, length) = np.random.default_rng(0), (6, 10)
    grpo = Grpo(
        rewards=(has_digit,), surrogate=Clipped(low=0.2, high=0.3), token_weights=token_weights, kl=0.1, updates=2,
        importance_cap=cap, sampling=Sampling(max_new_tokens=16, temperature=1.0),
    )  # fmt: skip
    weights = (np.arange(length) >= 3) & (np.arange(length) < rng.integers(5, 10, (rows, 1)))
    old, reference = -rng.uniform(1, 4, (2, rows, length))
    log_p, drawn = old + rng.normal(0, 0.3, (2, rows, length))
    gains = rng.normal(size=rows)
    want, want_gradient, clipped, apart, capped = 0.0, np.zeros_like(log_p), [], 0.0, 0.0
    for b in range(rows):
        places = np.flatnonzero(weights[b])
        share = 1 / len(places) if token_weights == "answer" else 1 / 16
        part = 0
        for t in places:
            ratio, away = np.exp(log_p[b, t] - old[b, t]), reference[b, t] - log_p[b, t]
            bounded = min(max(ratio, 0.8), 1.3)
            held = bounded * gains[b] < ratio * gains[b]
            part += held / len(places)
            apart += abs(old[b, t] - drawn[b, t]) / len(places)
            weight = 1.0 if cap is None else min(np.exp(old[b, t] - drawn[b, t]), cap)
            capped += (weight == cap) / len(places)
            gain = weight * min(ratio * gains[b], bounded * gains[b])
            want += share * (-gain + 0.1 * (np.exp(away) - away - 1))
            want_gradient[b, t] = share * (-(not held) * weight * ratio * gains[b] + 0.1 * (1 - np.exp(away)))
        clipped.append(part)
    batch = {"weights": weights, "advantages": weights * gains[:, None], "drawn": drawn, "old": old}
    batch = {**batch, "reference": reference, "segment_ids": np.ones((rows, length))}
    batch = {name: jnp.asarray(value, jnp.float32) for name, value in batch.items()}
    (got, totals), gradient = jax.value_and_grad(grpo.totals, has_aux=True)(jnp.asarray(log_p, jnp.float32), batch)
    assert float(got) == pytest.approx(want, rel=1e-5) and float(totals.weight) == rows
    np.testing.assert_allclose(gradient, want_gradient, atol=1e-5)
    assert 0 < sum(clipped) < rows and float(totals.values["clip_fraction"]) == pytest.approx(sum(clipped), rel=1e-5)
    assert float(totals.values["engine_difference"]) == pytest.approx(apart, rel=1e-5)
    assert float(totals.values["importance_capped"]) == pytest.approx(capped) and (capped > 0) == (cap is not None)


def test_advantages_are_of_the_group_and_zero_where_all_are_equal():
    rewards = np.array([[1.0, 0.0, 0.0, 1.0], [0.1, 0.1, 0.1, 0.1], [3.0, 1.0, 1.0, 1.0]])
    got = Grpo(rewards=(has_digit,)).estimates(rewards, {"weights": np.ones((12, 1))}, 0.0)["advantages"].reshape(3, 4)
    np.testing.assert_allclose(got[0], np.array([0.5, -0.5, -0.5, 0.5]) / np.std([1, 0, 0, 1], ddof=1), rtol=1e-3)
    assert (got[1] == 0).all() and got.dtype == np.float32
    got = (
        Grpo(rewards=(has_digit,), scale="none")
        .estimates(rewards, {"weights": np.ones((12, 1))}, 0.0)["advantages"]
        .reshape(3, 4)
    )
    np.testing.assert_array_equal(got[2], [1.5, -0.5, -0.5, -0.5])


# Whole runs.


@pytest.mark.heavy
def test_the_reward_rises(make_trainer, train):
    schedule = Schedule(kind="rsqrt", learning_rate=3e-2, warmup_steps=1)
    trainer = make_trainer(steps=24, optimizer=Optimizer(schedule=schedule, weight_decay=0.0))
    seen = train(dataclasses.replace(trainer, evaluation=Evaluation(every=24)))
    first, last = (np.mean([seen.metrics[step]["reward"] for step in steps]) for steps in (range(1, 4), range(22, 25)))
    assert first < 0.4 and last > first + 0.4, (first, last)
    for metrics in seen.metrics.values():
        assert (
            metrics["ratio"] == pytest.approx(1.0, abs=1e-6) and metrics["clip_fraction"] == 0.0 and "kl" not in metrics
        )
        assert 0 <= metrics["groups_without_signal"] <= 1 and 1 <= metrics["answer_length"] <= NEW
        assert metrics["rollout_s"] > 0 and 0 <= metrics["reward_std"] <= 0.5
    assert seen.evaluations[24]["loss"] == -seen.evaluations[24]["reward"]
    assert seen.evaluations[24]["answers"] > 3


def test_batches_are_the_answers_with_their_prompts(make_trainer, train, toy_tokenizer):
    batch = train(make_trainer(steps=1)).batches[1]
    vocabulary, (end,) = (
        TokenizerJsonVocabulary(path=toy_tokenizer),
        TokenizerJsonVocabulary(path=toy_tokenizer).encode("<|end|>")[-1:],
    )
    texts = []
    for row in range(32):
        part = {key: value[row] for key, value in batch.items()}
        count, answered = int(part["segment_ids"].sum()), part["weights"] > 0
        assert (part["tokens"][1:count] == part["targets"][: count - 1]).all()
        prompt, answer = part["tokens"][: np.argmax(answered) + 1], part["targets"][answered]
        assert vocabulary.decode(prompt).startswith("u:") and vocabulary.decode(prompt).endswith("?a:")
        assert len(answer) == NEW or answer[-1] == end
        assert (part["advantages"][answered] == part["advantages"][answered][0]).all()
        texts.append((vocabulary.decode(prompt), vocabulary.decode(answer)))
    prompts = [prompt for prompt, _ in texts]
    assert [prompts[i] for i in range(0, 32, 8)] == list(dict.fromkeys(prompts)) and len(set(prompts)) == 4
    assert len({answer for _, answer in texts}) > 24  # samples of a group differ
    for first in range(0, 32, 8):
        gains = [
            (batch["advantages"][row].max() if has_digit_in(text) else batch["advantages"][row].min())
            for row, (_, text) in zip(range(first, first + 8), texts[first : first + 8])
        ]
        given = [has_digit_in(text) for _, text in texts[first : first + 8]]
        if 0 < sum(given) < 8:
            assert all((gain > 0) == good for gain, good in zip(gains, given))


def test_no_answer_is_drawn_twice(make_trainer, train, tmp_path):
    """A seed depends on the step, the prompt's place and the sample: here the prompt and the model are always the same."""
    trainer = make_trainer(steps=2, optimizer=Optimizer(schedule=Schedule(kind="rsqrt", learning_rate=1e-9)))
    (tmp_path / "prompts.jsonl").write_text((json.dumps({"prompt": "1?"}) + "\n") * 40)
    batches = train(trainer).batches
    answers = {tuple(row[mask > 0]) for one in batches.values() for row, mask in zip(one["targets"], one["weights"])}
    assert len(batches) == 2 and len(answers) == 64


def has_digit_in(text):
    return any(letter.isdigit() for letter in text)


def test_answers_are_drawn_from_what_is_trained_and_other_numbers_of_an_engine_are_weighed(make_trainer, train):
    """At any temperature, and though the model has more ids (384) than the vocabulary; an engine in 8 bits is another one."""
    sampling = Sampling(max_new_tokens=NEW, temperature=0.7)
    exact = train(make_trainer({"sampling": sampling}, steps=1))
    assert 0 < exact.metrics[1]["engine_difference"] < 2e-6 and exact.metrics[1]["importance_capped"] == 0
    assert exact.metrics[1]["ratio"] == pytest.approx(1.0, abs=1e-6)
    drawn, said = exact.batches[1]["drawn"], exact.batches[1]["weights"] > 0
    assert (drawn[said] < 0).all() and (drawn[~said] == 0).all() and -9 < drawn[said].mean() < -3
    config = EngineConfig(slots=16, cache_dtype="int8", prefix_cache_mib=0)
    far = {"sampling": sampling, "engine": config, "importance_cap": 1.001}
    coarse = train(make_trainer(far, steps=1, model_dir=make_trainer().model_dir + "_8"))
    assert 1e-4 < coarse.metrics[1]["engine_difference"] < 0.1 and 0 < coarse.metrics[1]["importance_capped"] < 0.6


@pytest.mark.parametrize("stop", [pytest.param(2, marks=pytest.mark.heavy), 3])
def test_a_resumed_run_ends_bit_by_bit_as_one_that_was_not_stopped(make_trainer, train, stop):
    """Also within the steps on one rollout, whose parameters are gone by then."""
    options = dict(grpo={"updates": 2, "kl": 0.1})
    whole = train(make_trainer(**options, model_dir=make_trainer().model_dir + "_whole"))
    train(make_trainer(**options, steps=stop))
    resumed = train(make_trainer(**options))
    assert sorted(resumed.batches) == list(range(stop + 1, 5))
    for step, batch in resumed.batches.items():
        same(batch, whole.batches[step])
    same(whole.state.params, resumed.state.params)
    assert whole.metrics[1]["ratio"] == pytest.approx(1.0, abs=1e-5) and whole.metrics[1]["kl"] < 1e-5
    assert whole.metrics[2]["ratio"] != whole.metrics[1]["ratio"] and whole.metrics[4]["kl"] > 1e-4
    same(whole.batches[1]["tokens"], whole.batches[2]["tokens"])
    assert (whole.batches[3]["tokens"] != whole.batches[2]["tokens"]).any()
    assert "reward" in whole.metrics[1] and "reward" not in whole.metrics[2] and "rollout_s" not in whole.metrics[2]


def test_a_rollout_ends_in_the_middle_when_the_run_is_to_stop_and_none_of_its_prompts_is_lost(make_trainer, train):
    whole = train(make_trainer(steps=3, model_dir=make_trainer().model_dir + "_whole"))
    assert "rollout for step 2: 0 of 32 answers" in whole.progress
    stopped = train(make_trainer(), signal_at="rollout for step 3")
    assert dataclasses.astuple(stopped.outcome) == (2, "interrupted", signal.SIGTERM)
    assert len([text for text in stopped.progress if "step 3" in text]) == 1
    resumed = train(make_trainer(steps=3))
    assert sorted(resumed.batches) == [3]
    same(resumed.batches[3], whole.batches[3])
    same(resumed.state.params, whole.state.params)
    # Nor does an evaluation go on; what there was before it is kept, and it is made later.
    trainer = make_trainer(steps=4, evaluation=Evaluation(every=4))
    stopped = train(trainer, signal_at="evaluating, batch 1: ")
    assert dataclasses.astuple(stopped.outcome) == (4, "interrupted", signal.SIGTERM) and stopped.evaluations == {}
    assert len([text for text in stopped.progress if text.startswith("evaluating, batch 1")]) == 1
    assert not (resumed := train(trainer)).batches and list(resumed.evaluations) == [4]


@pytest.mark.heavy
@pytest.mark.parametrize("axes", [{"tensor": 2, "accumulation": 2}, {"context": 2}], ids=str)
def test_a_mesh_and_one_device_train_alike(make_trainer, train, axes):
    options = dict(grpo={"kl": 0.1, "updates": 2}, steps=2)
    want = train(make_trainer(**options, plan=Plan(batch_size=32)), 1)
    plan = Plan(batch_size=32, fsdp=2, **axes)
    got = train(make_trainer(**options, plan=plan, model_dir=make_trainer().model_dir + "_mesh"), 4)
    same(got.batches[1]["tokens"], want.batches[1]["tokens"])
    for name in ("drawn", "old", "reference"):
        np.testing.assert_allclose(got.batches[1][name], want.batches[1][name], atol=1e-5)
    for step in (1, 2):
        for key in ("loss", "grad_norm", "kl", "ratio", "engine_difference"):
            assert got.metrics[step][key] == pytest.approx(want.metrics[step][key], rel=1e-3, abs=1e-5), (step, key)


@pytest.mark.heavy
def test_adapters_are_rewarded_and_their_base_is_the_reference(make_trainer, train):
    model = dataclasses.replace(make_trainer().model, lora=Lora(rank=4, targets=("all-linear",)))
    seen = train(trainer := make_trainer({"kl": 0.1}, model=model, steps=3))
    assert seen.metrics[1]["kl"] < 1e-6 < seen.metrics[3]["kl"]
    # What is held beside the state is what the planner is told.
    generator, size = (
        seen.provider._drawer.answerer._generator,
        lambda arrays: sum(x.nbytes for x in jax.tree.leaves(arrays)),
    )  # noqa: E731
    held = {one.name: one for one in trainer.loss.resident_arrays(seen.run.model, trainer.dataset)}
    assert held["reference"].bytes == size(seen.provider._reference) < held["engine's parameters"].bytes
    assert held["engine's parameters"].bytes == size(generator._engine.core.params.current)
    prefix_cache_mib = 1
    kept = size(generator._engine.core.runner.state) + prefix_cache_mib * 2**20
    assert held["engine's keys and values"].bytes == kept
    devices = [
        {len(leaf.devices()) for leaf in jax.tree.leaves(x)}
        for x in (generator._engine.core.params.current, seen.provider._reference)
    ]
    assert devices == [{1}, {2}]
    without = dataclasses.replace(trainer.loss, kl=0.0)
    assert "reference" not in [one.name for one in without.resident_arrays(seen.run.model, trainer.dataset)]


# Rollouts, of answers that are given.


@pytest.fixture
def give(monkeypatch):
    """(function of a prompt and the sample -> reward, tokens, is cut off): the answers of each rollout."""

    def given(of):
        def answers(self, split, prompts, samplings, what):
            drawn.append([prompt.number for prompt in prompts])
            return [[answer(prompt, k) for k, _ in enumerate(samplings(prompt.row))] for prompt in prompts]

        def answer(prompt, k):
            reward, tokens, truncated = of(prompt, k)
            return Answer(prompt.ids, tokens, [-5.0] * len(tokens), reward, (reward,), truncated)

        drawn = []
        monkeypatch.setattr(Answerer, "load", lambda self, params: None)
        monkeypatch.setattr(Answerer, "answers", answers)
        return drawn

    return given


@pytest.mark.parametrize(("resample", "draws"), [(0, 1), (1, 2), (5, 3)])
def test_groups_with_equal_rewards_are_drawn_again(make_trainer, train, give, resample, draws):
    """Every second prompt has a signal, but none of the first draw."""

    def of(prompt, k):
        return (float(k) if len(drawn) > 1 and prompt.row % 2 else 1.0), [5, 6], False

    drawn = give(of)
    seen = train(make_trainer({"resample": resample}, steps=1))
    assert list(map(len, drawn)) == [4] * draws
    with_signal = np.abs(seen.batches[1]["advantages"]).sum(axis=1) > 0
    assert with_signal.reshape(4, 8).any(axis=1).sum() == {1: 0, 2: 2, 3: 4}[draws]
    assert seen.metrics[1].get("groups_drawn") == (4 * draws if resample else None)
    assert seen.metrics[1]["groups_without_signal"] == {1: 1.0, 2: 0.5, 3: 0.0}[draws]


def test_a_rollout_has_the_answers_of_several_steps(make_trainer, train, give):
    """Two steps, each twice; the policy that wrote them is that of the first."""
    drawn = give(lambda prompt, k: (float(k), [prompt.number + 4, k + 4], False))
    seen = train(make_trainer({"mini_batches": 2, "updates": 2}, steps=5))
    assert list(map(len, drawn)) == [8, 8]
    same(seen.batches[1], seen.batches[3])
    same(seen.batches[2], seen.batches[4])
    assert (seen.batches[1]["targets"] != seen.batches[2]["targets"]).any()
    ratios = [seen.metrics[step]["ratio"] for step in range(1, 6)]
    assert ratios[0] == pytest.approx(1.0, abs=1e-6) == ratios[4] and min(abs(r - 1) for r in ratios[1:4]) > 1e-4
    train(
        options := make_trainer({"mini_batches": 2, "updates": 2}, steps=2, model_dir=make_trainer().model_dir + "_2")
    )
    again = train(dataclasses.replace(options, steps=5))
    assert sorted(again.batches) == [3, 4, 5]
    same(again.batches[4], seen.batches[4])
    same(again.state.params, seen.state.params)


def test_answers_that_are_cut_off_are_masked_and_long_ones_punished(make_trainer, train, give):
    give(lambda prompt, k: (1.0, [5] * (k + 1), k == 7))
    seen = train(make_trainer({"mask_truncated": True, "overlong_tokens": 4, "missing_end_penalty": 0.5}, steps=1))
    batch = seen.batches[1]
    assert (batch["weights"].reshape(4, 8, -1).sum(-1) == [1, 2, 3, 4, 5, 6, 7, 0]).all()
    penalties, of_lengths = np.array([[0, 0, 0, 0, -0.25, -0.5, -0.75, -1.5], [0, 0, 0, 0, -0.25, -0.5, -0.75, -1]])
    gains = batch["advantages"].max(-1) + batch["advantages"].min(-1)
    want = (penalties - penalties.mean()) / (penalties.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(gains.reshape(4, 8)[:, :7], np.tile(want[:7], (4, 1)), rtol=1e-5)
    assert seen.metrics[1]["overlong_penalty"] == pytest.approx(of_lengths.mean()) and seen.metrics[1]["reward"] == 1.0
    assert seen.metrics[1]["missing_end_penalty"] == pytest.approx(-0.5 / 8)


def test_the_divergence_in_rewards_is_from_the_initial_weights(make_trainer, train, give):
    give(lambda prompt, k: (float(k), [k + 4, 9], False))
    options = {"kl": 0.5, "kl_in": "tokens", "baseline": "none", "scale": "tokens"}
    seen = train(make_trainer(options, steps=2))
    assert seen.metrics[1]["kl"] == 0.0 < abs(seen.metrics[2]["kl"]) and "reference" not in seen.batches[2]
    first, second = (
        [one["advantages"][row][one["weights"][row] > 0] for row in range(32)] for one in seen.batches.values()
    )
    assert all(row[0] == row[1] for row in first) and all(row[0] != row[1] for row in second)


# Mistakes.


@pytest.mark.parametrize(
    ("reward", "answer", "said"),
    [
        (functions.numeric_answer, {"answer": "1,5"}, r"'1,5': it must hold a number that has one reading"),
        (functions.numeric_answer, {"answer": "none"}, r"'none': it must hold a number"),
        (functions.exact_answer, {"result": "5"}, r"a record has no field 'answer'"),
        (JsonAnswer(field="answer"), {"answer": "{"}, r"must be a JSON Schema"),
    ],
)
def test_a_record_that_a_ready_reward_cannot_use_is_named_before_anything_is_compiled(
    make_trainer, train, tmp_path, monkeypatch, reward, answer, said
):
    lines = [{"prompt": f"{i}?", "answer": "{}" if isinstance(reward, JsonAnswer) else str(i)} for i in range(40)]
    lines[20:] = [{"prompt": line["prompt"]} | answer for line in lines[20:]]  # some of which are not for validation
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *_, **__: pytest.fail("compiled"))
    with pytest.raises(UserError, match=rf"prompts.jsonl:(2[1-9]|3\d): .*{said}"):
        train(make_trainer({"rewards": (has_digit, reward)}))


def test_rewards_must_be_finite_numbers(make_trainer, train):
    for value in (float("nan"), None, "1"):

        def broken(prompt, answer, record):
            return value

        with pytest.raises(
            UserError, match=r"broken returned .* for an answer to .*prompts.jsonl:\d+: it must return a finite"
        ):
            train(make_trainer({"rewards": (broken,)}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rewards": ()}, "Grpo.rewards is empty"),
        ({"group": 1}, "Grpo.group is 1, must be at least 2"),
        ({"group": 5}, r"Plan.batch_size \(32\) must be a multiple of Grpo.group \(5\): try 30"),
        ({"reward_weights": (1.0, 2.0)}, "as many as Grpo.rewards"),
        ({"sampling": Sampling(temperature=0.0)}, "temperature is 0.0, must be finite and above 0"),
        ({"sampling": Sampling(temperature=float("inf"))}, "temperature is inf"),
        ({"sampling": Sampling(top_k=50)}, "Grpo's Sampling.top_k is 50, .* leave it out, and lower"),
        ({"sampling": Sampling(top_p=0.9)}, "Grpo's Sampling.top_p is 0.9, .* leave it out, and lower"),
        ({"sampling": Sampling(min_p=0.1)}, "Grpo's Sampling.min_p is 0.1, .* leave it out, and lower"),
        ({"sampling": Sampling(repetition_penalty=1.1)}, "Grpo's Sampling.repetition_penalty is 1.1, .* leave it out"),
        ({"importance_cap": 0.5}, "Grpo.importance_cap is 0.5, must be at least 1"),
        ({"sampling": Sampling(max_new_tokens=LENGTH)}, "leaves prompts no room"),
        (
            {"engine": EngineConfig(page_size=8, pages=(LENGTH - 1) // 8)},
            rf"EngineConfig.pages .*too few for a row .* set EngineConfig.pages = {-(-(LENGTH - 1) // 8)} or more",
        ),
        ({"sampling": Sampling(max_new_tokens=NEW, thinking_tokens=2)}, "Sampling.thinking_tokens forces tokens"),
        ({"rewards": (Plan,)}, r"has Plan, which does not take \(prompt, answer, record\)"),
        ({"rewards": (functions.matches_pattern,)}, "matches_pattern.pattern has no value"),
    ],
)
def test_mistakes_in_the_configuration_are_named(make_trainer, changes, said):
    with pytest.raises(UserError, match=said):
        make_trainer(changes)


def test_answers_that_are_not_used_up_are_not_answers_of_other_options(make_trainer, train):
    train(make_trainer(steps=1))
    with pytest.raises(
        UserError,
        match=r"Grpo.updates, mini_batches \(1\) or the use of a reference was changed within the rollout of step 1",
    ):
        train(make_trainer({"updates": 2}, steps=2))


def test_prompts_that_leave_no_room_for_an_answer_are_refused(make_trainer, train):
    with pytest.raises(UserError, match="no prompt of a row .* raise Dataset.length by [1-9]"):
        train(make_trainer({"sampling": Sampling(max_new_tokens=LENGTH - 4)}))


def test_a_run_of_texts_asks_for_a_source_of_prompts(make_trainer):
    with pytest.raises(UserError, match="set Trainer.loss = @Grpo()"):
        dataclasses.replace(make_trainer(), loss=None)
    with pytest.raises(UserError, match="must be 'none' with @Grpo"):
        make_trainer(dataset=dataclasses.replace(make_trainer().dataset, packing="best_fit"))


# Ready rewards.


def test_ready_rewards():
    record = {"answer": "The  Capybara", "n": "#### 1,250", "m": 0.5}
    assert functions.exact_answer("", " the capybara ", record) == 1.0
    assert functions.exact_answer("", "a capybara", record) == 0.0
    assert functions.exact_answer("", "so <a>x</a> <a>the capybara</a>.", record, pattern="<a>(.*?)</a>") == 1.0
    assert functions.exact_answer("", "the capybara", record, pattern="<a>(.*?)</a>") == 0.0
    assert functions.numeric_answer("", "12 and so 1250.", record, field="n") == 1.0
    assert functions.numeric_answer("", "1250 or 12", record, field="n") == 0.0
    assert functions.numeric_answer("", "nothing", record, field="n") == 0.0
    assert functions.numeric_answer("", "it is .5", record, field="m") == 1.0
    assert functions.matches_pattern("", "<think>a\nb</think> 4\n", record, pattern="<think>.*</think>.+") == 1.0
    assert functions.matches_pattern("", "4", record, pattern="<think>.*</think>.+") == 0.0
    with pytest.raises(UserError, match="is no regular expression"):
        functions.exact_answer("", "", record, pattern="(")
    with pytest.raises(UserError, match="no field 'x'"):
        functions.exact_answer("", "", record, field="x")
    with pytest.raises(UserError, match="must hold a number"):
        functions.numeric_answer("", "", record)
