"""Unmerged adapters: every request's text and log probabilities equal those of its adapter merged."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest

from capibara import sharding
from capibara.core import tree
from capibara.core.types import UserError
from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.engine.reading import Pooling
from capibara.inference.sampling.sampling import BeamSearch, Sampling
from capibara.models import api
from capibara.models.api import Adapter, DecoderConfig, Lora, Moe, unmerged
from capibara.sharding import Plan

VOCABULARY, LENGTH, SLOTS = ByteVocabulary(), 64, 4
SIZES = dict(vocab_size=384, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, mlp_dim=64, dtype="float32")
MODEL = api.build(DecoderConfig(**SIZES))
LORAS = {
    "long": Lora(rank=2, alpha=4.0, targets=("query", "out", "up"), dora=True),
    "poet": Lora(rank=2, alpha=4.0),
    "coder": Lora(rank=5, alpha=3.0, rslora=True, targets=("all-linear",), fused=(("query", "key", "value"),)),
    "some": Lora(rank=3, alpha=6.0, targets=("layers/1/attention/out", "down"), rank_pattern=(("down", 4),)),
}
NAMES = (None, *LORAS)
GREEDY = Sampling(temperature=0.0, max_new_tokens=10)
PROMPTS = ["def f", "a longer prompt, of many words", "import numpy", "class A", "x = 1"]


@functools.cache
def params():
    # Large weights, so that one token is far likelier than the others and texts do not agree by chance.
    return jax.tree.map(lambda x: x * 3, jax.jit(MODEL.init)(jax.random.key(1)))


@functools.cache
def adapted(name):
    """The model with an adapter, and its parameters."""
    model = api.build(dataclasses.replace(MODEL.config, lora=LORAS[name]))
    new = jax.jit(model.adapt)(params(), jax.random.key(2))
    rng = np.random.default_rng(len(name))

    def drawn(path, x):
        if not path.endswith("_lora/b"):
            return x
        ranks, _ = LORAS[name].of_layers(path.removesuffix("_lora/b"), range(len(x)))
        own = np.arange(x.shape[1]) < np.array(ranks)[:, None]
        return jax.numpy.asarray(np.float32(0.4 * rng.standard_normal(x.shape)) * own[(..., *[None] * (x.ndim - 2))])

    return model, tree.map_with_names(drawn, new)


def adapters(*names):
    of = {name: adapted(name) for name in names or LORAS}
    return [Adapter(name, model.config.lora, model.trained(values)) for name, (model, values) in of.items()]


def engine(values=None, beside=(), **config):
    given = EngineConfig(**{"slots": SLOTS, "prefix_cache_mib": 0} | config)
    return Engine(MODEL, params() if values is None else values, VOCABULARY, LENGTH, given, adapters=beside)


@functools.cache
def merged(name):
    one = engine() if name is None else engine(values=jax.jit(adapted(name)[0].merge)(adapted(name)[1]))
    return [stream.result() for stream in [one.submit(prompt, GREEDY, likeliest=3) for prompt in PROMPTS]]


def mixed(one, **how):
    """The texts of every adapter, requested in turn, so that each batch has rows of several."""
    asked = [(name, index) for index in range(len(PROMPTS)) for name in NAMES]
    streams = [one.submit(PROMPTS[index], GREEDY, likeliest=3, adapter=name, **how) for name, index in asked]
    return {key: stream.result() for key, stream in zip(asked, streams)}


def check(found):
    for (name, index), one in found.items():
        want = merged(name)[index]
        assert one.tokens == want.tokens, (name, index)
        for got, wanted in zip(one.pieces, want.pieces):
            assert got.log_probability == pytest.approx(wanted.log_probability, abs=2e-4)
            np.testing.assert_allclose(*([p for _, p in x.likeliest] for x in (got, wanted)), rtol=0, atol=2e-4)


CONFIGS = {
    "rows": {},
    "pages": {"page_size": 8, "pages": 20},
    "guesses": {"draft_tokens": 3},
    "prefixes": {"prefix_cache_mib": 4},
    "one slot": {"slots": 1},
}
SHORT = ("prefixes",)  # in rows as well


@pytest.mark.parametrize(
    "config", [pytest.param(c, marks=() if n in SHORT else pytest.mark.heavy, id=n) for n, c in CONFIGS.items()]
)
def test_texts_of_a_mixed_batch_are_those_of_the_merged_models(config):
    one = engine(beside=adapters(), **config)
    check(mixed(one))
    if "prefix_cache_mib" in config:  # and again, of what was kept
        found = mixed(one)
        check(found)
        assert all(completion.cached_tokens for (_, index), completion in found.items() if index == 1)
    texts = {tuple(tuple(one.tokens) for one in merged(name)) for name in NAMES}
    assert len(texts) == len(NAMES)  # each adapter says something else


@pytest.mark.parametrize(
    "sizes", [dict(fsdp=1, tensor=2), pytest.param(dict(fsdp=2, tensor=2), marks=pytest.mark.heavy)]
)
def test_texts_are_the_same_where_devices_share_layers(sizes):
    plan = Plan(batch_size=4, **sizes)
    mesh = sharding.make_mesh(plan, jax.devices()[: math.prod(sizes.values())])
    spread = jax.device_put(params(), sharding.shardings(mesh, plan.rules, MODEL.axes, MODEL.abstract_params))
    one = engine(spread, adapters())
    own = one.core.adapters.of([])[0][0]["attention"]["out"]
    assert own["a"].sharding.shard_shape(own["a"].shape)[0] == SIZES["num_heads"] // 2
    check(mixed(one))


def test_readings_are_with_their_adapter():
    one, ids = engine(beside=adapters()), VOCABULARY.prompt_ids(PROMPTS[0])
    for name in NAMES:
        values = None if name is None else jax.jit(adapted(name)[0].merge)(adapted(name)[1])
        want, read = engine(values).reader, one.reader
        got = read.score(ids, 2, name), read.embed([ids, ids[:3]], Pooling.LAST, name)
        np.testing.assert_allclose(got[0].log_probabilities, want.score(ids, 2).log_probabilities, rtol=0, atol=2e-4)
        np.testing.assert_allclose(got[1], want.embed([ids, ids[:3]], Pooling.LAST), rtol=0, atol=2e-4)
    with pytest.raises(UserError, match="adapter is 'nobody', must be one of"):
        one.reader.score(ids, 2, "nobody")


def test_many_adapters_are_gathered_for_few_rows():
    """Two slots and six adapters: a decode step gathers its rows' factors instead of multiplying by all of them."""
    named = [Adapter(f"{one.name}{copy}", *one[1:]) for copy in (0, 1) for one in adapters("poet", "coder", "long")]
    one = engine(beside=named, slots=2)
    asked = [(n.name, index) for index in (0, 2) for n in named]
    streams = [one.submit(PROMPTS[index], GREEDY, likeliest=3, adapter=name) for name, index in asked]
    check({(name[:-1], index): stream.result() for (name, index), stream in zip(asked, streams)})


def test_what_is_asked_of_an_adapter_that_is_not_there_is_refused():
    one = engine(beside=adapters("poet"))
    with pytest.raises(UserError, match="adapter is 'painter', must be one of poet"):
        one.submit("a", adapter="painter")
    with pytest.raises(UserError, match="adapter is 'poet', but beam search supports no adapters: merge it"):
        one.submit("a", Sampling(beams=BeamSearch()), adapter="poet")
    with pytest.raises(UserError, match="none: no adapter is loaded"):
        engine().submit("a", adapter="poet")
    with pytest.raises(UserError, match="two adapters are called 'poet'"):
        engine(beside=adapters("poet") * 2)


@pytest.mark.parametrize(
    "config, lora, what",
    [
        (
            dict(moe=Moe(num_experts=2, top_k=1, expert_dim=16)),
            Lora(targets=("all-linear",)),
            "of experts or their router",
        ),
        ({}, Lora(modules_to_save=("embedding",)), "embedding is trained in full"),
    ],
)
def test_what_cannot_be_beside_others_is_named(config, lora, what):
    model = api.build(dataclasses.replace(MODEL.config, lora=lora, **config))
    values = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), model.trained(model.abstract_params))
    with pytest.raises(UserError, match=what):
        unmerged.check(model.plain, Adapter("poet", lora, values))
