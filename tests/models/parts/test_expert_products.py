"""The products of experts: how weights are laid out for them, and which a recomputed layer needs."""

import dataclasses
import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from test_moe import CONFIG, LENGTH, MOE, ROWS, as_on_tpu, assert_close, functional, inputs, on_mesh  # noqa: E402

from capibara.kernels.grouped_matmul import dispatch as grouped_matmul
from capibara.kernels.grouped_matmul.kernel import Transposed
from capibara.models.adapters.lora_experts import Rows
from capibara.models.layers.layers import Activation, ClampedSwiglu
from capibara.models.parts import dispatch


def test_a_recomputed_layer_does_not_need_the_results_of_experts(monkeypatch):
    """On TPU gates are factors of hidden units: of nine products, forward ones recomputed, all but that of down are left."""
    as_on_tpu(monkeypatch)
    params, _, apply = functional(MOE)
    x, segments = inputs()
    target = inputs(seed=1)[0]
    layer = jax.checkpoint(lambda params, x: apply(params, x, segments)[0])
    gradients = jax.jit(jax.grad(lambda params, x: jnp.sum(layer(params, x) * target), argnums=(0, 1)))
    tile = grouped_matmul.row_tile(ROWS * LENGTH * MOE.top_k, MOE.num_experts)
    rows = jnp.zeros((grouped_matmul.padded_rows(ROWS * LENGTH * MOE.top_k, tile), CONFIG.embed_dim))
    product = jax.jit(lambda x, w, sizes: grouped_matmul.grouped_matmul(x, w, sizes, tile))
    of_product = product.lower(rows, params["up"], jnp.zeros(MOE.num_experts, jnp.int32))
    loops, of_each = (
        lowered.compile().as_text().count(" while(") for lowered in (gradients.lower(params, x), of_product)
    )
    assert of_each > 0 and loops == (2 + 3 + 3) * of_each


@pytest.mark.parametrize(
    "sizes, changes",
    [
        (dict(fsdp=4, data=2), {}),
        pytest.param(dict(fsdp=2, expert=2, context=2), {}, marks=pytest.mark.heavy),
        pytest.param(dict(fsdp=4), {"bias": "all", "activation": "clamped_swiglu"}, marks=pytest.mark.heavy),
        pytest.param(dict(fsdp=4), {"activation": "gelu"}, marks=pytest.mark.heavy),
        pytest.param(dict(fsdp=4), {"activation": "geglu"}, marks=pytest.mark.heavy),
    ],
    ids=str,
)
def test_weights_laid_out_for_gathering_give_the_same_numbers(sizes, changes, monkeypatch):
    """Gate and up side by side, down with its outputs first, as TPUs gather them."""
    names = []

    def noted(weights):
        names.append(set(result := laid_out(weights)))
        return result

    config = dataclasses.replace(CONFIG, **changes)
    expected = on_mesh(MOE, {}, config)
    laid_out = dispatch.for_gathering
    monkeypatch.setattr(dispatch, "for_gathering", noted)
    as_on_tpu(monkeypatch)
    got = on_mesh(MOE, sizes, config)
    assert names and all(("gate_up" in layout) == config.activation.gated for layout in names)
    assert_close(got, expected)


@pytest.mark.parametrize("biases", [(), ("up",), ("gate", "up")], ids=str)
@pytest.mark.parametrize("activation", [Activation.SWIGLU, Activation.REGLU2, ClampedSwiglu(1.7, 0.8)], ids=str)
def test_gradients_of_gate_and_up_in_one_pass_are_those_of_each(activation, biases, monkeypatch):
    monkeypatch.setattr(grouped_matmul.sharding, "platform", lambda: "tpu")
    G, M, D, F = 2, 5, 4, 6
    keys = iter(jax.random.split(jax.random.key(0), 8))
    weights = {name: jax.random.normal(next(keys), (G, D, F)) for name in ("gate", "up")}
    weights |= {"down": jax.random.normal(next(keys), (G, F, D))}
    weights |= {f"{name}_bias": jax.random.normal(next(keys), (G, F)) for name in biases}
    x, gates = jax.random.normal(next(keys), (G, M, D)), jax.random.uniform(next(keys), (G, M, 1))
    target = jax.random.normal(next(keys), (G, M, D))

    def product(x, w):
        return x @ (jnp.swapaxes(w.w_GNK, 1, 2) if isinstance(w, Transposed) else w)

    rows = Rows(product, lambda values: values[:, None], jnp.ones((G, M), bool), None)

    def loss(layout, x, gates, weights):
        return jnp.sum(target * dispatch.mlp(x, gates, layout(weights), activation, rows, dispatch.Axes()))

    assert "gate_up" in dispatch.for_gathering(weights)
    want, got = (
        jax.value_and_grad(loss, argnums=(1, 2, 3))(layout, x, gates, weights)
        for layout in (dict, dispatch.for_gathering)
    )
    assert_close(got, want)
