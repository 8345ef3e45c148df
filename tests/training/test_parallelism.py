"""Every way to spread a model over 8 devices gives the loss and the gradients of one device."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest

from capibara import sharding
from capibara.core import tree
from capibara.core.types import UserError
from capibara.kernels.cross_entropy.dispatch import cross_entropy
from capibara.models import api
from capibara.models.api import DecoderConfig, EncoderDecoderConfig, Gemma3nConfig, Lora, ShortConv
from capibara.models.parts.moe import Moe
from capibara.sharding import Plan

ROWS, LENGTH, VOCAB = 16, 32, 128
DENSE = DecoderConfig(
    vocab_size=VOCAB,
    embed_dim=32,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=64,
    window=9,
    layer_pattern=("local", "global"),
    dtype="float32",
)
EXPERTS = Moe(num_experts=8, top_k=2, expert_dim=32, balance_loss=0.01, router_z_loss=0.001)
PAIRS = EncoderDecoderConfig(
    vocab_size=VOCAB, embed_dim=32, num_layers=2, num_encoder_layers=2, num_heads=4, mlp_dim=64, dtype="float32"
)
TOKENS = dataclasses.replace(DENSE, lora=Lora(rank=4, targets=("query",), trainable_tokens=(3, 50)))
MODELS = {
    "dense": DENSE,
    "experts": dataclasses.replace(DENSE, moe=EXPERTS),
    "gpt_oss": dataclasses.replace(
        DENSE,
        bias="attention",
        activation="clamped_swiglu",
        swiglu_limit=1.0,
        attention_sinks="head",
        moe=dataclasses.replace(EXPERTS, bias="all"),
    ),
    "gemma3n": Gemma3nConfig(
        vocab_size=VOCAB,
        embed_dim=32,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        mlp_dim=64,
        window=9,
        layer_pattern=("local", "global"),
        dtype="float32",
        streams=2,
        laurel_rank=4,
        per_layer_dim=8,
        per_layer_vocab_size=120,
        kv_shared_layers=2,
        activation_sparsity=(0.5,),
    ),
    "recurrent": dataclasses.replace(
        DENSE,
        layer_pattern=("recurrent", "global"),
        window=None,
        mixer=ShortConv(),
        moe=dataclasses.replace(EXPERTS, first_dense=1),
    ),
    "blocks": dataclasses.replace(
        DENSE,
        layer_pattern=("local", "unrotated"),
        window=9,
        window_kind="block",
        qk_norm="unit",
        query_growth=0.5,
        query_growth_length=4,
        query_growth_layers="unrotated",
        moe=dataclasses.replace(EXPERTS, score="sigmoid", gates="scores", weighted="inputs"),
    ),
    "encoder_decoder": PAIRS,
    "trainable tokens": TOKENS,
    "trainable tokens, head": dataclasses.replace(TOKENS, head="separate"),
}
# The six axes alone, then eight products of them.
MESHES = [
    dict(data=8, fsdp=1),
    dict(fsdp=8),
    dict(tensor=2, fsdp=1),
    dict(context=4, fsdp=1),
    dict(expert=8, fsdp=1),
    dict(stage=2, fsdp=1, pipeline_microbatches=4),
    dict(data=2, fsdp=2, tensor=2),
    dict(fsdp=2, tensor=2, context=2),
    dict(fsdp=2, expert=2, context=2),
    dict(data=2, expert=4, fsdp=1),
    dict(expert=2, tensor=2, fsdp=2),
    dict(stage=2, fsdp=2, tensor=2),
    dict(stage=2, expert=2, fsdp=2, pipeline_microbatches=2),
    dict(stage=2, context=2, fsdp=2),
]


def batch_of(name):
    """Two documents and some padding in each row, and another share of counted tokens in each."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
    segments = np.repeat([1, 2, 0], [14, 14, 4]).astype(np.int32)
    batch = {
        "tokens": tokens,
        "targets": (tokens * 3 + 1) % VOCAB,
        "weights": (rng.random((ROWS, LENGTH)) > np.linspace(0, 0.9, ROWS)[:, None]).astype(np.float32),
        "segment_ids": np.tile(segments, (ROWS, 1)),
        "positions": np.tile(np.concatenate([np.arange(14), np.arange(14), np.zeros(4)]).astype(np.int32), (ROWS, 1)),
    }
    batch["weights"] *= batch["segment_ids"] > 0
    if name == "encoder_decoder":
        # As long as a context axis of 2 divides, and another length than the targets'.
        segments = np.repeat([1, 2, 0], [10, 8, 6]).astype(np.int32)
        batch["encoder_tokens"] = rng.integers(0, VOCAB, (ROWS, 24)).astype(np.int32)
        batch["encoder_segment_ids"] = np.tile(segments, (ROWS, 1))
        batch["encoder_positions"] = np.tile(np.arange(24, dtype=np.int32), (ROWS, 1))
    return batch


@functools.cache
def params_of(config):
    """On the host: every mesh would compile their start anew."""
    params = jax.jit(api.build(config).init)(jax.random.key(0))
    # Fresh norms and biases are ones and zeros, which hide mistakes.
    add = lambda p: np.asarray(p + 0.1 * jax.random.normal(jax.random.key(p.size), p.shape))  # noqa: E731
    return jax.tree.map(add, params)


def gradient_of(name, plan, devices):
    """The compiled (parameters, batch) -> (mean loss, gradients), the parameters' shardings, and the batch."""
    model = api.build(MODELS[name])
    mesh = sharding.make_mesh(plan, devices)
    shardings = sharding.shardings(mesh, plan.rules, model.axes, model.abstract_params)

    def loss(params, batch):
        with sharding.activate(mesh, plan.rules, plan.pipeline(mesh)):
            batch = sharding.balanced(batch)
            hidden, stats = model.hidden(params, batch, plan.remat_policy)
            total, sums = cross_entropy(hidden, model.head(params), batch["targets"], batch["weights"])
            return (total + model.layer_loss(stats)) / sums.weight

    batch = sharding.global_batch(sharding.batch_sharding(mesh, plan.rules), batch_of(name))
    return jax.jit(jax.value_and_grad(loss), out_shardings=(None, shardings)), shardings, batch


def loss_and_grads(name, plan, devices):
    """The mean loss and the gradients of all parameters, on the host."""
    gradient, shardings, batch = gradient_of(name, plan, devices)
    return jax.device_get(gradient(jax.device_put(params_of(MODELS[name]), shardings), batch))


def five_steps(name, plan):
    """Loss and gradients of each step of gradient descent."""
    gradient, shardings, batch = gradient_of(name, plan, jax.devices())
    params, results = params_of(MODELS[name]), []
    for _ in range(5):
        loss, gradients = jax.device_get(gradient(jax.device_put(params, shardings), batch))
        results.append((loss, gradients))
        params = jax.tree.map(lambda p, g: p - np.float32(0.1) * g, params, gradients)
    return results


@functools.cache
def one_device(name):
    return loss_and_grads(name, Plan(batch_size=ROWS), jax.devices()[:1])


def compare(name, got, want):
    lora = MODELS[name].lora
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    for path, a, b in zip(tree.path_names(want[1]), jax.tree.leaves(got[1]), jax.tree.leaves(want[1])):
        is_frozen = lora is not None and not lora.trains(path)
        assert is_frozen or np.abs(b).max() > 1e-6, f"{path} has no gradient"
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=path)


def matrix():
    """Every mesh with every model; in the short suite fsdp alone, and products that have every axis, with one model."""
    for index, sizes in enumerate(MESHES):
        mesh = "-".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1)
        for name in MODELS:
            if name == "gemma3n" and "stage" in sizes:
                continue  # it has none
            if name == "recurrent" and sizes.keys() & {"stage", "context"}:
                continue  # refused
            short = (index, name) == (7, "trainable tokens")
            short |= (index, name) == (10, "gpt_oss")
            short |= (index, name) == (6, "recurrent")
            short |= name == {6: "encoder_decoder", 8: "experts"}.get(index, "dense") and index in (
                1,
                6,
                7,
                8,
                11,
                12,
                13,
            )
            yield pytest.param(name, sizes, id=f"{mesh}-{name}", marks=() if short else pytest.mark.heavy)


@pytest.mark.parametrize("name, sizes", list(matrix()))
def test_loss_and_gradients_are_those_of_one_device(name, sizes):
    devices = math.prod(size for axis, size in sizes.items() if axis in sharding.MESH_AXES)
    got = loss_and_grads(name, Plan(batch_size=ROWS, **sizes), jax.devices()[:devices])
    compare(name, got, one_device(name))


INPUTS = ("layer_input",)
OFFLOADED = [
    pytest.param("dense", dict(fsdp=8), "offload", INPUTS, id="dense"),
    pytest.param("dense", dict(fsdp=4, stage=2), "offload", INPUTS, id="stages", marks=pytest.mark.heavy),
    pytest.param("dense", dict(fsdp=8), "save", INPUTS, id="save", marks=pytest.mark.heavy),
    pytest.param("experts", dict(fsdp=2, expert=4), "offload", INPUTS, id="experts", marks=pytest.mark.heavy),
    pytest.param("encoder_decoder", dict(fsdp=8), "offload", INPUTS, id="pairs", marks=pytest.mark.heavy),
    pytest.param("gemma3n", dict(fsdp=8), "offload", INPUTS, id="gemma3n", marks=pytest.mark.heavy),
    pytest.param("dense", dict(fsdp=8), "offload", (*INPUTS, "query", "mlp_down"), id="more", marks=pytest.mark.heavy),
]


@pytest.mark.parametrize("name, sizes, remat, names", OFFLOADED)
def test_layer_inputs_elsewhere_change_no_number_of_five_steps(name, sizes, remat, names):
    """Against full recomputation from inputs on the device."""
    sizes = {"fsdp": 1} | sizes
    want = five_steps(name, Plan(batch_size=ROWS, remat="full", **sizes))
    got = five_steps(name, Plan(batch_size=ROWS, remat=remat, remat_names=names, **sizes))
    for (loss, gradients), (other, others) in zip(got, want, strict=True):
        assert loss == other
        jax.tree.map(np.testing.assert_array_equal, gradients, others)
    assert want[-1][0] < want[0][0]


@pytest.mark.parametrize("name", ["dense", pytest.param("experts", marks=pytest.mark.heavy)])
def test_bfloat16_compiles_and_learns_beside_a_tensor_axis(name, monkeypatch):
    """XLA's CPU compiler dies of sums in 16 bits in a shard_map beside an axis that it shares out itself."""
    monkeypatch.setitem(MODELS, "half", dataclasses.replace(MODELS[name], dtype="bfloat16"))
    got = loss_and_grads("half", Plan(batch_size=ROWS, data=2, fsdp=2, tensor=2), jax.devices())
    want = one_device(name)
    np.testing.assert_allclose(got[0], want[0], rtol=2e-3)
    if name == "dense":  # rounding sends tokens to other experts
        for path, a, b in zip(tree.path_names(want[1]), jax.tree.leaves(got[1]), jax.tree.leaves(want[1])):
            assert np.linalg.norm(a - b) < 0.05 * np.linalg.norm(b), path


def test_a_circular_pipeline_passes_each_stage_again():
    sizes = dict(stage=2, fsdp=2, pipeline_repeats=2, pipeline_microbatches=2, remat="full")
    plain = dataclasses.replace(DENSE, window=None, layer_pattern=("global",))
    MODELS["plain"] = plain
    try:
        got = loss_and_grads("plain", Plan(batch_size=ROWS, **sizes), jax.devices()[:4])
        compare("dense", got, loss_and_grads("plain", Plan(batch_size=ROWS), jax.devices()[:1]))
    finally:
        del MODELS["plain"]


def test_layers_that_do_not_divide_into_stages_are_named():
    with pytest.raises(
        UserError, match=r"num_layers \(4\) with a layer pattern of 2 must be a multiple of 8: Plan.stage"
    ):
        loss_and_grads("dense", Plan(batch_size=ROWS, stage=4, fsdp=1, pipeline_microbatches=4), jax.devices()[:4])


def test_what_is_sharded_is_nowhere_whole():
    """Each device holds its share of the parameters, on every axis but data."""
    model = api.build(DENSE)
    for sizes in (dict(fsdp=8), dict(context=4, fsdp=2), dict(stage=2, fsdp=2, tensor=2), dict(expert=2, fsdp=4)):
        mesh = sharding.make_mesh(Plan(batch_size=ROWS, **sizes))
        spread = sharding.shardings(mesh, sharding.Rules(), model.axes, model.abstract_params)
        local = sum(
            math.prod(s.shard_shape(leaf.shape))
            for s, leaf in zip(jax.tree.leaves(spread), jax.tree.leaves(model.abstract_params))
        )
        assert local < 1.1 * model.param_count / 8 + 4 * 32 * 3  # norms stay whole
