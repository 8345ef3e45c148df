"""Evaluation: sums over real tokens of the whole split, the same on every mesh."""

from __future__ import annotations

import dataclasses
import json
import math

import jax
import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.data.pipeline.loader import make_loader
from capibara.data.sources.sources import JsonlSource
from capibara.models.parts.moe import Hints, Moe
from capibara.objectives.batches import Reporter
from capibara.sharding import Plan
from capibara.training import assembly
from capibara.training.base.options import Evaluation
from capibara.training.evaluation import evaluate
from capibara.training.setup import set_up


def metrics_of(trainer, devices=None):
    run, initial = set_up(trainer, devices)
    ignore = lambda *_, **options: None  # noqa: E731
    with run:
        state = assembly.begin(run, initial).state
        evaluator = assembly.evaluator(run, Reporter(ignore, ignore, ignore, ignore))
        return run, state, evaluator.metrics(state.eval_params)


def test_the_whole_split_counts_once_on_every_mesh(make_trainer, tmp_path):
    run, state, metrics = metrics_of(make_trainer(evaluation=Evaluation(unigram_batches=2)))
    dataset = make_trainer().dataset
    batches = list(make_loader(dataset, split="validation", batch_size=8, epochs=1))
    tokens = sum(batch["weights"].sum() for batch in batches)
    text_bytes = sum(dataset.vocabulary.token_bytes()[b["targets"][b["weights"] > 0]].sum() for b in batches)
    assert metrics["tokens"] == tokens and len(batches) > 2 and batches[-1]["weights"].sum(-1).min() == 0
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))
    assert metrics["bits_per_byte"] == pytest.approx(metrics["loss"] * tokens / math.log(2) / text_bytes, rel=1e-6)

    logits_of = jax.jit(run.model.logits)
    nll = sum(_nll(logits_of(state.params, batch), batch) for batch in batches)  # by hand, in float64
    assert metrics["loss"] == pytest.approx(nll / tokens, rel=1e-5)
    assert 2 < metrics["unigram_bits_per_byte"] < 6

    one = make_trainer(plan=Plan(batch_size=8), model_dir=str(tmp_path / "one"), evaluation=Evaluation(batch_size=3))
    _, _, other = metrics_of(one, jax.devices()[:1])
    assert other["loss"] == pytest.approx(metrics["loss"], rel=1e-5) and other["tokens"] == tokens


def _nll(logits, batch):
    logits = np.asarray(logits, np.float64)
    log_total = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    target = np.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
    return ((log_total - target) * batch["weights"]).sum()


def test_no_batch_is_a_mistake_with_its_remedy():
    with pytest.raises(UserError, match="set Evaluation.every = 0"):
        evaluate(lambda params, batch: None, {}, [], None)


def test_evaluations_of_experts_have_their_load_and_the_accuracy_of_each_domain(make_trainer, tmp_path):
    path = tmp_path / "domains.jsonl"
    texts = [("abab" if i % 2 else "0101") * (3 + i % 9) for i in range(100)]
    path.write_text(
        "".join(json.dumps({"text": text, "domain": "code" if text[0] == "a" else "prose"}) + "\n" for text in texts)
    )
    base = make_trainer()
    hints = Hints(domains=("code", "prose", "none"), experts=((0, 1), (2, 3), (0,)), decay_steps=10)
    model = dataclasses.replace(base.model, moe=Moe(num_experts=4, top_k=1, hints=hints))
    source = JsonlSource(files=(str(path),), validation_fraction=0.5)
    dataset = dataclasses.replace(base.dataset, source=source, domains=hints.domains)
    of_mesh = []
    for name, devices, plan in (("all", None, base.plan), ("one", jax.devices()[:1], Plan(batch_size=4))):
        trainer = make_trainer(model=model, dataset=dataset, plan=plan, model_dir=str(tmp_path / name))
        of_mesh.append(metrics_of(trainer, devices)[2])
    first, second = of_mesh
    assert sum(first[f"expert_load/{expert}"] for expert in range(4)) == pytest.approx(4.0, rel=1e-5)
    assert 0 <= first["hint_accuracy/code"] <= 1 and "hint_accuracy/none" not in first
    assert min(first["hint_accuracy/code"], first["hint_accuracy/prose"]) <= first["hint_accuracy"]
    assert {name: value for name, value in second.items() if "hint" in name or "load" in name} == pytest.approx(
        {name: value for name, value in first.items() if "hint" in name or "load" in name}, abs=2e-3
    )
