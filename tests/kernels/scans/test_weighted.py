"""The weighted mean of RWKV-4 against the recurrence as it is written, token by token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels.scans import weighted

B, CHANNELS = 2, 5
RELATIVE = 1e-5
attend = jax.jit(weighted.attend)


def drawn(T, border=0.0, size=1.0):
    rng = np.random.default_rng(T)
    inputs = dict(k_BTI=size * rng.normal(size=(B, T, CHANNELS)), v_BTI=rng.normal(size=(B, T, CHANNELS)))
    inputs |= dict(log_decay_I=-rng.exponential(0.5, size=CHANNELS), bonus_I=rng.normal(size=CHANNELS))
    segments = np.cumsum(rng.uniform(size=(B, T)) < border, axis=1).astype(np.int32) if border else None
    return {name: x.astype(np.float32) for name, x in inputs.items()}, segments


def one_by_one(inputs, segments):
    """The recurrence with sums that nothing divides."""
    T, dtype = inputs["k_BTI"].shape[1], inputs["k_BTI"].dtype
    same = np.ones((B, T), dtype)
    if segments is not None:
        same[:, 1:] = segments[:, 1:] == segments[:, :-1]

    def token(sums, t):
        (total, weights), (k, v, same) = sums, t
        total, weights = total * same[:, None], weights * same[:, None]
        own, added = jnp.exp(k + inputs["bonus_I"]), jnp.exp(k)
        y = (total + own * v) / (weights + own)
        decay = jnp.exp(inputs["log_decay_I"])
        return (decay * total + added * v, decay * weights + added), y

    empty = jnp.zeros((B, CHANNELS), dtype)
    tokens = tuple(jnp.swapaxes(jnp.asarray(x), 0, 1) for x in (inputs["k_BTI"], inputs["v_BTI"], same))
    (total, weights), y = jax.lax.scan(token, (empty, empty), tokens)
    return jnp.swapaxes(y, 0, 1), total, weights


def as_sums(state):
    """The two sums of a state, whatever they are divided by."""
    scale = jnp.exp(state[:, 2])
    return state[:, 0] * scale, state[:, 1] * scale


def close(got, want):
    # Gradients of keys that change nothing are 0 but for the rounding of terms of about 1 that cancel.
    np.testing.assert_allclose(got, want, rtol=0, atol=RELATIVE * max(np.abs(want).max(), 0.1))


@pytest.mark.parametrize("border", [0.0, 0.1])
@pytest.mark.parametrize("T", [1, 2, 65, pytest.param(400, marks=pytest.mark.heavy)])
def test_a_scan_is_the_recurrence_forwards_and_backwards(T, border):
    inputs, segments = drawn(T, border)
    weight_BTI = np.random.default_rng(1).normal(size=(B, T, CHANNELS)).astype(np.float32)

    def in_parallel(inputs, segments):
        y, state = attend(**inputs, segment_ids_BT=segments)
        return y, *as_sums(state)

    def loss(inputs, way):
        y, total, weights = way(inputs, segments)
        return jnp.sum(y * weight_BTI), (y, total, weights)

    run = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
    (_, got), gradients = run(inputs, in_parallel)
    (_, want), theirs = run(inputs, one_by_one)
    for mine, reference in zip(got, want, strict=True):
        close(mine, reference)
    for name in inputs:
        close(gradients[name], theirs[name])


def test_no_key_overflows():
    inputs, segments = drawn(40, 0.1, size=100.0)  # exp(100) is beyond float32
    inputs = {
        name: x if name == "v_BTI" else np.round(64 * x) / 64 for name, x in inputs.items()
    }  # exact sums of exponents
    y, state = attend(**inputs, segment_ids_BT=segments)
    assert np.isfinite(y).all() and np.isfinite(state).all()
    gradients = jax.jit(jax.grad(lambda x: jnp.sum(attend(**x, segment_ids_BT=segments)[0] ** 2)))(inputs)
    assert all(np.isfinite(x).all() for x in gradients.values())
    with jax.enable_x64(True):
        exact = {name: np.float64(x) for name, x in inputs.items()}
        close(y, jax.jit(lambda inputs: one_by_one(inputs, segments)[0])(exact))


@pytest.mark.parametrize("cut", [1, 30])
def test_a_row_that_is_resumed_ends_as_the_whole_row(cut):
    inputs, _ = drawn(50)
    along = ("k_BTI", "v_BTI")
    part = lambda span: inputs | {name: inputs[name][:, span] for name in along}  # noqa: E731
    y, state = attend(**inputs)
    y1, state1 = attend(**part(slice(cut)))
    rest = part(slice(cut, None))
    padded = rest | {name: np.pad(rest[name], ((0, 0), (0, 3), (0, 0)), constant_values=9.0) for name in along}
    real = np.arange(padded["k_BTI"].shape[1]) < rest["k_BTI"].shape[1]
    y2, state2 = attend(**padded, state_B3I=state1, real_BT=np.broadcast_to(real, (B, len(real))))
    close(jnp.concatenate([y1, y2[:, :-3]], axis=1), y)
    for mine, whole in zip(as_sums(state2), as_sums(state), strict=True):
        close(mine, whole)


def test_rows_without_a_real_token_stay_empty():
    inputs, _ = drawn(4)
    _, state = attend(**inputs, real_BT=np.zeros((B, 4), bool))
    np.testing.assert_array_equal(state, weighted.empty(B, CHANNELS))
