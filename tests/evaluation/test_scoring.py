"""Probabilities of given texts are the sums of the log-softmax of the model's logits, however they are batched."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from capibara import sharding
from capibara.core.types import UserError
from capibara.evaluation.scoring import Pair, Scorer, make_scores
from capibara.inference.engine.placement import own_chips
from capibara.models import api
from capibara.models.api import DecoderConfig, EncoderDecoderConfig
from capibara.sharding import Plan


def logits(run, params, ids):
    """[n, V] of one row alone, on one device; what comes after the row is seen by none of it."""
    batch = {name: np.zeros((1, 64), np.int32) for name in ("tokens", "positions", "segment_ids")}
    for name, values in {"tokens": ids, "positions": range(len(ids)), "segment_ids": [1] * len(ids)}.items():
        batch[name][0, : len(ids)] = values
    return np.asarray(run(params, batch), np.float64)[0, : len(ids)]


def direct(run, params, context, continuation):
    found = logits(run, params, [*context, *continuation])[len(context) - 1 : -1]
    found -= found.max(-1, keepdims=True)
    found -= np.log(np.exp(found).sum(-1, keepdims=True))
    return found[np.arange(len(continuation)), continuation].sum(), (found.argmax(-1) == continuation).all()


def pairs(count=21):
    rng = np.random.default_rng(0)
    draw = lambda most: rng.integers(3, 259, rng.integers(1, most)).tolist()  # noqa: E731
    return [Pair([0, *draw(40)], draw(20)) for _ in range(count)]


def test_ids_without_a_row_are_refused(subject):
    rows = subject.model.config.vocab_size
    for context, continuation, what in (([0, rows], [5], "a context"), ([0], [5, rows + 7], "a continuation")):
        for scorer in (subject.scorer, Scorer(subject.model, subject.params, 64)):
            with pytest.raises(UserError, match=rf"{what} has token ({rows}|{rows + 7}), must be from 0 to {rows - 1}"):
                scorer([Pair([0, 7], [8]), Pair(context, continuation)])
    with pytest.raises(UserError, match="a continuation has token -1, must be from 0"):
        subject.scorer.check(Pair([0], [-1]))


def test_scores_are_sums_of_log_softmax(subject):
    run, params = jax.jit(subject.model.logits), jax.device_put(subject.params, jax.devices()[0])
    likeliest = []
    for context, *_ in pairs(3):  # and continuations that are greedy
        row = [*context]
        for _ in range(5):
            row.append(int(logits(run, params, row)[-1].argmax()))
        likeliest.append(Pair(context, row[len(context) :]))
    asked = [*pairs(), *likeliest]
    want = [direct(run, params, *pair[:2]) for pair in asked]
    told = []
    spread = subject.scorer(asked, told.append)
    alone = Scorer(subject.model, params, 64)(asked)
    for scores in (spread, alone):
        np.testing.assert_allclose([one.log_probability for one in scores], [w for w, _ in want], rtol=1e-5)
        assert [one.greedy for one in scores] == [bool(greedy) for _, greedy in want]
    assert [greedy for _, greedy in want[-3:]] == [True] * 3 and told[-1] == len(asked)


def test_a_long_context_loses_its_beginning(subject):
    params = jax.device_put(subject.params, jax.devices()[0])
    context, continuation = list(range(3, 203)), [7, 8, 9]
    want, _ = direct(jax.jit(subject.model.logits), params, context[-61:], continuation)
    assert subject.scorer([Pair(context, continuation)])[0].log_probability == pytest.approx(want, rel=1e-5)


def test_an_encoder_decoder_reads_the_context_in_its_encoder():
    config = EncoderDecoderConfig(
        vocab_size=64, embed_dim=16, num_layers=1, num_encoder_layers=1, num_heads=2, mlp_dim=32, dtype="float32"
    )
    model = api.build(config)
    params = jax.tree.map(lambda x: x * 3, jax.jit(model.init)(jax.random.key(0)))
    context, target = [5, 6, 7, 1], [9, 10, 1]
    ones = lambda x: np.ones_like(x)  # noqa: E731
    encoder, decoder = np.array([context], np.int32), np.array([[0, *target[:-1]]], np.int32)
    batch = {"encoder_tokens": encoder, "encoder_segment_ids": ones(encoder), "encoder_positions": np.arange(4)[None]}
    batch |= {"tokens": decoder, "segment_ids": ones(decoder), "positions": np.arange(3)[None]}
    found = np.asarray(jax.nn.log_softmax(jax.jit(model.logits)(params, batch)[0]))
    want = sum(float(found[i, token]) for i, token in enumerate(target))
    scores = Scorer(model, params, 16, encoder_length=32)([Pair(context, target), Pair([3, 1], [4])])
    assert scores[0].log_probability == pytest.approx(want, rel=1e-5)


def test_what_cannot_be_scored(subject):
    for pair, why in (
        (Pair([], [1]), "at least one token"),
        (Pair([1], []), "at least one"),
        (Pair([1], [3] * 65), "65"),
    ):
        with pytest.raises(UserError, match=why):
            subject.scorer([pair])


def test_the_next_evaluation_of_a_run_compiles_nothing():
    """The programs of equal models, plans and meshes are one, whatever is made anew around them."""

    def programs():
        model, plan = (
            api.build(DecoderConfig(vocab_size=384, embed_dim=32, num_layers=1, num_heads=2, mlp_dim=64)),
            Plan(batch_size=8, fsdp=2),
        )
        mesh = sharding.make_mesh(plan, jax.devices()[:2])
        return make_scores(model.plain, plan, mesh), own_chips.make_computed(model, mesh, plan.rules)

    assert programs() == programs()
