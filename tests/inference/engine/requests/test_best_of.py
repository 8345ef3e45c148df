"""The likeliest of several drawn texts of a prompt is returned."""

from __future__ import annotations

import contextlib
import dataclasses
import threading

import jax
import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.inference import speed
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.engine.requests import best_of
from capibara.inference.engine.requests.stream import Finish, Stream
from capibara.inference.sampling.sampling import Sampling
from capibara.models import api
from capibara.models.api import DecoderConfig

MODEL = api.build(DecoderConfig(vocab_size=384, embed_dim=32, num_layers=1, num_heads=2, mlp_dim=64, dtype="float32"))
DRAWN = Sampling(temperature=1.2, top_k=40, max_new_tokens=6, seed=3, num_decodes=4, num_return=3)


@pytest.fixture(scope="module")
def engine():
    params = jax.tree.map(lambda x: x * 3, jax.jit(MODEL.init)(jax.random.key(1)))
    return Engine(MODEL, params, ByteVocabulary(), 64, EngineConfig(slots=3))


def test_the_likeliest_of_what_each_seed_draws_is_given(engine):
    each = [engine.submit("one", sampling).result() for sampling in best_of.samplings(DRAWN)]
    scores = [sum(one.drawn) + one.end_drawn for one in each]
    order = np.argsort(scores)
    found = engine.submit("one", DRAWN).result()
    assert [one.score for one in found.decodes] == [scores[i] for i in order[-3:]] and len({*scores}) == 4
    assert [one.text for one in found.decodes] == [each[i].text for i in order[-3:]]
    best = each[order[-1]]
    assert (found.text, found.tokens, found.finish, found.end) == (best.text, best.tokens, best.finish, best.end)


def test_two_texts_that_end_at_once_are_chosen_from_once(engine, monkeypatch):
    """The one by the engine's thread, the other by the caller's."""
    best, barrier = engine.submit("one", dataclasses.replace(DRAWN, num_decodes=2, num_return=1)), threading.Barrier(2)

    class Slow(dict):
        def __len__(self):
            with contextlib.suppress(threading.BrokenBarrierError):
                barrier.wait(0.5)
            return super().__len__()

    chosen, best._completions = [], Slow()
    monkeypatch.setattr(best, "_choose", lambda: chosen.append(1))
    threads = [threading.Thread(target=best._take, args=(number, object())) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert chosen == [1]
    best.cancel()
    engine.run()


def test_its_tokens_name_others_as_those_of_one_text_do(engine):
    each = [engine.submit("one", one, likeliest=2).result() for one in best_of.samplings(DRAWN)]
    best = max(each, key=lambda one: sum(one.drawn) + one.end_drawn)
    found = engine.submit("one", DRAWN, likeliest=2).result()
    assert [piece.likeliest for piece in found.pieces] == [piece.likeliest for piece in best.pieces]
    assert all(len(piece.likeliest) == 2 for piece in found.pieces if piece.token is not None)


def test_a_benchmark_draws_one_text_of_each_prompt(engine):
    with pytest.raises(UserError, match="--benchmark times one text per prompt, and Sampling.num_decodes is 4"):
        speed.measure(engine, DRAWN, 4, 300)


def test_seeds_of_neighbouring_prompts_share_no_draw():
    seeds = [one.seed for seed in (-(2**63), -1, 0, 1, 2**63 - 1)
             for one in best_of.samplings(dataclasses.replace(DRAWN, seed=seed))]  # fmt: skip
    assert len({*seeds}) == 20


def test_one_that_nobody_wants_is_drawn_no_further(engine):
    stream = engine.submit("one", dataclasses.replace(DRAWN, max_new_tokens=40))
    stream.cancel()
    assert stream.result().finish is Finish.CANCELLED and engine.load == (0, 0)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (dict(num_decodes=0), "Sampling.num_decodes is 0, must be from 1 to 1024"),
        (dict(num_return=2), "Sampling.num_return is 2, must be from 1 to Sampling.num_decodes"),
        (dict(num_decodes=2, temperature=0.0), "num_decodes is 2 and Sampling.temperature 0: texts would be equal"),
    ],
)
def test_bad_counts(fields, told):
    with pytest.raises(UserError, match=told):
        Sampling(**fields)


def test_an_error_of_one_text_is_that_of_all():
    texts = [Stream(lambda: False) for _ in range(2)]
    best, given = best_of.BestOf(lambda: False, Sampling(temperature=1.0, num_decodes=2), texts), []
    best.forward(given.append)
    error = RuntimeError("lost")
    texts[1].fail(error)
    assert given == [error]
