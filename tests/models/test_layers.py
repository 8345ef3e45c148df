"""The small parts of every model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.models.layers import Activation, OutputFirst, dense


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", [a for a in Activation if a.gated])
def test_a_gate_has_the_gradients_of_its_parts(activation, dtype):
    rng = np.random.default_rng(0)
    gate, up, factor = (jnp.asarray(4 * rng.normal(size=(64, 48)), dtype) for _ in range(3))

    def loss(gated):
        return lambda gate, up: jnp.sum((gated(gate, up) * factor).astype(jnp.float32))

    found = jax.jit(jax.value_and_grad(loss(activation.gate), (0, 1)))(gate, up)
    wanted = jax.jit(jax.value_and_grad(loss(lambda gate, up: activation(gate) * up), (0, 1)))(gate, up)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), found, wanted)


def test_of_a_gate_only_its_two_operands_are_kept():
    """What an activation computes on the way is computed again: beside a product it is little."""
    gate, up = jnp.ones((8, 16)), jnp.ones((8, 16))
    _, pull = jax.vjp(Activation.SWIGLU.gate, gate, up)
    assert [x.shape for x in jax.tree.leaves(pull) if x.ndim] == [(8, 16)] * 2


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8, 9, 33])
@pytest.mark.parametrize("outer", [(64,), (4, 24), (63,), (16,)])
def test_a_weight_with_its_outputs_first_gives_the_product_of_every_number_of_rows(rows, outer):
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(rows, 1, 4, 8)), rng.normal(size=(4, 8, *outer))
    turned = OutputFirst.of(jnp.asarray(weight, jnp.float32), 2)
    got = jax.jit(dense, static_argnums=2)(jnp.asarray(x, jnp.float32), turned, 2)
    want = np.tensordot(x, weight, 2)
    assert got.shape == (rows, 1, *outer) and got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
