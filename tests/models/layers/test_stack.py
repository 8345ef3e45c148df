"""Layers that follow each other: what the backward pass recomputes, and when it computes what."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from capibara import sharding
from capibara.models import api
from capibara.models.api import DecoderConfig, EncoderConfig, EncoderDecoderConfig, Gemma3nConfig, Lora
from capibara.models.layers import stack
from capibara.models.layers.stack import LayerLoop
from capibara.sharding import Remat, RematPolicy

FULL = RematPolicy(Remat.FULL)
SIZES = dict(vocab_size=64, embed_dim=16, num_layers=2, num_heads=2, mlp_dim=32, dtype="float32")


class Layer(nnx.Module):
    """x + tanh(x w) scale."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (4, 4)), axes=("embed", "mlp"))
        self.scale = nnx.Param(jnp.ones(4), axes=("norm",))


def loss_of(layers, *, group, loop=LayerLoop.SCAN, all_trained=True, numbered=False):
    graphdef, state = nnx.split(layers)

    def apply(layer, x, rows, kind, *number):
        return x + jnp.tanh(x @ layer.w[...]) * layer.scale[...] * (1 + kind), {}

    def loss(values, x):
        nnx.replace_by_pure_dict(state, values)
        module = nnx.merge(graphdef, state)
        y, _ = stack.run(
            module, x, (), apply, tuple(range(group)), loop, FULL, all_trained=all_trained, numbered=numbered
        )
        return jnp.sum(y**2)

    return loss, nnx.to_pure_dict(state)


def layers_of(count):
    return stack.stacked(Layer, nnx.Rngs(0), count)


X = jnp.linspace(-1, 1, 12).reshape(3, 4)


@pytest.mark.parametrize(
    "group, count, loop, scanned, unrolled",
    [(2, 5, LayerLoop.SCAN, 2, 1), (1, 4, LayerLoop.SCAN, 1, 0), (1, 3, LayerLoop.UNROLL, 0, 3)],
)
def test_layers_outside_a_scan_are_recomputed_too(group, count, loop, scanned, unrolled):
    """Both passes of such a layer are in one computation: XLA would notice, and keep what the policy drops."""
    loss, values = loss_of(layers_of(count), group=group, loop=loop)
    text = str(jax.make_jaxpr(loss)(values, X))
    assert (text.count("prevent_cse=False"), text.count("prevent_cse=True")) == (scanned, unrolled)


@pytest.mark.parametrize(
    "group, count, all_trained, ties",
    [(2, 5, True, 3), (2, 4, True, 2), (1, 4, True, 0), (2, 5, False, 0)],
)
def test_on_tpu_the_gradients_of_a_layer_are_finished_before_the_one_before(
    group, count, all_trained, ties, monkeypatch
):
    """A scan over single layers ends each of them by itself."""

    def barriers(platform):
        monkeypatch.setattr(sharding, "platform", lambda: platform)
        loss, values = loss_of(layers_of(count), group=group, all_trained=all_trained, numbered=True)
        gradients = jax.grad(loss)
        return str(jax.make_jaxpr(gradients)(values, X)).count("optimization_barrier"), gradients(values, X)

    (tied, ours), (plain, want) = barriers("tpu"), barriers("cpu")
    assert tied - plain == ties
    jax.tree.map(np.testing.assert_array_equal, ours, want)


class Called(Exception):
    """How a model calls `stack.run`."""


@pytest.mark.parametrize(
    "config",
    [
        DecoderConfig(**SIZES),
        EncoderDecoderConfig(**SIZES),
        EncoderConfig(**SIZES, max_length=16),
        Gemma3nConfig(**SIZES, layer_pattern=("local", "global"), window=8, laurel_rank=4, per_layer_dim=8),
    ],
    ids=lambda config: type(config).__name__,
)
def test_every_architecture_says_whether_all_of_a_layer_is_trained(config, monkeypatch):
    def run(*_, all_trained=None, **named):
        raise Called(all_trained)

    monkeypatch.setattr(stack, "run", run)
    of_rows = jax.ShapeDtypeStruct((1, 16), np.int32)
    names = ("tokens", "positions", "segment_ids", "targets")
    batch = dict.fromkeys([*names, *(f"encoder_{name}" for name in names)], of_rows)
    for lora in (None, Lora(rank=2, targets=("all-linear",))):
        model = api.build(dataclasses.replace(config, lora=lora))
        with pytest.raises(Called) as caught:
            jax.eval_shape(model.logits, model.abstract_params, batch)
        assert caught.value.args == (lora is None,)


def test_the_input_and_all_float_parameters_of_a_layer_are_tied(monkeypatch):
    monkeypatch.setattr(stack, "gradients_together", lambda *arrays: tuple(-a for a in arrays))
    values = {"w": jnp.ones(2), "number": jnp.int32(3), "scale": jnp.full(2, 4.0)}
    x, own = stack._finished(jnp.ones(3), values, True)
    assert (x == -1).all() and (own["w"] == -1).all() and own["number"] == 3 and (own["scale"] == -4).all()
