"""DeepSeek-V4: entries of documents, states of the engine, streams, tables of experts, and what is refused."""

from __future__ import annotations

import dataclasses
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.core import tree
from capibara.core.types import UserError
from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.sampling.sampling import Sampling
from capibara.interop.experts import measuring, operation
from capibara.models import api
from capibara.models.api import DecoderConfig, DeepseekV4Config, Indexer, Lora, Moe, Rope
from capibara.models.architectures.deepseek_v4 import attention as entry_attention
from capibara.models.architectures.deepseek_v4 import streams
from capibara.sharding import Plan

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from mesh_gradients import on_mesh, random_params  # noqa: E402

CONFIG = DeepseekV4Config(
    vocab_size=384,
    embed_dim=32,
    num_layers=3,
    num_heads=4,
    head_dim=16,
    mlp_dim=24,
    dtype="float32",
    first_kinds=("local",),
    layer_pattern=("compressed", "compressed_sparse"),
    window=7,
    rate=8,
    sparse_rate=2,
    # As many heads as leave no two entries with the score 0.
    indexer=Indexer(heads=16, head_dim=12, top=3, pairs="adjacent"),
    query_rank=12,
    out_groups=2,
    out_rank=6,
    streams=3,
    rope=Rope(theta=500.0, local_theta=100.0, fraction=0.5, pairs="adjacent"),
    moe=Moe(
        num_experts=8, top_k=2, hash_layers=1, score="sqrt_softplus", correction="expert", shared_experts=1, scale=1.5
    ),
)
UNTRAINED = ("expert_table", "/indexer/")
GREEDY = Sampling(temperature=0.0, max_new_tokens=8)


def drawn(model):
    """Random parameters, whose tables have numbers of experts."""
    params = random_params(model)

    def of(name, x):
        if not name.endswith("expert_table"):
            return x
        return jnp.asarray(np.random.default_rng(0).integers(0, 8, x.shape), jnp.float32)

    return tree.map_with_names(of, params)


def row(tokens, segments):
    segments = np.asarray(segments, np.int32)
    positions = np.concatenate([np.arange(np.sum(segments == s)) for s in dict.fromkeys(segments.tolist())])
    return {"tokens": tokens[None], "segment_ids": segments[None], "positions": positions[None].astype(np.int32)}


def tokens_of(count):
    return np.random.default_rng(0).integers(3, 300, count).astype(np.int32)


def whole(model, params, tokens):
    return np.asarray(jax.jit(model.logits)(params, row(tokens, np.ones(len(tokens)))))[0]


@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param((1,) * 40, marks=pytest.mark.heavy, id="tokens"),
        pytest.param((5, 1, 30, 4), marks=pytest.mark.heavy, id="parts"),
        pytest.param((24, 16), id="halves"),
    ],
)
def test_a_state_gives_what_the_whole_row_gives(chunks):
    model = api.build(CONFIG)
    params, tokens = drawn(model), tokens_of(40)
    cache, at, got = model.start_cache(1, 48), 0, []
    read = jax.jit(model.read, static_argnums=3)
    serving = model.serving(params)
    for number, count in enumerate(chunks):
        # Padding behind the tokens changes nothing.
        padded = np.pad(tokens[None, at : at + count], ((0, 0), (0, 0 if count == 1 else 3)))
        batch = {"tokens": padded, "counts": np.array([count], np.int32)}
        hidden, cache = read(serving, batch, cache, number == 0)
        got.append(np.asarray(model.logits_of(params, hidden))[0, :count])
        at += count
    want = whole(model, params, tokens)
    np.testing.assert_allclose(np.concatenate(got), want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.heavy
@pytest.mark.parametrize("loop", ["scan", "unroll"])
def test_documents_of_a_row_see_no_entries_of_each_other(loop, monkeypatch):
    monkeypatch.setattr(entry_attention, "_LEAST_BLOCK", 16)  # so that blocks end within documents
    model = api.build(dataclasses.replace(CONFIG, layer_loop=loop))
    params, tokens = drawn(model), tokens_of(90)
    parts = [slice(0, 21), slice(21, 22), slice(22, 81)]  # the rest is padding
    segments = np.concatenate([np.full(part.stop - part.start, i + 1) for i, part in enumerate(parts)] + [np.zeros(9)])
    weights = jax.random.normal(jax.random.key(1), (90, CONFIG.vocab_size))

    def loss(trained, batch, weights):
        logits = model.logits(tree.joined(trained, model.frozen(params)), batch)[0]
        return jnp.sum(logits * weights), logits

    grad = jax.jit(jax.value_and_grad(loss, has_aux=True))
    trained = model.trained(params)
    (_, packed), of_packed = grad(trained, row(tokens, segments), jnp.where((segments > 0)[:, None], weights, 0.0))
    total = jax.tree.map(jnp.zeros_like, of_packed)
    for part in parts:
        (_, alone), of_alone = grad(trained, row(tokens[part], np.ones(part.stop - part.start)), weights[part])
        np.testing.assert_allclose(packed[part], alone, rtol=0, atol=1e-5 * np.abs(alone).max())
        total = jax.tree.map(jnp.add, total, of_alone)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(total))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * largest), of_packed, total)


@pytest.mark.heavy
def test_blocks_of_queries_give_what_one_block_gives(monkeypatch):
    model = api.build(CONFIG)
    params, tokens = drawn(model), tokens_of(50)
    want = whole(model, params, tokens)
    monkeypatch.setattr(entry_attention, "_LEAST_BLOCK", 8)
    np.testing.assert_allclose(whole(model, params, tokens), want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.heavy
@pytest.mark.parametrize(
    "options", [dict(), dict(prefix_cache_mib=8), dict(cache_dtype="int8")], ids=["plain", "prefix", "int8"]
)
def test_the_engine_continues_as_the_whole_row_does(options):
    model = api.build(CONFIG)
    params, prompt = drawn(model), tokens_of(29).tolist()
    engine = Engine(model, params, ByteVocabulary(), 48, EngineConfig(**dict(slots=2, prefix_cache_mib=0) | options))
    for _ in range(2):  # the second time from the prefix cache, where there is one
        streams = [engine.submit(part, GREEDY) for part in (prompt, prompt[:11], prompt)]
        results = [stream.result().tokens for stream in streams]
        for part, result in zip((prompt, prompt[:11], prompt), results, strict=True):
            tokens = list(part)
            for token in result:
                assert token == whole(model, params, np.array(tokens, np.int32))[-1].argmax()
                tokens.append(token)


def test_what_cannot_forget_tokens_is_refused():
    model = api.build(CONFIG)
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), model.abstract_params)
    for options, message in (
        (dict(draft_tokens=3), "EngineConfig.draft_tokens is 3, and the model's layers have states"),
        (dict(page_size=16), "EngineConfig.page_size is 16, but no layer of the model keeps keys and values"),
    ):
        with pytest.raises(UserError) as error:
            Engine(model, params, ByteVocabulary(), 48, EngineConfig(**options))
        assert message in str(error.value)


@pytest.mark.heavy
@pytest.mark.parametrize("axes", [dict(fsdp=2, tensor=2), dict(data=2, expert=2)])
def test_a_mesh_gives_the_loss_and_the_gradients_of_one_device(axes):
    model, tokens = api.build(CONFIG), tokens_of(8 * 16).reshape(8, 16)
    segments = np.broadcast_to(np.repeat([1, 2], 8).astype(np.int32), tokens.shape)
    positions = np.broadcast_to(np.tile(np.arange(8, dtype=np.int32), 2), tokens.shape)
    batch = {"tokens": tokens, "segment_ids": segments, "positions": positions}
    loss, gradients = on_mesh(model, batch, Plan(batch_size=8, **axes), jax.devices()[:4])
    want, theirs = on_mesh(model, batch, Plan(batch_size=8, fsdp=1), jax.devices()[:1])
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(theirs))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * largest), gradients, theirs)


@pytest.mark.heavy
def test_adapters_of_all_weights_merge_to_the_same_logits():
    model = api.build(dataclasses.replace(CONFIG, lora=Lora(rank=2, alpha=2.0, targets=("all-linear",))))
    params = tree.map_with_names(lambda name, x: x if "table" in name else 0.4 * x, drawn(model))
    adapted = {name.rpartition("/")[0] for name in tree.path_names(model.abstract_params) if "_lora/" in name}
    assert {
        "layers/sparse_attention/compressor/entry_gate_lora",
        "layers/compressed_attention/query_up_lora",
        "layers/attention/out_lora",
        "layers/hash_mlp/up_lora",
    } <= adapted
    assert not any("indexer" in name or "group_out" in name for name in adapted)
    want, got = whole(model, params, tokens_of(24)), whole(model.plain, jax.jit(model.merge)(params), tokens_of(24))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())


def test_nothing_trains_tables_and_the_indexer():
    model = api.build(CONFIG)
    names = {*tree.path_names(model.abstract_params)}
    trained = {*tree.path_names(model.trained(model.abstract_params))}
    assert names - trained == model.config.untrained
    assert names - trained == {name for name in names if any(part in name for part in UNTRAINED)}


def test_a_table_chooses_experts_by_the_ids_of_tokens():
    model = api.build(dataclasses.replace(CONFIG, num_layers=1, first_kinds=(), layer_pattern=("local",)))
    assert "mlp" not in model.abstract_params["layers"]  # all layers have tables
    params = drawn(model)
    table = params["layers"]["hash_mlp"]["expert_table"]
    tokens = np.arange(3, 15, dtype=np.int32)
    before = whole(model, params, tokens)
    changed = table.at[0, 9].set((table[0, 9] + 1) % 8)  # of the token at position 6
    params["layers"]["hash_mlp"]["expert_table"] = changed
    assert {*np.flatnonzero(np.abs(whole(model, params, tokens) - before).max(axis=-1) > 1e-4)} == {6}


def test_mixtures_of_streams_are_doubly_stochastic():
    logits = jax.random.normal(jax.random.key(0), (5, 4, 4))
    mixed = np.asarray(streams._doubly_stochastic(logits, 20, 1e-6))
    np.testing.assert_allclose(mixed.sum(axis=-1), 1, atol=1e-3)
    np.testing.assert_allclose(mixed.sum(axis=-2), 1, atol=1e-5)


def test_tokens_see_entries_beside_their_window():
    model, length = api.build(CONFIG), 64
    alone = api.build(dataclasses.replace(CONFIG, first_kinds=(), layer_pattern=("local",)))
    sizes = [
        dict(zip(tree.path_names(of.abstract_params), jax.tree.leaves(of.abstract_params), strict=True))
        for of in (model, alone)
    ]
    weights = [
        sum(x.size for name, x in of.items() if "/compressor/" in name and name.endswith(("_key", "_gate")))
        for of in sizes
    ]
    weights[0] += sum(x.size for name, x in sizes[0].items() if name.endswith(("index_query", "index_weight")))
    # Half of 64 / 8 entries; 3 of 32, but for the first ones, and the scores of half of 32 with 16 heads of 12.
    seen = 4 + (3 - 9 / 64) + 16 * 16 * 12 / (2 * 4 * 16)
    assert model.config.further_keys(length) == pytest.approx(seen)
    more = 6 * weights[0] + 6 * 2 * 4 * 16 * seen
    assert model.flops_per_token(length) - alone.flops_per_token(length) == pytest.approx(more)


def test_a_smaller_copy_has_tables_and_layers_of_each_kind():
    values = {"num_layers": 2, "embed_dim": 16, "head_dim": 8, "moe": CONFIG.moe}
    small = dataclasses.replace(CONFIG, **values | CONFIG.emulated(values, 0.5))
    assert (small.kinds, small.moe.hash_layers, small.query_rank) == (("compressed", "compressed_sparse"), 1, 8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(rate=0), "DeepseekV4Config.rate is 0, must be at least 1"),
        (dict(stream_eps=0.0), "DeepseekV4Config.stream_eps is 0.0, must be finite and above 0"),
        (dict(layer_pattern=("compressed", "global")), "has 'global', must be of 'local', 'compressed' and"),
        (dict(out_groups=3), "out_groups (3) must divide num_heads (4)"),
        (dict(num_kv_heads=2), "DeepseekV4Config.num_kv_heads is 2, must be 1: leave it out"),
        (dict(qk_norm="head"), "DeepseekV4Config.qk_norm (head) is of other decoders: leave it out"),
        (dict(indexer=Indexer(head_dim=4, pairs="adjacent")), "Indexer.head_dim (4) and pairs ('adjacent') must be at least the 8"),
        (dict(indexer=Indexer()), "pairs ('halves') must be at least the 8 dimensions"),
        (dict(rope=Rope(scaling="dynamic", factor=2.0, original_length=8, pairs="adjacent", fraction=0.5)), "Rope.scaling is 'dynamic'"),
        (dict(window=None), "DecoderConfig.window has no value"),
        (dict(moe=dict(num_experts=4, hash_layers=1, first_dense=1)), "Moe.hash_layers (1) is not supported where first_dense is"),
        (dict(swiglu_alpha=2.0), "swiglu_alpha and swiglu_limit are for the activation 'clamped_swiglu'"),
    ],
)  # fmt: skip
def test_what_it_does_not_have_is_refused_by_name(fields, message):
    with pytest.raises(UserError) as error:
        dataclasses.replace(CONFIG, **fields | ({"moe": Moe(**fields["moe"])} if "moe" in fields else {}))
    assert message in str(error.value)


def test_tables_are_no_others():
    with pytest.raises(UserError, match=r"Moe.hash_layers \(1\) is for DeepseekV4Config, not for DecoderConfig"):
        DecoderConfig(
            vocab_size=8, embed_dim=8, num_layers=1, num_heads=1, mlp_dim=8, moe=Moe(num_experts=2, hash_layers=1)
        )
    for check in (lambda: operation.mixture(CONFIG, "prune"), lambda: measuring.check(CONFIG, "runs/v4")):
        with pytest.raises(UserError, match="Moe.hash_layers"):
            check()


def test_other_decoders_have_no_entries():
    with pytest.raises(UserError, match="layer_pattern has 'compressed', which DeepseekV4Config has alone"):
        DecoderConfig(
            vocab_size=8, embed_dim=8, num_layers=1, num_heads=1, mlp_dim=8, window=4, layer_pattern=("compressed",)
        )
