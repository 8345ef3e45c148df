"""A program over many requests fails: the request that makes it fail gets the error, all others get the same texts.

Faults are planted in the programs themselves, for a request with a certain token or setting: before the program runs,
after it (the donated state is then gone), and on the devices, where they are noticed when tokens are received.
"""

from __future__ import annotations

import functools
import gc
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.inference.engine import beam_search
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.engine.programs import programs
from capibara.inference.engine.recovery import Recovery
from capibara.inference.engine.requests.request import Request
from capibara.inference.sampling.sampling import BeamSearch, Sampling
from capibara.models import api
from capibara.models.api import DecoderConfig, EncoderDecoderConfig

SIZES = dict(vocab_size=384, embed_dim=32, num_layers=2, num_heads=2, mlp_dim=64, dtype="float32")
LENGTH, ENCODER = 48, 48
BAD, MARK = 383, 77  # a token that no text has, and a top_k
MODELS = {
    "decoder": api.build(DecoderConfig(**SIZES)),
    "windows": api.build(DecoderConfig(**SIZES, layer_pattern=("local", "global"), window=8)),
    "prefix": api.build(DecoderConfig(**SIZES, inputs_attention="bidirectional")),
    "encoder": api.build(EncoderDecoderConfig(**SIZES)),
}
ENGINES = {
    "rows": ("decoder", {"prefix_cache_mib": 0, "decode_steps": 1}),
    "prefixes": ("decoder", {}),
    "pages": ("decoder", {"page_size": 8, "pages": 11}),
    "parts": ("windows", {"prefill_tokens": 16}),
    "guesses": ("decoder", {"draft_tokens": 2}),
    "sliding": ("decoder", {"when_full": "slide", "decode_steps": 1}),
    "prefix LM": ("prefix", {}),
    "encoder": ("encoder", {"prefill_tokens": 8}),
}


def sampling(**options):
    return Sampling(**{"temperature": 0.0, "max_new_tokens": 14} | options)


GOOD = [
    ("def f", sampling(max_new_tokens=30)),
    ("a longer prompt, of many words", sampling(temperature=1.2, seed=3)),
    ("x = 1; x = 1; x = 1; x = ", sampling(max_new_tokens=20)),
    ("def f", sampling(temperature=1.2, seed=4, top_p=0.9, max_new_tokens=25)),
    ("class A", sampling(temperature=1.2, seed=5, repetition_penalty=1.4)),
    ("a question <", sampling(temperature=1.2, seed=1, thinking_tokens=7, thinking_tags=("<", "?>"))),
    ("import numpy", sampling(max_new_tokens=1)),
    ("for", sampling(max_new_tokens=70)),  # longer than a slot: it slides where that is asked for
]
WRONG = [7, 8, BAD, 9, 10], sampling(top_k=MARK, max_new_tokens=20)


@functools.cache
def params_of(name):
    # Large weights, so that one token is far likelier than the others and texts do not agree by chance.
    return jax.tree.map(lambda x: x * 3, jax.jit(MODELS[name].init)(jax.random.key(1)))


def engine(kind="rows", **options):
    name, own = ENGINES[kind]
    of = MODELS[name], params_of(name), ByteVocabulary(), LENGTH, EngineConfig(**{"slots": 3} | own | options)
    return Engine(*of, ENCODER if name == "encoder" else None)


@functools.cache
def wanted(kind):
    one = engine(kind)
    return [one.submit(*request).result() for request in GOOD]


def in_prompt(_, batch, *rest):
    if rest and isinstance(rest[0], programs.MixedTokens):
        return BAD in rest[0].tokens
    return any(BAD in np.asarray(batch[name]) for name in ("tokens", "encoder_tokens") if name in batch)


def at_token(count, _, __, settings, next_, *___):
    return ((settings.top_k == MARK) & (np.asarray(next_.index) >= count)).any()


def begins(*args):
    if not isinstance(args[2], programs.MixedTokens):
        return MARK in args[4].top_k
    _, _, tokens, settings, next_, _ = args
    return ((settings.top_k == MARK) & (next_.index == 0) & (tokens.slots < 3)).any()


# Where it fails -> the programs that do, and for which arguments.
WHERE = {
    "prefill": (("prefill", "resume", "mix"), in_prompt),
    "admission": (("admit", "mix"), begins),
    "decode": (("step", "verify"), functools.partial(at_token, 1)),
    "a later decode": (("step", "verify"), functools.partial(at_token, 9)),
}


def plant(one, names, concerns, lost=True, error=jax.errors.JaxRuntimeError):
    """Has programs of an engine fail for arguments that `concerns` names; `lost`: after what they were given is gone."""

    def planted(real, *args):
        if not concerns(*args):
            return real(*args)
        if lost:
            real(*args)
        raise error("INTERNAL: planted")

    compiled = one.core.runner.programs
    compiled = compiled._replace(**{name: functools.partial(planted, getattr(compiled, name)) for name in names})
    one.core.runner.programs = one.core.prefill.programs = compiled


def check(one, kind, wrong=(WRONG,), error=jax.errors.JaxRuntimeError, good=GOOD):
    """Runs good and wrong requests together; compares the good ones' streams with those without a fault."""
    streams, failing = [], []
    for number, request in enumerate(good):
        streams.append(one.submit(*request))
        if number < len(wrong):
            failing.append(one.submit(*wrong[number]))
    pieces = [list(stream) for stream in streams]
    for stream in failing:
        with pytest.raises(error, match="planted"):
            stream.result()
    for stream, parts, want in zip(streams, pieces, wanted(kind)):
        found = stream.result()
        assert found.tokens == want.tokens == [part.token for part in parts if part.token is not None]
        assert (found.text, found.finish, found.prompt_tokens) == (want.text, want.finish, want.prompt_tokens)
        assert "".join(part.text for part in parts) == want.text
    assert one.load == (0, 0) and one.pages[1] == 0 and not one.failed and not one.core.scheduler.lone


QUICK = [("rows", "decode"), ("prefixes", "a later decode"), ("pages", "decode"), ("guesses", "a later decode")]
QUICK += [("rows", "prefill"), ("sliding", "a later decode"), ("rows", "admission")]
SLOW = [(kind, where) for kind in ENGINES for where in WHERE if (kind, where) not in QUICK]


@pytest.mark.parametrize("lost", [True, pytest.param(False, marks=pytest.mark.heavy)])
@pytest.mark.parametrize("kind, where", [*QUICK, *(pytest.param(*one, marks=pytest.mark.heavy) for one in SLOW)])
def test_only_the_request_that_makes_a_program_fail_gets_the_error(kind, where, lost):
    one = engine(kind)
    plant(one, *WHERE[where], lost=lost)
    check(one, kind)
    assert one.statistics.faults >= 2  # with others, and alone
    assert one.submit(*GOOD[0]).result().tokens == wanted(kind)[0].tokens


@pytest.mark.parametrize("kind", ["rows", *(pytest.param(kind, marks=pytest.mark.heavy) for kind in ENGINES)])
def test_several_requests_make_programs_fail(kind):
    one = engine(kind)
    plant(one, *WHERE["decode"])
    check(one, kind, [WRONG, ([BAD], sampling(top_k=MARK)), WRONG, ("y", sampling(top_k=MARK, temperature=1.0))])


def test_errors_of_the_host_in_a_program_are_found_alike():
    for error in (FloatingPointError, MemoryError):
        one = engine()
        plant(one, *WHERE["decode"], error=error)
        check(one, "rows", error=error)


@pytest.mark.parametrize("at", [0, pytest.param(6, marks=pytest.mark.heavy)])
def test_a_fault_on_the_devices_is_found_when_tokens_arrive(monkeypatch, at):
    """It poisons all later programs, and those that were dispatched before anyone knew."""

    def fails(seen, index):
        if (seen & (index >= at)).any():
            raise FloatingPointError("planted")
        return np.int32(0)

    real = programs._next

    def planted(model, usable, params, state, settings, next_, *rest):
        zero = jax.pure_callback(fails, jax.ShapeDtypeStruct((), jnp.int32), state["history"].seen[:, BAD], next_.index)
        return real(model, usable, params, state | {"tokens": state["tokens"] + zero}, settings, next_, *rest)

    monkeypatch.setattr(programs, "_next", planted)
    one = engine(slots=5 + (at > 0))  # programs of their own
    wrong = [([BAD, 7], sampling(repetition_penalty=1.3))]
    check(one, "rows", wrong, error=(ValueError, jax.errors.JaxRuntimeError))  # raised at once, or later


def test_a_fault_on_the_devices_while_prompts_are_read_is_one_requests(monkeypatch):
    def fails(tokens):
        if (tokens == BAD).any():
            raise FloatingPointError("planted")
        return np.int32(0)

    real = api.Model.prefill

    def planted(self, params, batch, cache):
        zero = jax.pure_callback(fails, jax.ShapeDtypeStruct((), jnp.int32), batch["tokens"])
        return real(self, params, batch | {"tokens": batch["tokens"] + zero}, cache)

    monkeypatch.setattr(api.Model, "prefill", planted)
    wrong = [([BAD, 7], sampling()), ([8, BAD], sampling())]
    one = engine("prefixes", slots=7)  # programs of their own
    check(one, "prefixes", wrong, error=(ValueError, jax.errors.JaxRuntimeError))  # raised at once, or later


def test_a_fault_that_no_request_alone_repeats_ends_nothing():
    """Two that fail only together get their texts one after the other; so does everyone after a single fault."""
    one = engine()
    plant(one, ("step",), lambda *a: (a[2].top_k == MARK).sum() > 1)
    together = [one.submit(prompt, sampling(top_k=MARK, max_new_tokens=30)) for prompt in ("ab", "def f")]
    check(one, "rows", [])
    assert all(len(stream.result().tokens) == 30 for stream in together)
    assert one.statistics.faults < 10
    left = [1]
    plant(one, ("step",), lambda *_: left and left.pop())
    check(one, "rows", [])


def test_faults_that_another_request_explains_do_not_count(monkeypatch):
    """Else a long request beside a few wrong ones would run alone to its end, and all others would wait for it."""
    faults, real = [], Recovery._marked

    def marked(self, suspects, running):
        found = real(self, suspects, running)
        faults.append([one.faults for one in suspects])
        return found

    monkeypatch.setattr(Recovery, "_marked", marked)
    one = engine()
    plant(one, *WHERE["decode"])
    long = one.submit("def f", sampling(max_new_tokens=30))
    next(iter(long))
    for _ in range(3):
        with pytest.raises(jax.errors.JaxRuntimeError, match="planted"):
            one.submit(*WRONG).result()
    assert long.result().tokens == wanted("rows")[0].tokens
    assert faults == [[1, 1]] * 3


def test_a_beam_search_whose_program_fails_is_one_requests(monkeypatch):
    real, beams = beam_search.search, BeamSearch(num_decodes=2)
    one = engine(slots=4)
    want = one.submit(GOOD[0][0], sampling(beams=beams)).result().text

    def planted(compiled, params, batch, requests):
        if BAD in batch["tokens"]:
            raise jax.errors.JaxRuntimeError("INTERNAL: planted")
        return real(compiled, params, batch, requests)

    monkeypatch.setattr(beam_search, "search", planted)
    found = [one.submit(prompt, sampling(beams=beams)) for prompt in (GOOD[0][0], [BAD], GOOD[0][0], [BAD, 5])]
    check(one, "rows", [])
    for number, stream in enumerate(found):
        if number % 2:
            with pytest.raises(jax.errors.JaxRuntimeError, match="planted"):
                stream.result()
        else:
            assert stream.result().text == want
    assert one.load == (0, 0)


def test_a_row_that_cannot_be_copied_is_not_in_the_prefix_cache():
    one = engine("prefixes")
    plant(one, ("row",), lambda *_: True)
    check(one, "prefixes", [])
    assert one.statistics.faults == 0


def test_cancelled_requests_are_not_read_again():
    one = engine()
    left = [1]
    plant(one, ("step",), lambda *_: left and left.pop())
    streams = [one.submit(*request) for request in GOOD[:3]]
    one.step()
    assert one.statistics.faults == 1 and one.load[0] == 3 + 1  # the engine's own comes first
    streams[1].cancel()
    one.run()
    assert streams[1].result().finish == "cancelled" and not streams[1].result().tokens[1:]
    assert streams[0].result().tokens == wanted("rows")[0].tokens and one.load == (0, 0)


@pytest.mark.parametrize("names", [("step",), ("prefill",), ("admit",), ("start",)])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_ends_only_after_its_devices_fail_again_and_again(names):
    """Its own requests fail then; all that run get the error each time, and who waits gets it at the end."""
    one = engine()
    if names == ("start",):
        plant(one, ("step",), lambda *_: True)
        one.core.runner._start = functools.partial(pytest.fail, "planted", pytrace=False)
    plant(one, ("step",) if names == ("start",) else names, lambda *_: True)
    one.start()
    for _ in range(3):
        assert not one.failed
        stream = one.submit(*GOOD[0])
        with pytest.raises(BaseException, match="planted"):
            stream.result()
    one._loop._thread.join(30)
    assert one.failed
    with pytest.raises(RuntimeError, match="closed"):
        one.submit("a")


def test_texts_between_failures_of_the_devices_keep_an_engine_alive():
    one, broken = engine(), [False]
    plant(one, ("step",), lambda *_: broken[0])
    for _ in range(5):
        broken[0] = True
        with pytest.raises(jax.errors.JaxRuntimeError, match="planted"):
            one.submit(*GOOD[0]).result()
        broken[0] = False
        assert one.submit(*GOOD[0]).result().tokens == wanted("rows")[0].tokens


def test_devices_that_work_between_failures_keep_an_engine_alive():
    """Its own request shows it, where those of users only get errors of their own."""
    one, broken = engine(), [False]
    plant(one, ("step",), lambda *given: broken[0] or at_token(1, *given))
    one.start()
    for _ in range(4):
        broken[0] = True
        with pytest.raises(jax.errors.JaxRuntimeError, match="planted"):
            one.submit(*GOOD[0]).result()
        broken[0] = False
        with pytest.raises(jax.errors.JaxRuntimeError, match="planted"):
            one.submit(*WRONG).result()
    assert not one.failed and one.submit(*GOOD[0]).result().tokens == wanted("rows")[0].tokens
    one.close()


def test_faults_leave_no_memory_behind(caplog):
    caplog.set_level(logging.CRITICAL)
    one = engine()
    plant(one, *WHERE["decode"])
    errors, sizes = [], []
    for _ in range(4):
        for _ in range(3):
            stream = one.submit(*WRONG)
            one.submit(*GOOD[2])
            with pytest.raises(jax.errors.JaxRuntimeError) as error:
                stream.result()
            errors.append(error.value)  # who keeps an error keeps none of the arrays
            one.run()
        del stream
        gc.collect()
        sizes.append((sum(x.nbytes for x in jax.live_arrays()), sum(isinstance(x, Request) for x in gc.get_objects())))
    assert sizes[-1][0] <= sizes[0][0] and sizes[-1][1] <= 4, sizes
