"""Modules for multi-token prediction: their arithmetic, their options, and what generation remembers of rows."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.inference.engine.programs.speculative import draft
from capibara.models import api
from capibara.models.api import DecoderConfig, GatedDelta, LatentAttention, Moe, Mtp
from capibara.sharding import RematPolicy

V, T = 64, 12
SIZES = dict(vocab_size=V, embed_dim=32, num_layers=2, num_heads=2, mlp_dim=64, dtype="float32")
VARIANTS = {
    "plain": dict(mtp=Mtp()),
    "latent": dict(
        mtp=Mtp(), latent=LatentAttention(kv_rank=16, query_rank=None, rotary_dim=4, value_dim=8), head_dim=12
    ),
    "windows": dict(
        mtp=Mtp(kind="local", mlp="dense"),
        layer_pattern=("local", "unrotated"),
        window=4,
        moe=Moe(num_experts=4, first_dense=1, expert_dim=24),
    ),
    "recurrent": dict(
        mtp=Mtp(norm="none"),
        layer_pattern=("recurrent", "global"),
        mixer=GatedDelta(key_heads=2, value_heads=2, key_dim=8, value_dim=8),
        moe=Moe(num_experts=4),
    ),
}


def built(**options):
    model = api.build(DecoderConfig(**SIZES | options))
    params = model.init(jax.random.key(0))
    return model, jax.tree.map(lambda x: 3 * x if x.ndim > 2 else x, params)  # sharper than at the start


def rows(segments=None):
    tokens = jax.random.randint(jax.random.key(1), (2, T), 0, V)
    segments = jnp.ones((2, T), jnp.int32) if segments is None else jnp.asarray(segments, jnp.int32)
    starts = jnp.concatenate([jnp.ones((2, 1), bool), segments[:, 1:] != segments[:, :-1]], axis=1)
    first = jax.lax.cummax(jnp.where(starts, jnp.arange(T), 0), axis=1)
    weights = (segments > 0).astype(jnp.float32)
    batch = {"tokens": tokens, "targets": jnp.roll(tokens, -1, axis=1), "segment_ids": segments, "weights": weights}
    return batch | {"positions": jnp.arange(T) - first}


def states(model, params, batch):
    def of_rows(params, batch):
        hidden, _ = model.hidden(params, batch)
        depths = range(1, model.config.mtp.layers + 1)
        tokens = [api.mtp.next_tokens(batch, depth)[0] for depth in depths]
        return hidden, model.ahead.states(params, hidden, tokens, batch, RematPolicy(), None)[0]

    return jax.jit(of_rows)(params, batch)


def rms(x, scale):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def by_hand(config, params, hidden, embedded):
    """One module in numpy: DeepSeek-V3's formula (section 2.2), and a layer of attention and SwiGLU."""
    block, H = params["block"], config.head_size
    side_by_side = np.concatenate(
        [rms(embedded, params["embedding_norm"]["scale"]), rms(hidden, params["hidden_norm"]["scale"])], axis=-1
    )
    x = side_by_side @ np.concatenate([params["from_embedding"], params["from_hidden"]])
    h = rms(x, block["attention_norm"]["scale"])
    q, k, v = (np.einsum("td,dnh->tnh", h, block["attention"][name]) for name in ("query", "key", "value"))
    angle = np.arange(len(x))[:, None] * 10_000.0 ** (-2 * np.arange(H // 2) / H)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

    def turned(y):
        a, b = np.split(y, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    scores = np.einsum("tnh,snh->nts", turned(q), turned(k)) / np.sqrt(H)
    scores = np.where(np.tril(np.ones((len(x), len(x)), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    x = x + np.einsum("nts,snh,nhd->td", weights, v, block["attention"]["out"])
    h = rms(x, block["mlp_norm"]["scale"])
    gate = h @ block["mlp"]["gate"]
    x = x + (gate / (1 + np.exp(-gate)) * (h @ block["mlp"]["up"])) @ block["mlp"]["down"]
    return rms(x, params["norm"]["scale"])


def test_two_modules_are_those_of_the_paper():
    model, params = built(mtp=Mtp(layers=2))
    batch = rows()
    hidden, found = states(model, params, batch)
    each = jax.tree.map(lambda x: np.asarray(x, np.float64), params["mtp"])
    table, before = np.asarray(params["embedding"], np.float64), np.asarray(hidden, np.float64)[0]
    for depth, item in enumerate(found, 1):
        after = np.asarray(batch["tokens"])[0, depth:]
        module = jax.tree.map(lambda x, depth=depth: x[depth - 1], each)
        before = by_hand(model.config, module, before[: len(after)], table[after])
        np.testing.assert_allclose(item[0, : len(after)], before, rtol=2e-4, atol=2e-5)


def test_a_packed_document_is_predicted_as_alone():
    model, params = built(mtp=Mtp())
    packed = rows([[1] * 7 + [2] * 5, [1] * 12])
    _, (both,) = states(model, params, packed)
    alone = {name: jnp.pad(x[:, 7:], ((0, 0), (0, 7))) for name, x in packed.items()}
    _, (second,) = states(model, params, alone)
    np.testing.assert_allclose(both[0, 7:11], second[0, :4], atol=1e-5)
    _, targets, weights = api.mtp.next_tokens(packed, 2)
    np.testing.assert_array_equal(weights[0], [1] * 5 + [0, 0] + [1] * 3 + [0, 0])
    np.testing.assert_array_equal(targets[0, :9], packed["tokens"][0, 3:12])


@pytest.mark.parametrize("name", VARIANTS)
def test_drafts_are_those_of_the_whole_row(name):
    """After a prefill, several tokens, wrong guesses that are taken back, and one token; in rows of several lengths."""
    model, params = built(**VARIANTS[name])
    batch = rows()
    _, (found,) = states(model, params, batch)
    want, tokens = jnp.argmax(model.logits_of(params, found), axis=-1), batch["tokens"]
    serving = jax.jit(model.serving)(params)
    next_token = jax.jit(lambda last, cache: draft(model, serving, last, cache, 1, V)[:, 0])

    def check(cache):
        result = next_token(tokens[jnp.arange(2), cache["lengths"]], cache)
        np.testing.assert_array_equal(result, want[jnp.arange(2), cache["lengths"] - 1])

    cache = model.start_cache(2, 16, spare=2)
    _, cache = jax.jit(model.prefill)(serving, {"tokens": tokens[:, :4], "counts": jnp.array([4, 3])}, cache)
    check(cache)
    more = jnp.stack([tokens[0, 4:7], tokens[1, 3:6]])
    _, hidden, after = jax.jit(model.extend)(serving, {"tokens": more, "counts": jnp.array([3, 2])}, cache)
    check(after)
    if model.config.mixer is None:  # states forget nothing
        check(api.mtp.at_token(after, hidden, jnp.array([0, 1])) | {"lengths": jnp.array([5, 5])})
    _, after = jax.jit(model.decode)(serving, tokens[jnp.arange(2), after["lengths"]], after)
    check(after)


def test_further_drafts_apply_the_module_to_its_own_states():
    model, params = built(mtp=Mtp())
    tokens, serving, prefill = rows()["tokens"], jax.jit(model.serving)(params), jax.jit(model.prefill)
    _, cache = prefill(serving, {"tokens": tokens[:, :4], "counts": jnp.full(2, 4)}, model.start_cache(2, 16))
    drafts = jax.jit(lambda last, cache: draft(model, serving, last, cache, 3, V))(tokens[:, 4], cache)
    first, second, _ = jnp.moveaxis(drafts, 1, 0)

    def ahead(state, tokens, now, cache):
        return jax.jit(lambda *args: model.ahead.draft(serving, *args[:2], now, args[2]))(state, tokens, cache)

    state = cache["layers"][-1][api.mtp.STATE][:, None]
    now = api.PrefillInputs(jnp.full(2, 3), jnp.ones(2, jnp.int32), jnp.full((2, 1), 3), False)
    state, after = ahead(state, tokens[:, 4:5], now, cache)
    np.testing.assert_array_equal(jnp.argmax(model.logits_of(params, state)[:, 0], -1), first)
    later = api.PrefillInputs(jnp.full(2, 4), jnp.ones(2, jnp.int32), jnp.full((2, 1), 4), False)
    state, _ = ahead(state, first[:, None], later, after)
    np.testing.assert_array_equal(jnp.argmax(model.logits_of(params, state)[:, 0], -1), second)


def test_a_model_without_its_modules_has_the_same_logits():
    model, params = built(mtp=Mtp())
    plain = api.without_mtp(model)
    assert plain.config.mtp is None and api.without_mtp(plain) is plain
    rest = {name: params[name] for name in plain.abstract_params}
    np.testing.assert_array_equal(model.logits(params, rows()), plain.logits(rest, rows()))


def test_parameters_flops_and_what_is_trained():
    model, params = built(mtp=Mtp(layers=2))
    plain, module = api.without_mtp(model), jax.tree.map(lambda x: x[0], params["mtp"])
    assert model.param_count - plain.param_count == 2 * sum(x.size for x in jax.tree.leaves(module))
    matrices = sum(x.size for x in jax.tree.leaves(module) if x.ndim > 1)
    keys = 2 * SIZES["num_heads"] * model.config.head_size * T / 2
    more = 6 * 2 * (matrices + V * SIZES["embed_dim"] + keys)
    assert model.flops_per_token(T) - plain.flops_per_token(T) == pytest.approx(more)
    frozen, _ = built(mtp=Mtp(loss_weight=0.0))
    assert "mtp" in frozen.frozen(params) and "mtp" not in frozen.trained(params)
    assert "mtp" in model.trained(params) and not model.config.runs_in_stages and plain.config.runs_in_stages
    adapted = api.build(dataclasses.replace(model.config, lora=api.Lora(targets=("all-linear",))))
    assert "mtp" not in adapted.trained(adapted.abstract_params) and "mtp" in adapted.abstract_params


@pytest.mark.parametrize(
    "options, line",
    [
        (dict(mtp=Mtp(), positions="learned", max_length=16), "mtp is not supported where positions are 'learned'"),
        (dict(mtp=Mtp(), head_bias="vocab"), "where head_bias is 'vocab'"),
        (dict(mtp=Mtp(), dropout_rate=0.1), "where dropout_rate is 0.1"),
        (dict(mtp=Mtp(kind="local")), "where window is None and Mtp.kind 'local'"),
        (dict(mtp=Mtp(), head="score"), "where head is 'score'"),
        (dict(mtp=Mtp(), inputs_attention="bidirectional"), "where data are 'prefix'"),
    ],
)
def test_a_model_that_has_no_modules_says_so(options, line):
    with pytest.raises(UserError, match=line):
        DecoderConfig(**SIZES | options)


@pytest.mark.parametrize(
    "options, line",
    [
        (dict(layers=0), "Mtp.layers is 0, must be from 1 to 16"),
        (dict(loss_weight=-1.0), "Mtp.loss_weight is -1.0, must be finite and at least 0"),
        (dict(kind="recurrent"), "Mtp.kind is 'recurrent', must be one of global, local, unrotated"),
    ],
)
def test_options_that_no_module_has_are_refused(options, line):
    with pytest.raises(UserError, match=line):
        Mtp(**options)
