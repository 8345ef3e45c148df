"""The encoder against transformers' BERT, and which tokens it sees."""

import dataclasses
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara import config
from capibara.core import tree
from capibara.core.types import UserError
from capibara.interop.hf import tables
from capibara.interop.hf.layout import tensors
from capibara.models import api
from capibara.models.api import Disentangled, EncoderConfig, Lora
from capibara.models.architectures import encoder
from capibara.sharding import Plan, Remat

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"
sys.path.insert(0, str(GOLDEN))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import answers  # noqa: E402
import mesh_gradients  # noqa: E402
from mesh_gradients import random_params  # noqa: E402

ANSWERS = json.loads((GOLDEN / "encoders.json").read_text())
TINY = EncoderConfig(vocab_size=96, embed_dim=32, num_layers=2, num_heads=4, mlp_dim=48, max_length=40, dtype="float32")


def batch_of(tokens, padding=0):
    """One document a row; the last one has padding."""
    segments = np.ones_like(tokens)
    segments[-1, tokens.shape[1] - padding :] = 0
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    return {"tokens": tokens, "segment_ids": segments, "positions": positions}


def random_tokens(rows=2, length=24):
    return np.random.default_rng(0).integers(0, 96, (rows, length)).astype(np.int32)


def test_logits_are_those_of_transformers():
    model = api.build(TINY)
    names = tree.path_names(model.abstract_params)
    shapes = {name: leaf.shape for name, leaf in zip(names, jax.tree.leaves(model.abstract_params), strict=True)}
    values = tensors.read(tables.of("bert", shapes, {}), shapes, answers.draw)
    assert values.keys() == shapes.keys()
    params = tree.map_with_names(lambda name, _: values[name], model.abstract_params)
    batch = batch_of(np.array(ANSWERS["tokens"], np.int32), ANSWERS["padding"])
    batch["token_types"] = np.array(ANSWERS["token_types"], np.int32)
    got, want = np.asarray(jax.jit(model.logits)(params, batch)), ANSWERS["bert"]
    kept = np.array(ANSWERS["positions"]) < 24 - ANSWERS["padding"]  # results at padding are meaningless
    for row, answer, some in zip(got, want["logits"], (slice(None), kept), strict=True):
        picked = row[np.ix_(ANSWERS["positions"], ANSWERS["entries"])]
        np.testing.assert_allclose(picked[some], np.array(answer)[some], rtol=0, atol=2e-4)
    assert np.square(got[:, : -ANSWERS["padding"]]).mean() == pytest.approx(want["mean_square"], abs=2e-4)


def test_without_token_types_all_are_of_the_first():
    model, batch = api.build(TINY), batch_of(random_tokens())
    params = random_params(model)
    zeros = batch | {"token_types": np.zeros_like(batch["tokens"])}
    got, want = (jax.jit(model.logits)(params, one) for one in (batch, zeros))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_every_token_sees_its_whole_document_and_no_other():
    model = api.build(TINY)
    params, batch = random_params(model), batch_of(random_tokens(1))
    batch["segment_ids"][0, 10:] = 2
    logits = np.asarray(jax.jit(model.logits)(params, batch))
    tokens = batch["tokens"].copy()
    tokens[0, 9] = (tokens[0, 9] + 1) % 96
    change = np.abs(np.asarray(jax.jit(model.logits)(params, batch | {"tokens": tokens})) - logits)[0].max(axis=1)
    assert (change[:10] > 1e-3).all() and (change[10:] == 0).all()


@pytest.mark.parametrize(
    "placement",
    ["pre", pytest.param("post", marks=pytest.mark.heavy), pytest.param("sandwich", marks=pytest.mark.heavy)],
)
def test_scan_unroll_and_remat_give_the_same_loss_and_gradients(placement):
    batch = batch_of(random_tokens(), padding=5)

    def grads(loop, remat):
        model = api.build(dataclasses.replace(TINY, layer_loop=loop, norm_placement=placement, head="separate"))
        loss = lambda p: jnp.mean(jnp.square(model.logits(p, batch)))  # noqa: E731
        got = jax.jit(jax.value_and_grad(loss))(random_params(model))
        return got, jax.jit(lambda p: model.hidden(p, batch, remat)[0])(random_params(model))

    want = grads("scan", Remat.NONE)
    got = grads("unroll", Remat.FULL)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


def test_the_output_bias_is_a_column_of_the_head():
    model, batch = api.build(TINY), batch_of(random_tokens())
    params = random_params(model)
    assert model.head(params).shape == (96, 33)
    moved = {**params, "output_bias": params["output_bias"] + jnp.arange(96, dtype=jnp.float32)}
    difference = model.logits(moved, batch) - model.logits(params, batch)
    np.testing.assert_allclose(difference, np.broadcast_to(np.arange(96.0), difference.shape), atol=1e-4)


@pytest.mark.parametrize("sizes", [None, Disentangled(span=16, buckets=6, norm="layer")], ids=str)
def test_a_mesh_gives_the_gradients_of_one_device(sizes):
    batch = batch_of(random_tokens(8), padding=5)
    model = api.build(dataclasses.replace(TINY, disentangled=sizes))

    want = mesh_gradients.on_mesh(model, batch, Plan(batch_size=8), jax.devices()[:1])
    got = mesh_gradients.on_mesh(model, batch, Plan(batch_size=8, fsdp=2, tensor=2, context=2), jax.devices())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


DISTANCES = {
    "shared": Disentangled(span=16, buckets=6, norm="layer"),
    "own": Disentangled(span=5, projections="own"),
    "queries": Disentangled(span=5, terms="queries"),
}


@pytest.mark.parametrize("name", [*DISTANCES])
def test_documents_of_a_row_do_not_see_each_other_by_distances(name):
    model = api.build(dataclasses.replace(TINY, disentangled=DISTANCES[name], positions="none", max_length=None))
    params, batch = random_params(model), batch_of(random_tokens(1))
    batch["segment_ids"][0, 10:] = 2
    packed = np.asarray(jax.jit(model.logits)(params, batch))[0]
    for part in (slice(0, 10), slice(10, 24)):
        alone = np.asarray(jax.jit(model.logits)(params, batch_of(batch["tokens"][:, part])))[0]
        np.testing.assert_allclose(alone, packed[part], rtol=1e-4, atol=1e-4)


def test_adapters_change_what_is_made_of_distances():
    """As those of PEFT, which are on the layers' projections, whatever these read."""
    changed = []
    for targets in (("query", "key"), ("position_key", "position_query")):
        own = "own" if "position_key" in targets else "shared"
        lora = Lora(rank=2, targets=targets, modules_to_save=("relative_embedding",))
        sizes = Disentangled(span=5, projections=own)
        model = api.build(dataclasses.replace(TINY, disentangled=sizes, lora=lora))
        params, batch = random_params(model), batch_of(random_tokens())
        gradients = jax.grad(lambda p: jnp.mean(jnp.square(model.logits(p, batch))))(params)  # noqa: B023
        kept = model.trained(gradients)
        changed += [np.abs(x).max() for x in jax.tree.leaves(kept)]
    assert min(changed) > 1e-6


def test_flops_count_the_scores_of_distances():
    sizes = DISTANCES["own"]
    more = api.build(dataclasses.replace(TINY, disentangled=sizes)).flops_per_token(24) - api.build(
        TINY
    ).flops_per_token(24)
    assert more == 6 * 2 * 32 * sizes.rows * 2


def of_each_layer(params, layers):
    """The parameters of layers with these numbers."""
    return params | {"layers": jax.tree.map(lambda x: x[jnp.array(layers)], params["layers"])}


@pytest.mark.parametrize(
    ("loop", "remat"), [("scan", Remat.FULL), pytest.param("unroll", Remat.NONE, marks=pytest.mark.heavy)]
)
def test_layers_that_repeat_are_trained_as_one(loop, remat):
    """In rows of several documents: as a deeper model with equal weights, whose gradients are added up."""
    batch = batch_of(random_tokens(), padding=5)
    batch["segment_ids"][0, 10:] = 2
    shared = api.build(dataclasses.replace(TINY, layer_repeats=3, layer_loop=loop))
    deep, params = api.build(dataclasses.replace(TINY, num_layers=6)), random_params(shared)
    loss = lambda model: lambda p: jnp.mean(jnp.square(model.hidden(p, batch, remat)[0]))  # noqa: E731
    got, gradients = jax.jit(jax.value_and_grad(loss(shared)))(params)
    want, apart = jax.jit(jax.value_and_grad(loss(deep)))(of_each_layer(params, [0, 0, 0, 1, 1, 1]))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    summed = apart | {"layers": jax.tree.map(lambda g: g.reshape(2, 3, *g.shape[1:]).sum(1), apart["layers"])}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), gradients, summed)
    assert shared.flops_per_token(24) == deep.flops_per_token(24)


def test_layers_that_repeat_drop_out_apart():
    """Each time with numbers of its own, in a train step."""
    model = api.build(dataclasses.replace(TINY, num_layers=1, layer_repeats=2, dropout_rate=0.5))
    params, batch = random_params(model), batch_of(random_tokens())
    deep = api.build(dataclasses.replace(TINY, num_layers=2, dropout_rate=0.5))
    got = model.hidden(params, batch, Remat.NONE, jnp.int32(3))[0]
    want = deep.hidden(of_each_layer(params, [0, 0]), batch, Remat.NONE, jnp.int32(3))[0]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "count"), [("bert_base", 109_514_298), ("bert_large", 335_174_458)])
def test_a_published_model_has_its_published_size(name, count):
    config.parse([f"models/{name}.gin"])
    model = api.build(config.build(EncoderConfig))
    assert config.unused() == []
    assert model.param_count == count
    assert model.config.dtype == "bfloat16"


def test_masked_places_scale_the_embeddings_of_their_own_document():
    """ESM-2: a row of two documents is as the documents alone, of which one has no masked token."""
    model = api.build(dataclasses.replace(TINY, token_dropout=7))
    params, tokens = random_params(model), random_tokens(1)
    tokens[tokens == 7] = 8
    tokens[0, [2, 3, 5]] = 7
    packed = batch_of(tokens)
    packed["segment_ids"][0, 10:] = 2
    packed["positions"] = np.concatenate([np.arange(10), np.arange(14)])[None].astype(np.int32)
    got = np.asarray(model.logits(params, packed))
    for start, stop in ((0, 10), (10, 24)):
        alone = model.logits(params, batch_of(tokens[:, start:stop]))
        np.testing.assert_allclose(got[:, start:stop], alone, rtol=1e-5, atol=1e-5)
    scale = np.asarray(encoder.unmasked_scale(tokens == 7, packed["segment_ids"]))[0]
    np.testing.assert_allclose(scale[[0, 2, 12]], [0.88 * 10 / 7, 0.0, 0.88], rtol=1e-6)


def test_a_document_of_masked_places_alone_is_finite():
    scale = encoder.unmasked_scale(np.ones((1, 4), bool), np.ones((1, 4), np.int32))
    assert not np.asarray(scale).any()


def test_flops_count_attention_in_both_directions():
    weights = 2 * (4 * 32 * 32 + 2 * 32 * 48) + 32 * 32 + 96 * 32
    assert api.build(TINY).flops_per_token(24) == 6 * weights + 12 * 2 * 32 * 24


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(max_length=None), "max_length has no value, learned positions need one"),
        (dict(token_types=-1), "token_types is -1, must be at least 0"),
        (dict(embedding_dim=32), r"embedding_dim is 32, must be at least 1 and not embed_dim \(32\)"),
        (dict(transform_activation="swiglu"), "transform_activation is .swiglu., the transform has one projection"),
        (
            dict(transform="none", embedding_dim=16),
            r"embedding_dim \(16\) is of the transform before the head, and tran",
        ),
        (dict(transform="none", transform_activation="relu"), r"transform_activation \(relu\) is of the transform"),
        (dict(disentangled=Disentangled(), num_kv_heads=2), "disentangled is for heads with keys of their own"),
        (dict(disentangled=Disentangled(), relative_buckets=8), "disentangled has distances of its own"),
        (dict(disentangled=Disentangled(), attention="cudnn"), "cannot score contents with distances: try 'auto'"),
        (dict(positions="alibi"), "positions is 'alibi', must be 'learned', 'rope' or 'none'"),
        (dict(token_dropout=96), r"token_dropout is 96, must be a token, below vocab_size \(96\)"),
        (dict(layer_repeats=0), "layer_repeats is 0, must be at least 1"),
        (
            dict(layer_repeats=2, norm_placement="pre", first_norm="none"),
            r"layer_repeats \(2\) is for layers that are alike",
        ),
        (dict(embed_dim=30), r"EncoderConfig.embed_dim \(30\) must be a multiple of num_heads \(4\)"),
    ],
)
def test_impossible_shapes_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(TINY, **change)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(span=0), "span is 0, must be from 1"),
        (dict(span=4, buckets=6), "buckets is 6, must be 0, or at least 2 and less than twice"),
        (dict(buckets=1), "buckets is 1, must be 0, or at least 2"),
    ],
)
def test_impossible_distances_are_refused(sizes, message):
    with pytest.raises(UserError, match=message):
        Disentangled(**sizes)
