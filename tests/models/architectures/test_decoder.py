"""The decoder against a plain numpy transformer, and the invariances of its options."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.models import api
from capibara.models.architectures.decoder import DecoderConfig
from capibara.models.layers.rope import Rope
from capibara.models.parts.router import Moe
from capibara.sharding import Remat

TINY = DecoderConfig(
    vocab_size=64, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, mlp_dim=48, dtype="float32", max_length=16
)
VARIANTS = [
    dict(norm=norm, activation=activation, positions=positions, head=head, bias=bias)
    for norm, activation, positions, head, bias in [
        ("rms", "swiglu", "rope", "tied", "none"),
        ("layer", "gelu", "learned", "tied", "all"),
        ("rms", "geglu", "none", "separate", "none"),
        ("layer", "swiglu", "rope", "separate", "all"),
    ]
]


def batch_of(rows, rng=0, vocab=64):
    """Rows are lists of document lengths; the rest of the 16 positions is padding."""
    rng = np.random.default_rng(rng)
    B, T = len(rows), 16
    segment_ids, positions = np.zeros((B, T), np.int32), np.zeros((B, T), np.int32)
    for b, lengths in enumerate(rows):
        start = 0
        for number, length in enumerate(lengths, 1):
            segment_ids[b, start : start + length] = number
            positions[b, start : start + length] = np.arange(length)
            start += length
    tokens = rng.integers(0, vocab, (B, T)).astype(np.int32)
    return {"tokens": tokens, "positions": positions, "segment_ids": segment_ids}


def random_params(model, seed=0):
    """All parameters random: zero biases and unit scales would hide mistakes."""
    keys = iter(jax.random.split(jax.random.key(seed), 100))
    return jax.tree.map(lambda s: jax.random.normal(next(keys), s.shape) * 0.3, model.abstract_params)


def reference(config, params, batch):
    """A decoder in numpy and float64, one token and one head at a time."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    group = config.num_heads // config.kv_heads

    def norm(x, scale, bias):
        if config.norm == "layer":
            x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * scale + bias

    def rotate(x, position):
        if config.positions != "rope":
            return x
        half = len(x) // 2
        out = np.empty_like(x)
        for i in range(half):
            angle = position * config.rope.theta ** (-i / half)
            out[i] = x[i] * np.cos(angle) - x[half + i] * np.sin(angle)
            out[half + i] = x[half + i] * np.cos(angle) + x[i] * np.sin(angle)
        return out

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    def layer(l, x, segments, positions):
        a, m = l["attention"], l["mlp"]
        h = norm(x, l["attention_norm"]["scale"], l["attention_norm"].get("bias", 0))
        q = np.einsum("td,dnh->tnh", h, a["query"]) + a.get("query_bias", 0)
        k = np.einsum("td,dnh->tnh", h, a["key"]) + a.get("key_bias", 0)
        v = np.einsum("td,dnh->tnh", h, a["value"]) + a.get("value_bias", 0)
        y = np.zeros_like(q)
        for t, n in itertools.product(range(len(x)), range(config.num_heads)):
            seen = [s for s in range(t + 1) if segments[s] == segments[t]]
            query = rotate(q[t, n], positions[t])
            scores = np.array([query @ rotate(k[s, n // group], positions[s]) for s in seen]) / np.sqrt(q.shape[-1])
            weights = np.exp(scores - scores.max())
            y[t, n] = (weights / weights.sum()) @ np.stack([v[s, n // group] for s in seen])
        x = x + np.einsum("tnh,nhd->td", y, a["out"]) + a.get("out_bias", 0)
        h = norm(x, l["mlp_norm"]["scale"], l["mlp_norm"].get("bias", 0))
        up = h @ m["up"] + m.get("up_bias", 0)
        if config.activation == "gelu":
            up = gelu(up)
        else:
            gate = h @ m["gate"] + m.get("gate_bias", 0)
            up = up * (gate / (1 + np.exp(-gate)) if config.activation == "swiglu" else gelu(gate))
        return x + up @ m["down"] + m.get("down_bias", 0)

    rows = []
    for tokens, segments, positions in zip(batch["tokens"], batch["segment_ids"], batch["positions"]):
        x = p["embedding"][tokens]
        if config.positions == "learned":
            x = x + p["position_embedding"][positions]
        for index in range(config.num_layers):
            x = layer(jax.tree.map(lambda w: w[index], p["layers"]), x, segments, positions)
        x = norm(x, p["final_norm"]["scale"], p["final_norm"].get("bias", 0))
        rows.append(x @ (p["embedding"] if config.head == "tied" else p["output"]).T)
    return np.stack(rows)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(map(str, v.values())))
def test_logits_equal_a_plain_transformer(variant):
    config = dataclasses.replace(TINY, **variant)
    model = api.build(config)
    params, batch = random_params(model), batch_of([[16], [5, 8]])
    got = np.asarray(jax.jit(model.logits)(params, batch))
    want = reference(config, params, batch)
    real = batch["segment_ids"] > 0
    np.testing.assert_allclose(got[real], want[real], rtol=2e-4, atol=2e-4)


@functools.cache
def loss_and_gradients(loop, remat):
    model = api.build(dataclasses.replace(TINY, layer_loop=loop))
    batch = batch_of([[16], [7, 9]])
    loss = lambda p: jnp.mean(jnp.square(model.hidden(p, batch, remat)[0][..., :3]))  # noqa: E731
    return jax.jit(jax.value_and_grad(loss))(random_params(model))


@pytest.mark.parametrize("loop, remat", list(itertools.product(("scan", "unroll"), Remat))[1:])
def test_scan_unroll_and_remat_give_the_same_loss_and_gradients(loop, remat):
    got, want = loss_and_gradients(loop, remat), loss_and_gradients("scan", Remat.NONE)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


def test_a_document_does_not_see_its_neighbours():
    model = api.build(TINY)
    params, batch = random_params(model), batch_of([[6, 7]])
    changed = {**batch, "tokens": batch["tokens"].copy()}
    changed["tokens"][0, :6] = (changed["tokens"][0, :6] + 1) % 64
    before, after = (np.asarray(model.logits(params, b)) for b in (batch, changed))
    np.testing.assert_array_equal(before[0, 6:13], after[0, 6:13])
    assert np.abs(before[0, :6] - after[0, :6]).max() > 0.1


@pytest.mark.parametrize(
    "variant",
    [
        dict(positions="sinusoidal", position_offset=2, embedding_scale="tokens", final_norm="none"),
        dict(positions="alibi_rounded", inner_norm="layer", activation="reglu2"),
    ],
    ids=str,
)
def test_documents_of_a_row_get_what_they_get_alone(variant):
    model = api.build(dataclasses.replace(TINY, **variant))
    params, batch = random_params(model), batch_of([[6, 10]])
    alone = {key: np.roll(value, -6, axis=1) for key, value in batch.items()}  # the second one, first in its row
    together, apart = (np.asarray(model.logits(params, b)) for b in (batch, alone))
    np.testing.assert_allclose(together[0, 6:], apart[0, :10], rtol=0, atol=1e-5 * np.abs(apart).max())


def test_a_token_does_not_see_what_follows():
    model = api.build(TINY)
    params, batch = random_params(model), batch_of([[16]])
    changed = {**batch, "tokens": batch["tokens"].copy()}
    changed["tokens"][0, 9:] = 0
    before, after = (np.asarray(model.logits(params, b)) for b in (batch, changed))
    np.testing.assert_array_equal(before[0, :9], after[0, :9])


def test_bfloat16_computes_in_bfloat16_and_stays_near():
    batch = batch_of([[16]])
    exact = api.build(TINY)
    rough = api.build(dataclasses.replace(TINY, dtype="bfloat16"))
    params = random_params(exact)
    hidden, exact_hidden = rough.hidden(params, batch)[0], exact.hidden(params, batch)[0]
    assert hidden.dtype == jnp.bfloat16
    assert rough.logits(params, batch).dtype == jnp.float32
    np.testing.assert_allclose(hidden.astype(jnp.float32), exact_hidden, atol=0.15)


def test_init_is_scaled_and_the_same_on_every_run():
    model = api.build(dataclasses.replace(TINY, embed_dim=256, num_heads=4, mlp_dim=512))
    params = model.init(jax.random.key(0))
    again = model.init(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, params, again)
    assert np.std(params["layers"]["mlp"]["up"]) == pytest.approx(256**-0.5, rel=0.02)
    assert np.std(params["layers"]["mlp"]["down"]) == pytest.approx((0.25 / 512) ** 0.5, rel=0.02)
    assert not np.array_equal(params["layers"]["mlp"]["up"][0], params["layers"]["mlp"]["up"][1])


def test_axes_mirror_the_parameters():
    model = api.build(dataclasses.replace(TINY, bias="all", positions="learned", norm="layer"))
    ranks = jax.tree.map(lambda s: len(s.shape), model.abstract_params)
    lengths = jax.tree.map(len, model.axes, is_leaf=lambda x: isinstance(x, tuple))
    assert ranks == lengths
    assert model.axes["layers"]["mlp"]["up"] == ("layers", "embed", "mlp")


def test_flops_count_the_matmuls_that_are_there():
    model = api.build(TINY)
    D, H, F, V, L = 32, 8, 48, 64, 2
    weights = L * (D * 4 * H + 2 * D * 2 * H + 4 * H * D + 3 * D * F) + V * D
    attention = 12 * L * 4 * H * 16 / 2  # query-key and value products, forward and backward, causal half
    assert model.flops_per_token(16) == 6 * weights + attention


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(num_kv_heads=3), r"num_kv_heads \(3\) must divide num_heads \(4\): try 2"),
        (dict(embed_dim=30), r"embed_dim \(30\) must be a multiple of num_heads \(4\)"),
        (dict(head_dim=7), r"head_dim \(7\) must be even for rotary positions: try 6"),
        (dict(rope=Rope(fraction=0.01)), r"Rope.fraction \(0.01\) of head_dim \(8\) must be at least 2 dimensions"),
        (dict(rope=Rope(theta=5.0), positions="none"), r"rope is set, but positions \('none'\) are not rotary"),
        (dict(positions="learned", max_length=None), "max_length has no value"),
        (dict(num_layers=0), "num_layers is 0, must be at least 1"),
        (dict(vocab_size=2**31), "vocab_size is 2147483648, must be below 2..31"),
        (dict(head_dim=0), "head_dim is 0, must be at least 1, or None"),
        (dict(head_dim=-2), "head_dim is -2, must be at least 1, or None"),
        (dict(max_length=0), "max_length is 0, must be at least 1, or None"),
        (dict(norm_eps=0.0), "norm_eps is 0.0, must be finite and above 0: try 1e-6"),
        (dict(norm_eps=float("nan")), "norm_eps is nan, must be finite"),
        (dict(layer_pattern=()), "layer_pattern is empty"),
        (dict(layer_pattern=("local",)), "window has no value, local layers in layer_pattern need one"),
        (dict(window=8), r'window \(8\) is for local layers, layer_pattern has none: set .* \("local",\)'),
        (dict(embedding_scale="tokens"), "embedding_scale .'tokens'. is for positions that are added .* are 'rope'"),
        (dict(position_offset=2), "position_offset is 2, .* is for learned or sinusoidal positions only"),
        (dict(positions="sinusoidal", embed_dim=33, head_dim=8), "embed_dim .33. must be even and at least 4"),
        (
            dict(positions="alibi_rounded", attention="splash"),
            "attention .'splash'. cannot add alibi_rounded positions",
        ),
        (dict(inner_norm="layer", moe=Moe(num_experts=2, top_k=1)), "inner_norm is for MLPs, not for experts"),
        (dict(logit_soft_cap=0.0), "logit_soft_cap is 0.0, must be finite and above 0: try None"),
        (dict(first_norm="none", norm_placement="sandwich"), "first_norm 'none' is for norm_placement 'pre'"),
        (dict(first_norm="none", moe=Moe(num_experts=2, top_k=1)), "num_layers of at least 2, without moe and mixer"),
        (dict(transform="dense", head="score"), "transform is 'dense', must be 'none' with scores or values"),
        (dict(transform_bias="none"), r"transform_bias \(none\) is of the transform before the head"),
        (
            dict(transform="dense", transform_activation="swiglu"),
            "transform_activation is 'swiglu', the transform has one",
        ),
        (dict(window_kind="block"), r"window_kind is 'block', must have a window \(is None\)"),
        (
            dict(window_kind="block", window=4, layer_pattern=("local",), inputs_attention="bidirectional"),
            "inputs_attention 'causal' .is 'bidirectional'.",
        ),
        (
            dict(query_growth_layers="unrotated", query_growth=0.1, query_growth_length=8),
            "query_growth_layers is 'unrotated', must have query_growth above 0 and unrotated layers",
        ),
        (
            dict(qk_norm="unit", positions="none"),
            "qk_norm is 'unit', of rotated queries and keys, and positions are 'none'",
        ),
        (
            dict(bias="mlp", moe=Moe(num_experts=2, top_k=1, weighted="inputs")),
            "weighted is 'inputs', must be with experts without biases, DecoderConfig.bias is 'mlp'",
        ),
        (dict(query_growth=-0.1), "query_growth is -0.1, must be finite and at least 0"),
        (dict(query_growth=0.1), r"query_growth_length is None, must be at least 1 with query_growth \(0.1\)"),
        (dict(query_growth_length=8), r"query_growth_length is 8, .* and None without: try 8192"),
        (dict(activation="xielu", moe=Moe(num_experts=2, top_k=1)), r"activation \('xielu'\) has parameters"),
    ],
)
def test_impossible_shapes_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(TINY, **change)


@pytest.mark.parametrize("scaling", ["linear", "llama3", "yarn"])
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_a_scaling_stretches(scaling, factor):
    with pytest.raises(UserError, match=rf"Rope.factor \({factor}\) must be above 1 with {scaling} scaling: try 8.0"):
        Rope(scaling=scaling, factor=factor, original_length=64)


@pytest.mark.parametrize(
    "layers, pattern", [(5, ("local", "global")), (2, ("local", "local", "global")), (4, ("local",))]
)
def test_layer_patterns_run_in_groups_and_what_is_left_over(layers, pattern):
    """The scan equals the unrolled layers, and a local layer sees no further than its window."""
    config = dataclasses.replace(TINY, num_layers=layers, layer_pattern=pattern, window=3)
    batch = batch_of([[16], [7, 9]])
    params = random_params(api.build(config))
    scan, unrolled = (
        jax.jit(api.build(dataclasses.replace(config, layer_loop=loop)).logits)(params, batch)
        for loop in ("scan", "unroll")
    )
    np.testing.assert_allclose(scan, unrolled, rtol=1e-4, atol=1e-4)
    reach = 2 * layers if "global" not in pattern[:layers] else 16
    changed = {**batch, "tokens": batch["tokens"].copy()}
    changed["tokens"][0, 0] += 1
    moved = np.abs(jax.jit(api.build(config).logits)(params, changed) - scan)[0].max(-1) > 0
    assert moved[0] and not moved[reach + 1 :].any() and (reach < 16 or moved[15])


def test_packed_documents_have_blocks_of_their_own():
    """Blocks start at each document, wherever it is in the row; what it answers does not depend on its neighbours."""
    config = DecoderConfig(
        vocab_size=64, embed_dim=32, num_layers=2, num_heads=4, mlp_dim=48, dtype="float32", qk_norm="unit",
        window_kind="block", window=4, layer_pattern=("local", "unrotated"), query_growth=0.5, query_growth_length=3,
        query_growth_layers="unrotated", moe=Moe(num_experts=4, top_k=2, score="sigmoid", gates="scores", weighted="inputs"),
    )  # fmt: skip
    model = api.build(config)
    params, lengths = model.init(jax.random.key(0)), (5, 11, 6)
    tokens = np.random.default_rng(0).integers(0, 64, sum(lengths)).astype(np.int32)
    positions = np.concatenate([np.arange(length) for length in lengths]).astype(np.int32)
    segments = np.repeat(np.arange(1, 4), lengths).astype(np.int32)

    def logits(part):
        row = {"tokens": tokens[part], "positions": positions[part], "segment_ids": segments[part]}
        return np.asarray(jax.jit(model.logits)(params, {name: value[None] for name, value in row.items()}))[0]

    alone = [logits(segments == number) for number in (1, 2, 3)]
    np.testing.assert_allclose(logits(segments > 0), np.concatenate(alone), rtol=1e-4, atol=1e-5)
    changed = dataclasses.replace(config, layer_pattern=("local",), query_growth_layers="all")
    model = api.build(changed)
    before = logits(segments == 2)
    tokens[6] += 1 - 2 * (tokens[6] > 0)  # the second token of that document: in its first block
    same = np.abs(logits(segments == 2) - before).max(axis=-1) < 1e-6
    np.testing.assert_array_equal(same, [True] + [False] * 3 + [True] * 7)


def test_tokens_without_a_row_of_the_output_projection_are_read_and_never_predicted():
    config = dataclasses.replace(TINY, head="separate", output_rows=50)
    model = api.build(config)
    params = random_params(model)
    assert params["output"].shape == (50, 32) and params["embedding"].shape == (64, 32)
    batch = batch_of([[16]])
    logits = np.asarray(jax.jit(model.logits)(params, batch))
    whole = params | {"output": jnp.pad(params["output"], ((0, 14), (0, 0)))}
    want = np.asarray(jax.jit(api.build(dataclasses.replace(config, output_rows=None)).logits)(whole, batch))
    np.testing.assert_allclose(logits[..., :50], want[..., :50], rtol=0, atol=1e-5)
    assert np.all(np.asarray(jax.nn.softmax(logits))[..., 50:] == 0)
    cache, served = model.start_cache(1, 16), model.serving(params)
    piece = {"tokens": batch["tokens"], "counts": np.full(1, 16, np.int32)}
    last, _ = jax.jit(model.prefill)(served, piece, cache)
    np.testing.assert_allclose(last, logits[:, -1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("fields", [dict(output_rows=64), dict(output_rows=50, head="tied"), dict(output_rows=0)])
def test_a_shorter_output_projection_is_a_separate_one(fields):
    with pytest.raises(UserError, match="output_rows is .*, must be from 1 to below vocab_size"):
        dataclasses.replace(TINY, **{"head": "separate"} | fields)
