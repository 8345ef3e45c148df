"""Every implementation of a product agrees with the reference in values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from capibara import sharding
from capibara.kernels.matmul import cpu, dispatch, reference
from capibara.kernels.matmul.quantized import Quantization
from capibara.sharding import Plan


def drawn(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def matmul(x, weight, in_dims=1):
    return dispatch.matmul(x, weight, in_dims, Quantization.NONE)


@pytest.mark.parametrize(
    "inner, outer", [((24,), (40,)), ((40,), (24,)), ((16,), (16,)), ((4, 8), (2, 16)), ((2, 8), (8,))]
)
def test_as_matrices_it_is_the_plain_product_with_its_gradients(inner, outer):
    x, weight, dy = drawn(2, 5, *inner), drawn(*inner, *outer, seed=1), drawn(2, 5, *outer, seed=2)

    def found(way):
        y, pull = jax.vjp(lambda x, weight: way(x, weight, len(inner)), x, weight)
        return y, *pull(dy)

    for got, want in zip(found(cpu.as_matrices), found(reference.contracted), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_on_a_cpu_products_are_matrices_and_where_rows_are_cut_they_are_not(monkeypatch):
    used = []
    monkeypatch.setattr(cpu, "as_matrices", lambda x, weight, in_dims: used.append("matrices") or x)
    monkeypatch.setattr(reference, "contracted", lambda x, weight, in_dims: used.append("plain") or x)
    plan = Plan(batch_size=4, fsdp=1, context=2, tensor=2)
    matmul(drawn(2, 2), drawn(2, 2))
    with sharding.activate(sharding.make_mesh(plan, jax.devices()[:4]), plan.rules):
        matmul(drawn(2, 2), drawn(2, 2))
    monkeypatch.setattr(sharding, "platform", lambda: "tpu")
    matmul(drawn(2, 2), drawn(2, 2))
    assert used == ["matrices", "plain", "plain"]


@pytest.mark.parametrize("rows", [1, 4, 5, 8])
@pytest.mark.parametrize("length, vocab_size", [(1, 64), (1, 63), (3, 64)])
def test_logits_are_those_of_the_plain_formula(rows, length, vocab_size):
    hidden, head = drawn(rows, length, 16), drawn(vocab_size, 16, seed=1)
    got = jax.jit(dispatch.logits)(hidden, head)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, reference.logits(hidden, head), rtol=1e-5, atol=1e-5)


def test_a_weight_as_wide_as_its_input_sends_no_rows_about():
    """On devices that divide the rows, its gradient is one sum over them, like any other weight's."""
    plan = Plan(batch_size=8, data=4)
    mesh = sharding.make_mesh(plan, jax.devices()[:4])
    x, weight = jnp.zeros((8, 256, 256)), jnp.zeros((256, 256))
    assert x.nbytes >= 2**20, "smaller ones are not cut"

    def gradient(weight, x):
        with sharding.activate(mesh, plan.rules):
            return jax.grad(lambda weight: jnp.sum(jnp.square(matmul(x, weight))))(weight)

    rows = NamedSharding(mesh, P(plan.rules.batch))
    text = jax.jit(gradient).lower(weight, jax.device_put(x, rows)).compile().as_text()
    assert "all-reduce" in text and "all-to-all" not in text and "collective-permute" not in text
