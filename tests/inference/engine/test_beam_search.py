"""Beam search finds the best of all texts, alone or beside other requests, through the engine and its files."""

from __future__ import annotations

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.evaluation.tasks import EvalTask
from capibara.inference import speed
from capibara.inference.engine import beam_search
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.engine.requests.following import Orders, Submission
from capibara.inference.engine.requests.stream import Finish
from capibara.inference.interactive import files
from capibara.inference.sampling.sampling import BeamSearch, Sampling, changed, of_values
from capibara.inference.server.service.service import check_streams
from capibara.models import api
from capibara.models.api import DecoderConfig, EncoderDecoderConfig
from capibara.strategies.grpo import Grpo

SIZES = dict(embed_dim=32, num_layers=2, num_heads=2, mlp_dim=64, dtype="float32")
SMALL = api.build(DecoderConfig(vocab_size=7, **SIZES))
MODELS = {
    "decoder": api.build(DecoderConfig(vocab_size=384, **SIZES, layer_pattern=("local", "global"), window=8)),
    "encoder-decoder": api.build(EncoderDecoderConfig(vocab_size=384, **SIZES)),
}
VOCABULARY = ByteVocabulary()
PROMPTS = ["one", "another prompt", "and a third", "4"]
BEAMS = Sampling(max_new_tokens=9, beams=BeamSearch(num_decodes=3, num_return=3))


def params_of(model):
    return jax.tree.map(lambda x: x * 3, jax.jit(model.init)(jax.random.key(1)))


def scored(model, params, prompt, alpha, tokens, ends):
    """Every text of up to that many tokens that ends, with its score, the likeliest first."""
    rows = [[*prompt, *text] for text in itertools.product(range(model.config.vocab_size), repeat=tokens)]
    rows = jnp.asarray(rows, jnp.int32)
    batch = {"tokens": rows, "segment_ids": jnp.ones_like(rows)}
    batch["positions"] = jnp.broadcast_to(jnp.arange(rows.shape[1]), rows.shape)
    log_p = np.asarray(jax.nn.log_softmax(jax.jit(model.logits)(params, batch)))
    found = {}
    for row, of_row in zip(np.asarray(rows), log_p):
        text = row[len(prompt) :].tolist()
        size = next((i + 1 for i, token in enumerate(text) if token in ends), None)
        if size is not None:
            total = sum(of_row[len(prompt) + i - 1, text[i]] for i in range(size))
            found[tuple(text[:size])] = total / ((5 + len(prompt) - 1 + size) / 6) ** alpha
    return sorted(found.items(), key=lambda one: -one[1])


@pytest.mark.parametrize(
    ("alpha", "ends"), [pytest.param(0.0, [1], marks=pytest.mark.heavy), (0.6, [1, 4]), (3.0, [1])]
)
def test_a_search_as_wide_as_all_texts_finds_the_best_of_them(alpha, ends):
    params, tokens, K = params_of(SMALL), 4, 60
    served, prompts = SMALL.serving(params), [[0, 5, 2], [0, 6]]
    sizes = beam_search.Sizes(K, tokens, 8)
    asked = beam_search.beam_requests_of([tokens] * 2, [2, 1], [ends] * 2, alpha, -1e7)
    batch = {"tokens": np.array([[0, 5, 2], [0, 6, 0]], np.int32), "counts": np.array([3, 2], np.int32)}
    found = beam_search.search(beam_search.build(SMALL, 7, sizes), served, batch, asked)
    for row, prompt in enumerate(prompts):
        best = scored(SMALL, params, prompt, alpha, tokens, ends)[:5]
        for rank, (text, score) in enumerate(best, 1):
            assert found.texts[row, -rank].tolist() == [*text, *[0] * (tokens - len(text))]
            np.testing.assert_allclose(found.scores[row, -rank], score, rtol=1e-5)


def made(name, **config):
    length = {"encoder_length": 64} if name == "encoder-decoder" else {}
    model = MODELS[name]
    return Engine(model, params_of(model), VOCABULARY, 64, EngineConfig(**config), **length)


def results(engine, sampling, prompts=PROMPTS):
    streams = [engine.submit(prompt, sampling) for prompt in prompts]
    return [stream.result() for stream in streams]


@pytest.mark.parametrize("name", [x if x == "decoder" else pytest.param(x, marks=pytest.mark.heavy) for x in MODELS])
def test_a_text_does_not_depend_on_what_else_is_searched_for(name):
    """Prompts of several lengths at once, with texts of several lengths; beside them texts that are drawn."""
    together, alone = made(name, slots=12), made(name, slots=1)
    greedy = Sampling(temperature=0.0, max_new_tokens=9)
    asked = [dataclasses.replace(BEAMS, max_new_tokens=9 - number) for number in range(len(PROMPTS))]
    mixed = [together.submit(prompt, how) for prompt, own in zip(PROMPTS, asked) for how in (own, greedy)]
    both = [stream.result() for stream in mixed]
    for prompt, own, found, written in zip(PROMPTS, asked, both[::2], both[1::2]):
        again = alone.submit(prompt, own).result()
        assert [one.tokens for one in again.decodes] == [one.tokens for one in found.decodes]
        np.testing.assert_allclose(
            [one.score for one in again.decodes], [one.score for one in found.decodes], rtol=1e-4
        )
        assert found.text == found.decodes[-1].text and found.tokens == list(found.decodes[-1].tokens)
        assert [one.score for one in found.decodes] == sorted(one.score for one in found.decodes)
        assert not written.decodes
        one = dataclasses.replace(BEAMS, beams=BeamSearch(num_decodes=1))
        first = alone.submit(prompt, one).result()
        if first.finish is written.finish:
            assert first.tokens == written.tokens  # a search of one text is greedy


def test_a_text_ends_before_a_stop_string_and_at_the_end_of_its_row():
    engine = made("decoder", slots=4)
    whole = engine.submit("one", BEAMS).result()
    stop = whole.text[2:4]
    cut = engine.submit("one", dataclasses.replace(BEAMS, stop=(stop,))).result()
    assert cut.text == whole.text[: whole.text.index(stop)] and cut.finish is Finish.STOP
    long = engine.submit("x" * 60, BEAMS).result()
    assert len(long.tokens) <= 64 - 61 + 1
    ended = engine.submit("one", BEAMS, ends=(whole.tokens[1],)).result()
    assert any(one.finish is Finish.STOP for one in ended.decodes) and whole.tokens[1] not in ended.tokens


@pytest.mark.parametrize("name", MODELS)
def test_a_search_ends_with_its_row_where_other_texts_slide(name):
    asked = dataclasses.replace(BEAMS, max_new_tokens=200)
    found = [made(name, slots=4, when_full=full).submit("x" * 50, asked).result() for full in ("stop", "slide")]
    assert [(one.tokens, one.score) for one in found[0].decodes] == [
        (one.tokens, one.score) for one in found[1].decodes
    ]


def test_files_have_scores_and_say_how_they_were_made(tmp_path):
    engine, path = made("encoder-decoder", slots=4), tmp_path / "in.jsonl"
    lines = [
        {"prompt": "one"},
        {"prompt": "two", "beams": {"num_decodes": 2, "alpha": 1.0}},
        {"prompt": "3", "beams": None},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    prompts = files.read_prompts(str(path), BEAMS)
    list(files.complete(engine, prompts, str(tmp_path / "out.jsonl")))
    out = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    found = engine.submit("one", BEAMS).result()
    assert [one["score"] for one in out[0]["decodes"]] == [one.score for one in found.decodes]
    assert (out[0]["text"], out[0]["score"]) == (found.text, found.decodes[-1].score)
    assert out[0]["sampling"]["beams"]["num_decodes"] == 3 and "score" in out[1] and "decodes" not in out[1]
    assert out[1]["sampling"]["beams"]["alpha"] == 1.0 and "score" not in out[2]
    assert list(files.complete(engine, prompts, str(tmp_path / "out.jsonl"))) == [3]  # all of it is there
    best = found.decodes[-1]
    assert files.shown(found, "one ").splitlines()[-1] == f"{best.score:.6f}\tone {best.text}"


def test_other_processes_search_for_the_same():
    """A sampling passes through the messages unchanged, and an engine that follows sees the same tokens."""
    assert of_values(json.loads(json.dumps(changed(BEAMS)))) == BEAMS
    orders = Orders([Submission([0, 5], BEAMS, (3,), 0)], [], 1, 7)
    assert Orders.of(json.loads(json.dumps(orders.packed()))).submitted[0].sampling == BEAMS
    leader, follower, sent = made("decoder", slots=4), made("decoder", slots=4), []
    leader.lead(sent.append)
    results(leader, BEAMS, PROMPTS[:2])
    follower.follow(json.loads(json.dumps(sent)))
    assert follower.core.runner.checksum.value == leader.core.runner.checksum.value != 0


def test_one_that_nobody_wants_is_not_searched_for():
    engine = made("decoder", slots=3)
    first, second, third = (engine.submit(prompt, BEAMS) for prompt in PROMPTS[:3])
    second.cancel()
    assert engine.load[0] == 3
    assert second.result().finish is Finish.CANCELLED and third.result().decodes and first.result().decodes
    assert engine.load == (0, 0)


@pytest.mark.parametrize(
    ("made_by", "told"),
    [
        (lambda: BeamSearch(num_decodes=0), "BeamSearch.num_decodes is 0, must be from 1 to 1024"),
        (lambda: BeamSearch(alpha=-0.1), "BeamSearch.alpha is -0.1, must be finite and at least 0"),
        (lambda: BeamSearch(num_return=5), "BeamSearch.num_return is 5, must be from 1 to num_decodes"),
        (lambda: BeamSearch(min_log_prob=0.0), "BeamSearch.min_log_prob is 0.0, must be below 0"),
        (lambda: Sampling(beams=BeamSearch(), top_p=0.5), "Sampling.top_p is 0.5, which beam search does not support"),
        (
            lambda: made("decoder", draft_tokens=2).submit("x", BEAMS),
            "draft_tokens is 2, which beam search does not support",
        ),
        (
            lambda: made("decoder").submit("x", BEAMS, likeliest=1),
            "likeliest is 1, but beam search returns no other tokens",
        ),
        (lambda: check_streams(BEAMS), "Sampling.beams is set, and a server streams tokens"),
        (lambda: speed.measure(made("decoder"), BEAMS, 4, 300), "--benchmark times tokens one by one"),
        (
            lambda: Grpo(rewards=(len,), sampling=BEAMS),
            "Grpo's Sampling.beams is set, but it trains on all sampled answers",
        ),
        (lambda: EvalTask(files=("x",), metrics=(len,), num_samples=2, sampling=BEAMS), "num_samples is 2 and"),
    ],
)
def test_what_has_no_beams_says_so(made_by, told):
    with pytest.raises(UserError, match=told) as error:
        made_by()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("said, error", [("RESOURCE_EXHAUSTED: out of memory", UserError), ("INTERNAL: x", None)])
def test_a_search_without_room_says_what_it_asked_for(said, error, monkeypatch):
    def search(*arguments):
        raise jax.errors.JaxRuntimeError(said)

    monkeypatch.setattr(beam_search, "search", search)
    engine = made("decoder")
    with pytest.raises(
        error or jax.errors.JaxRuntimeError,
        match=said
        if error is None
        else r"num_decodes \(3\) of 2 prompts with \d+ tokens need 0\.\d GiB .* request fewer",
    ):
        results(engine, BEAMS, PROMPTS[:1])


def chosen(log_p, ends, K=1, min_log_prob=-1e7):
    asked = beam_search.beam_requests_of([4], [0], [ends], 0.6, min_log_prob)
    state = beam_search._nothing_found(1, beam_search.Sizes(K, 4, 8), asked) | {"cache": {"layers": ()}}
    logits = jnp.repeat(jnp.log(jnp.asarray([log_p])), K, axis=0)
    return beam_search._chosen(logits, len(log_p), state, asked)


def test_all_beams_live_where_the_likeliest_tokens_all_end():
    state = chosen([0.1, 0.3, 0.2, 0.4], ends=[1, 3])
    assert state["last"].tolist() == [[2]] and state["log_p"][0, 0] > beam_search.NEVER / 2


def test_a_search_ends_once_all_its_beams_are_less_likely_than_asked():
    found = [bool(chosen([0.5, 0.2, 0.3], [-1], K=2, min_log_prob=least)["done"][0]) for least in (-0.6, -0.8)]
    assert found == [True, False]
