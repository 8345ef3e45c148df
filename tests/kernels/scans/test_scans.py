"""Recurrences in chunks are those of one token after the other: values, gradients, documents, resumed states."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels.scans import convolution, delta, diagonal, linear, selective

B, H, K, V = 2, 3, 8, 5
LENGTHS = [1, 2, 63, 64, 65, 200, pytest.param(4097, marks=pytest.mark.heavy)]
RELATIVE = 1e-5
NAMES = ("q_BTHK", "k_BTHK", "v_BTHV", "log_decay_BTH", "strength_BTH")


def drawn(T, border=0.0, kind="delta"):
    """Inputs of T tokens for this kind of recurrence, and document numbers if documents end with this probability at each."""
    rng = np.random.default_rng(T)
    q, k = rng.normal(size=(2, B, T, H, K))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v, decay = rng.normal(size=(B, T, H, V)), -rng.exponential(0.3, size=(B, T, H, K)[: 4 if kind == "channels" else 3])
    inputs = dict(zip(NAMES, (q, k, v, decay, rng.uniform(size=(B, T, H)))))
    segments = np.cumsum(rng.uniform(size=(B, T)) < border, axis=1).astype(np.int32) if border else None
    return {name: x.astype(np.float32) for name, x in inputs.items()}, segments


def one_by_one(inputs, segments, state, kind):
    """The recurrence as it is written, token by token."""
    same = np.ones((B, inputs["q_BTHK"].shape[1]))
    if segments is not None:
        same[:, 1:] = segments[:, 1:] == segments[:, :-1]

    def step(S, token):
        q, k, v, decay, strength, same = token
        S = S * jnp.exp(decay).reshape(B, H, -1, 1) * same[:, None, None, None]
        if kind != "linear":
            v = (v - jnp.einsum("BHKV,BHK->BHV", S, k)) * strength[..., None]
        S = S + jnp.einsum("BHK,BHV->BHKV", k, v)
        return S, jnp.einsum("BHKV,BHK->BHV", S, q)

    state = jnp.zeros((B, H, K, V)) if state is None else state
    of_tokens = [inputs[name] for name in NAMES] + [same.astype(np.float32)]
    tokens = [jnp.swapaxes(jnp.asarray(x), 0, 1) for x in of_tokens]
    state, y = jax.lax.scan(step, state, tuple(tokens))
    return jnp.swapaxes(y, 0, 1), state


def in_chunks(inputs, segments, state, kind):
    inputs = dict(inputs)
    if kind == "linear":
        del inputs["strength_BTH"]
    if kind == "channels":
        inputs["log_decay_BTHK"] = inputs.pop("log_decay_BTH")
    attend = {"delta": delta.attend, "channels": delta.attend_by_channel, "linear": linear.attend}[kind]
    return attend(**inputs, segment_ids_BT=segments, state_BHKV=state)


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=RELATIVE * max(np.abs(want).max(), 1e-3))


@pytest.mark.parametrize("kind", ["delta", "channels", "linear"])
@pytest.mark.parametrize("border", [0.0, 0.05])
@pytest.mark.parametrize("T", LENGTHS)
def test_chunks_are_the_recurrence_forwards_and_backwards(T, border, kind):
    inputs, segments = drawn(T, border, kind)
    weight_BTHV = np.random.default_rng(1).normal(size=(B, T, H, V)).astype(np.float32)

    def loss(inputs, way):
        y, state = way(inputs, segments, None, kind)
        return jnp.sum(y * weight_BTHV) + jnp.sum(state), (y, state)

    run = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
    with jax.default_matmul_precision("highest"):
        (_, got), gradients = run(inputs, in_chunks)
        (_, want), theirs = run(inputs, one_by_one)
    close(got[0], want[0])
    close(got[1], want[1])
    for name in inputs:
        close(gradients[name], theirs[name])


@pytest.mark.parametrize("kind", ["delta", "channels", "linear"])
def test_what_follows_strong_decays_is_as_exact(kind):
    inputs, _ = drawn(64, kind=kind)
    inputs["log_decay_BTH"][:, :32] *= 200  # tens for each token: nothing of the first half is left
    inputs["log_decay_BTH"][:, 32:] *= 0.01
    got, want = in_chunks(inputs, None, None, kind), one_by_one(inputs, None, None, kind)
    close(got[0], want[0])
    close(got[1], want[1])


@pytest.mark.parametrize("kind", ["delta", "channels", "linear"])
@pytest.mark.parametrize("cut", [1, 64, 100])
def test_a_row_that_is_resumed_ends_as_the_whole_row(cut, kind):
    inputs, _ = drawn(150, kind=kind)
    first, last = ({name: x[:, part] for name, x in inputs.items()} for part in (slice(cut), slice(cut, None)))
    y, state = in_chunks(inputs, None, None, kind)
    y1, state1 = in_chunks(first, None, None, kind)
    y2, state2 = in_chunks(last, None, state1, kind)
    close(jnp.concatenate([y1, y2], axis=1), y)
    close(state2, state)


@pytest.mark.parametrize("kind", ["delta", "channels", "linear"])
def test_tokens_that_write_nothing_leave_the_state(kind):
    inputs, _ = drawn(70, kind=kind)
    kept = np.arange(70)[:, None] < 40
    idle = {"strength_BTH", "log_decay_BTH"} if kind != "linear" else {"k_BTHK", "log_decay_BTH"}
    padded = {
        name: np.where(kept if x.ndim == 3 else kept[..., None], x, 0) if name in idle else x
        for name, x in inputs.items()
    }
    _, state = in_chunks(padded, None, None, kind)
    _, want = in_chunks({name: x[:, :40] for name, x in inputs.items()}, None, None, kind)
    close(state, want)


def drawn_channels(T, border=0.0):
    rng = np.random.default_rng(T)
    x, decay = rng.normal(size=(B, T, V)), -rng.exponential(0.3, size=(B, T, V))
    segments = np.cumsum(rng.uniform(size=(B, T)) < border, axis=1).astype(np.int32) if border else None
    return x.astype(np.float32), decay.astype(np.float32), segments


@pytest.mark.parametrize("border", [0.0, 0.2])
@pytest.mark.parametrize("T", [1, 2, 65])
def test_a_diagonal_recurrence_is_that_of_one_token_after_the_other(T, border):
    x, decay, segments = drawn_channels(T, border)
    want, state = np.zeros_like(x), np.zeros((B, V), np.float32)
    for t in range(T):
        same = t == 0 or segments is None or (segments[:, t] == segments[:, t - 1])[:, None]
        state = np.where(same, state, 0) * np.exp(decay[:, t]) + x[:, t]
        want[:, t] = state
    got, last = diagonal.recur(x, decay, segments)
    close(got, want)
    close(last, state)


def test_a_diagonal_recurrence_is_resumed():
    x, decay, _ = drawn_channels(20)
    whole, state = diagonal.recur(x, decay)
    first, before = diagonal.recur(x[:, :7], decay[:, :7])
    rest, last = diagonal.recur(x[:, 7:], decay[:, 7:], None, before)
    close(jnp.concatenate([first, rest], axis=1), whole)
    close(last, state)
    idle, kept = diagonal.recur(jnp.zeros((B, 3, V)), jnp.zeros((B, 3, V)), None, state)
    close(kept, state)
    close(idle[:, 0], state)


@pytest.mark.parametrize("taps", [2, 3, 4])
def test_a_convolution_sees_the_last_tokens_of_its_document(taps):
    rng = np.random.default_rng(taps)
    x, weight = rng.normal(size=(2, 9, 2, 3)).astype(np.float32), rng.normal(size=(2, 3, taps)).astype(np.float32)
    segments = np.array([[1, 1, 1, 2, 2, 2, 2, 3, 0], [1] * 9], np.int32)
    want = np.zeros_like(x)
    for row in range(2):
        for t in range(9):
            for back in range(taps):
                if t >= back and segments[row, t - back] == segments[row, t]:
                    want[row, t] += x[row, t - back] * weight[..., taps - 1 - back]
    np.testing.assert_allclose(convolution.convolve(x, weight, segments), want, atol=1e-6)


def test_a_convolution_is_resumed_after_the_real_tokens():
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(2, 12, 3)).astype(np.float32), rng.normal(size=(3, 4)).astype(np.float32)
    whole = convolution.convolve(x, weight)
    counts, before = np.array([5, 2], np.int32), np.zeros((2, 3, 3), np.float32)
    before = convolution.last_inputs(x[:, :7], before, counts)  # the second row has read two, the rest is padding
    rest = np.stack([x[0, 5:10], x[1, 2:7]])
    got = convolution.convolve(rest, weight, None, before)
    np.testing.assert_allclose(got[0], whole[0, 5:10], atol=1e-6)
    np.testing.assert_allclose(got[1], whole[1, 2:7], atol=1e-6)


def selective_inputs(T, border=0.0):
    rng = np.random.default_rng(T)
    x, step = rng.normal(size=(B, T, V)), rng.exponential(0.5, size=(B, T, V))
    k, q = rng.normal(size=(2, B, T, K))
    inputs = dict(x_BTI=x, step_BTI=step, rate_KI=rng.uniform(0.2, 4, size=(K, V)), k_BTK=k, q_BTK=q)
    segments = np.cumsum(rng.uniform(size=(B, T)) < border, axis=1).astype(np.int32) if border else None
    return {name: x.astype(np.float32) for name, x in inputs.items()}, segments


def channel_by_channel(inputs, segments, state):
    """Mamba's recurrence as it is written, token by token."""
    T = inputs["x_BTI"].shape[1]
    same = np.ones((B, T), np.float32)
    if segments is not None:
        same[:, 1:] = segments[:, 1:] == segments[:, :-1]

    def token(h, t):
        x, s, k, q, same = t
        h = h * jnp.exp(-s[:, None] * inputs["rate_KI"]) * same[:, None, None] + (s * x)[:, None] * k[..., None]
        return h, jnp.einsum("BKI,BK->BI", h, q)

    state = jnp.zeros((B, K, V)) if state is None else state
    rows = [inputs[name] for name in ("x_BTI", "step_BTI", "k_BTK", "q_BTK")] + [same]
    state, y = jax.lax.scan(token, state, tuple(jnp.swapaxes(jnp.asarray(x), 0, 1) for x in rows))
    return jnp.swapaxes(y, 0, 1), state


def selective_scan(inputs, segments, state):
    return selective.attend(**inputs, segment_ids_BT=segments, state_BKI=state)


@pytest.mark.parametrize("border", [0.0, 0.05])
@pytest.mark.parametrize("T", LENGTHS)
def test_a_selective_scan_is_the_recurrence_forwards_and_backwards(T, border):
    inputs, segments = selective_inputs(T, border)
    weight_BTI = np.random.default_rng(1).normal(size=(B, T, V)).astype(np.float32)

    def loss(inputs, way):
        y, state = way(inputs, segments, None)
        return jnp.sum(y * weight_BTI) + jnp.sum(state), (y, state)

    run = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
    (_, got), gradients = run(inputs, selective_scan)
    (_, want), theirs = run(inputs, channel_by_channel)
    close(got[0], want[0])
    close(got[1], want[1])
    for name in inputs:
        close(gradients[name], theirs[name])


@pytest.mark.parametrize("cut", [1, 32, 100])
def test_a_selective_scan_is_resumed(cut):
    inputs, _ = selective_inputs(150)
    split = lambda part: {n: x if n == "rate_KI" else x[:, part] for n, x in inputs.items()}  # noqa: E731
    y, state = selective_scan(inputs, None, None)
    y1, state1 = selective_scan(split(slice(cut)), None, None)
    idle = {
        n: np.concatenate([x, np.zeros_like(x[:, :3])], 1) if x.ndim == 3 else x
        for n, x in split(slice(cut, None)).items()
    }
    y2, state2 = selective_scan(idle, None, state1)  # three tokens with steps of 0 leave the state
    close(jnp.concatenate([y1, y2[:, :-3]], axis=1), y)
    close(state2, state)
