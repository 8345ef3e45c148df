"""The small parts of every model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from capibara import sharding
from capibara.models.layers.layers import Activation, OutputFirst, dense
from capibara.sharding import Plan


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", [a for a in Activation if a.gated])
def test_a_gate_has_the_gradients_of_its_parts(activation, dtype):
    rng = np.random.default_rng(0)
    operands = [jnp.asarray(4 * rng.normal(size=(64, 48)), dtype) for _ in range(3)]

    def value_and_gradients(gated, gate, up, factor):
        def loss(gate, up):
            return jnp.sum((gated(gate, up) * factor).astype(jnp.float64 if gate.dtype == jnp.float64 else jnp.float32))

        value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(gate, up)
        return value, *gradients

    def plain(gate, up):
        return activation(gate) * up

    found, wanted = (value_and_gradients(gated, *operands) for gated in (activation.gate, plain))
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for name, ours, formula in zip(("value", "gate", "up"), found, wanted):
        if (activation, dtype, name) != (Activation.GEGLU, "float32", "gate"):
            np.testing.assert_allclose(ours, formula, rtol=tolerance, atol=tolerance, err_msg=name)
    if (activation, dtype) == (Activation.GEGLU, "float32"):
        # Where 1 - tanh(x)**2 is nearly 0 the formula itself is rounding: ours must be as near to float64's.
        with jax.enable_x64(True):
            exact = np.asarray(value_and_gradients(plain, *(jnp.asarray(x, jnp.float64) for x in operands))[1])
        error, allowed = (np.max(np.abs(np.asarray(x[1], np.float64) - exact)) for x in (found, wanted))
        assert error <= 1.5 * allowed and allowed < 1e-3


def test_a_weight_as_wide_as_its_input_sends_no_rows_about():
    """On devices that share out the rows its gradient is one sum over them, as that of any other weight."""
    plan = Plan(batch_size=8, data=4)
    mesh = sharding.make_mesh(plan, jax.devices()[:4])
    x, weight = jnp.zeros((8, 256, 256)), jnp.zeros((256, 256))
    assert x.nbytes >= 2**20, "smaller ones are not cut"

    def gradient(weight, x):
        with sharding.activate(mesh, plan.rules):
            return jax.grad(lambda weight: jnp.sum(jnp.square(dense(x, weight))))(weight)

    rows = NamedSharding(mesh, P(plan.rules.batch))
    text = jax.jit(gradient).lower(weight, jax.device_put(x, rows)).compile().as_text()
    assert "all-reduce" in text and "all-to-all" not in text and "collective-permute" not in text


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
