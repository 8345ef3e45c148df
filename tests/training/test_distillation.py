"""Whole runs with a teacher: on a mesh, with drawn answers, with stored log-probabilities, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

import capibara as cb
from capibara.checkpoints.manager import Checkpointing
from capibara.core.types import UserError
from capibara.inference.engine.engine import EngineConfig
from capibara.models import api
from capibara.sharding import Plan
from capibara.strategies.distillation import storing
from capibara.training import run_folder
from capibara.training.base.options import Evaluation

MODEL = cb.DecoderConfig(vocab_size=384, embed_dim=32, num_layers=1, num_heads=2, mlp_dim=64, dtype="float32")
LARGE = dataclasses.replace(MODEL, embed_dim=64, num_heads=4)


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("chats") / "chats.jsonl"
    lines = []
    for i in range(60):
        words = rng.choice(["river", "grass", "fish", "sun"], 1 + i % 3)
        lines.append({"prompt": f"{i}?", "completion": " ".join(words)})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A run folder with other weights than a student begins with."""
    folder = str(tmp_path_factory.mktemp("teacher") / "run")
    params = jax.jit(api.build(LARGE).init)(jax.random.key(7))
    run_folder.save(folder, jax.tree.map(lambda x: 3 * x, params), "")
    return cb.Teacher(path=folder, model=LARGE)


@pytest.fixture
def make_trainer(chats, teacher, toy_tokenizer, tmp_path):
    source = cb.ChatJsonlSource(
        files=(str(chats),), template=cb.ChatTemplate(tokenizer=toy_tokenizer), validation_fraction=0.3
    )
    vocabulary = cb.TokenizerJsonVocabulary(path=toy_tokenizer)
    base = cb.Trainer(
        model_dir=str(tmp_path / "run"),
        steps=3,
        model=MODEL,
        plan=Plan(batch_size=8),
        dataset=cb.Dataset(source=source, vocabulary=vocabulary, length=48, packing="none"),
        optimizer=cb.Optimizer(
            schedule=cb.Schedule(kind="rsqrt", learning_rate=1e-2, warmup_steps=1), weight_decay=0.0
        ),
        evaluation=Evaluation(every=0),
        checkpointing=Checkpointing(every=0),
        loss=cb.Distillation(
            teacher=teacher,
            sampling=cb.Sampling(max_new_tokens=12, temperature=1.0),
            engine=EngineConfig(slots=8, prefix_cache_mib=0),
        ),
        log_every=1,
    )

    def make(loss=(), **changes):
        return dataclasses.replace(base, loss=dataclasses.replace(base.loss, **dict(loss)), **changes)

    return make


def test_the_student_comes_closer_to_its_teacher(make_trainer, train):
    seen = train(make_trainer(steps=30, evaluation=Evaluation(every=30)), jax.devices()[:2])
    first, last = seen.metrics[1], seen.metrics[30]
    assert last["divergence"] < 0.8 * first["divergence"] and first["loss"] == first["divergence"]
    assert seen.evaluations[30]["divergence"] < 0.85 * first["divergence"]


MESHES = {
    "all tokens": ({}, Plan(batch_size=8, data=2, fsdp=2, tensor=2), 8),
    "top_k": ({"top_k": 5, "hard_weight": 0.3, "temperature": 2.0}, Plan(batch_size=8, fsdp=2, context=2), 4),
    "accumulation": ({"beta": 0.0}, Plan(batch_size=8, fsdp=4, accumulation=2), 4),
}


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_changes_nothing(name, make_trainer, train):
    loss, plan, count = MESHES[name]
    runs = []
    for at, devices in ((Plan(batch_size=8), 1), (plan, count)):
        trainer = make_trainer(loss, plan=at, model_dir=f"{make_trainer().model_dir}{devices}")
        runs.append(train(trainer, jax.devices()[:devices]))
    for step in (1, 2, 3):
        for key in ("loss", "grad_norm", "nll", "agreement"):
            one, other = (run.metrics[step][key] for run in runs)
            assert other == pytest.approx(one, rel=2e-4, abs=1e-5), (step, key)


@pytest.mark.parametrize(
    "loss", [{"on_policy": 1.0}, {"teacher_draws": True}, {"on_policy": 0.5, "teacher_draws": True}]
)
def test_answers_are_drawn(loss, make_trainer, train):
    """On each step by one of both; the prompts are those of the data."""
    seen = train(make_trainer(loss, steps=6), jax.devices()[:1])
    given = train(make_trainer(steps=6, model_dir=make_trainer().model_dir + "_given"), jax.devices()[:1])
    shares = [seen.metrics[step].get("on_policy", 0.0) for step in range(1, 7)]
    assert {1.0: {1.0}, 0.5: {0.0, 1.0}, 0.0: {0.0}}[loss.get("on_policy", 0.0)] == set(shares)
    assert all(one != other for one, other in zip(seen.batches, given.batches))
    assert seen.metrics[6]["divergence"] < seen.metrics[1]["divergence"]


def test_an_interrupted_run_draws_the_same_answers(make_trainer, train):
    one = jax.devices()[:1]
    whole = train(make_trainer({"on_policy": 0.5}, steps=6, model_dir=make_trainer().model_dir + "_whole"), one)
    train(make_trainer({"on_policy": 0.5}, steps=3), one)
    resumed = train(make_trainer({"on_policy": 0.5}, steps=6), one)
    assert resumed.start_step == 3 and whole.batches[3:] == resumed.batches
    jax.tree.map(np.testing.assert_array_equal, whole.state.params, resumed.state.params)


def test_adapters_are_trained(make_trainer, train):
    model = dataclasses.replace(MODEL, lora=cb.Lora(rank=4, targets=("all-linear",)))
    seen = train(make_trainer(steps=6, model=model), jax.devices()[:1])
    assert seen.metrics[6]["divergence"] < seen.metrics[1]["divergence"]


REFUSED = {
    "beta is 2": {"beta": 2.0},
    "temperature is 0": {"temperature": 0.0},
    "top_k is 0": {"top_k": 0},
    "top_k \\(384\\) must be below the vocabulary": {"top_k": 384},
    "exactly one of teacher and stored, and both": {"stored": "there"},
    "exactly one of teacher and stored, and neither": {"teacher": None},
    "leaves prompts no room": {"on_policy": 1.0, "sampling": cb.Sampling(max_new_tokens=48, temperature=1.0)},
    "on_policy is 1.0, and Distillation.stored": {"on_policy": 1.0, "stored": "there", "teacher": None},
    "has no manifest.json": {"stored": "there", "teacher": None},
    "does not exist": {"teacher": cb.Teacher(path="nowhere", model=LARGE)},
    "set Distillation.top_k = 64": {
        "teacher": cb.Teacher(path="nowhere", model=dataclasses.replace(LARGE, vocab_size=400))
    },
    "num_decodes is set": {"on_policy": 1.0, "sampling": cb.Sampling(max_new_tokens=8, num_decodes=2)},
}


@pytest.mark.parametrize("error", REFUSED)
def test_mistakes_are_named_before_anything_compiles(error, make_trainer, train, monkeypatch):
    monkeypatch.setattr("capibara.training.setup.compile_step", None)
    with pytest.raises(UserError, match=error):
        train(make_trainer(REFUSED[error]), jax.devices()[:1])


def test_a_teacher_that_the_mesh_does_not_divide_is_named(make_trainer, train, monkeypatch):
    monkeypatch.setattr("capibara.training.setup.compile_step", None)
    odd = cb.Teacher(path=make_trainer().loss.teacher.path, model=dataclasses.replace(LARGE, num_heads=1))
    with pytest.raises(UserError, match=r"Distillation.teacher: .*'kv_heads' \(1\) must be a multiple of tensor=2"):
        train(make_trainer({"teacher": odd}, plan=Plan(batch_size=8, tensor=2)), jax.devices()[:2])


def test_packed_rows_have_no_prompts(make_trainer):
    packed = dataclasses.replace(make_trainer().dataset, packing="best_fit")
    with pytest.raises(UserError, match=r"packing \('best_fit'\) must be 'none'"):
        make_trainer({"on_policy": 1.0}, dataset=packed)


def test_what_is_stored_teaches_as_the_teacher_does(make_trainer, train, tmp_path):
    """With the same tokens, packed and in another order; other documents are named."""
    dataset = dataclasses.replace(make_trainer().dataset, packing="best_fit", window_rows=2, window_documents=16)
    options = dict(dataset=dataset, steps=4, evaluation=Evaluation(every=4))
    trainer, folder = make_trainer({"top_k": 6, "temperature": 2.0}, **options), str(tmp_path / "stored")
    stored = storing.store(trainer, trainer.loss, trainer.loss.teacher, folder, load=None, show=lambda *_: None)
    assert stored.top_k == 6 and stored.documents > 50
    want = train(trainer, jax.devices()[:2])
    alone = {"teacher": None, "stored": folder, "top_k": None, "temperature": 2.0}
    got = train(make_trainer(alone, **options | {"model_dir": trainer.model_dir + "_stored"}), jax.devices()[:2])
    for name in ("loss", "grad_norm", "agreement"):
        assert got.metrics[4][name] == pytest.approx(want.metrics[4][name], rel=1e-5), name
    assert got.evaluations[4] == pytest.approx(want.evaluations[4], rel=1e-5)
    with pytest.raises(UserError, match=r"temperature is 1.0, and Distillation.stored \(.*\) is of 2.0"):
        train(make_trainer(alone | {"temperature": 1.0}, **options | {"model_dir": folder + "_run"}), jax.devices()[:1])
    with pytest.raises(UserError, match="has nothing on a document of the data"):
        source = dataclasses.replace(dataset.source, train_on="all")
        other = options | {"dataset": dataclasses.replace(dataset, source=source), "model_dir": folder + "_other"}
        train(make_trainer(alone, **other), jax.devices()[:1])
