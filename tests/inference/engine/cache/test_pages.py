"""Slots with pages produce the same texts as slots with whole rows, and free all pages in the end."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara import sharding
from capibara.core import tree
from capibara.core.types import UserError
from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.inference.engine.cache.pages import Pages
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.engine.placement import footprint
from capibara.inference.engine.runner.next_tokens import next_tokens
from capibara.inference.sampling.sampler import History
from capibara.inference.sampling.sampling import Sampling
from capibara.inference.server.prometheus import ServingMetrics
from capibara.inference.server.service.service import Served, ServerConfig, Service
from capibara.kernels.attention.spec import AttentionSpec
from capibara.models import api
from capibara.models.api import DecoderConfig, EncoderDecoderConfig, GatedDelta, ShortConv
from capibara.models.cache import dense, paged
from capibara.sharding import Plan

CONFIG = DecoderConfig(
    vocab_size=384, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, mlp_dim=64, dtype="float32"
)
VOCABULARY, LENGTH = ByteVocabulary(), 64
GREEDY = Sampling(temperature=0.0, max_new_tokens=24)
DRAWN = dataclasses.replace(GREEDY, temperature=1.2)
REQUESTS = [
    ("def f", GREEDY),
    ("a longer prompt, of many words", dataclasses.replace(DRAWN, seed=3, max_new_tokens=30)),
    ("", dataclasses.replace(DRAWN, top_k=5, seed=4, max_new_tokens=3)),
    ("x", dataclasses.replace(DRAWN, top_p=0.8, seed=5, max_new_tokens=33)),
    ("import numpy", dataclasses.replace(DRAWN, min_p=0.05, seed=6, max_new_tokens=1)),
    ("class A", dataclasses.replace(DRAWN, repetition_penalty=1.5, seed=7, max_new_tokens=60)),  # its slot is full
    ("def f", dataclasses.replace(DRAWN, seed=8)),
    ("a question <", dataclasses.replace(DRAWN, seed=1, thinking_tokens=7, thinking_tags=("<", "?>"))),
]
VARIANTS = {
    "global": {},
    "patterns": dict(layer_pattern=("local", "global"), window=8, attention_soft_cap=5.0),
    "sinks": dict(layer_pattern=("local", "global"), window=8, attention_sinks="head"),
    "recurrent": dict(
        layer_pattern=("recurrent", "global"), mixer=GatedDelta(key_heads=2, value_heads=4, key_dim=8, value_dim=8)
    ),
    "masked": dict(layer_pattern=("local", "global"), window=LENGTH, positions="learned", max_length=LENGTH),
}
SMALL = dict(page_size=8, pages=10)  # three slots could need 24


@functools.cache
def made(variant="global"):
    model = api.build(dataclasses.replace(CONFIG, **VARIANTS[variant]))
    # Large weights, so that one token is far likelier than the others and texts do not agree by chance.
    return model, jax.tree.map(lambda x: x * 3, jax.jit(model.init)(jax.random.key(1)))


def engine(variant="global", params=None, **config):
    model, own = made(variant)
    settings = EngineConfig(**{"slots": 3, "prefix_cache_mib": 0} | config)
    return Engine(model, own if params is None else params, VOCABULARY, LENGTH, settings)


def texts(one):
    found = [stream.result() for stream in [one.submit(*request) for request in REQUESTS]]
    assert one.pages[1] == 0  # all are given back
    return found


@functools.cache
def of_rows(variant="global", dtype="compute"):
    return texts(engine(variant, cache_dtype=dtype))


@pytest.mark.parametrize(
    "variant, pages",
    [
        pytest.param("global", dict(page_size=24), marks=pytest.mark.heavy),  # no divisor of the length
        ("global", SMALL),
        ("patterns", SMALL),
        ("recurrent", SMALL),
        pytest.param("sinks", SMALL, marks=pytest.mark.heavy),
        pytest.param("masked", SMALL, marks=pytest.mark.heavy),
        pytest.param("patterns", dict(page_size=8), marks=pytest.mark.heavy),
    ],
    ids=str,
)
def test_texts_are_those_of_rows(variant, pages):
    want, one = of_rows(variant), engine(variant, **pages)
    for found, other in zip(texts(one), want, strict=True):
        assert (found.text, found.tokens, found.finish) == (other.text, other.tokens, other.finish)
        np.testing.assert_allclose(
            *([piece.log_probability for piece in r.pieces] for r in (found, other)), rtol=1e-4, atol=1e-4
        )
    assert (one.statistics.preempted > 0) == ("pages" in pages)
    assert len({tuple(found.tokens) for found in want}) == len(REQUESTS)


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_other_dtypes_lie_in_pages_too(dtype):
    one = engine(cache_dtype=dtype, **SMALL)
    assert [r.tokens for r in texts(one)] == [r.tokens for r in of_rows(dtype=dtype)]
    assert one.statistics.preempted > 0
    assert {x.dtype for x in jax.tree.leaves(one.core.runner.state["cache"]["layers"])} >= {jnp.dtype(dtype)}


def test_on_a_mesh():
    model, params = made()
    plan = Plan(batch_size=2, tensor=2)
    mesh = sharding.make_mesh(plan, jax.devices()[:2])
    spread = jax.device_put(params, sharding.shardings(mesh, plan.rules, model.axes))
    one = engine(params=spread, **SMALL)
    assert [r.tokens for r in texts(one)] == [r.tokens for r in of_rows()]
    assert one.statistics.preempted > 0
    for layer in one.core.runner.state["cache"]["layers"]:  # each device has one of the two heads
        assert layer["key_pages"].sharding.shard_shape(layer["key_pages"].shape) == (11, 1, 8, 8)


def test_what_is_preempted_is_not_read_from_its_first_token():
    one = engine(**SMALL | {"prefix_cache_mib": 16})
    found = texts(one)
    assert [r.tokens for r in found] == [r.tokens for r in of_rows()]
    assert one.statistics.preempted > 0
    assert all(r.cached_tokens <= r.prompt_tokens for r in found)
    again = one.submit("a longer prompt, of many words again", GREEDY).result()
    assert again.cached_tokens == 31
    assert again.tokens == engine().submit("a longer prompt, of many words again", GREEDY).result().tokens


@pytest.mark.heavy
def test_guesses_take_no_page_from_others():
    model, params = made()
    # A model that repeats itself: its embedding and head are large, its layers add little.
    params = params | {"layers": jax.tree.map(lambda x: x * 0.2, params["layers"])}
    want = texts(engine(params=params))
    for pages in (dict(page_size=8), SMALL):
        one = engine(params=params, draft_tokens=5, **pages)
        assert [r.tokens for r in texts(one)] == [r.tokens for r in want]
        assert 0 < one.statistics.accepted < one.statistics.drafted
        assert (one.statistics.preempted > 0) == ("pages" in pages)


def test_a_stop_string_and_a_cancelled_request_give_their_pages_back():
    whole = of_rows()[0]
    one = engine(**SMALL)
    stop = one.submit("def f", dataclasses.replace(GREEDY, stop=(whole.text[4:7],)))
    waits = [one.submit("y" * 30, dataclasses.replace(DRAWN, max_new_tokens=30)) for _ in range(4)]
    for _ in range(6):
        one.step()
    assert 0 < one.pages[1] <= one.pages[0] == 10
    waits[0].cancel(), waits[3].cancel()
    assert stop.result().text == whole.text[: whole.text.index(whole.text[4:7])]
    assert [stream.result().finish for stream in waits] == ["cancelled", "length", "length", "cancelled"]
    assert one.pages[1] == 0


def test_those_who_wait_go_on_where_all_end_for_want_of_a_page():
    asked, prompt = dataclasses.replace(GREEDY, max_new_tokens=11), [5] * 6
    tokens = engine().submit(prompt, asked).result().tokens
    assert tokens[2] not in tokens[:2]
    one = engine(slots=2, page_size=8, pages=2)
    streams = [one.submit(prompt, asked, ends=tokens[2:3]) for _ in range(5)]
    one.run()
    assert one.load == (0, 0) and one.pages == (2, 0) and one.statistics.preempted == 0
    assert all(stream.result().tokens == tokens[:2] for stream in streams)


def test_a_failed_engine_has_no_page():
    one = engine(**SMALL, slots=1, decode_steps=4)
    streams = [one.submit("def f", GREEDY) for _ in range(3)]
    one.step()
    assert one.pages[1] == 2  # for the tokens of the next program too

    def fails(*_):
        raise RuntimeError("no device")

    one.core.runner.programs = one.core.runner.programs._replace(step=fails)
    with pytest.raises(RuntimeError, match="no device"):
        one._loop._work()
    for stream in streams:
        with pytest.raises(RuntimeError, match="no device"):
            stream.result()
    assert one.pages[1] == 0 and one.failed


def test_who_is_preempted_goes_on_where_its_row_cannot_be_copied():
    one, asked = engine(slots=2, page_size=8, pages=5, prefix_cache_mib=16), ([5] * 10, GREEDY)
    want = one.submit(*asked).result().tokens

    def fails(*_):
        raise RuntimeError("no room")

    one.core.runner.programs = one.core.runner.programs._replace(row=fails)  # the copy of what it has read
    streams = [one.submit(*asked) for _ in range(2)]
    assert [stream.result().tokens for stream in streams] == [want] * 2
    assert one.statistics.preempted >= 1 and one.statistics.faults == 0


def test_a_server_tells_of_pages():
    service = Service(None)
    metrics = ServingMetrics(lambda: service.load)
    assert b"capibara_pages 0.0" in metrics.page()
    one = engine(**SMALL, decode_steps=1)
    service.ready(Served(one, VOCABULARY, None, LENGTH, None, "tiny", GREEDY), ServerConfig())
    texts(one)
    streams = [one.submit("y" * 30, GREEDY) for _ in range(2)]
    one.step()
    page = metrics.page().decode()
    assert "capibara_pages 10.0" in page and "capibara_pages_busy 8.0" in page and "capibara_compiling 0.0" in page
    count = one.statistics.preempted
    assert count > 0 and f"capibara_preempted_texts_total {float(count)}" in page
    assert f"capibara_put_back_texts_total {float(count)}" in page  # the old name
    assert all(stream.result().finish == "length" for stream in streams)


@pytest.mark.parametrize("seed", range(3))
def test_no_page_belongs_to_two(seed):
    pages, random, held = Pages(4, 40, paged.Sizes(9, 8)), np.random.default_rng(seed), [0] * 4
    for _ in range(300):
        slot = int(random.integers(4))
        if random.random() < 0.3:
            pages.release(slot)
            held[slot] = 0
        else:
            tokens, before = int(random.integers(1, 41)), pages.table
            needed = max(-(-tokens // 8) - held[slot], 0)
            assert pages.grow(slot, tokens) == (needed <= 9 - sum(held))
            assert (before == pages.table).all() or before is not pages.table
            held[slot] += needed if needed <= 9 - sum(held) else 0
        taken = pages.table[pages.table > 0]
        assert len(set(taken.tolist())) == len(taken) == pages.busy == sum(held) and taken.max(initial=1) <= 9
        assert [pages.room(slot) for slot in range(4)] == [8 * count for count in held]
        assert [(row > 0).sum() for row in pages.table] == held == [np.argmin([*row, 0]) for row in pages.table]
    for slot in range(4):
        pages.release(slot)
    assert pages.busy == 0 and not pages.table.any()


def test_who_begins_leaves_some_to_those_that_run():
    pages = Pages(3, 40, paged.Sizes(5, 8))
    assert pages.begin(0, 40) and not pages.begin(1, 1)  # alone it may have all
    pages.release(0)
    assert pages.begin(0, 24) and not pages.begin(1, 16) and pages.begin(1, 8)
    assert not pages.begin(2, 1) and pages.grow(0, 32)


def test_rows_that_are_full_leave_the_last_page_to_who_begins():
    """A pool that is large enough for all slots accepts a full prompt in each: none of them grows any more."""
    pages = Pages(4, 32, paged.Sizes(16, 8))
    assert all(pages.begin(slot, 32) for slot in range(4)) and pages.busy == 16


def test_a_text_ends_where_the_pool_does_and_a_larger_prompt_is_refused(caplog):
    engine(page_size=8, pages=8)
    assert not caplog.records
    one = engine(page_size=8, pages=5)
    said = r"EngineConfig.pages \(5\) of 8 .* ends, .* at 41 tokens; set EngineConfig.pages = 8 "
    assert re.match(said, caplog.messages[0]) and len(caplog.messages) == 1
    others = [one.submit("other", GREEDY) for _ in range(3)]
    assert len(one.submit([5] * 30, dataclasses.replace(GREEDY, max_new_tokens=11)).result().tokens) == 11
    assert all(len(stream.result().tokens) == 24 for stream in others)
    assert len(one.submit([5] * 30, dataclasses.replace(GREEDY, max_new_tokens=12)).result().tokens) == 11
    with pytest.raises(UserError, match=r"41 tokens .* EngineConfig.pages .5. of 8 .*: shorten it, or set .* = 6"):
        one.submit([5] * 41, dataclasses.replace(GREEDY, max_new_tokens=1))
    assert one.load == (0, 0) and one.pages == (5, 0)


@pytest.mark.parametrize(
    "settings, says",
    [
        (dict(page_size=-1), "EngineConfig.page_size is -1, must be at least 0"),
        (dict(page_size=8, pages=0), "EngineConfig.pages is 0, must be at least 1"),
        (dict(pages=8), "EngineConfig.pages is 8, but page_size is 0"),
        (dict(page_size=8, when_full="slide"), "when_full .'slide'.*page_size 8"),
    ],
)
def test_settings_that_do_not_go_together(settings, says):
    with pytest.raises(UserError, match=says):
        EngineConfig(**settings)


def test_memory_is_that_of_the_pool():
    model, _ = made()
    per_token = 2 * 2 * 8 * 4 * CONFIG.num_layers  # keys and values of two heads of 8, float32
    needs = {}
    for pages in (10, 20):
        one = engine(page_size=8, pages=pages)
        needs[pages] = footprint.state_bytes(model, one._config, LENGTH)
        assert needs[pages] == tree.byte_count(one.core.runner.state)
    assert needs[20] - needs[10] == 10 * 8 * per_token


@pytest.mark.parametrize(
    "settings, says",
    [
        (dict(slots=10**12), r"^EngineConfig.slots \(1000000000000\) of 64 tokens need .* GiB, .* fewer slots, or"),
        (
            dict(page_size=32, pages=10**13),
            r"with EngineConfig.pages \(10000000000000\), EngineConfig.page_size \(32\)",
        ),
        (
            dict(page_size=10**14),
            r"EngineConfig.page_size \(100000000000000\) need .* fewer slots or pages, or a shorter",
        ),
    ],
)
def test_more_memory_than_there_is(settings, says):
    with pytest.raises(UserError, match=says):
        engine(**settings)


def test_models_that_have_nothing_to_share():
    settings = EngineConfig(page_size=8)
    windowed = api.build(dataclasses.replace(CONFIG, layer_pattern=("local",), window=16))
    with pytest.raises(UserError, match="page_size is 8, but every layer of the model has a window .16. shorter"):
        Engine(windowed, {}, VOCABULARY, LENGTH, settings)
    states = dict(mixer=ShortConv(), layer_pattern=("recurrent",), positions="none")
    with pytest.raises(UserError, match="page_size is 8, but no layer of the model keeps keys and values"):
        Engine(api.build(dataclasses.replace(CONFIG, **states)), {}, VOCABULARY, LENGTH, settings)
    sizes = dict(vocab_size=64, embed_dim=32, num_layers=2, num_heads=2, mlp_dim=48)
    with pytest.raises(UserError, match="page_size is 8, but pages are for decoders"):
        Engine(api.build(EncoderDecoderConfig(**sizes)), {}, VOCABULARY, LENGTH, settings, 16)


def attention_cases():
    """Of the window and the cap in both dtypes; of the plain attention in one."""
    for kind in (AttentionSpec(True, None, None, 0.3), AttentionSpec(True, 9, 2.0, 0.3)):
        for dtype, tokens in itertools.product(("float32", "int8"), (1, 3)):
            short = (dtype == "float32") == (tokens == 1) if kind.window else (dtype, tokens) == ("float32", 3)
            yield pytest.param(kind, dtype, tokens, marks=() if short else pytest.mark.heavy)


@pytest.mark.parametrize("kind, dtype, tokens", list(attention_cases()), ids=str)
def test_attention_is_that_to_rows_whoever_computes_it(monkeypatch, tokens, dtype, kind):
    B, K, S, P, H, random = 3, 2, 24, 8, 8, np.random.default_rng(0)
    lengths, counts = np.array([11, 5, 20], np.int32), np.array([tokens, 1, tokens], np.int32)
    now = dense.PrefillInputs(lengths, counts, lengths[:, None] + np.arange(tokens, dtype=np.int32), False)
    drawn = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)  # noqa: E731
    read = dense.PrefillInputs(jnp.zeros(B, jnp.int32), lengths, np.arange(S, dtype=np.int32)[None].repeat(B, 0), True)
    empty = dense.empty_layer(dataclasses.replace(CONFIG, embed_dim=32), B, S, jnp.dtype(dtype))
    rows = dense.write(empty, drawn(B, S, K, H), drawn(B, S, K, H), read)
    pages = Pages(B, S, paged.Sizes(9, P))
    for slot in (2, 0, 1):
        assert pages.grow(slot, int(lengths[slot] + counts[slot]))
    table, start = jnp.asarray(pages.table), {"lengths": jnp.zeros(B, jnp.int32), "layers": (rows,)}
    kept = paged.empty(start, S, pages.sizes)
    nothing = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan if x.dtype == jnp.float32 else 100), kept["layers"])
    kept = kept | {"layers": nothing}  # as others may have left it
    for slot in range(B):
        row = jax.tree.map(lambda x: x[slot : slot + 1], start)
        kept = paged.put_row(kept, row, jnp.int32(slot), table)
        row = paged.row(kept, jnp.int32(slot), int(lengths[slot]), table)["layers"][0]
        for name, x in row.items():
            np.testing.assert_array_equal(x, rows[name][slot : slot + 1, :, : lengths[slot]])
    (layer,) = paged.with_table(kept, table)["layers"]
    q, new = drawn(B, tokens, 4, H), (drawn(B, tokens, K, H), drawn(B, tokens, K, H))
    want = dense.attend(q, dense.write(rows, *new, now), rows, new, kind, now)
    real = np.asarray(now.real)
    for loops in (True, False):  # as on a CPU, and elsewhere
        monkeypatch.setattr(sharding, "platform", lambda: "cpu" if loops else "gpu")
        got = paged.attend(q, paged.write(layer, *new, now), kind, now)
        np.testing.assert_allclose(np.asarray(got)[real], np.asarray(want)[real], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("program", ["step", "admit"])
def test_the_pool_is_updated_in_place(program):
    one = engine(slots=4, page_size=32, pages=400)
    given = (
        one.core.params.current,
        one.core.runner.state,
        one.core.runner.settings,
        next_tokens([], 4, 384)[0],
        np.int32(1),
        one.core.runner.table,
        0,
    )
    if program == "admit":
        batch = {"tokens": np.zeros((1, 32), np.int32), "counts": np.array([3], np.int32)}
        logits, row = one.core.runner.programs.prefill(one.core.params.current, batch)
        of_one = jax.tree.map(lambda x: x[:1], one.core.runner.settings)
        given = (
            one.core.runner.state,
            row,
            logits,
            np.int32(1),
            of_one,
            next_tokens([], 1, 384)[0],
            History(*(np.zeros((1, 384), dtype) for dtype in (bool, np.int32, np.float32))),
            one.core.runner.table,
            0,
        )
    memory = getattr(one.core.runner.programs, program).lower(*given).compile().memory_analysis()
    pool = sum(x.nbytes for x in jax.tree.leaves(one.core.runner.state["cache"]))
    assert memory.alias_size_in_bytes >= pool and memory.temp_size_in_bytes < pool / 2
