"""A request whose handling raises gets its error; all others get their texts, and the engine goes on.

Faults are injected where the host handles single requests: in prefill, sampling, decoding, detokenizing, stop strings,
guesses, full rows and beam search.
"""

from __future__ import annotations

import functools

import jax
import pytest

from capibara.core.types import UserError
from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.inference.engine import beam_requests
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.engine.programs import speculative
from capibara.inference.engine.requests.request import Request
from capibara.inference.engine.runner import decode, prompt_batches, slot_state
from capibara.inference.engine.runner.prefill import PrefillQueue
from capibara.inference.sampling.sampling import BeamSearch, Sampling
from capibara.inference.sampling.text import TextStream
from capibara.models import api
from capibara.models.api import DecoderConfig

MODEL = api.build(DecoderConfig(vocab_size=384, embed_dim=32, num_layers=2, num_heads=2, mlp_dim=64, dtype="float32"))
LENGTH = 64
GOOD = ["def f", "a longer prompt, of many words", "x", "def f"]
BAD = "planted \x07"
STOP = "\x07planted"


class Panic(BaseException):
    """As a library in Rust raises it: no Exception."""


@functools.cache
def params():
    return jax.tree.map(lambda x: x * 3, jax.jit(MODEL.init)(jax.random.key(1)))


def engine(slots=3, **config):
    return Engine(MODEL, params(), ByteVocabulary(), LENGTH, EngineConfig(slots=slots, **config))


def sampling(**options):
    return Sampling(**{"temperature": 0.0, "max_new_tokens": 10} | options)


def is_bad(request: Request) -> bool:
    return STOP in request.sampling.stop


def plant(monkeypatch, owner, name, concerns):
    """Has a function raise whenever `concerns(its arguments)`."""
    real = getattr(owner, name)

    def planted(*args, **kwargs):
        if concerns(*args):
            raise Panic("planted")
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, planted)


FAULTS = {
    "prefill": (prompt_batches, "batch_of", lambda requests, *_: any(map(is_bad, requests)), {}),
    "prefill of one that is read in parts": (PrefillQueue, "extend", lambda *a: is_bad(a[2]), {"prefill_tokens": 4}),
    "sampling": (slot_state, "settings_of", lambda samplings: STOP in samplings[0].stop, {}),
    "penalties": (decode, "history_of", lambda request, _: is_bad(request), {}),
    "decoding": (Request, "receive", lambda request, *_: is_bad(request) and request.received == 3, {}),
    "detokenizing": (TextStream, "feed", lambda stream, *_: STOP in stream._stop, {}),
    "the rest of a text": (TextStream, "close", lambda stream: STOP in stream._stop, {}),
    "stop strings": (TextStream, "_take", lambda stream, *_: STOP in stream._stop, {}),
    "guesses": (speculative.Drafter, "guess", lambda drafter, _: 7 + 3 in drafter._tokens, {"draft_tokens": 2}),
    "pages": (Request, "receive", lambda request, *_: is_bad(request), {"page_size": 8, "pages": 12}),
}


@pytest.mark.parametrize("where", FAULTS)
def test_a_fault_is_one_requests(monkeypatch, where):
    owner, name, concerns, options = FAULTS[where]
    one = engine(**options)
    want = [engine(**options).submit(prompt, sampling()).result().tokens for prompt in GOOD]
    plant(monkeypatch, owner, name, concerns)
    streams = []
    for prompt in GOOD:
        streams += [one.submit(prompt, sampling()), one.submit(BAD, sampling(stop=(STOP,)))]
    one.run()
    for good, bad, tokens in zip(streams[::2], streams[1::2], want, strict=True):
        assert good.result().tokens == tokens
        with pytest.raises(RuntimeError, match="Panic: planted"):
            bad.result()
    assert one.load == (0, 0) and one.pages[1] == 0 and not one.failed
    assert one.submit(GOOD[0], sampling()).result().tokens == want[0]


def test_a_fault_while_full_rows_are_reread_is_one_requests(monkeypatch):
    one = engine(when_full="slide")
    long = sampling(max_new_tokens=LENGTH + 8)
    want = one.submit(GOOD[0], long).result().tokens
    plant(monkeypatch, PrefillQueue, "extend", lambda *a: is_bad(a[2]))
    good, bad = one.submit(GOOD[0], long), one.submit("y", sampling(max_new_tokens=LENGTH + 8, stop=(STOP,)))
    assert good.result().tokens == want
    with pytest.raises(RuntimeError, match="Panic: planted"):
        bad.result()


@pytest.mark.parametrize("name", ["_decode", "batch_of"])
def test_a_fault_in_beam_search_is_one_requests(monkeypatch, name):
    one, beams = engine(slots=4), BeamSearch(num_decodes=2)
    want = one.submit(GOOD[0], sampling(beams=beams)).result().text
    if name == "_decode":
        plant(monkeypatch, beam_requests, "_decode", lambda request, *_: is_bad(request))
    else:
        plant(monkeypatch, prompt_batches, "batch_of", lambda requests, *_: any(map(is_bad, requests)))
    good, bad = one.submit(GOOD[0], sampling(beams=beams)), one.submit(BAD, sampling(beams=beams, stop=(STOP,)))
    assert good.result().text == want
    with pytest.raises(RuntimeError, match="Panic: planted"):
        bad.result()
    assert one.submit(GOOD[0], sampling(beams=beams)).result().text == want


def test_ids_without_a_row_are_refused():
    one = engine()
    for ids in ([5, 384], [-1], [2**40], ["a"], [1.5], [None]):
        with pytest.raises(UserError, match="the prompt has token .*must be from 0 to 383"):
            one.submit(ids, sampling())
    assert len(one.submit([5, 383], sampling()).result().tokens) == 10
