"""PPO: the loss and its gradient against the papers' formulas in float64, whole runs with a value head, and mistakes."""

from __future__ import annotations

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import capibara as cb
from capibara.checkpoints.manager import Checkpointing
from capibara.core.types import UserError
from capibara.data.chat.answers import PromptJsonlSource
from capibara.data.chat.template import ChatTemplate
from capibara.data.dataset import Dataset
from capibara.data.tokenizers.vocabulary import TokenizerJsonVocabulary
from capibara.inference.engine.engine import EngineConfig
from capibara.inference.sampling.sampling import Sampling
from capibara.models.api import DecoderConfig, Lora
from capibara.monitoring.metrics_file.loggers import read_metrics
from capibara.optim import Optimizer, Schedule
from capibara.sharding import Plan
from capibara.strategies.answering import Answer, Answerer
from capibara.strategies.policy.clipped import Clipped
from capibara.strategies.ppo import Ppo
from capibara.strategies.rewards.functions import exact_answer, numeric_answer
from capibara.training import loop
from capibara.training.base.callbacks import Callback
from capibara.training.base.options import Evaluation
from capibara.training.trainer import Trainer

LENGTH, NEW, ROWS = 24, 8, 8
SIZES = dict(vocab_size=384, embed_dim=32, num_layers=1, num_heads=2, mlp_dim=64, dtype="float32")


def has_digit(prompt, answer, record):
    return float(any(letter.isdigit() for letter in answer))


def ppo(**options):
    return Ppo(rewards=(has_digit,), sampling=Sampling(max_new_tokens=NEW, temperature=1.0), **options)


@pytest.fixture
def make_trainer(tmp_path, toy_tokenizer):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}?", "answer": str(i)}) + "\n" for i in range(40)))
    source = PromptJsonlSource(files=(str(path),), template=ChatTemplate(tokenizer=toy_tokenizer))
    base = Trainer(
        model_dir=str(tmp_path / "run"),
        steps=4,
        model=DecoderConfig(**SIZES, value_head=True),
        plan=Plan(batch_size=ROWS),
        dataset=Dataset(
            source=dataclasses.replace(source, validation_fraction=0.2),
            vocabulary=TokenizerJsonVocabulary(path=toy_tokenizer),
            length=LENGTH,
            packing="none",
        ),
        optimizer=Optimizer(schedule=Schedule(kind="rsqrt", learning_rate=1e-2, warmup_steps=1), weight_decay=0.0),
        evaluation=Evaluation(every=0),
        checkpointing=Checkpointing(every=0),
        loss=ppo(updates=2, kl=0.1, kl_target=1.0, kl_horizon=16, engine=EngineConfig(slots=8, prefix_cache_mib=0)),
        log_every=1,
    )

    def make(loss=(), **changes):
        return dataclasses.replace(base, loss=dataclasses.replace(base.loss, **dict(loss)), **changes)

    return make


class Seen(Callback):
    def __init__(self):
        self.metrics, self.batches = {}, {}

    def on_step(self, step, metrics):
        self.metrics[step] = dict(metrics)


@pytest.fixture
def train(monkeypatch):
    """(trainer, number of devices) -> metrics and batches by step, the last state."""
    set_up = loop.set_up

    def run_it(trainer, devices=1):
        seen = Seen()

        def watched(trainer, **options):
            seen.run, initial = set_up(trainer, jax.devices()[:devices], **options)
            return dataclasses.replace(seen.run, train_step=stepping), initial

        def stepping(state, batch):
            seen.batches[int(state.step) + 1] = jax.device_get(batch)
            state, metrics = seen.run.train_step(state, batch)
            seen.state = jax.device_get(state)
            return state, metrics

        monkeypatch.setattr(loop, "set_up", watched)
        loop.train(trainer, seen)
        return seen

    return run_it


@pytest.fixture
def given(monkeypatch):
    """Answers without an engine: the reward of the last token, and of the prompt."""

    def answers(self, split, prompts, samplings, what):
        return [[answer(prompt)] for prompt in prompts]

    def answer(prompt):
        tokens = [4 + (prompt.number * k) % 90 for k in range(2 + prompt.number % 5)]
        reward = float(prompt.number % 3)
        return Answer(prompt.ids, tokens, [-5.9] * len(tokens), reward, (reward,), False)

    monkeypatch.setattr(Answerer, "load", lambda self, params: None)
    monkeypatch.setattr(Answerer, "answers", answers)


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_drawn_beside_training_without_staleness_it_trains_as_drawn_in_turn(make_trainer, train):
    turns = train(make_trainer(steps=3, model_dir=make_trainer().model_dir + "_turns"))
    apart = train(make_trainer({"rollout_devices": 1, "max_staleness": 0}, steps=3), devices=2)
    same(turns.batches, apart.batches)
    same(turns.state, apart.state)
    stale = train(make_trainer({"rollout_devices": 1}, model_dir=make_trainer().model_dir + "_stale"), devices=2)
    assert stale.metrics[1]["staleness"] == 0 and stale.metrics[3]["staleness"] == 2


@pytest.mark.parametrize("value_clip", [0.2, None])
def test_the_loss_and_its_gradient_equal_the_formula_in_float64(value_clip):
    rng, (rows, length) = np.random.default_rng(0), (5, 10)
    weights = (np.arange(length) < rng.integers(2, 10, (rows, 1))).astype(float)
    old = -rng.uniform(1, 4, (rows, length))
    log_p, drawn = old + rng.normal(0, 0.3, (2, rows, length))
    before, value, wanted, gains = rng.normal(0, 0.3, (4, rows, length))
    loss = ppo(clip=Clipped(low=0.1, high=0.2), value_clip=value_clip, value_weight=0.7, importance_cap=1.2)
    want, by_log_p, by_value, clipped = 0.0, np.zeros_like(log_p), np.zeros_like(log_p), 0
    for b, t in zip(*np.nonzero(weights)):
        ratio, weight = np.exp(log_p[b, t] - old[b, t]), min(np.exp(old[b, t] - drawn[b, t]), 1.2)
        bounded = min(max(ratio, 0.9), 1.2)
        is_held = bounded * gains[b, t] < ratio * gains[b, t]
        want -= weight * min(ratio * gains[b, t], bounded * gains[b, t])
        by_log_p[b, t] = -(not is_held) * weight * ratio * gains[b, t]
        error, slope = value[b, t] - wanted[b, t], 1.0
        if value_clip is not None:
            near = min(max(value[b, t], before[b, t] - value_clip), before[b, t] + value_clip)
            if (near - wanted[b, t]) ** 2 > error**2:
                error, slope, clipped = near - wanted[b, t], float(near == value[b, t]), clipped + 1
        want += 0.7 * 0.5 * error**2
        by_value[b, t] = 0.7 * error * slope
    batch = {"advantages": weights * gains, "old": old, "drawn": drawn, "values": before, "returns": wanted}
    batch |= {"weights": weights, "segment_ids": np.ones((rows, length))}
    batch = {name: jnp.asarray(x, jnp.float32) for name, x in batch.items()}
    given = jnp.asarray(log_p, jnp.float32), jnp.asarray(value, jnp.float32)
    (got, totals), gradients = jax.value_and_grad(loss.totals, (0, 1), has_aux=True)(*given, batch)
    assert float(got) == pytest.approx(want, rel=1e-5) and float(totals.weight) == weights.sum()
    np.testing.assert_allclose(gradients[0], by_log_p, atol=1e-5)
    np.testing.assert_allclose(gradients[1], by_value, atol=1e-5)
    assert float(totals.values["value_clip_fraction"]) == clipped and (clipped > 0) == (value_clip is not None)


def test_batches_have_normalised_advantages_and_returns_of_the_values(make_trainer, train, given):
    seen = train(make_trainer(steps=3))
    same(seen.batches[1], seen.batches[2])
    for step in (1, 3):
        batch = seen.batches[step]
        at = batch["weights"] > 0
        gains, returns = batch["advantages"][at], batch["returns"][at]
        assert abs(gains.mean()) < 1e-5 and gains.std(ddof=1) == pytest.approx(1.0, abs=1e-5)
        apart = (returns - batch["values"][at]) / gains  # before they were normalised
        slope, offset = np.polyfit(gains, returns - batch["values"][at], 1)
        np.testing.assert_allclose(gains * slope + offset, returns - batch["values"][at], atol=1e-5)
        assert slope > 0 and apart.shape == gains.shape
        assert (batch["values"][~at] == 0).all() and np.abs(batch["values"][at]).max() > 1e-3
    assert seen.metrics[1]["ratio"] == pytest.approx(1.0, abs=1e-5) != seen.metrics[2]["ratio"]
    assert seen.metrics[1]["kl"] == 0.0 and seen.metrics[3]["kl"] != 0.0
    assert seen.metrics[2]["value_loss"] < seen.metrics[1]["value_loss"]


def test_the_coefficient_of_the_divergence_is_controlled_and_resumed(make_trainer, train, given):
    """Of 8 answers and a horizon of 16: at a divergence of 0 it falls by 0.2 * 8 / 16."""
    whole = train(make_trainer(steps=5, model_dir=make_trainer().model_dir + "_whole"))
    assert whole.metrics[1]["kl_coefficient"] == pytest.approx(0.1)
    assert whole.metrics[3]["kl_coefficient"] == pytest.approx(0.1 * 0.9)
    assert "kl_coefficient" not in whole.metrics[2]
    train(make_trainer(steps=3))
    resumed = train(make_trainer(steps=5))
    assert resumed.metrics[5]["kl_coefficient"] == whole.metrics[5]["kl_coefficient"] != 0.1
    same(resumed.state.params, whole.state.params)


def test_a_mesh_and_one_device_train_alike(make_trainer, train, given):
    options = dict(loss={"mini_batches": 2}, steps=3)
    want = train(make_trainer(**options, model_dir=make_trainer().model_dir + "_one"))
    got = train(make_trainer(**options, plan=Plan(batch_size=ROWS, data=2, fsdp=2, tensor=2)), 8)
    for step in (1, 2, 3):
        for key in ("loss", "grad_norm", "value_loss", "ratio"):
            assert got.metrics[step][key] == pytest.approx(want.metrics[step][key], rel=1e-3, abs=1e-5), (step, key)


@pytest.mark.heavy
def test_adapters_and_values_begin_from_any_model_and_values_stay_behind(make_trainer, tmp_path):
    """The engine answers with a model that has values; what begins from its run, and what others load, has none."""
    base = make_trainer({"rewards": (numeric_answer,), "kl_target": None, "kl_horizon": 10_000}, steps=2)
    plain = dataclasses.replace(base.model, value_head=False)
    texts = dict(loss=None, dataset=_texts(base.dataset), model=plain, steps=1)
    cb.train(dataclasses.replace(base, model_dir=f"{tmp_path}/plain", **texts))
    lora = dataclasses.replace(base.model, lora=Lora(rank=4, targets=("all-linear",)))
    path = base.model_dir
    cb.train(dataclasses.replace(base, model=lora, init_from=f"{tmp_path}/plain"))
    first = next(one for one in read_metrics(f"{path}/metrics.jsonl") if "value_loss" in one)
    assert first["engine_difference"] < 1e-5 and 0 < first["value_loss"]
    cb.train(dataclasses.replace(base, model_dir=f"{tmp_path}/again", init_from=path, **texts))
    cb.convert(path, f"{tmp_path}/hf", format="hf")
    names = safetensors.numpy.load_file(tmp_path / "hf" / "model.safetensors")
    assert len(names) > 5 and not [name for name in names if "critic" in name]
    with pytest.raises(UserError, match="--format=peft has no value heads: use hf"):
        cb.convert(path, f"{tmp_path}/peft", format="peft")


def _texts(dataset):
    from capibara.data.sources.sources import StdlibSource

    return dataclasses.replace(dataset, source=StdlibSource())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ppo(gamma=1.5), "Ppo.gamma is 1.5, must be from 0 to 1: try 1.0"),
        (lambda: ppo(gae_lambda=-0.1), "Ppo.gae_lambda is -0.1, must be from 0 to 1: try 0.95"),
        (lambda: ppo(value_clip=0.0), "Ppo.value_clip is 0.0, must be above 0, or None: try 0.2"),
        (lambda: ppo(value_weight=0.0), "Ppo.value_weight is 0.0, must be above 0: try 0.1"),
        (lambda: ppo(kl_target=-1.0), "Ppo.kl_target is -1.0 and Ppo.kl is 0.05, both must be above 0"),
        (lambda: ppo(kl_target=6.0, kl=0.0), "Ppo.kl_target is 6.0 and Ppo.kl is 0.0, both must be above 0"),
        (lambda: ppo(kl_horizon=0), "Ppo.kl_horizon is 0, must be at least 1: try 10000"),
        (lambda: ppo(importance_cap=0.5), "Ppo.importance_cap is 0.5, must be at least 1, or None: try 2.0"),
        (
            lambda: ppo().check_model(DecoderConfig(**SIZES)),
            "Trainer.loss is @Ppo(), and DecoderConfig.value_head is False: set it to True",
        ),
        (lambda: DecoderConfig(**SIZES, value_head=True, head="score"), "DecoderConfig.value_head is True, which causal"),
    ],
)  # fmt: skip
def test_mistakes_are_named_in_a_line(make, said):
    with pytest.raises(UserError, match=re.escape(said)) as error:
        make()
    assert "\n" not in str(error.value)


def test_other_losses_refuse_a_value_head(make_trainer):
    with pytest.raises(UserError, match=r"value_head is True, which only @Ppo\(\) reads, and Trainer.loss is Grpo"):
        from capibara.strategies.grpo import Grpo

        Grpo(rewards=(exact_answer,)).check_model(make_trainer().model)
