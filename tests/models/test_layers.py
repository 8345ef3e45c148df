"""The small parts of every model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from capibara import sharding
from capibara.models.layers import Activation, OutputFirst, dense
from capibara.sharding import Plan


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", [a for a in Activation if a.gated])
def test_a_gate_has_the_gradients_of_its_parts(activation, dtype):
    """As near those of float64 as the plain formula's: where 1 - tanh(x)**2 is nearly 0 neither is near."""
    rng = np.random.default_rng(0)
    operands = [jnp.asarray(4 * rng.normal(size=(64, 48)), dtype) for _ in range(3)]

    def gradients(gated, gate, up, factor):
        return jax.jit(jax.grad(lambda gate, up: jnp.sum(gated(gate, up) * factor), (0, 1)))(gate, up)

    def plain(gate, up):
        return activation(gate) * up

    with jax.enable_x64(True):
        exact = [np.asarray(x) for x in gradients(plain, *(jnp.asarray(x, jnp.float64) for x in operands))]
    found, usual = gradients(activation.gate, *operands), gradients(plain, *operands)
    np.testing.assert_array_equal(jax.jit(activation.gate)(*operands[:2]), jax.jit(plain)(*operands[:2]))
    tolerance = 1e-4 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(found[1], usual[1], rtol=tolerance, atol=tolerance)
    for name, ours, formula, wanted in zip(("gate", "up"), found, usual, exact):
        error, allowed = (np.max(np.abs(np.asarray(x, np.float64) - wanted)) for x in (ours, formula))
        assert ours.dtype == dtype and error <= 1.5 * allowed, name
        assert allowed < (1e-3 if dtype == "float32" else 2.0), "the formula itself"


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
