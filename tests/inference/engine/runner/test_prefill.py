"""Prompts are read together, in chunks, or from the prefix cache; texts are unaffected."""

from __future__ import annotations

import dataclasses
import threading

import jax
import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.inference.engine.core import mixes_prompts
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.sampling.sampling import Sampling
from capibara.models import api
from capibara.models.api import DecoderConfig, LatentAttention, Moe
from capibara.models.architectures.decoder import Block, Decoder

MODEL = api.build(
    DecoderConfig(
        vocab_size=384, embed_dim=32, num_layers=2, num_heads=2, mlp_dim=64, dtype="float32",
        layer_pattern=("local", "global"), window=24,
    )
)  # fmt: skip
VOCABULARY, LENGTH = ByteVocabulary(), 96
GREEDY = Sampling(temperature=0.0, max_new_tokens=6)


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(lambda x: x * 3, jax.jit(MODEL.init)(jax.random.key(1)))


def made(params, model=MODEL, **config):
    return Engine(model, params, VOCABULARY, LENGTH, EngineConfig(**{"prefix_cache_mib": 0} | config))


class Counted:
    """An engine's programs, which record the rows and positions that were read."""

    def __init__(self, engine):
        self.prefilled, self.resumed, self.mixed, programs = [], [], [], engine.core.runner.programs

        def prefill(params, batch):
            self.prefilled.append(batch["tokens"].shape)
            return programs.prefill(params, batch)

        def mix(params, state, tokens, *rest):
            documents = tokens.packed.documents
            texts = int(((documents == 0) & (tokens.counts > 0)).sum())
            self.mixed.append((texts, [int((documents == n).sum()) for n in range(1, documents.max() + 1)]))
            return programs.mix(params, state, tokens, *rest)

        def resume(params, batch, *rest):
            self.resumed.append(batch["tokens"].shape)
            return programs.resume(params, batch, *rest)

        engine.core.prefill.programs = programs._replace(prefill=prefill, resume=resume)
        engine.core.runner.programs = programs._replace(mix=mix)


def test_prompts_of_one_size_are_read_together(params):
    prompts = [f"{number} is a number" for number in range(5)] + [
        "a prompt of other size, it is longer",
        "0 is a number",
    ]
    alone = [made(params, slots=1).submit(prompt, GREEDY).result() for prompt in prompts]
    together = made(params, slots=8)
    counted = Counted(together)
    streams = [together.submit(prompt, GREEDY) for prompt in prompts]
    found = [stream.result() for stream in streams]
    assert [r.tokens for r in found] == [r.tokens for r in alone]
    assert len({tuple(r.tokens) for r in found}) == 6
    assert counted.prefilled == [(4, 32), (1, 32), (1, 48)]  # the last prompt is the first one again
    assert [r.cached_tokens for r in found] == [0] * 6 + [found[0].prompt_tokens]


def test_what_two_prompts_share_is_read_once(params):
    system = "you are a helpful animal. "
    prompts = [system + "a", system + "b", "something else of that size"]
    plain = [made(params).submit(prompt, GREEDY).result().tokens for prompt in prompts]
    one = made(params, prefix_cache_mib=16)
    counted = Counted(one)
    streams = [one.submit(prompt, GREEDY) for prompt in prompts]
    found = [stream.result() for stream in streams]
    assert [r.tokens for r in found] == plain
    assert counted.prefilled[0] == (2, 32)


def test_a_long_prompt_is_read_in_parts_while_others_go_on(params):
    long = list(range(10, 90))
    want = made(params).submit(long, GREEDY).result().tokens
    one = made(params, slots=2, prefill_tokens=32)
    counted = Counted(one)
    short = one.submit("x", dataclasses.replace(GREEDY, max_new_tokens=30))
    one.step()
    stream = one.submit(long, GREEDY)
    received = []
    while stream._arrived.empty():
        one.step()
        received.append(short._arrived.qsize())
    assert counted.prefilled == [(1, 32), (1, 32)] and counted.resumed == [(1, 32), (1, 32)]
    assert received == sorted(set(received)) and len(received) >= 3  # more in every step
    assert stream.result().tokens == want and len(short.result().tokens) == 30
    # A cancelled request leaves nothing of its prompt behind.
    dropped = one.submit(long, GREEDY)
    one.step()
    dropped.cancel()
    after = one.submit(long[::-1], GREEDY)
    assert after.result().tokens == made(params).submit(long[::-1], GREEDY).result().tokens
    assert dropped.result().finish == "cancelled"


@pytest.mark.parametrize("reading", ["alone", "beside a text", "after others"])
def test_parts_are_read_into_the_pages_of_their_slot(params, reading):
    long, model = (
        list(range(10, 90)),
        api.build(dataclasses.replace(MODEL.config, layer_pattern=("global",), window=None)),
    )
    want = made(params, model).submit(long, GREEDY).result()
    one = made(params, model, slots=2, prefill_tokens=32, page_size=8)
    counted = Counted(one)
    if reading == "after others":  # whose lengths and pages the slots still have
        for _ in range(2):
            one.submit("x" * 25, GREEDY).result()
    if reading == "beside a text":
        short = one.submit("x", dataclasses.replace(GREEDY, max_new_tokens=30))
        one.step()
    stream, begun = one.submit(long, GREEDY), one.statistics.steps
    got = stream.result()
    assert got.tokens == want.tokens and not counted.resumed
    each = ([piece.log_probability for piece in result.pieces] for result in (got, want))
    np.testing.assert_allclose(*each, atol=1e-4)
    if reading == "beside a text":
        assert one.statistics.steps >= begun + 3 and len(short.result().tokens) == 30
    assert one.pages[1] == 0


POSITIONS = {
    "rotary": {"num_kv_heads": 1},
    "learned positions": {"positions": "learned", "max_length": LENGTH},
    "alibi": {"positions": "alibi", "attention_sinks": "head"},
}


def whole(**options):
    """The model without windows, and its parameters."""
    model = api.build(dataclasses.replace(MODEL.config, layer_pattern=("global",), window=None, **options))
    return model, jax.tree.map(lambda x: x * 3, jax.jit(model.init)(jax.random.key(1)))


def assert_same_texts(results, expected):
    for result, want in zip(results, expected, strict=True):
        assert result.tokens == want.tokens
        each = ([piece.log_probability for piece in item.pieces if piece.token is not None] for item in (result, want))
        np.testing.assert_allclose(*each, atol=1e-4)


@pytest.mark.parametrize("kind", POSITIONS)
def test_prompts_of_any_lengths_are_read_beside_texts(kind):
    model, params = whole(**POSITIONS[kind])
    prompts = ["a", "a prompt of another size", "short one", "and one that begins otherwise" * 2, "b" * 80]
    alone = [made(params, model, slots=1).submit(prompt, GREEDY).result() for prompt in prompts]
    engine = made(params, model, slots=8, page_size=16, prefill_tokens=32, prefix_cache_mib=16)
    counted = Counted(engine)
    streams = [engine.submit(prompts[0], GREEDY)]
    engine.step()
    streams += [engine.submit(prompt, GREEDY) for prompt in prompts[1:]]
    assert_same_texts([stream.result() for stream in streams], alone)
    lengths = [stream.prompt_tokens for stream in (s.result() for s in streams)]
    # Room for 40 tokens: whole prompts, a part of the next one, and its rest before others.
    first = lengths[1:3]
    assert counted.mixed[0] == (1, first) or counted.mixed[0][1][:2] == first
    assert sum(sum(parts) for _, parts in counted.mixed) == sum(lengths[1:])
    assert all(texts + sum(parts) <= 40 and max(parts) <= 32 for texts, parts in counted.mixed)
    later = engine.submit(prompts[3] + "!", GREEDY).result()
    assert later.cached_tokens >= len(prompts[3])
    assert_same_texts([later], [made(params, model, slots=1).submit(prompts[3] + "!", GREEDY).result()])


@pytest.mark.parametrize(
    "options, packed",
    [
        ({"moe": Moe(num_experts=4)}, True),
        ({"moe": Moe(num_experts=4, dispatch="capacity")}, False),
        ({"latent": LatentAttention(kv_rank=8, rotary_dim=4, value_dim=8)}, False),
    ],
    ids=["dropless", "capacity", "latent"],
)
def test_models_that_pack_prompts(options, packed):
    model = api.build(dataclasses.replace(MODEL.config, layer_pattern=("global",), window=None, **options))
    assert mixes_prompts(model, EngineConfig()) == packed and not mixes_prompts(model, EngineConfig(cache_dtype="int8"))


def test_a_model_of_users_packs_no_prompts_unless_it_says_so():
    """Its blocks may not know of documents: prompts would see each other."""

    class MyConfig(DecoderConfig):
        pass

    class MyBlock(Block):
        pass

    @api.model_of(MyConfig)
    class MyDecoder(Decoder):
        block = MyBlock

    options = {field.name: getattr(MODEL.config, field.name) for field in dataclasses.fields(MODEL.config)}
    model = api.build(MyConfig(**options | {"layer_pattern": ("global",), "window": None}))
    assert not mixes_prompts(model, EngineConfig())
    MyDecoder.packs_prompts = True
    assert mixes_prompts(model, EngineConfig())


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_a_rounded_cache_gives_one_text_however_its_prompt_was_cut(params, dtype):
    long = list(range(10, 90))
    ways = ({}, {"prefill_tokens": 32}, {"draft_tokens": 3, "prefill_tokens": 32}, {"prefix_cache_mib": 16})
    found = []
    for way in ways:
        one = made(params, slots=2, cache_dtype=dtype, **way)
        if "prefix_cache_mib" in way:
            one.submit(long[:41], dataclasses.replace(GREEDY, max_new_tokens=1)).result()
        found.append(one.submit(long, dataclasses.replace(GREEDY, max_new_tokens=16)).result())
    assert found[-1].cached_tokens == 41
    for one in found[1:]:
        assert one.tokens == found[0].tokens
        want = [piece.log_probability for piece in found[0].pieces]
        np.testing.assert_allclose([piece.log_probability for piece in one.pieces], want, atol=1e-4)


def test_parameters_are_replaced(params):
    others = jax.tree.map(lambda x: x * 3, jax.jit(MODEL.init)(jax.random.key(2)))
    want = made(others).submit("a prompt that is kept", GREEDY).result().tokens
    one = made(params, prefix_cache_mib=16)
    before = one.submit("a prompt that is kept", GREEDY).result().tokens
    compiled = one.core.runner.programs.serving._cache_size(), one.core.runner.programs.step._cache_size()
    one.update(others)
    after = one.submit("a prompt that is kept", GREEDY).result()
    assert after.tokens == want != before and after.cached_tokens == 0
    assert compiled == (one.core.runner.programs.serving._cache_size(), one.core.runner.programs.step._cache_size())


@pytest.mark.parametrize("steps, parts", [(4, 1024), (1, 32)], ids=["a text under way", "a prompt half read"])
def test_what_was_read_with_old_parameters_is_not_kept(params, steps, parts):
    others = jax.tree.map(lambda x: x * 3, jax.jit(MODEL.init)(jax.random.key(2)))
    prompt = list(range(10, 60))
    one = made(params, slots=2, prefix_cache_mib=16, prefill_tokens=parts, decode_steps=1)
    under_way = one.submit(prompt, GREEDY)
    for _ in range(steps):
        one.step()
    assert one.load == (0, 1) and under_way._arrived.empty() == (parts == 32)
    one.update(others)
    first, plain = under_way.result(), made(others)
    if parts == 32:
        assert first.tokens == plain.submit(prompt, GREEDY).result().tokens
    again = one.submit([*prompt, 7], GREEDY).result()
    assert again.tokens == plain.submit([*prompt, 7], GREEDY).result().tokens
    assert again.cached_tokens == (len(prompt) if parts == 32 else 0)


def test_parameters_that_come_while_others_are_taken_are_not_lost(params):
    one = made(params)
    held = one.core.params

    class Slow(type(held)):
        """Gives another thread time between checking and taking."""

        def __setattr__(self, name, value):
            if name == "_updated" and value is None:
                other.start()
                other.join(0.5)
            super().__setattr__(name, value)

    last = jax.tree.map(lambda x: x * 2, params)
    other = threading.Thread(target=lambda: one.update(last))
    one.update(params)
    held.__class__ = Slow
    one.step()
    held.__class__ = Slow.__base__
    other.join()
    one.step()
    want = one.core.runner.programs.serving(last)
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(held.current), jax.tree.leaves(want)))


@pytest.mark.heavy
@pytest.mark.parametrize("mixed", [False, True])
def test_nothing_is_compiled_after_the_warm_up(params, caplog, mixed):
    model, options = (whole()[0], {"page_size": 16}) if mixed else (MODEL, {"draft_tokens": 3})
    one = made(params, model, slots=2, **options)
    assert (one.core.mixed is not None) == mixed
    one.warm_up()
    assert one.statistics.steps == 0
    with jax.log_compiles(), caplog.at_level("WARNING"):
        streams = [
            one.submit([7, 8] * count, dataclasses.replace(GREEDY, logit_bias={9: 1.0}), likeliest=likeliest)
            for count, likeliest in ((9, 0), (20, 2), (40, 0), (11, 0), (17, 0))
        ]
        assert all(len(stream.result().tokens) == 6 for stream in streams)
        assert not [record for record in caplog.records if "Compiling" in record.getMessage()]
        jax.jit(lambda x: x + 1)(np.ones(7, np.float32))
        assert [record for record in caplog.records if "Compiling" in record.getMessage()]


@pytest.mark.parametrize("name, value", [("prefill_tokens", 0), ("draft_tokens", -1), ("slots", 0)])
def test_sizes_are_checked(name, value):
    with pytest.raises(UserError, match=f"EngineConfig.{name} is {value}"):
        EngineConfig(**{name: value})
