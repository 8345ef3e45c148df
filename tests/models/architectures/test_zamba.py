"""Zamba2: blocks that layers share in turn, what of them is a layer's own, and how often a token passes them."""

from __future__ import annotations

import dataclasses
import pathlib
import sys

import jax
import numpy as np
import pytest

from capibara.core import tree
from capibara.core.types import UserError
from capibara.models import api
from capibara.models.api import ChannelMix, DecoderConfig, Lora, Mamba2, Rwkv4, ZambaConfig
from capibara.optim import Optimizer
from capibara.planner.model import workload
from capibara.sharding import Plan

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from mesh_gradients import on_mesh, random_params  # noqa: E402

SIZES = dict(vocab_size=64, embed_dim=32, num_heads=4, mlp_dim=48, dtype="float32")
CONFIG = ZambaConfig(
    **SIZES,
    num_layers=6,
    mixer=Mamba2(heads=4, head_dim=8, groups=2, state_dim=8, taps=3),
    layer_pattern=("recurrent", "hybrid", "hybrid"),
    activation="geglu_exact",
    shared_blocks=2,
    adapters="all",
    adapter_rank=4,
)
RWKV = DecoderConfig(
    **SIZES, num_layers=2, mixer=Rwkv4(), channel_mixer=ChannelMix(), activation="relu2", norm="layer", positions="none",
    layer_pattern=("recurrent",), embedding_norm="layer",
)  # fmt: skip


def batch_of(rows=4, length=16):
    tokens = np.random.default_rng(0).integers(0, 64, (rows, length)).astype(np.int32)
    segments = np.broadcast_to(np.repeat([1, 2], length // 2).astype(np.int32), tokens.shape)
    positions = np.broadcast_to(np.tile(np.arange(length // 2, dtype=np.int32), 2), tokens.shape)
    return {"tokens": tokens, "segment_ids": segments, "positions": positions}


def logits_of(model, params):
    return np.asarray(jax.jit(model.logits)(params, batch_of()))


def test_layers_read_the_blocks_in_turn():
    assert CONFIG.reading == (1, 2, 4, 5) and [CONFIG.block_of(n) for n in range(6)] == [None, 0, 1, None, 0, 1]
    odd = dataclasses.replace(CONFIG, layer_pattern=("recurrent", "hybrid"))
    assert odd.period == 4 and [odd.block_of(n) for n in range(6)] == [None, 0, None, 1, None, 0]
    model = api.build(CONFIG)
    params = random_params(model)
    before = logits_of(model, params)
    # A layer's adapters belong to it alone: without those of the last one, the others' blocks are as they were.
    own = params["layers"]["shared_input"]
    last = {name: value.at[3].set(0) if name.endswith("_up") else value for name, value in own.items()}
    changed = params | {"layers": params["layers"] | {"shared_input": last}}
    assert np.abs(logits_of(model, changed) - before).max() > 1e-3
    rank = {name: value.shape[0] for name, value in own.items()}
    assert set(rank.values()) == {4} and params["shared"]["layers"]["mlp"]["up"].shape[0] == 2


def test_a_block_that_no_layer_adds_changes_nothing():
    model = api.build(CONFIG)
    params = random_params(model)
    own = params["layers"]["shared_input"]
    silent = params | {"layers": params["layers"] | {"shared_input": own | {"projection": own["projection"] * 0}}}
    other = silent | {"shared": jax.tree.map(lambda x: x + 1, params["shared"])}
    np.testing.assert_array_equal(logits_of(model, silent), logits_of(model, other))


def test_a_token_passes_a_block_once_for_each_layer_that_reads_it():
    model = api.build(CONFIG)
    sizes = dict(zip(tree.path_names(model.abstract_params), jax.tree.leaves(model.abstract_params), strict=True))
    shared = sum(leaf.size for name, leaf in sizes.items() if name.startswith("shared/") and "norm" not in name)
    alone = dataclasses.replace(CONFIG, layer_pattern=("recurrent", "hybrid", "recurrent"), shared_blocks=2)
    assert (CONFIG.passes("shared/layers/mlp/up"), alone.passes("shared/layers/mlp/up")) == (2, 1)
    once = api.build(alone)
    own = sum(leaf.size for name, leaf in sizes.items() if name.startswith("layers/shared_input/")) / 2
    # Two more layers read the two blocks, and attend to 32 of 64 tokens on average, with heads of 32 channels together.
    more = 6 * (shared + own) + 2 * 3 * 2 * 32 * 2 * 32
    assert model.flops_per_token(64) - once.flops_per_token(64) == more
    step = workload.describe(model, Optimizer(), length=64)
    in_layers = sum(leaf.size for name, leaf in sizes.items() if name.startswith("layers/"))
    in_blocks = sum(leaf.size for name, leaf in sizes.items() if name.startswith("shared/"))
    assert step.active_weights == in_layers + 2 * in_blocks
    assert step.params.total() == 4 * sum(leaf.size for leaf in sizes.values())


def test_adapters_of_all_weights_merge_to_the_same_logits():
    config = dataclasses.replace(CONFIG, lora=Lora(rank=2, alpha=2.0, targets=("all-linear",)))
    model = api.build(config)
    # Smaller than elsewhere: of random blocks without a residual, large weights multiply rounding by thousands.
    params = jax.tree.map(lambda x: 0.4 * x, random_params(model))
    names = {name.rpartition("/")[0] for name in tree.path_names(model.abstract_params) if "_lora/" in name}
    assert {
        "shared/layers/attention/query_lora",
        "shared/layers/mlp/down_lora",
        "layers/shared_input/projection_lora",
    } <= names
    want = logits_of(model, params)
    got = logits_of(model.plain, jax.jit(model.merge)(params))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("config", [CONFIG, RWKV], ids=["zamba", "rwkv"])
@pytest.mark.parametrize("axes", [dict(fsdp=2, tensor=2), pytest.param(dict(data=2, fsdp=4), marks=pytest.mark.heavy)])
def test_a_mesh_gives_the_loss_and_the_gradients_of_one_device(config, axes):
    model, batch = api.build(config), batch_of(rows=8)
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    loss, gradients = on_mesh(model, batch, Plan(batch_size=8, **axes), devices)
    want, theirs = on_mesh(model, batch, Plan(batch_size=8, fsdp=1), jax.devices()[:1])
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(theirs))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * largest), gradients, theirs)


def test_a_smaller_copy_has_blocks_that_its_layers_read():
    values = {"num_layers": 2, "embed_dim": 16, "head_dim": 8}
    small = dataclasses.replace(CONFIG, **values | CONFIG.emulated(values, 0.5))
    assert (small.shared_blocks, small.adapter_rank, small.reading) == (1, 2, (1,))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(shared_blocks=0), "ZambaConfig.shared_blocks is 0"),
        (dict(adapter_rank=0), "ZambaConfig.adapter_rank is 0"),
        (dict(shared_blocks=5), "shared_blocks (5) must be at most the number of hybrid layers (4)"),
        (
            dict(layer_pattern=("recurrent", "global")),
            "ZambaConfig.layer_pattern has 'global', must be of 'recurrent' and",
        ),
        (dict(activation="gelu"), "ZambaConfig.activation is 'gelu' and mlp_dim 48, must be an MLP with a gate"),
        (dict(num_kv_heads=2), "num_kv_heads (2) must be num_heads (4) where adapters is 'all'"),
        (dict(bias="all"), "ZambaConfig.bias is 'all', must be 'none' or 'mlp'"),
        (dict(qk_norm="head"), "ZambaConfig.qk_norm (head) is of other decoders: leave it out"),
    ],
)
def test_what_it_does_not_have_is_refused_by_name(fields, message):
    with pytest.raises(UserError) as error:
        dataclasses.replace(CONFIG, **fields)
    assert message in str(error.value)
