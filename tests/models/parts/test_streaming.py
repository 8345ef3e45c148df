"""Streaming heads see sinks and recent tokens alone, and keep no more; the others see and keep all."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.core import tree
from capibara.core.types import UserError
from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.sampling.sampling import BeamSearch, Sampling
from capibara.kernels.attention import reference, streaming
from capibara.kernels.attention.signature import AttentionInputs
from capibara.kernels.attention.spec import AttentionSpec
from capibara.models import api
from capibara.models.api import DecoderConfig, Lora, StreamingHeads
from capibara.models.parts.streaming import bounded

SIZES = dict(vocab_size=384, embed_dim=32, num_layers=3, num_heads=4, mlp_dim=48, dtype="float32")
PATTERN = StreamingHeads(heads=((0, 2), (0, 1, 2, 3), ()), sink_tokens=3, recent_window=6)
CONFIG = DecoderConfig(**SIZES, streaming=PATTERN)
LENGTH = 96
VOCABULARY = ByteVocabulary()


@functools.cache
def params():
    # Large weights, so that one token is far likelier than the others and texts do not agree by chance.
    return jax.tree.map(lambda x: x * 3, jax.jit(api.build(CONFIG).init)(jax.random.key(1)))


def batch(rows=2, length=40):
    """Rows of two documents each, and padding."""
    tokens = np.random.default_rng(0).integers(0, 256, (rows, length)).astype(np.int32)
    segments = np.array([[1] * 17 + [2] * 23, [1] * 30 + [2] * 2 + [0] * 8], np.int32)
    positions = np.array([[*range(17), *range(23)], [*range(30), *range(2), *[0] * 8]], np.int32)
    return {"tokens": tokens, "segment_ids": segments, "positions": positions}


def sees(segments, head, layer):
    """[T, T]: the keys that each query of a head sees, by the definition."""
    T = len(segments)
    start = [min(t for t in range(T) if (segments[t : i + 1] == segments[i]).all()) for i in range(T)]
    streams = head in PATTERN.heads[layer]

    def one(t, s):
        seen = segments[t] == segments[s] and s <= t
        return seen and (not streams or t - s < PATTERN.recent_window or s - start[s] < PATTERN.sink_tokens)

    return np.array([[one(t, s) for s in range(T)] for t in range(T)])


def test_each_head_of_packed_rows_sees_what_the_pattern_says(monkeypatch):
    """With attention computed here, by one mask for each head and layer."""
    given, layers = batch(), iter(range(3))
    plain = api.build(dataclasses.replace(CONFIG, streaming=None, layer_loop="unroll"))
    want_masks = np.array(
        [[[sees(row, head, layer) for head in range(4)] for row in given["segment_ids"]] for layer in range(3)]
    )

    def masked(inputs, spec, backend):
        del spec, backend
        scores = jnp.einsum("BTNH,BSNH->BNTS", inputs.q_BTNH, inputs.k_BSKH) * 8**-0.5
        weights = jax.nn.softmax(jnp.where(want_masks[next(layers)], scores, -1e30), axis=-1)
        return jnp.einsum("BNTS,BSNH->BTNH", weights, inputs.v_BSKH)

    monkeypatch.setattr("capibara.models.parts.attention.attend", masked)
    want = plain.logits(params(), given)
    monkeypatch.undo()
    real = given["segment_ids"] > 0
    for loop in ("scan", "unroll"):
        got = jax.jit(api.build(dataclasses.replace(CONFIG, layer_loop=loop)).logits)(params(), given)
        np.testing.assert_allclose(np.asarray(got)[real], np.asarray(want)[real], rtol=2e-4, atol=2e-4)
    everything = jax.jit(plain.logits)(params(), given)
    assert np.abs(np.asarray(everything) - np.asarray(want))[real].max() > 0.1


@pytest.mark.parametrize(("window", "sinks"), [(40, 7), (150, 20), (700, 4), (3, 1)])
def test_blocks_agree_with_the_reference(window, sinks):
    rng, (B, T, N, K, H) = np.random.default_rng(0), (2, 300, 4, 2, 8)
    arrays = [jnp.asarray(rng.normal(size=(B, T, heads, H)), jnp.float32) for heads in (N, K, K)]
    segments = np.ones((B, T), np.int32)
    segments[0, 100:], segments[0, 250:], segments[0, 252:], segments[1, 280:] = 2, 3, 4, 0
    spec = AttentionSpec(causal=True, window=window, soft_cap=2.0, scale=0.4, sink_tokens=sinks)
    logits_N = jnp.asarray(rng.normal(size=N), jnp.float32)

    def outputs(attend):
        def loss(q, k, v):
            y = attend(AttentionInputs(q, k, v, segments, segments, sinks_N=logits_N), spec)
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*arrays)

    for got, want in zip(*(jax.tree.leaves(outputs(way.attend)) for way in (streaming, reference)), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("batching", [{}, {"page_size": 8}, {"draft_tokens": 3}], ids=str)
def test_texts_are_those_of_whole_rows(batching):
    """Prompts are read in parts, and rows are longer than the ring."""
    model = api.build(CONFIG)
    config = EngineConfig(slots=2, prefix_cache_mib=0, prefill_tokens=16, **batching)
    engine = Engine(model, params(), VOCABULARY, LENGTH, config)
    prompts = ["x = 1; " * 6, "def f", "aaaaaaaa bbbbb ab ab ab ab ab"]
    streams = [engine.submit(prompt, Sampling(temperature=0.0, max_new_tokens=30)) for prompt in prompts]
    logits_of = jax.jit(model.logits)
    for prompt, stream in zip(prompts, streams, strict=True):
        tokens = stream.result().tokens
        row = [*VOCABULARY.begin_ids, *VOCABULARY.encode(prompt), *tokens]
        padded = np.zeros((1, LENGTH), np.int32)
        padded[0, : len(row)] = row
        segments = (np.arange(LENGTH) < len(row)).astype(np.int32)[None]
        given = {"tokens": padded, "segment_ids": segments, "positions": np.arange(LENGTH, dtype=np.int32)[None]}
        want = np.asarray(logits_of(params(), given))[0, len(row) - len(tokens) - 1 : len(row) - 1, : VOCABULARY.size]
        assert len(tokens) == 30 and want.argmax(-1).tolist() == list(tokens)


def test_streaming_heads_keep_sinks_and_a_ring():
    """Bytes of the arrays, in rows and in pages."""
    for batching in ({}, {"page_size": 8}):
        engines = {}
        for name, config in (("pattern", CONFIG), ("all", dataclasses.replace(CONFIG, streaming=None))):
            engine = Engine(
                api.build(config), params(), VOCABULARY, LENGTH, EngineConfig(slots=2, prefix_cache_mib=0, **batching)
            )
            engines[name] = engine.core.runner.state["cache"]["layers"]
        of_token, spare = 2 * 8 * 4, EngineConfig(prefix_cache_mib=0).spare  # a head's key and value of 8 float32
        whole = tree.byte_count(engines["all"]) // 12
        ring = 2 * (3 + 6 + spare) * of_token
        assert whole >= 2 * LENGTH * of_token
        assert [tree.byte_count(layer) for layer in engines["pattern"]] == [
            2 * whole + 2 * ring,
            4 * ring,
            4 * whole,
        ]


def test_a_prompt_that_shares_a_beginning_reads_on_where_the_ring_is_whole():
    model = api.build(CONFIG)
    greedy = Sampling(temperature=0.0, max_new_tokens=6)
    texts = {}
    for mib in (0, 16):
        engine = Engine(model, params(), VOCABULARY, LENGTH, EngineConfig(slots=2, prefix_cache_mib=mib))
        first = engine.submit("a prompt of more than sixteen tokens", greedy).result()
        again = "a prompt of more than sixteen tokens" + first.text
        prompts = ["a prompt of more than sixteen tokens", "a prompt of more than sixteen notes", again + "?"]
        texts[mib] = [engine.submit(prompt, greedy).result().tokens for prompt in prompts]
    assert texts[0] == texts[16]


def test_a_search_of_one_beam_is_greedy():
    engine = Engine(api.build(CONFIG), params(), VOCABULARY, LENGTH, EngineConfig(slots=2, prefix_cache_mib=0))
    prompts, sampling = ["x = 1; y", "def f"], Sampling(max_new_tokens=20, beams=BeamSearch(num_decodes=1))
    found = [engine.submit(prompt, sampling).result().tokens for prompt in prompts]
    greedy = [engine.submit(prompt, Sampling(temperature=0.0, max_new_tokens=20)).result().tokens for prompt in prompts]
    for beam, tokens in zip(found, greedy, strict=True):  # a search may end a text where its end is likely enough
        assert len(beam) > PATTERN.capacity and beam == tokens[: len(beam)]


def test_gates_of_zero_and_one_are_a_pattern():
    gated = api.build(dataclasses.replace(CONFIG, streaming=dataclasses.replace(PATTERN, heads=None)))
    gates = np.ones((3, 4), np.float32)
    gates[0, [0, 2]], gates[1] = -0.1, 0  # beyond the bounds, too
    got = jax.jit(gated.logits)(params() | {"retrieval_gates": jnp.asarray(gates)}, batch())
    want = jax.jit(api.build(CONFIG).logits)(params(), batch())
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)
    assert list(tree.path_names(gated.trained(gated.abstract_params))) == ["retrieval_gates"]


def test_gradients_move_gates_within_their_bounds():
    gates, target = jnp.array([-0.1, -0.1, 0.5, 1.2, 1.0]), jnp.array([1.0, -1.0, 1.0, 1.0, 2.0])
    got = jax.grad(lambda g: jnp.sum(bounded(g) * target))(gates)
    np.testing.assert_array_equal(got, [0.0, -1.0, 1.0, 1.0, 2.0])


def bad(**changes):
    return lambda: dataclasses.replace(CONFIG, **changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StreamingHeads(sink_tokens=-1), "StreamingHeads.sink_tokens is -1, must be from 0"),
        (lambda: StreamingHeads(recent_window=0), "StreamingHeads.recent_window is 0, must be from 1"),
        (lambda: StreamingHeads(heads=((1, 0),)), r"heads\[0\] is \(1, 0\), must be in order .* try \(0, 1\)"),
        (bad(num_layers=2), r"heads has 3 layers, must have DecoderConfig.num_layers \(2\)"),
        (bad(num_kv_heads=2), r"heads\[0\] is \(0, 2\), must be from 0 to 1 .*num_kv_heads is 2"),
        (
            bad(layer_pattern=("local", "global", "global"), window=4),
            r"heads\[0\] is \(0, 2\), and that layer has a window .* write \(\) for it",
        ),
        (bad(positions="alibi"), "streaming is not supported where positions are 'alibi'"),
        (bad(inputs_attention="bidirectional"), "streaming is not supported where inputs_attention is 'bidirectional'"),
        (
            bad(streaming=StreamingHeads(), lora=Lora(rank=2)),
            "streaming is not supported where lora is set",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()
