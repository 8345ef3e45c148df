"""Unmerged adapters: every request's text and log probabilities equal those of its adapter merged, also if loaded later."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
import time

import jax
import numpy as np
import pytest

from capibara import sharding
from capibara.core import tree
from capibara.core.types import UserError
from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.engine.reading import Pooling
from capibara.inference.engine.requests.adapters import AdapterSlots, SlotsBusy
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


def engine(values=None, beside=(), room=AdapterSlots(), **config):
    given = EngineConfig(**{"slots": SLOTS, "prefix_cache_mib": 0} | config)
    values = params() if values is None else values
    return Engine(MODEL, values, VOCABULARY, LENGTH, given, adapters=beside, adapter_slots=room)


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


# Loaded while the engine runs.

ROOM = AdapterSlots(count=3, rank=5)


def load(one, *names, replace=False):
    for adapter in adapters(*names):
        one.adapters.load(adapter, replace=replace)


def renamed(adapter, name):
    return adapter._replace(name=name)


def texts_of(one, name, index=1, **how):
    return one.submit(PROMPTS[index], GREEDY, likeliest=3, adapter=name, **how).result()


@pytest.mark.parametrize("beside", [("long",), pytest.param((), marks=pytest.mark.heavy)])
@pytest.mark.parametrize("config", [{}, pytest.param({"page_size": 8, "pages": 20}, marks=pytest.mark.heavy)])
def test_what_is_loaded_later_is_as_from_the_start(beside, config):
    one = engine(beside=adapters(*beside) if beside else (), room=ROOM, **config)
    check({(None, 1): texts_of(one, None)})
    load(one, *(name for name in LORAS if name not in ("long", "some")))
    load(one, "some")
    known = [name for name in NAMES if name in (None, "poet", "coder", "some", *beside)]
    assert one.adapters.names == (*beside, "poet", "coder", "some")
    asked = [(name, index) for index in range(len(PROMPTS)) for name in known]
    streams = [one.submit(PROMPTS[index], GREEDY, likeliest=3, adapter=name) for name, index in asked]
    check({key: stream.result() for key, stream in zip(asked, streams)})


def test_loading_compiles_nothing():
    compiled = []
    one = engine(room=ROOM)
    texts_of(one, None)
    listener = lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        load(one, "poet")
        check({("poet", 1): texts_of(one, "poet"), (None, 1): texts_of(one, None)})
        load(one, "coder")
        one.adapters.unload("poet")
        check({("coder", 1): texts_of(one, "coder")})
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert compiled == []


def test_an_unloaded_adapter_ends_its_texts():
    one = engine(room=AdapterSlots(count=1, rank=5))
    load(one, "poet")
    streams = [one.submit(PROMPTS[index], GREEDY, likeliest=3, adapter="poet") for index in range(5)]
    for _ in range(4):
        one.step()  # some have a slot, one waits
    one.adapters.unload("poet")
    with pytest.raises(UserError, match="adapter is 'poet', must be one of none"):
        one.submit("a", adapter="poet")
    with pytest.raises(UserError, match="adapter is 'poet', must be one of none"):
        one.adapters.unload("poet")
    load(one, "coder")  # into the slot that is left
    one.adapters.unload("coder")
    load(one, "coder")
    with pytest.raises(UserError, match="1 adapters are loaded, and there is room for 1: unload one, or raise"):
        load(one, "some")
    with pytest.raises(SlotsBusy, match="slots of adapters that were unloaded: try again"):
        load(one, "coder", replace=True)
    check({("coder", 1): texts_of(one, "coder")})
    check({("poet", index): stream.result() for index, stream in enumerate(streams)})
    load(one, "coder", replace=True)  # the texts have ended


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_a_text_without_an_end_gives_its_slot_back(how):
    one = engine(room=AdapterSlots(count=1, rank=5))
    load(one, "poet")
    stream = one.submit(PROMPTS[0], GREEDY, adapter="poet")
    one.step()
    one.adapters.unload("poet")
    load(one, "coder")
    if how == "cancelled":
        stream.cancel()
        one.run()
    else:
        next(item for item in one.core.scheduler.slots if item is not None).fail(RuntimeError("planted"))
        with pytest.raises(RuntimeError, match="planted"):
            stream.result()
    load(one, "coder", replace=True)
    check({("coder", 1): texts_of(one, "coder")})


def test_a_replaced_adapter_ends_its_texts_with_its_own_weights():
    one = engine(room=AdapterSlots(count=1, rank=5))
    load(one, "poet")
    first = one.submit(PROMPTS[1], GREEDY, likeliest=3, adapter="poet")
    for _ in range(3):
        one.step()
    one.adapters.load(renamed(*adapters("coder"), "poet"), replace=True)
    check({("coder", 1): texts_of(one, "poet"), ("poet", 1): first.result()})
    with pytest.raises(UserError, match="adapter 'poet' is loaded already: unload it first, or replace it"):
        load(one, "poet")


@pytest.mark.parametrize("replace", [False, True])
def test_what_an_adapter_read_serves_no_other(replace):
    """Not even one of the same name in the same slot."""
    one = engine(room=AdapterSlots(count=1, rank=5), prefix_cache_mib=4)
    load(one, "poet")
    texts_of(one, "poet")
    assert texts_of(one, "poet").cached_tokens > 16
    for name in ("coder", "some", "poet"):
        if not replace:
            one.adapters.unload("poet")
        one.adapters.load(renamed(*adapters(name), "poet"), replace=replace)
        result = texts_of(one, "poet")
        assert result.cached_tokens == 0
        check({(name, 1): result})


@pytest.mark.heavy
def test_adapters_come_and_go_beside_running_texts():
    """Two threads load and unload; others' texts stay those of their own adapters."""
    one = engine(beside=adapters("long"), room=ROOM, prefix_cache_mib=4)
    faults, until_s = [], time.monotonic() + 4

    def change(name):
        try:
            while time.monotonic() < until_s:
                load(one, name)
                check({(name, 1): texts_of(one, name), (None, 0): texts_of(one, None, 0)})
                one.adapters.load(*adapters(name), replace=True)
                check({(name, 1): texts_of(one, name)})
                one.adapters.unload(name)
        except BaseException as error:
            faults.append(error)

    with one.start():
        threads = [threading.Thread(target=change, args=(name,)) for name in ("poet", "coder")]
        for thread in threads:
            thread.start()
        while time.monotonic() < until_s:
            check({("long", 2): texts_of(one, "long", 2), (None, 1): texts_of(one, None)})
        for thread in threads:
            thread.join(60)
    assert not faults and one.adapters.names == ("long",)


def test_two_loads_of_one_name_are_one():
    one, results = engine(room=AdapterSlots(count=3, rank=5)), []

    def one_load():
        try:
            load(one, "poet")
            results.append("loaded")
        except UserError as error:
            results.append(str(error))

    threads = [threading.Thread(target=one_load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results, key=len)[0] == "loaded" and sum("loaded already" in item for item in results) == 3
    check({("poet", 1): texts_of(one, "poet")})


def test_what_has_no_room_is_named():
    one = engine(room=AdapterSlots(count=1, rank=4, targets=("query", "down", "out", "up")))
    (coder,), (poet,), (long,) = adapters("coder"), adapters("poet"), adapters("long")
    with pytest.raises(UserError, match=r"'coder': layers/attention/\w+ (is none of the weights with room|has rank 5)"):
        one.adapters.load(coder)
    with pytest.raises(
        UserError, match="layers/attention/value is none of the weights with room for adapters: add it to"
    ):
        one.adapters.load(poet)
    with pytest.raises(
        UserError, match="layers/attention/out has magnitudes .DoRA., which need the weights as they were"
    ):
        one.adapters.load(long)
    deep = api.build(dataclasses.replace(MODEL.config, mlp_dim=48, lora=LORAS["some"]))
    values = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), deep.trained(deep.abstract_params))
    with pytest.raises(UserError, match=r"down is \[2, 48, 32\] in the adapter and \[2, 64, 32\] in this model"):
        one.adapters.load(Adapter("deep", LORAS["some"], values))
    with pytest.raises(UserError, match="there is no room for further adapters: set Adapters.slots"):
        engine().adapters.load(poet)
    load(one, "some")
    check({("some", 1): texts_of(one, "some")})
    with pytest.raises(UserError, match="Adapters.targets is .*: Lora.targets has 'quary', which must match one of"):
        engine(room=AdapterSlots(count=1, targets=("quary",)))
    experts = api.build(DecoderConfig(**SIZES, moe=Moe(num_experts=2, top_k=1, expert_dim=16)))
    with pytest.raises(UserError, match="adapters of these weights must be merged: no adapter can be loaded"):
        Engine(
            experts, jax.jit(experts.init)(jax.random.key(0)), VOCABULARY, LENGTH, EngineConfig(slots=1),
            adapter_slots=AdapterSlots(count=1, targets=("gate", "up", "down")),
        )  # fmt: skip


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("part", ["a", "b"])
def test_values_that_are_not_finite_are_refused(value, part):
    """0 times infinity is no number: rows of others would have it, too."""
    (poet,) = adapters("poet")
    values = tree.map_with_names(
        lambda name, x: np.full(x.shape, value) if name.endswith(f"query_lora/{part}") else np.asarray(x), poet.values
    )
    broken = poet._replace(values=values)
    with pytest.raises(
        UserError, match="adapter 'poet' has values of layers/attention/query that are not finite in float32"
    ):
        engine(beside=[broken])
    one = engine(room=ROOM)
    with pytest.raises(UserError, match="that are not finite in float32"):
        one.adapters.load(broken)
    load(one, "poet")
    check({("poet", 1): texts_of(one, "poet")})


@pytest.mark.heavy
@pytest.mark.parametrize("sizes", [dict(fsdp=1, tensor=2), dict(fsdp=2, tensor=2)])
def test_adapters_are_loaded_where_devices_share_layers(sizes):
    plan = Plan(batch_size=4, **sizes)
    mesh = sharding.make_mesh(plan, jax.devices()[: math.prod(sizes.values())])
    spread = jax.device_put(params(), sharding.shardings(mesh, plan.rules, MODEL.axes, MODEL.abstract_params))
    one = engine(spread, room=ROOM)
    layouts = lambda: [x.sharding for x in jax.tree.leaves(one.adapters.of([])[0])]  # noqa: E731
    before = layouts()
    load(one, "poet", "coder")
    assert layouts() == before
    check({(name, 1): texts_of(one, name) for name in (None, "poet", "coder")})


@pytest.mark.heavy
def test_readings_keep_the_adapter_that_they_began_with():
    one, ids = engine(room=ROOM), VOCABULARY.prompt_ids(PROMPTS[0])
    load(one, "poet")
    want = engine(jax.jit(adapted("poet")[0].merge)(adapted("poet")[1])).reader.embed([ids], Pooling.LAST)
    np.testing.assert_allclose(one.reader.embed([ids], Pooling.LAST, "poet"), want, rtol=0, atol=2e-4)
    one.adapters.unload("poet")
    with pytest.raises(UserError, match="adapter is 'poet', must be one of none"):
        one.reader.embed([ids], Pooling.LAST, "poet")
    for name in ("coder", "some", "poet"):
        load(one, name)
    assert len(one.adapters.names) == 3
