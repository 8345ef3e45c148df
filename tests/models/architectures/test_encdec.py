"""The encoder-decoder against transformers' T5, and its invariances under packing, remat and scan."""

import dataclasses
import itertools
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from capibara import config, sharding
from capibara.core import tree
from capibara.core.types import UserError
from capibara.interop.hf import tables
from capibara.interop.hf.layout import tensors
from capibara.models import api
from capibara.models.api import EncoderDecoderConfig, longest_encoded
from capibara.models.layers.relative import RelativeBias, buckets
from capibara.models.layers.rope import Rope
from capibara.optim import Optimizer
from capibara.sharding import Plan, Remat
from capibara.training.base import state as states
from capibara.training.step import make_train_step

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"
sys.path.insert(0, str(GOLDEN))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import answers  # noqa: E402
import mesh_gradients  # noqa: E402
from mesh_gradients import random_params  # noqa: E402

ANSWERS = json.loads((GOLDEN / "encoders.json").read_text())
TINY = EncoderDecoderConfig(
    vocab_size=96,
    embed_dim=32,
    num_layers=2,
    num_encoder_layers=3,
    num_heads=4,
    head_dim=16,
    mlp_dim=48,
    relative_buckets=8,
    relative_distance=20,
    dtype="float32",
)
ADDED = EncoderDecoderConfig(
    vocab_size=96, embed_dim=32, num_layers=2, num_encoder_layers=3, num_heads=4, mlp_dim=48, max_length=40, dtype="float32",
    positions="learned", position_offset=2, norm="layer", norm_placement="post", final_norm="none", bias="all", activation="gelu",
    embedding_norm="layer", embedding_scale="tokens", attention_scale=None, head="tied", head_scale="none", head_bias="vocab",
)  # fmt: skip
LOCAL = dataclasses.replace(TINY, encoder_window=4)
GEMMA = EncoderDecoderConfig(
    vocab_size=96, embed_dim=32, num_layers=4, num_encoder_layers=3, num_heads=4, num_kv_heads=2, head_dim=12, mlp_dim=48,
    positions="rope", rope=Rope(theta=500.0), layer_pattern=("local", "global"), window=5, encoder_window=4, norm_scale="offset",
    norm_placement="sandwich", embedding_scale="sqrt_dim", encoder_embedding="own", head="tied", head_scale="none",
    attention_scale=None, attention_soft_cap=3.0, logit_soft_cap=4.0, dtype="float32",
)  # fmt: skip
T5 = dataclasses.replace(TINY, activation="relu", head="tied")
UNSCALED = dataclasses.replace(TINY, head="tied", head_scale="none")


def side(rows, length, vocab=96, seed=0):
    """Tokens, segments and positions; rows are lists of document lengths."""
    segments, positions = np.zeros((len(rows), length), np.int32), np.zeros((len(rows), length), np.int32)
    for b, lengths in enumerate(rows):
        start = 0
        for number, size in enumerate(lengths, 1):
            segments[b, start : start + size] = number
            positions[b, start : start + size] = np.arange(size)
            start += size
    tokens = np.random.default_rng(seed).integers(0, vocab, segments.shape).astype(np.int32)
    return tokens, segments, positions


def batch_of(encoder_rows, rows, encoder_length=32, length=24):
    tokens, segments, positions = side(rows, length)
    encoder_tokens, encoder_segments, encoder_positions = side(encoder_rows, encoder_length, seed=1)
    return {
        "tokens": tokens,
        "segment_ids": segments,
        "positions": positions,
        "encoder_tokens": encoder_tokens,
        "encoder_segment_ids": encoder_segments,
        "encoder_positions": encoder_positions,
    }


@pytest.mark.parametrize(("name", "config"), [("t5", T5), ("t5_1_1", TINY), ("t5_1_1_tied", UNSCALED)])
def test_logits_are_those_of_transformers(name, config):
    model = api.build(config)
    names = tree.path_names(model.abstract_params)
    shapes = {name: leaf.shape for name, leaf in zip(names, jax.tree.leaves(model.abstract_params), strict=True)}
    values = tensors.read(tables.of("t5", shapes, {}), shapes, answers.draw)
    assert values.keys() == shapes.keys()
    params = tree.map_with_names(lambda name, _: values[name], model.abstract_params)
    batch = batch_of([[32], [32 - ANSWERS["padding"]]], [[24], [24]])
    batch |= {key: np.array(ANSWERS[key], np.int32) for key in ("tokens", "encoder_tokens")}
    got, want = np.asarray(jax.jit(model.logits)(params, batch)), ANSWERS[name]
    for row, answer in zip(got, want["logits"], strict=True):
        np.testing.assert_allclose(row[np.ix_(ANSWERS["positions"], ANSWERS["entries"])], answer, rtol=0, atol=2e-4)
    assert np.square(got[:, : -ANSWERS["padding"]]).mean() == pytest.approx(want["mean_square"], abs=2e-4)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_are_those_of_the_paper(bidirectional):
    """Half of the buckets hold one distance each; others grow logarithmically up to 128, then all share the last."""
    got = buckets(np.arange(-300, 301), count=32, longest=128, bidirectional=bidirectional)
    past, future = got[300::-1], got[300:]  # by distance
    count = 16 if bidirectional else 32
    assert past[: count // 2].tolist() == list(range(count // 2))
    assert (np.diff(past) >= 0).all() and (past[128:] == count - 1).all() and set(past) == set(range(count))
    widths = np.bincount(past)[count // 2 : -1]
    assert (widths >= 1).all() and widths[-1] > 3 * widths[0]
    assert future[1:].tolist() == ((past[1:] + 16).tolist() if bidirectional else [0] * 300)


def test_a_bias_is_looked_up_by_the_distance_of_positions():
    bias = RelativeBias(TINY, nnx.Rngs(0), bidirectional=True)
    table = np.asarray(bias.table[...])
    row_positions = np.array([0, 5, 2, 3, 1, 4, 7, 6])
    distance = row_positions[None, :] - row_positions[:, None]
    want = table[buckets(distance, count=8, longest=20, bidirectional=True)].transpose(2, 0, 1)
    np.testing.assert_array_equal(bias(8, row_positions), want)
    np.testing.assert_array_equal(bias(8), want[:, np.argsort(row_positions)][:, :, np.argsort(row_positions)])


@pytest.mark.parametrize("of", [TINY, ADDED, LOCAL, GEMMA], ids=["relative", "learned", "local", "rotary"])
def test_packed_pairs_do_not_see_each_other(of):
    model = api.build(of)
    params = random_params(model)
    packed = batch_of([[13, 15]], [[9, 12]])
    logits = np.asarray(jax.jit(model.logits)(params, packed))
    for segment, ends in ((1, (13, 9)), (2, (28, 21))):
        alone = {}
        for key, value in packed.items():
            ids = packed["encoder_segment_ids" if key.startswith("encoder") else "segment_ids"]
            part = value[ids == segment]
            alone[key] = np.zeros_like(value)
            alone[key][0, : len(part)] = part
        size = int((packed["segment_ids"] == segment).sum())
        got = np.asarray(jax.jit(model.logits)(params, alone))[0, :size]
        np.testing.assert_allclose(got, logits[0, ends[1] - size : ends[1]], rtol=2e-4, atol=2e-4)


def test_sines_and_the_bias_of_the_head_are_not_trained():
    model = api.build(dataclasses.replace(ADDED, positions="sinusoidal", position_offset=0))
    names = {*tree.path_names(model.abstract_params)}
    kept = {*tree.path_names(model.trained(model.abstract_params))}
    assert names - kept == {"output_bias", "encoder/position_embedding", "decoder/position_embedding"}
    assert {*tree.path_names(model.frozen(model.abstract_params))} == names - kept
    assert model.whole_params == model.abstract_params
    table = np.asarray(jax.jit(model.init)(jax.random.key(0))["decoder"]["position_embedding"])
    angles = np.arange(40)[:, None] / 10_000.0 ** (np.arange(16) / 16)
    np.testing.assert_allclose(table, np.concatenate([np.sin(angles), np.cos(angles)], axis=1), atol=1e-6)
    plan, batch = Plan(batch_size=2), batch_of([[32], [20]], [[24], [10]])
    optimizer = Optimizer(weight_decay=0.5)
    mesh, tx = sharding.make_mesh(plan, jax.devices()[:1]), optimizer.build(10, model.trained(model.axes))
    state = states.init_state(model, tx, jax.random.key(0), ema=False)
    step = jax.jit(make_train_step(model, tx, optimizer.schedule.build(10), plan, mesh))
    batch |= {"targets": batch["tokens"], "weights": np.ones(batch["tokens"].shape, np.float32)}
    with jax.numpy_dtype_promotion("standard"):  # as optax computes
        after, before = step(state, batch)[0].params, state.params
    np.testing.assert_array_equal(after["decoder"]["position_embedding"], before["decoder"]["position_embedding"])
    np.testing.assert_array_equal(after["output_bias"], before["output_bias"])
    assert np.abs(np.asarray(after["embedding"] - before["embedding"])).max() > 1e-5


@pytest.mark.parametrize("of", [ADDED, GEMMA], ids=["learned", "rotary"])
def test_a_mesh_gives_the_gradients_of_one_device(of):
    batch, model = batch_of([[32]] * 8, [[24], [10, 9]] * 4), api.build(of)
    want = mesh_gradients.on_mesh(model, batch, Plan(batch_size=8), jax.devices()[:1])
    got = mesh_gradients.on_mesh(model, batch, Plan(batch_size=8, fsdp=2, tensor=2, context=2), jax.devices())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


def test_who_sees_what():
    model = api.build(TINY)
    params, batch = random_params(model), batch_of([[32]], [[24]])
    logits = np.asarray(jax.jit(model.logits)(params, batch))

    def changed(key, at):
        tokens = batch[key].copy()
        tokens[0, at] = (tokens[0, at] + 1) % 96
        return np.abs(np.asarray(jax.jit(model.logits)(params, batch | {key: tokens})) - logits)[0].max(axis=1)

    later = changed("tokens", 10)
    assert (later[:10] == 0).all() and (later[10:] > 1e-3).all()
    assert (changed("encoder_tokens", 31) > 1e-3).all()


def test_layers_with_relative_positions_of_their_own():
    """With equal tables in all layers it equals the model whose layers share one; with different ones it does not."""
    own = api.build(dataclasses.replace(TINY, relative_tables="each_layer"))
    shared = api.build(TINY)
    params, batch = random_params(shared), batch_of([[32], [20]], [[24], [10]])
    spread = {"embedding": params["embedding"], "output": params["output"]}
    for side in ("encoder", "decoder"):
        count, table = len(params[side]["layers"]["mlp"]["up"]), params[side]["relative_bias"]["table"]
        layers = params[side]["layers"] | {"relative_bias": {"table": jnp.stack([table] * count)}}
        spread[side] = {"layers": layers, "norm": params[side]["norm"]}
    want = np.asarray(jax.jit(shared.logits)(params, batch))
    np.testing.assert_allclose(jax.jit(own.logits)(spread, batch), want, rtol=1e-5, atol=1e-5)
    table = spread["decoder"]["layers"]["relative_bias"]["table"]
    spread["decoder"]["layers"]["relative_bias"]["table"] = table.at[1].add(jnp.arange(8.0)[:, None])
    assert np.abs(np.asarray(jax.jit(own.logits)(spread, batch)) - want).max() > 1e-2


def test_what_was_encoded_before_is_not_encoded_again():
    model = api.build(TINY)
    params, batch = random_params(model), batch_of([[32], [20]], [[24], [10]])
    encoded = jax.jit(model.encode)(params, batch)
    assert encoded.shape == (2, 32, 32)
    without = {key: value for key, value in batch.items() if key != "encoder_tokens"} | {"encoded": encoded}
    got, want = (jax.jit(model.logits)(params, one) for one in (without, batch))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("of", [TINY, GEMMA], ids=["relative", "rotary"])
def test_cached_tokens_have_the_logits_of_whole_rows(of):
    """A prefill of 9 tokens, 14 more, and the last one, in caches of local layers with room for pieces."""
    model, batch = api.build(of), batch_of([[32], [20]], [[24], [24]])
    params = random_params(model)
    want = jax.jit(model.logits)(params, batch)
    served, cache = model.serving(params), model.start_cache(2, 24, encoder_length=32, spare=14)
    pieces, at = [], 0
    for size in (9, 14, 1):
        piece = {"tokens": batch["tokens"][:, at : at + size], "counts": np.full(2, size, np.int32)}
        if not at:
            piece |= {key: value for key, value in batch.items() if key.startswith("encoder")}
            logits, cache = jax.jit(model.prefill)(served, piece, cache)
            logits = logits[:, None]
        else:
            logits, _, cache = jax.jit(model.extend)(served, piece, cache)
        pieces.append(logits)
        at += size
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), want[:, 8:], rtol=0, atol=1e-4)


@pytest.mark.heavy
def test_scan_unroll_and_remat_give_the_same_loss_and_gradients():
    batch = batch_of([[32], [12, 9]], [[24], [7, 9]])

    def grads(loop, remat):
        model = api.build(dataclasses.replace(TINY, layer_loop=loop))
        loss = lambda p: jnp.mean(jnp.square(model.hidden(p, batch, remat)[0][..., :3]))  # noqa: E731
        return jax.jit(jax.value_and_grad(loss))(random_params(model))

    want = grads("scan", Remat.NONE)
    for loop, remat in itertools.product(("scan", "unroll"), (Remat.DOTS, Remat.FULL)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), grads(loop, remat), want)


@pytest.mark.parametrize("of", [TINY, LOCAL, GEMMA], ids=["whole", "local", "rotary"])
def test_attention_back_ends_agree(of):
    batch = batch_of([[100, 28], [90]], [[40, 24], [64]], encoder_length=128, length=64)
    want = api.build(dataclasses.replace(of, attention="xla"))
    got = api.build(dataclasses.replace(of, attention="blockwise"))
    params = random_params(want)

    def grads(model):
        loss = lambda p: jnp.mean(jnp.square(model.hidden(p, batch)[0][..., :3]))  # noqa: E731
        return jax.jit(jax.value_and_grad(loss))(params)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), grads(got), grads(want))


def test_a_new_model_begins_with_scores_and_logits_of_variance_one():
    for start in (TINY, T5):
        model = api.build(dataclasses.replace(start, vocab_size=512, embed_dim=256, head_dim=64))
        params = jax.jit(model.init)(jax.random.key(0))
        query, key = (np.asarray(params["encoder"]["layers"]["attention"][name][0]) for name in ("query", "key"))
        x = np.random.default_rng(0).normal(size=(200, 256))
        scores = np.einsum("tnh,snh->tsn", np.einsum("td,dnh->tnh", x, query), np.einsum("td,dnh->tnh", x, key))
        assert scores.std() == pytest.approx(1.0, rel=0.1)
        assert np.std(jax.jit(model.logits)(params, batch_of([[32]], [[24]]))) == pytest.approx(1.0, rel=0.2)


PUBLISHED = {
    "t5_small": 60_506_624,
    "t5_base": 222_903_552,
    "t5_large": 737_668_096,
    "t5_3b": 2_851_598_336,
    "t5_11b": 11_307_321_344,
    "t5_1_1_small": 76_961_152,
    "t5_1_1_base": 247_577_856,
    "t5_1_1_large": 783_150_080,
    "t5_1_1_xl": 2_849_757_184,
    "t5_1_1_xxl": 11_135_332_352,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_published_size(name):
    config.parse([f"models/{name}.gin"])
    model = api.build(config.build(EncoderDecoderConfig))
    assert config.unused() == []
    assert model.param_count == PUBLISHED[name]
    assert model.config.dtype == "bfloat16"


def test_flops_count_each_side_for_its_own_length():
    D, H, F, V, S, T = 32, 64, 48, 96, 32, 24  # H: of all heads
    encoder = 3 * (4 * D * H + 3 * D * F)
    decoder = 2 * (6 * D * H + 3 * D * F)
    keys_and_values = 2 * 2 * D * H  # of the encoder's output
    attention = 12 * H * (3 * S * S + 2 * (T * T / 2 + T * S))
    want = 6 * ((encoder + keys_and_values) * S + (decoder + V * D) * T) + attention
    assert api.build(TINY).flops_per_token(T, S) * T == pytest.approx(want)
    seen = 7 * S - 12  # by a window of 4 in both directions: 1, 2 and 3 keys less at each end
    want += 12 * H * 3 * (seen - S * S)
    assert api.build(LOCAL).flops_per_token(T, S) * T == pytest.approx(want)
    whole = dataclasses.replace(GEMMA, layer_pattern=("global",), window=None, encoder_window=None)
    saved = (api.build(whole).flops_per_token(T, S) - api.build(GEMMA).flops_per_token(T, S)) * T
    later = T * T / 2 - (5 * T - 12.5)  # keys of a decoder's layer beyond a window of 5
    assert saved == pytest.approx(12 * 48 * (2 * (S * S - seen) + 2 * later))


def test_an_encoders_window_hides_what_is_farther():
    """A query sees the window's keys on both sides, in each layer again."""
    model, batch = api.build(dataclasses.replace(LOCAL, num_encoder_layers=1)), batch_of([[32]], [[24]])
    params = random_params(model)
    whole = np.asarray(jax.jit(model.encode)(params, batch))[0]
    tokens = batch["encoder_tokens"].copy()
    tokens[0, 10] = (tokens[0, 10] + 1) % 96
    change = np.abs(np.asarray(jax.jit(model.encode)(params, batch | {"encoder_tokens": tokens}))[0] - whole).max(
        axis=1
    )
    assert np.flatnonzero(change > 1e-4).tolist() == [7, 8, 9, 10, 11, 12, 13]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(max_length=None), "max_length has no value, learned positions need one"),
        (
            dict(embedding_scale="sqrt_dim"),
            r"embedding_scale \('sqrt_dim'\) would scale learned positions: write 'tokens'",
        ),
    ],
)
def test_impossible_positions_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(ADDED, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(encoder_window=0), "encoder_window is 0, must be at least 1, or None: no window"),
        (dict(num_encoder_layers=0), "num_encoder_layers is 0, must be at least 1, or None"),
        (dict(relative_buckets=6), r"relative_buckets \(6\) must be a multiple of 4: try 32"),
        (dict(relative_distance=4), r"relative_distance \(4\) must be above half of relative_buckets \(8\): try 32"),
        (dict(residual="parallel"), "residual .* is for decoders only"),
        (dict(positions="alibi"), "positions is 'alibi', must be 'relative', 'rope', 'learned' or 'sinusoidal'"),
        (dict(rope=Rope(theta=500.0)), r"rope is set, but positions \('relative'\) are not rotary"),
        (dict(layer_pattern=("unrotated",)), r"layer_pattern is \['unrotated'\], must be of 'global' and 'local'"),
        (dict(layer_pattern=("local",)), "window is None, must be at least 1 where layer_pattern has local layers"),
        (dict(layer_pattern=("local",), window=4), "encoder_window has no value, local layers in layer_pattern need"),
        (dict(window=4), "window is 4, must be at least 1 where layer_pattern has local layers, and None elsewhere"),
        (
            dict(sines="computed"),
            r"sines \('computed'\) is for 'sinusoidal' positions, not for 'relative': leave it out",
        ),
        (
            dict(positions="sinusoidal", embed_dim=2, max_length=8, relative_buckets=32, relative_distance=128),
            r"embed_dim \(2\) must be even and at least 4",
        ),
        (dict(position_offset=2), r"position_offset \(2\) is for positions that are added"),
        (
            dict(positions="learned", max_length=8),
            "relative_buckets, relative_distance and relative_tables are for relative",
        ),
        (dict(embedding_scale="tokens"), r"embedding_scale \('tokens'\) is for positions that are added"),
        (dict(attention="splash"), "cannot add relative positions: try 'auto'"),
        (dict(num_kv_heads=3), r"EncoderDecoderConfig.num_kv_heads \(3\) must divide"),
    ],
)
def test_impossible_shapes_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(TINY, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(head_dim=15), r"head_dim \(15\) must be even, and at least 2 of its dimensions rotated"),
        (
            dict(rope=Rope(scaling="dynamic", factor=2.0, original_length=16)),
            r"Rope.scaling \('dynamic'\) depends on the length of rows, which differs between encoder and decoder",
        ),
        (dict(relative_buckets=8), "relative_buckets, relative_distance and relative_tables are for relative"),
    ],
)
def test_impossible_rotations_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(GEMMA, **change)


@pytest.mark.parametrize("sines, most", [("computed", 0.0), ("tensor2tensor", None)])
def test_computed_sines_have_no_table(sines, most):
    """The same as those that are stored, or with other wavelengths (M2M-100)."""
    stored = dataclasses.replace(ADDED, positions="sinusoidal")
    models = api.build(stored), api.build(dataclasses.replace(stored, sines=sines))
    params = random_params(models[1])
    tables = {side: {**params[side], "position_embedding": api.sine_table(42, 32)} for side in ("encoder", "decoder")}
    batch = batch_of([[20, 8], [32]], [[16, 6], [24]])
    want, got = (
        np.asarray(model.logits(values, batch))
        for model, values in zip(models, ({**params, **tables}, params), strict=True)
    )
    assert np.abs(got - want).max() == most if most is not None else np.abs(got - want).max() > 1e-3
    assert "position_embedding" not in models[1].abstract_params["encoder"]
    assert models[1].config.untrained == {"output_bias"}


def test_norms_behind_the_layers_are_a_choice_of_their_own():
    """Runs of earlier versions with norms behind the branches have final norms."""
    with_norms = api.build(dataclasses.replace(ADDED, final_norm="layer")).abstract_params
    without = api.build(ADDED).abstract_params
    for side in ("encoder", "decoder"):
        assert "norm" in with_norms[side] and "norm" not in without[side]


def test_only_added_positions_limit_the_encoders_rows():
    assert longest_encoded(ADDED) == 40 and longest_encoded(dataclasses.replace(TINY, max_length=16)) is None
