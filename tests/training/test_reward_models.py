"""Whole runs of reward models: from a language model to scores, their evaluation and their Hugging Face folder."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

import capibara as cb
from capibara.checkpoints.manager import Checkpointing
from capibara.cli import evaluate as evaluate_verb
from capibara.cli.composition import models
from capibara.core.types import UserError
from capibara.data.chat.formats import Conversation
from capibara.multihost import exits
from capibara.objectives.cpo import Cpo
from capibara.objectives.reward import Reward
from capibara.sharding import Plan
from capibara.training.base.options import Evaluation

MODEL = cb.DecoderConfig(vocab_size=384, embed_dim=32, num_layers=1, num_heads=2, mlp_dim=64, dtype="float32")
SCORES = dataclasses.replace(MODEL, head="score")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Pairs whose chosen answers are in capitals, some with a margin."""
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    lines = []
    for i in range(60):
        word = str(rng.choice(["river", "grass", "fish", "sun"]))
        pair = {"prompt": f"{i}?", "chosen": word.upper() + "!" * (i % 4), "rejected": word}
        lines.append(pair | ({"margin": 0.5} if i % 2 else {}))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def make_trainer(pairs, toy_tokenizer, tmp_path):
    def make(scored=True, **changes):
        source = cb.PreferenceJsonlSource(
            files=(str(pairs),),
            template=cb.ChatTemplate(tokenizer=toy_tokenizer),
            validation_fraction=0.3,
            scored=scored,
        )
        vocabulary = cb.TokenizerJsonVocabulary(path=toy_tokenizer)
        dataset = cb.Dataset(
            source=source, vocabulary=vocabulary, length=96, window_rows=2, window_documents=16, shuffle=False
        )
        options = dict(
            model_dir=str(tmp_path / "run"),
            steps=4,
            model=SCORES,
            plan=Plan(batch_size=8, fsdp=2),
            dataset=dataset,
            optimizer=cb.Optimizer(schedule=cb.Schedule(learning_rate=3e-3, warmup_steps=1), weight_decay=0.0),
            evaluation=Evaluation(every=0),
            checkpointing=Checkpointing(every=4),
            loss=Reward(),
            log_every=1,
        )
        return cb.Trainer(**options | changes)

    return make


def test_a_mesh_changes_nothing(make_trainer, train):
    runs = []
    for devices, plan in ((1, Plan(batch_size=8)), (8, Plan(batch_size=8, data=2, fsdp=2, tensor=2))):
        options = dict(plan=plan, evaluation=Evaluation(every=4), checkpointing=Checkpointing(every=0))
        runs.append(
            train(make_trainer(model_dir=f"{make_trainer().model_dir}{devices}", **options), jax.devices()[:devices])
        )
    want, got = runs
    for step in (1, 2, 3, 4):
        for key in ("loss", "grad_norm", *Reward.means):
            assert got.metrics[step][key] == pytest.approx(want.metrics[step][key], rel=2e-4, abs=2e-5), key
    assert want.metrics[4]["loss"] < want.metrics[1]["loss"]
    assert got.evaluations[4]["reward_accuracy"] == want.evaluations[4]["reward_accuracy"] >= 0.9


@pytest.mark.parametrize(
    ("head", "lora"),
    [("separate", None), pytest.param("tied", cb.Lora(rank=4, targets=("all-linear",)), marks=pytest.mark.heavy)],
)
def test_a_language_model_becomes_a_folder_of_transformers(head, lora, make_trainer, tmp_path):
    """Of all weights, and of adapters; a score of the folder is the run's, and the run is evaluated on held-out pairs."""
    plan, language_model = Plan(batch_size=8, fsdp=8), dataclasses.replace(MODEL, head=head)
    cb.train(make_trainer(scored=False, model=language_model, loss=Cpo(), model_dir=str(tmp_path / "lm"), plan=plan))
    model, begun = dataclasses.replace(SCORES, lora=lora), str(tmp_path / "lm")
    run = make_trainer(model=model, init_from=begun, plan=plan, steps=8, checkpointing=Checkpointing(every=8))
    cb.train(run)
    folder = cb.convert(run.model_dir, str(tmp_path / "hf"), dtype="f32")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"] and config["id2label"] == {"0": "LABEL_0"}
    text = "<|turn|>u:1?<|end|><|turn|>a:RIVER<|end|>"
    scores = cb.load(run.model_dir).logits(text)
    assert scores.shape[-1] == 1 and np.ptp(scores) > 0
    np.testing.assert_allclose(cb.load(folder).logits(text), scores, rtol=1e-5, atol=1e-6)
    assert exits.run_verb(evaluate_verb.main, [f"--model_dir={run.model_dir}", f"--out={tmp_path}/found.json"]) == 0
    metrics = json.loads((tmp_path / "found.json").read_text())["tasks"]["validation"]["metrics"]
    assert metrics["reward_accuracy"]["value"] >= 0.8 and metrics["pairs"]["value"] > 5
    with pytest.raises(UserError, match="--format=gguf has no reward models: use hf, pytorch or capibara"):
        cb.convert(run.model_dir, str(tmp_path / "model.gguf"))
    if lora is not None:
        with pytest.raises(UserError, match="--format=peft has no reward models: use hf, which merges the adapters"):
            cb.convert(run.model_dir, str(tmp_path / "adapter"), format="peft")
    with pytest.raises(UserError, match="is a reward model and generates no text"):
        cb.load(folder).generate("a", max_new_tokens=1)
    still = cb.Schedule(kind="constant", learning_rate=1e-12, warmup_steps=0, warmup_fraction=0.0)
    for number, source in enumerate((folder, run.model_dir)):  # both go on with the scores that they have
        options = dict(optimizer=cb.Optimizer(schedule=still), steps=1, checkpointing=Checkpointing(every=1), plan=plan)
        cb.train(make_trainer(init_from=source, model_dir=str(tmp_path / f"again{number}"), **options))
        np.testing.assert_allclose(cb.load(str(tmp_path / f"again{number}")).logits(text), scores, rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_a_reward_model_is_named(make_trainer):
    for changes, message in (
        ({"scored": False}, "PreferenceJsonlSource.scored is False: set it to True"),
        ({"model": MODEL}, "DecoderConfig.head is 'tied': set it to 'score'"),
        ({"loss": Cpo()}, "PreferenceJsonlSource.scored is True, for @Reward"),
        ({"loss": Cpo(), "scored": False}, "DecoderConfig.head is 'score', of a reward model, and Trainer.loss is Cpo"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            make_trainer(**changes)
        assert "\n" not in str(caught.value)


def test_a_reward_model_has_no_cross_entropy(make_trainer, train):
    texts = make_trainer().dataset
    texts = dataclasses.replace(texts, source=cb.StdlibSource(), vocabulary=cb.ByteVocabulary())
    with pytest.raises(
        UserError, match="DecoderConfig.head is 'score', of a reward model, and Trainer.loss is CrossEntropy"
    ):
        train(make_trainer(loss=None, dataset=texts), jax.devices()[:2])


def test_a_margin_is_a_number(make_trainer, pairs, tmp_path):
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    (tmp_path / "bad.jsonl").write_text("".join(json.dumps(pair | more) + "\n" for more in ({}, {"margin": "1"})))
    source = dataclasses.replace(
        make_trainer().dataset.source, files=(str(tmp_path / "bad.jsonl"),), validation_files=(str(pairs),)
    )
    with pytest.raises(UserError, match=r"bad.jsonl:2: margin is '1', must be a finite number"):
        source.open("train")


@pytest.fixture
def make_verifier(make_trainer, toy_tokenizer, tmp_path):
    """A run on solutions whose wrong steps are in capitals."""
    rng, path, lines = np.random.default_rng(0), tmp_path / "solutions.jsonl", []
    for i in range(60):
        labels = [bool(label) for label in rng.integers(0, 2, 1 + i % 3)]
        words = [str(rng.choice(["river", "grass", "fish"])) for _ in labels]
        steps = [word if label else word.upper() for word, label in zip(words, labels)]
        lines.append({"prompt": f"{i}?", "steps": steps, "labels": labels})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = cb.StepsJsonlSource(
        files=(str(path),), template=cb.ChatTemplate(tokenizer=toy_tokenizer), validation_fraction=0.3
    )

    def make(**changes):
        dataset = dataclasses.replace(make_trainer().dataset, source=source)
        return make_trainer(**{"dataset": dataset, "loss": cb.ProcessReward()} | changes)

    return make


def test_steps_are_told_apart(make_verifier, train):
    """Of solutions that are held out."""
    seen = train(make_verifier(steps=40, evaluation=Evaluation(every=40)), jax.devices()[:2])
    held_out = seen.evaluations[40]
    assert held_out["step_accuracy"] > 0.9 and held_out["right_score"] > 0 > held_out["wrong_score"]
    with pytest.raises(UserError, match="DecoderConfig.head is 'tied': set it to 'score'"):
        make_verifier(model=MODEL)
    with pytest.raises(UserError, match="set Dataset.source = @StepsJsonlSource"):
        make_verifier(dataset=dataclasses.replace(make_verifier().dataset, source=cb.StdlibSource()))


def test_a_mesh_changes_no_score_of_a_step(make_verifier, train):
    runs = []
    for devices, plan in ((1, Plan(batch_size=8)), (8, Plan(batch_size=8, fsdp=2, context=2, tensor=2))):
        name = f"{make_verifier().model_dir}{devices}"
        runs.append(train(make_verifier(steps=3, plan=plan, model_dir=name), jax.devices()[:devices]))
    for step in (1, 2, 3):
        for key in ("loss", "grad_norm", "right_score", "wrong_score", "step_accuracy"):
            one, other = (run.metrics[step][key] for run in runs)
            assert other == pytest.approx(one, rel=2e-4, abs=1e-5), key


def test_the_folder_of_a_verifier_is_evaluated_and_converted(make_verifier, tmp_path):
    """Its steps are told apart by `evaluate`, and a Hugging Face folder has the same scores."""
    run = make_verifier(steps=30, plan=Plan(batch_size=8, fsdp=8), checkpointing=Checkpointing(every=30))
    cb.train(run)
    assert exits.run_verb(evaluate_verb.main, [f"--model_dir={run.model_dir}", f"--out={tmp_path}/found.json"]) == 0
    metrics = json.loads((tmp_path / "found.json").read_text())["tasks"]["validation"]["metrics"]
    assert metrics["step_accuracy"]["value"] > 0.8 and metrics["steps"]["value"] > 5
    text = "<|turn|>u:1?<|end|><|turn|>a:river\nGRASS\n"
    scores = cb.load(run.model_dir).logits(text)
    ends = [len(cb.TokenizerJsonVocabulary(path=run.dataset.vocabulary.path).encode_rendered(part)[0]) - 1 for part in (
        text.removesuffix("GRASS\n"), text
    )]  # fmt: skip
    right, wrong = scores[ends, 0]
    assert right > 0 > wrong
    judge = models.reward_model(cb.BestOfN(reward=run.model_dir))
    question = Conversation([{"role": "user", "content": "1?"}])
    each = judge.scores(question, ["river\nGRASS", "river\n\n", " "])
    assert [len(item) for item in each] == [2, 1, 0] and each[0] == pytest.approx([right, wrong], rel=1e-4)
    assert each[1] == pytest.approx([right], rel=1e-4)
    with pytest.raises(UserError, match="must fit the 96 of .*: shorten the answers"):
        judge.scores(question, ["river\n" * 40])
    folder = cb.convert(run.model_dir, str(tmp_path / "hf"), dtype="f32")
    np.testing.assert_allclose(cb.load(folder).logits(text), scores, rtol=1e-5, atol=1e-6)
