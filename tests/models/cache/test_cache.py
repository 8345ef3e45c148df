"""Token by token through a cache, every model gives the same logits as for the whole row."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara import sharding
from capibara.models import api
from capibara.models.api import DecoderConfig, EncoderDecoderConfig, GatedDelta, Mamba2, ShortConv, StreamingHeads
from capibara.models.cache import dense as caches
from capibara.models.layers.rope import Rope
from capibara.models.parts.moe import Moe
from capibara.sharding import Plan

TINY = DecoderConfig(
    vocab_size=64, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, mlp_dim=48, dtype="float32", max_length=64
)
LENGTH, PROMPTS = 24, (9, 5)  # length of a row; of each row's prompt
FACTORS = dict(short_factors=(1.0, 1.5, 2.0, 2.5), long_factors=(1.0, 3.0, 5.0, 9.0))
VARIANTS = {
    "llama": {},
    "gpt2": dict(norm="layer", activation="gelu", positions="learned", bias="all", num_kv_heads=None),
    "neox": dict(residual="parallel", norm="layer", activation="gelu", rope=Rope(fraction=0.5), head="separate"),
    "qwen": dict(bias="qkv", qk_norm="head", rope=Rope(theta=1e6)),
    "mistral": dict(window=6, layer_pattern=("local",)),
    "gemma2": dict(
        window=4,
        layer_pattern=("local", "global"),
        num_layers=3,
        attention_soft_cap=5.0,
        logit_soft_cap=3.0,
        norm_placement="sandwich",
        norm_scale="offset",
        embedding_scale="sqrt_dim",
    ),
    "gemma3": dict(window=5, layer_pattern=("local", "local", "global"), num_layers=4, rope=Rope(local_theta=100.0)),
    "llama3": dict(rope=Rope(scaling="llama3", factor=4.0, original_length=8)),
    "yarn": dict(rope=Rope(scaling="yarn", factor=4.0, original_length=8), norm_placement="post"),
    "relative": dict(
        positions="relative", attention_scale=1.0, relative_distance=20, num_kv_heads=None, logit_scale=0.5
    ),
    "dynamic": dict(max_length=LENGTH, rope=Rope(scaling="dynamic", factor=4.0, original_length=8)),
    "longrope": dict(rope=Rope(scaling="longrope", factor=4.0, original_length=8, **FACTORS)),
    "none": dict(positions="none", attention_scale=0.5, layer_loop="unroll"),
    "mixture": dict(
        moe=Moe(num_experts=4, top_k=2, shared_experts=1),
        bias="all",
        positions="learned",
        norm="layer",
        residual="parallel",
    ),
    "capacity": dict(moe=Moe(num_experts=4, top_k=2, dispatch="capacity", capacity_factor=4.0)),
    "gpt_oss": dict(
        moe=Moe(num_experts=4, top_k=2, bias="all"),
        bias="attention",
        activation="clamped_swiglu",
        swiglu_limit=1.0,
        attention_sinks="head",
        layer_pattern=("local", "global"),
        window=6,
        rope=Rope(scaling="yarn", factor=4.0, original_length=8, yarn_bounds="exact"),
    ),
    "int8": dict(quantization="int8"),
    "conv": dict(mixer=ShortConv(), layer_pattern=("recurrent", "global", "recurrent"), num_layers=4, qk_norm="head"),
    "delta": dict(
        mixer=GatedDelta(key_heads=2, value_heads=4, key_dim=8, value_dim=6),
        layer_pattern=("recurrent", "recurrent", "global"),
        num_layers=5,
        attention_gate="sigmoid",
        moe=Moe(num_experts=4, top_k=2, first_dense=1),
    ),
    "alternating": dict(
        moe=Moe(num_experts=4, top_k=2, expert_dim=24, first_dense=1, pattern=("experts", "dense", "experts")),
        layer_pattern=("local", "global"),
        window=6,
        num_layers=8,
    ),
    "modern": dict(
        norm="layer_unbiased",
        embedding_norm="layer",
        first_norm="none",
        transform="dense",
        transform_activation="silu",
        layer_pattern=("global", "local", "local"),
        num_layers=5,
        window=6,
    ),
    "head_gate": dict(attention_gate="head_softplus", layer_pattern=("local", "unrotated"), window=6),
    "gate": dict(attention_gate="sigmoid", layer_pattern=("local", "unrotated"), window=6, norm_placement="sandwich"),
    "blocks": dict(
        window_kind="block",
        window=6,
        layer_pattern=("local", "unrotated"),
        qk_norm="unit",
        query_growth=0.5,
        query_growth_length=4,
        query_growth_layers="unrotated",
        moe=Moe(num_experts=4, top_k=2, score="sigmoid", gates="scores", weighted="inputs", shared_experts=1),
    ),
    "streaming": dict(
        num_layers=3,
        attention_sinks="head",
        streaming=StreamingHeads(heads=((0,), (1,), ()), sink_tokens=3, recent_window=5),
    ),
    "gates": dict(streaming=StreamingHeads(sink_tokens=3, recent_window=5)),
    "mamba2": dict(
        mixer=Mamba2(heads=4, head_dim=6, groups=2, state_dim=8), layer_pattern=("recurrent", "global"), num_layers=3
    ),
}
ENCODER_DECODER = EncoderDecoderConfig(
    vocab_size=64, embed_dim=32, num_layers=2, num_heads=4, mlp_dim=48, dtype="float32", relative_distance=24
)


@functools.cache
def made(config):
    model = api.build(config)
    keys = iter(jax.random.split(jax.random.key(0), 100))
    # All parameters random: zero biases and unit scales would hide mistakes.
    return model, jax.tree.map(lambda s: jax.random.normal(next(keys), s.shape) * 0.3, model.abstract_params)


def rows_of(vocab=64):
    return np.random.default_rng(0).integers(0, vocab, (len(PROMPTS), LENGTH)).astype(np.int32)


# BART's and Pegasus' variants.
ADDED = dict(positions="learned", position_offset=2, max_length=64, norm="layer", norm_placement="post", bias="all")
ADDED |= dict(activation="gelu", embedding_norm="layer", embedding_scale="tokens", attention_scale=None, head="tied")
ADDED |= dict(head_scale="none", head_bias="vocab")
SINES = ADDED | dict(positions="sinusoidal", position_offset=0, norm_placement="pre", embedding_norm="none")


def encoder_entries():
    segments = (np.arange(10) < np.array([[10], [7]])).astype(np.int32)
    tokens = np.random.default_rng(1).integers(0, 64, (2, 10)).astype(np.int32)
    return {
        "encoder_tokens": tokens,
        "encoder_segment_ids": segments,
        "encoder_positions": np.arange(10)[None] * segments,
    }


def of_whole_rows(model, params, tokens, encoder):
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)
    batch = {"tokens": tokens, "positions": positions, "segment_ids": np.ones_like(tokens)}
    return np.asarray(jax.jit(model.logits)(params, batch | encoder))


def step_by_step(model, params, tokens, encoder, capacity=LENGTH, padded=12):
    """Logits [B, steps, V] after each row's prompt and each later token, for rows with prompts of different lengths."""
    cache = model.start_cache(len(tokens), capacity, encoder_length=10 if encoder else None)
    prompts = np.zeros((len(tokens), padded), np.int32)
    for row, count in enumerate(PROMPTS):
        prompts[row, :count] = tokens[row, :count]
    logits, cache = jax.jit(model.prefill)(params, {"tokens": prompts, "counts": np.array(PROMPTS)} | encoder, cache)
    found, decode = [logits], jax.jit(model.decode, donate_argnums=2)
    for step in range(LENGTH - max(PROMPTS)):
        given = np.array([row[count + step] for row, count in zip(tokens, PROMPTS)])
        logits, cache = decode(params, jnp.asarray(given), cache)
        found.append(logits)
    return np.stack(found, axis=1), cache


def compare(config, encoder, **how):
    model, params = made(config)
    want = of_whole_rows(model, params, rows_of(), encoder)
    got, cache = step_by_step(model, jax.jit(model.serving)(params), rows_of(), encoder, **how)
    assert np.std(want) > 0.05
    for row, count in enumerate(PROMPTS):
        np.testing.assert_allclose(got[row], want[row, count - 1 :][: got.shape[1]], rtol=2e-4, atol=2e-4)
    np.testing.assert_array_equal(got.argmax(-1)[0], want[0, PROMPTS[0] - 1 :].argmax(-1))
    return cache


QUICK = ("gemma2", "longrope", "gpt_oss", "streaming")  # these cover the features that matter to the cache


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.heavy) for name in VARIANTS if name not in QUICK)]
)
def test_a_decoder(name):
    config = dataclasses.replace(TINY, **VARIANTS[name])
    cache = compare(config, {})
    kinds = [config.layer_pattern[i % len(config.layer_pattern)] for i in range(config.num_layers)]
    capacities = [layer["key"].shape[2] for layer in cache["layers"] if caches.has_keys(layer)]
    kept = [kind for kind in kinds if kind != "recurrent"]
    assert capacities == [config.window if kind == "local" else LENGTH for kind in kept]


@pytest.mark.parametrize(
    ("head", "tables"),
    [
        pytest.param("separate", "shared", marks=pytest.mark.heavy),
        pytest.param("tied", "shared", marks=pytest.mark.heavy),
        ("tied", "each_layer"),
    ],
)
def test_an_encoder_decoder(head, tables):
    compare(dataclasses.replace(ENCODER_DECODER, head=head, relative_tables=tables), encoder_entries())


@pytest.mark.parametrize("added", [ADDED, SINES], ids=["post", "sines"])
def test_an_encoder_decoder_with_added_positions(added):
    """Its parameters' sines are random here, as all others."""
    compare(dataclasses.replace(ENCODER_DECODER, relative_distance=128, **added), encoder_entries())


def test_a_row_longer_than_its_cache_sees_its_last_tokens():
    config = dataclasses.replace(TINY, num_layers=1)
    model, params = made(config)
    windowed = api.build(dataclasses.replace(config, window=8, layer_pattern=("local",)))
    want = of_whole_rows(windowed, params, rows_of(), {})
    got, cache = step_by_step(model, params, rows_of(), {}, capacity=8)
    for row, count in enumerate(PROMPTS):  # from the first token after the prompt, which is read whole
        np.testing.assert_allclose(got[row, 1:], want[row, count:][: got.shape[1] - 1], rtol=2e-4, atol=2e-4)
    np.testing.assert_array_equal(caches.cached_positions(cache["lengths"], 8)[0], [24 - 8, 17, 18, 19, 20, 21, 22, 23])


@pytest.mark.parametrize("name", ["gemma2", "blocks", "streaming", "gates"])
def test_rows_go_on_by_several_tokens_at_once(name):
    model, params = made(dataclasses.replace(TINY, **VARIANTS[name]))
    tokens = rows_of()
    want = of_whole_rows(model, params, tokens, {})
    cache = model.start_cache(2, LENGTH)
    _, cache = jax.jit(model.prefill)(params, {"tokens": tokens[:, :4], "counts": np.array([4, 2])}, cache)
    pieces = np.stack([tokens[0, 4:12], tokens[1, 2:10]])  # more than the window; of the second row three are padding
    batch = {"tokens": pieces, "counts": np.array([8, 5])}
    every, _, extended = jax.jit(model.extend)(params, batch, cache)
    last, resumed = jax.jit(model.resume)(params, batch, cache)
    np.testing.assert_allclose(every[0], want[0, 4:12], rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(every[1, :5], want[1, 2:7], rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(last, np.stack([every[0, 7], every[1, 4]]), rtol=2e-4, atol=2e-4)
    jax.tree.map(np.testing.assert_array_equal, extended, resumed)
    logits, _ = jax.jit(model.decode)(params, jnp.asarray([tokens[0, 12], tokens[1, 7]]), extended)
    np.testing.assert_allclose(logits, np.stack([want[0, 12], want[1, 7]]), rtol=2e-4, atol=2e-4)


def test_a_row_replaces_another_one():
    model, params = made(TINY)
    tokens = rows_of()
    _, cache = step_by_step(model, params, tokens, {})
    alone = model.start_cache(1, LENGTH)
    _, alone = jax.jit(model.prefill)(params, {"tokens": tokens[:1, :6], "counts": np.array([6])}, alone)
    cache = jax.jit(caches.put_rows)(cache, alone, jnp.int32(1))
    logits, cache = jax.jit(model.decode)(params, jnp.asarray(tokens[[0, 0], 6]), cache)
    np.testing.assert_array_equal(cache["lengths"], [LENGTH - max(PROMPTS) + PROMPTS[0] + 1, 7])
    np.testing.assert_allclose(logits[1], of_whole_rows(model, params, tokens, {})[0, 6], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("sizes", [dict(fsdp=2, tensor=2, data=2)], ids=str)
def test_on_a_mesh(sizes):
    config = dataclasses.replace(TINY, **VARIANTS["gemma2"])
    model, params = made(config)
    tokens, plan = rows_of(), Plan(batch_size=4, **sizes)
    mesh = sharding.make_mesh(plan)
    shardings = sharding.shardings(mesh, plan.rules, model.axes)
    with sharding.activate(mesh, plan.rules):
        cache = jax.tree.map(
            jax.device_put,
            model.start_cache(4, LENGTH),
            sharding.shardings(mesh, plan.rules, caches.axes(model.start_cache(4, LENGTH))),
        )
        serving = jax.jit(model.serving)(jax.device_put(params, shardings))
        batch = {"tokens": np.tile(tokens[:, :9], (2, 1)), "counts": np.array([9, 5, 9, 5])}
        _, cache = jax.jit(model.prefill, donate_argnums=2)(serving, batch, cache)
        given = jnp.asarray(np.tile([tokens[0, 9], tokens[1, 5]], 2))
        logits, cache = jax.jit(model.decode, donate_argnums=2)(serving, given, cache)
    want = of_whole_rows(model, params, tokens, {})
    np.testing.assert_allclose(logits, np.tile(np.stack([want[0, 9], want[1, 5]]), (2, 1)), rtol=2e-4, atol=2e-4)
    # Rows over data and fsdp, key/value heads over tensor: each device holds a quarter of the rows and one of two heads.
    assert cache["layers"][0]["key"].sharding.shard_shape((4, 2, 4, 8)) == (1, 1, 4, 8)


def test_the_cache_is_updated_in_place():
    model, params = made(TINY)
    compiled = jax.jit(model.decode, donate_argnums=2).lower(params, jnp.zeros(2, jnp.int32), model.start_cache(2, 64))
    memory = compiled.compile().memory_analysis()
    cache_bytes = sum(x.nbytes for x in jax.tree.leaves(model.start_cache(2, 64)))
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes


def model_of(name):
    """Its model, parameters and encoder's entries."""
    if name == "t5":
        return *made(ENCODER_DECODER), encoder_entries()
    name, _, dtype = name.partition(" in ")
    return *made(dataclasses.replace(TINY, **VARIANTS[name], dtype=dtype or TINY.dtype)), {}


def cut(name, dtype, pieces):
    """Logits [B, V] after prompts that were read in chunks, and after 4 more tokens; and the cache."""
    model, params, encoder = model_of(name)
    tokens, at = rows_of(), 0
    cache = model.start_cache(2, LENGTH, dtype, encoder_length=10 if encoder else None)
    for size in pieces:
        batch = {"tokens": tokens[:, at : at + size], "counts": np.full(2, size)}
        if at:
            logits, cache = jax.jit(model.resume)(params, batch, cache)
        else:
            logits, cache = jax.jit(model.prefill)(params, batch | encoder, cache)
        at += size
    more, _, cache = jax.jit(model.extend)(params, {"tokens": tokens[:, at : at + 4], "counts": np.full(2, 4)}, cache)
    return np.concatenate([logits[:, None], more], axis=1), cache


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gemma2", jnp.int8),
        *(
            pytest.param(name, dtype, marks=pytest.mark.heavy)
            for name, dtype in [
                ("streaming", jnp.int8),
                ("qwen in bfloat16", jnp.int8),
                ("gemma2", jnp.bfloat16),
                ("t5", jnp.bfloat16),
                ("t5", jnp.int8),
                ("gpt2", jnp.int8),
                ("gpt2", jnp.bfloat16),
            ]
        ),
    ],
)
def test_nothing_depends_on_how_a_prompt_was_cut(name, dtype):
    want, kept = cut(name, dtype, [12])
    for pieces in ([5, 7], [1, 6, 1, 4]):
        got, cache = cut(name, dtype, pieces)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), cache, kept)
    # The dtype has an effect: without it the logits differ.
    exact, _ = cut(name, jnp.float32, [12])
    assert 1e-4 < np.abs(want - exact).max() / np.abs(exact).max() < 0.03


@pytest.mark.parametrize("name", ["gemma2", "t5", pytest.param("qwen", marks=pytest.mark.heavy)])
def test_a_cache_in_8_bits(name):
    model, params, encoder = model_of(name)
    tokens = rows_of()
    want = of_whole_rows(model, params, tokens, encoder)
    cache = model.start_cache(2, LENGTH, jnp.int8, encoder_length=10 if encoder else None)
    prompts = {"tokens": tokens[:, : max(PROMPTS)], "counts": np.array(PROMPTS)}
    logits, cache = jax.jit(model.prefill)(params, prompts | encoder, cache)
    apart, decode = cache, jax.jit(model.decode)
    for step in range(7):
        for row, count in enumerate(PROMPTS):
            error = np.abs(logits[row] - want[row, count + step - 1])
            assert error.max() < 0.03 * np.abs(want).max() and error.max() > 0
        if step < 6:
            given = np.array([row[count + step] for row, count in zip(tokens, PROMPTS)])
            logits, apart = decode(params, jnp.asarray(given), apart)
    pieces = np.stack([row[count : count + 6] for row, count in zip(tokens, PROMPTS)])
    together, _, at_once = jax.jit(model.extend)(params, {"tokens": pieces, "counts": np.array([6, 6])}, cache)
    np.testing.assert_allclose(together[:, -1], logits, rtol=1e-3, atol=1e-3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1.01), at_once, apart)  # int8: the last bit


def test_8_bits_of_a_token_and_head_are_close():
    x = np.random.default_rng(0).normal(size=(2, 3, 2, 8)).astype(np.float32) * np.array([1e-6, 1, 1e4])[:, None, None]
    x[0, 0] = 0
    numbers, scales = caches._in_8_bits(jnp.asarray(x, jnp.float32))
    assert numbers.dtype == jnp.int8 and np.abs(numbers).max() == 127
    np.testing.assert_array_equal(numbers[0, 0], 0)
    error = np.abs(np.asarray(numbers, np.float32) * np.asarray(scales)[..., None] - x)
    assert (error <= np.abs(x).max(axis=-1, keepdims=True) / 254 * 1.001).all()


def test_8_bits_take_half_the_memory():
    config = dataclasses.replace(TINY, embed_dim=256, dtype="bfloat16")  # heads of 64
    model = api.build(config)

    def needs(dtype):
        cache = jax.eval_shape(lambda: model.start_cache(2, 64, dtype))
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache["layers"]))

    assert needs(jnp.int8) / needs(None) == (64 + 4) / 128
    assert needs(jnp.int8) / needs(jnp.float32) == (64 + 4) / 256


@pytest.mark.parametrize("vocab_size", [64, 63])
@pytest.mark.parametrize("rows", [1, 3, 4, 7, 8, 9])
def test_logits_of_single_tokens_are_the_product_for_every_number_of_rows(rows, vocab_size):
    model = api.build(dataclasses.replace(TINY, vocab_size=vocab_size, head="separate", logit_soft_cap=3.0))
    params = model.init(jax.random.key(0))
    hidden = jax.random.normal(jax.random.key(1), (rows, 1, TINY.embed_dim))
    hidden = hidden.at[-1].set(0.0)
    got = jax.jit(model.logits_of)(params, hidden)
    exact = np.asarray(hidden, np.float64) @ np.asarray(params["output"], np.float64).T
    assert got.shape == (rows, 1, vocab_size) and got.dtype == jnp.float32
    np.testing.assert_allclose(got, 3 * np.tanh(exact / 3), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got[-1], 0.0)


def test_a_row_that_is_no_number_leaves_the_logits_of_others():
    model = api.build(TINY)
    params = model.init(jax.random.key(0))
    hidden = jax.random.normal(jax.random.key(1), (8, 1, TINY.embed_dim))
    want = model.logits_of(params, hidden)
    got = model.logits_of(params, hidden.at[2].set(jnp.nan))
    others = np.arange(8) != 2
    np.testing.assert_array_equal(got[others], want[others])
    assert np.isnan(got[2]).all()


def test_rows_of_a_cache_turn_as_those_of_the_length_that_is_said():
    """Short rows use the factors of short rows if none can grow longer; an engine sets the longest length."""
    model, params = made(dataclasses.replace(TINY, **VARIANTS["longrope"]))
    tokens = rows_of()[:, :6]
    batch = {"tokens": tokens, "positions": np.tile(np.arange(6, dtype=np.int32), (2, 1))}
    whole = jax.jit(model.logits)(params, batch | {"segment_ids": np.ones_like(tokens)})[:, -1]
    read = {"tokens": tokens, "counts": np.array([6, 6], np.int32)}
    short, long = (
        jax.jit(model.of_length(length).prefill)(params, read, model.start_cache(2, LENGTH))[0]
        for length in (8, LENGTH)
    )
    np.testing.assert_allclose(short, whole, rtol=2e-4, atol=2e-4)
    assert np.abs(long - whole).max() > 0.01
    plain = api.build(TINY)
    assert plain.of_length(8) is plain
