"""JAX's paged attention kernel over our rows and pages, in Pallas's interpreter, agrees with the reference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from capibara import sharding
from capibara.kernels.attention.spec import AttentionSpec
from capibara.kernels.cached_attention import tpu as paged_attention
from capibara.models.cache import dense, paged
from capibara.sharding import Plan

PLAIN = AttentionSpec(causal=True, window=None, soft_cap=None, scale=0.1)
CAPPED = AttentionSpec(causal=True, window=None, soft_cap=4.0, scale=0.2)
B, K, N, H = 4, 2, 8, 128
LENGTHS = np.array([33, 0, 96, 1], np.int32)  # read before; one more is read now


def drawn(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(jnp.bfloat16)


def now(lengths=LENGTHS):
    tokens = jnp.zeros((len(lengths), 1), jnp.int32)
    return dense.prefill_inputs(tokens, jnp.ones(len(lengths), jnp.int32), {"lengths": jnp.asarray(lengths)}, False)


def both(monkeypatch, attend):
    """The kernel's output, and the reference's."""
    used = []
    real = paged_attention.attend
    want = attend()
    monkeypatch.setattr(sharding, "platform", lambda: "tpu")
    monkeypatch.setattr(paged_attention, "attend", lambda *args: used.append(1) or real(*args))
    with pltpu.force_tpu_interpret_mode():
        got = attend()
    assert used == [1]
    return np.asarray(got, np.float32), np.asarray(want, np.float32)


@pytest.mark.parametrize("kind", [PLAIN, CAPPED], ids=["plain", "capped"])
def test_whole_rows(monkeypatch, kind):
    q, layer = drawn(B, 1, N, H), {"key": drawn(B, K, 112, H, seed=1), "value": drawn(B, K, 112, H, seed=2)}
    got, want = both(monkeypatch, lambda: dense.attend(q, layer, None, None, kind, now()))
    np.testing.assert_allclose(got, want, atol=0.02)


def test_a_row_that_has_gone_round_its_window_sees_all_of_it(monkeypatch):
    q, layer = drawn(B, 1, N, H), {"key": drawn(B, K, 48, H, seed=1), "value": drawn(B, K, 48, H, seed=2)}
    kind = dataclasses.replace(PLAIN, window=48)
    got, want = both(monkeypatch, lambda: dense.attend(q, layer, None, None, kind, now()))
    np.testing.assert_allclose(got, want, atol=0.02)


@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.heavy)])
def test_pages_wherever_they_lie(monkeypatch, tensor):
    q, pages, page = drawn(B, 1, N, H), 20, 16
    table = np.zeros((B, 7), np.int32)
    free = list(np.random.default_rng(0).permutation(np.arange(1, pages + 1)))
    for row, length in enumerate(LENGTHS):
        for index in range(-(-(length + 1) // page)):
            table[row, index] = free.pop()
    layer = {f"{name}_pages": drawn(pages + 1, K, page, H, seed=seed) for seed, name in enumerate(("key", "value"), 1)}
    layer["table"] = jnp.asarray(table)
    mesh = sharding.make_mesh(Plan(batch_size=B, data=2, fsdp=1, tensor=tensor), jax.devices()[: 2 * tensor])

    def attend():
        with sharding.activate(mesh, sharding.Rules()):
            return jax.jit(lambda q, layer: paged.attend(q, layer, PLAIN, now()))(q, layer)

    got, want = both(monkeypatch, attend)
    np.testing.assert_allclose(got, want, atol=0.02)


def test_a_slot_without_pages_reads_nothing(monkeypatch):
    layer = {f"{name}_pages": drawn(4, K, 16, H) for name in ("key", "value")} | {"table": jnp.zeros((B, 2), jnp.int32)}
    monkeypatch.setattr(sharding, "platform", lambda: "tpu")
    with pltpu.force_tpu_interpret_mode():
        got = paged.attend(drawn(B, 1, N, H), layer, PLAIN, now())
    np.testing.assert_array_equal(np.asarray(got, np.float32), 0)


def test_what_the_kernel_cannot_do_is_left_to_the_formula(monkeypatch):
    monkeypatch.setattr(sharding, "platform", lambda: "tpu")
    q, keys = drawn(B, 1, N, H), drawn(B, K, 64, H)

    def asked(q=q, keys=keys, window=None, plain=True):
        return paged_attention.supported(q, keys, AttentionSpec(True, window, None, 1.0), 64, plain=plain)

    assert asked()
    assert not asked(q=drawn(B, 2, N, H)) and not asked(plain=False) and not asked(window=63)
    assert not asked(keys=keys.astype(jnp.float32)) and not asked(keys=drawn(B, K, 60, H))
    assert not asked(q=drawn(B, 1, N, 64), keys=drawn(B, K, 64, 64))
