"""Re-mixed experts: kernel regression over neighbours, one token and the last layers alone, and one program for all prompts."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import capibara as cb
from capibara import config
from capibara.cli.composition.models import open_subject
from capibara.core.types import UserError
from capibara.evaluation import answers
from capibara.evaluation.predictions import Predictions
from capibara.evaluation.remix.remixing import Pathway, RemixExperts, unmixed
from capibara.evaluation.scoring import Pair, Routing, Scorer
from capibara.evaluation.tasks import read_items
from capibara.models import api
from capibara.models.api import DecoderConfig, Moe
from capibara.models.parts import router

CONFIG = DecoderConfig(
    vocab_size=259, embed_dim=16, num_layers=3, num_heads=2, mlp_dim=24, dtype="float32",
    moe=Moe(num_experts=6, top_k=2, first_dense=1, bias="all"),
)  # fmt: skip
REMIX = RemixExperts(references=("a.jsonl",), neighbours=2, strength=0.25, layers=1)


@pytest.fixture(scope="module")
def mixture():
    model = api.build(CONFIG)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: (3 * np.asarray(x) + 0.2 * rng.standard_normal(x.shape)).astype(np.float32),
        model.init(jax.random.key(0)),
    )
    return model, params


def rows(**more):
    tokens = np.random.default_rng(1).integers(3, 259, (2, 12)).astype(np.int32)
    positions = np.broadcast_to(np.arange(12, dtype=np.int32), tokens.shape)
    return {"tokens": tokens, "positions": positions, "segment_ids": np.ones_like(tokens)} | more


def pathways(scores, weights, at=7):
    mask = np.zeros((2, 12), np.int32)
    mask[:, at] = 1
    shape = (2, CONFIG.num_layers, CONFIG.moe.num_experts)
    return {
        "pathway_at": mask,
        "pathway_scores": np.broadcast_to(np.asarray(scores, np.float32), shape),
        "pathway_weights": np.broadcast_to(np.asarray(weights, np.float32), shape[:2]),
    }


def test_scores_of_other_prompts_route_that_token_alone(mixture):
    """With weight 1 and all scores on two experts the token has these, as with a bias of the router that leaves no others."""
    model, params = mixture
    hidden = jax.jit(model.hidden)
    plain, _ = hidden(params, rows())
    only = np.zeros(6)
    only[[2, 5]] = 0.5
    found, _ = hidden(params, rows(**pathways(only, [0, 0, 1])))
    layers = params["layers"]
    bias = np.array(layers["mlp"]["router_bias"])
    bias[-1] = np.where(only > 0, 0, -1e4)
    router = np.array(layers["mlp"]["router"])
    router[-1] = 0
    forced = params | {"layers": layers | {"mlp": layers["mlp"] | {"router_bias": bias, "router": router}}}
    want, _ = hidden(forced, rows())
    np.testing.assert_allclose(found[:, 7], want[:, 7], rtol=1e-5, atol=1e-5)
    assert np.abs(found[:, 7] - plain[:, 7]).max() > 1e-2
    others = np.arange(12) != 7
    np.testing.assert_allclose(
        found[:, others], plain[:, others], rtol=1e-6, atol=1e-6
    )  # the last layer: nobody reads it


def test_the_pathway_is_recorded_and_its_own_scores_change_nothing(mixture):
    model, params = mixture
    hidden = jax.jit(model.hidden)
    plain, _ = hidden(params, rows())
    recorded, stats = hidden(params, rows(**pathways(0, 0)))
    np.testing.assert_array_equal(recorded, plain)
    pathway = np.swapaxes(stats["pathway"], 0, 1)
    assert pathway.shape == (2, 2, 6)  # of the layers with experts
    np.testing.assert_allclose(pathway.sum(-1), 1, rtol=1e-5)
    own = np.concatenate([np.zeros((2, 1, 6)), pathway], 1)
    same, _ = hidden(params, rows(**(pathways(0, 1) | {"pathway_scores": own.astype(np.float32)})))
    np.testing.assert_allclose(same, plain, rtol=1e-4, atol=1e-4)


def test_scores_are_mixed_arithmetically_and_recorded_before():
    logits = np.random.default_rng(0).standard_normal((2, 3, 6)).astype(np.float32)
    at = np.array([[True, False, False], [False, False, True]])
    scores = np.random.default_rng(1).random((2, 6)).astype(np.float32)
    remix = router.Remix(jnp.asarray(at), jnp.asarray(scores), jnp.asarray([0.25, 0.0], np.float32))
    moe = Moe(num_experts=6, top_k=6, gates="scores")
    choice, stats = router.choose(jnp.asarray(logits), jnp.ones((2, 3), bool), moe, None, None, remix)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(stats["pathway"], p[at], rtol=1e-5)
    p[0, 0] = 0.75 * p[0, 0] + 0.25 * scores[0]
    np.testing.assert_allclose(choice.gates, np.take_along_axis(p, np.asarray(choice.experts), -1), rtol=1e-5)
    np.testing.assert_array_equal(choice.experts, np.argsort(-p, -1))


def test_neighbours_are_weighted_by_a_gaussian_kernel():
    embeddings = np.array([[0.0, 0], [3, 4], [0, 1], [30, 40]])
    scores = np.random.default_rng(0).random((4, 2, 6))
    references = [Pathway(*item) for item in zip(scores, embeddings)]
    found = REMIX.routing(references, Pathway(scores[0], np.array([0.0, 0.5])), CONFIG)
    # Both neighbours, 0 and 2, are at 0.5.
    np.testing.assert_allclose(found.scores[1:], (scores[0] + scores[2]) / 2, rtol=1e-6)
    far = REMIX.routing(references, Pathway(scores[0], np.array([0.0, 0.25])), CONFIG)
    near, other = (np.exp(-0.5 * (distance / 0.5) ** 2) for distance in (0.25, 0.75))
    np.testing.assert_allclose(far.scores[1:], (near * scores[0] + other * scores[2]) / (near + other), rtol=1e-6)
    assert found.weights.tolist() == [0, 0, 0.25] and not found.scores[0].any()
    assert not unmixed(CONFIG).weights.any()


def test_one_program_scores_all_prompts(mixture):
    model, params = mixture
    scorer = Scorer(model, params, 64)
    rng = np.random.default_rng(3)
    draw = lambda: Routing(rng.random((3, 6)).astype(np.float32), np.full(3, 0.5, np.float32))  # noqa: E731
    pairs = [Pair(rng.integers(3, 259, 9).tolist(), [7, 8], draw()) for _ in range(5)]
    together = scorer(pairs)
    compiled = scorer._program._cache_size()
    alone = [scorer([pair])[0] for pair in pairs]
    assert scorer._program._cache_size() == compiled
    np.testing.assert_allclose([s.log_probability for s in alone], [s.log_probability for s in together], rtol=1e-5)
    plain = scorer([pair._replace(routing=None) for pair in pairs])
    assert max(abs(a.log_probability - b.log_probability) for a, b in zip(plain, together)) > 1e-3
    assert plain[0].pathway is None and together[0].pathway.scores.shape == (2, 6)
    np.testing.assert_allclose(np.linalg.norm(together[0].pathway.embedding), 1, rtol=1e-5)


def test_the_embedding_is_of_the_context_alone(mixture):
    model, params = mixture
    scorer, context = Scorer(model, params, 64), [5, 6, 7, 8]
    first, second = scorer([Pair(context, continuation, unmixed(CONFIG)) for continuation in ([9, 10, 11], [12])])
    np.testing.assert_allclose(first.pathway.embedding, second.pathway.embedding, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(first.pathway.scores, second.pathway.scores, rtol=1e-5, atol=1e-6)
    batch = {name: np.zeros((1, 32), np.int32) for name in ("tokens", "positions", "segment_ids")}
    batch["tokens"][0, :4], batch["positions"][0, :4], batch["segment_ids"][0, :4] = context, range(4), 1
    hidden, _ = model.hidden(params, batch)
    mean = np.asarray(hidden)[0, :4].mean(0)
    np.testing.assert_allclose(first.pathway.embedding, mean / np.linalg.norm(mean), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder of a mixture, a task and its references."""
    folder = tmp_path_factory.mktemp("remix")
    lines = [{"question": f"{n} and {n}", "choices": [str(2 * n), str(n), "none"], "answer": n % 3} for n in range(12)]
    for name, part in (("task", lines[:4]), ("references", lines[4:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in part))
    cb.train(
        cb.Trainer(
            model_dir=str(folder / "run"),
            steps=1,
            model=dataclasses.replace(CONFIG, vocab_size=384),
            plan=cb.Plan(batch_size=8),
            dataset=cb.Dataset(
                source=cb.JsonlSource(files=(str(folder / "task.jsonl"),), field="question", validation_fraction=0.3),
                vocabulary=cb.ByteVocabulary(), length=64, workers=0,
            ),
            optimizer=cb.Optimizer(schedule=cb.Schedule(learning_rate=1e-3)),
            evaluation=cb.Evaluation(every=0),
        )
    )  # fmt: skip
    config.reset()
    return folder


def task(folder, **fields):
    values = {"prompt": "{question} is", "choices": "choices", "target": "answer"} | fields
    return cb.EvalTask(files=(str(folder / "task.jsonl"),), **values)


def test_choices_are_scored_with_the_experts_of_references(run):
    """And what is reported says how; answers of another remix are not reused."""
    remix = cb.RemixExperts(references=(str(run / "references.jsonl"),), strength=1.0)
    found = cb.evaluate(str(run / "run"), {"plain": task(run), "remixed": task(run, remix=remix)})["tasks"]
    assert found["remixed"]["remix"]["strength"] == 1 and "remix" not in found["plain"]
    assert found["remixed"]["metrics"].keys() == found["plain"]["metrics"].keys()
    subject = open_subject(str(run / "run"))
    scores = {}
    with Predictions(str(run / "predictions.jsonl"), subject.about) as recorded:
        for name, of in (("plain", None), ("all", remix), ("half", dataclasses.replace(remix, strength=0.5))):
            items = read_items("t", task(run))
            ranked = answers.ranked(subject, "t", task(run, remix=of), items, recorded, lambda topic, detail: None)
            scores[name] = [choice.log_probability for of_item in ranked for choice in of_item]
    config.reset()
    assert len(scores["plain"]) == 12
    for name in ("all", "half"):
        assert np.abs(np.subtract(scores[name], scores["plain"])).max() > 1e-4
    assert scores["all"] != scores["half"]


def test_choices_are_scored_with_experts_of_descent(run):
    kernel = cb.RemixExperts(references=(str(run / "references.jsonl"),), strength=1.0)
    gradient = dataclasses.replace(kernel, method="neighborhood_gradient", steps=3, learning_rate=2.0)
    subject, scores = open_subject(str(run / "run")), {}
    for name, remix in (
        ("kernel", kernel),
        ("gradient", gradient),
        ("one step", dataclasses.replace(gradient, steps=1)),
    ):
        with Predictions(None, {}) as recorded:
            items = read_items("t", task(run))
            ranked = answers.ranked(subject, "t", task(run, remix=remix), items, recorded, lambda topic, detail: None)
        scores[name] = [choice.log_probability for of_item in ranked for choice in of_item]
    config.reset()
    assert np.abs(np.subtract(scores["gradient"], scores["kernel"])).max() > 1e-4
    assert np.abs(np.subtract(scores["gradient"], scores["one step"])).max() > 1e-5


def test_a_descent_begins_at_the_prompts_own_scores_and_reads_right_answers(run, monkeypatch):
    asked = []

    def descended(self, remix, neighbours, weights_PK, scores_PLE, done):
        asked.append((neighbours, weights_PK, scores_PLE))
        return iter(scores_PLE)

    monkeypatch.setattr(Scorer, "descended", descended)
    remix = cb.RemixExperts(references=(str(run / "references.jsonl"),), method="neighborhood_gradient")
    subject, plain = open_subject(str(run / "run")), task(run)
    items = read_items("t", plain)
    with Predictions(None, {}) as recorded:
        answers.ranked(subject, "t", task(run, remix=remix), items, recorded, lambda topic, detail: None)
    [(neighbours, weights, scores)] = asked
    pairs_of = lambda item: [*answers._pairs(subject, plain, item)]  # noqa: E731
    right = {}
    for item in read_items("t", dataclasses.replace(plain, files=remix.references)):
        pair = pairs_of(item)[item.target]
        right[tuple(pair.context), tuple(pair.continuation)] = item.target
    chosen = {(tuple(pair.context), tuple(pair.continuation)) for of_prompt in neighbours for pair in of_prompt}
    assert chosen <= right.keys() and any(right[pair] for pair in chosen), "not the first choices alone"
    prompts = subject.scorer([pairs_of(item)[0]._replace(routing=unmixed(subject.model.config)) for item in items])
    np.testing.assert_allclose(scores, [prompt.pathway.scores for prompt in prompts], rtol=1e-5)
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)
    config.reset()


def test_references_that_are_all_answered_wrongly_are_refused(run):
    wrong = run / "wrong.jsonl"
    lines = [json.loads(line) for line in (run / "references.jsonl").read_text().splitlines()]
    loaded = [line | {"choices": ["a", "a" * 9], "answer": 1} for line in lines[:3]]
    wrong.write_text("".join(json.dumps(line) + "\n" for line in loaded))
    with pytest.raises(UserError, match="answers none of the 3 lines of RemixExperts.references rightly"):
        cb.evaluate(str(run / "run"), {"r": task(run, remix=cb.RemixExperts(references=(str(wrong),)))})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"references": ()}, "RemixExperts.references is empty"),
        ({"references": ("a",), "neighbours": 0}, "RemixExperts.neighbours is 0, must be at least 1"),
        (
            {"references": ("a",), "method": "neighborhood_gradient", "steps": 0},
            "RemixExperts.steps is 0, must be at least 1",
        ),
        ({"references": ("a",), "learning_rate": 0.0}, "RemixExperts.learning_rate is 0.0, must be finite and above 0"),
        (
            {"references": ("a",), "steps": 5},
            "RemixExperts.steps is 5, and RemixExperts.method 'kernel_regression' has no",
        ),
        ({"references": ("a",), "strength": 1.5}, "RemixExperts.strength is 1.5, must be above 0 and at most 1"),
    ],
)
def test_settings_are_checked(fields, message):
    with pytest.raises(UserError, match=message):
        RemixExperts(**fields)


def test_a_task_says_what_remixing_needs():
    remix = RemixExperts(references=("a.jsonl",))
    with pytest.raises(UserError, match="EvalTask.remix is for choices, and EvalTask.choices is None"):
        cb.EvalTask(files=("b.jsonl",), metrics=(cb.exact_match,), remix=remix)
    with pytest.raises(UserError, match="RemixExperts.references has a.jsonl, which is in EvalTask.files"):
        cb.EvalTask(files=("a.jsonl",), choices="choices", remix=remix)


@pytest.mark.parametrize(
    ("moe", "sizes", "message"),
    [
        (None, {}, "for decoders with experts, and this model has none"),
        (Moe(num_experts=4, routing="expert_choice"), {}, "Moe.routing is 'expert_choice'"),
        (Moe(num_experts=4, gates="close"), {}, "Moe.gates is 'close'"),
        (Moe(num_experts=4), {"context": 2}, "Plan.context is 2"),
        (Moe(num_experts=4), {"stage": 2}, "Plan.stage is 2"),
    ],
)
def test_models_that_cannot_be_remixed_are_refused(moe, sizes, message):
    with pytest.raises(UserError, match=message):
        REMIX.check(dataclasses.replace(CONFIG, moe=moe), **({"context": 1, "stage": 1} | sizes))
