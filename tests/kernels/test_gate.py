"""The gated product of an MLP."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara import sharding
from capibara.kernels.gate import gated, reference
from capibara.models.layers.layers import Activation


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", [a for a in Activation if a.gated])
def test_a_gate_has_the_gradients_of_its_parts(activation, dtype):
    rng = np.random.default_rng(0)
    operands = [jnp.asarray(4 * rng.normal(size=(64, 48)), dtype) for _ in range(3)]

    def value_and_gradients(of, gate, up, factor):
        def loss(gate, up):
            return jnp.sum((of(gate, up) * factor).astype(jnp.float64 if gate.dtype == jnp.float64 else jnp.float32))

        value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(gate, up)
        return value, *gradients

    plain = functools.partial(reference, activation)
    found, wanted = (value_and_gradients(of, *operands) for of in (functools.partial(gated, activation), plain))
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


def test_of_a_gate_only_its_two_operands_are_kept():
    """Intermediate results of an activation are recomputed, which is cheap beside a product."""
    gate, up = jnp.ones((8, 16)), jnp.ones((8, 16))
    _, pull = jax.vjp(functools.partial(gated, Activation.SWIGLU), gate, up)
    assert [x.shape for x in jax.tree.leaves(pull) if x.ndim] == [(8, 16)] * 2


@pytest.mark.parametrize(
    "platform, activation, barriers",
    [("tpu", Activation.GEGLU, 2), ("tpu", Activation.SWIGLU, 0), ("gpu", Activation.GEGLU, 0)],
)
def test_on_tpu_a_costly_activation_is_computed_once_in_each_pass(platform, activation, barriers, monkeypatch):
    monkeypatch.setattr(sharding, "platform", lambda: platform)
    rng = np.random.default_rng(1)
    gate, up, factor = (jnp.asarray(rng.normal(size=(8, 16)), jnp.float32) for _ in range(3))

    def gradients(of):
        return jax.grad(lambda gate, up: jnp.sum(of(gate, up) * factor), (0, 1))

    ours = gradients(activation.gate)
    assert str(jax.make_jaxpr(ours)(gate, up)).count("optimization_barrier") == barriers
    plain = gradients(functools.partial(reference, activation))
    for got, formula in zip(ours(gate, up), plain(gate, up), strict=True):
        np.testing.assert_allclose(got, formula, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("axis", ["fsdp", "context"])
@pytest.mark.parametrize("rows, kind, barriers", [(4, "TPU v5 lite", 2), (8, "TPU v5 lite", 0), (4, "TPU v6 lite", 0)])
def test_silu_is_computed_once_where_a_v5e_has_few_tokens(rows, kind, barriers, axis, monkeypatch):
    """In training alone; rows are shared out over two devices, and so is the time of each."""
    monkeypatch.setattr(sharding, "platform", lambda: "tpu")
    monkeypatch.setattr(sharding, "device_kind", lambda: kind)
    mesh = sharding.make_mesh(sharding.Plan(batch_size=rows, tensor=2, **{axis: 2}), jax.devices()[:4])
    gate, up = (jnp.ones((rows, 8, 64)) for _ in range(2))
    with sharding.activate(mesh, sharding.Rules()):
        product = Activation.SWIGLU.gate
        gradients = jax.make_jaxpr(jax.grad(lambda gate, up: jnp.sum(product(gate, up)), (0, 1)))(gate, up)
        assert "optimization_barrier" not in str(jax.make_jaxpr(product)(gate, up))
    assert str(gradients).count("optimization_barrier") == barriers
