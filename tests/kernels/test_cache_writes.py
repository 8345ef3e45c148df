"""Tokens are written at their indices, one by one or by a scatter."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from capibara import sharding
from capibara.kernels import cache_writes

B, K, S, H = 3, 2, 8, 4


def drawn(dtype, *shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(-99, 99, shape), dtype)


@pytest.fixture(params=["cpu", "tpu"], autouse=True)
def platform(request, monkeypatch):
    monkeypatch.setattr(sharding, "platform", lambda: request.param)
    return request.param


# 8-bit values have scales, one per token and head.
@pytest.mark.parametrize("dtype, rest", [("float32", (H,)), ("int8", (H,)), ("float32", ())], ids=str)
def test_a_token_of_each_row(platform, dtype, rest):
    old, new = drawn(dtype, B, K, S, *rest), drawn(dtype, B, K, *rest, seed=1)
    index = np.array([5, 0, 7], np.int32)
    want = np.array(old)
    want[np.arange(B), :, index] = new
    write = jax.jit(lambda *arrays: cache_writes.append(*arrays))
    np.testing.assert_array_equal(write(old, new, index), want)
    assert ("scatter" in write.lower(old, new, index).as_text()) == (platform == "tpu")


@pytest.mark.parametrize("dtype, rest", [("float32", (H,)), ("int8", (H,)), ("float32", ())], ids=str)
def test_tokens_in_pages(platform, dtype, rest):
    pool, new = drawn(dtype, 5, K, S, *rest), drawn(dtype, B, 2, K, *rest, seed=1)
    page, offset = np.array([[1, 3], [2, 2], [4, 4]], np.int32), np.array([[7, 0], [2, 3], [0, 1]], np.int32)
    want = np.array(pool)
    want[page, :, offset] = new
    write = jax.jit(lambda *arrays: cache_writes.into_pages(*arrays))
    np.testing.assert_array_equal(write(pool, new, page, offset), want)
    assert ("scatter" in write.lower(pool, new, page, offset).as_text()) == (platform == "tpu")


@pytest.mark.parametrize("mesh", [None, dict(data=2, tensor=2)], ids=["one device", "mesh"])
@pytest.mark.parametrize("dtype, tokens, size", [("int8", 64, 128), ("float32", 16, 128), ("bfloat16", 256, 64)])
def test_a_kernel_writes_what_xla_attends_to_on_a_tpu(platform, dtype, tokens, size, mesh, monkeypatch):
    """In whole tiles, of tokens in lanes where heads do not fill them."""
    if platform == "cpu":
        return
    old, new = drawn(dtype, 4, K, tokens, size), drawn(dtype, 4, K, size, seed=1)
    index = np.array([tokens - 1, 0, 7, tokens // 2], np.int32)
    want = np.array(old)
    want[np.arange(4), :, index] = new
    plan = sharding.Plan(batch_size=4, fsdp=1, **mesh or {})
    active = sharding.make_mesh(plan, jax.devices()[:4]) if mesh else None

    @jax.jit
    def write(*arrays):
        with sharding.activate(active, plan.rules) if mesh else contextlib.nullcontext():
            return cache_writes.append(*arrays)

    with pltpu.force_tpu_interpret_mode():
        assert "pallas_call" in str(jax.make_jaxpr(write)(old, new, index))
        np.testing.assert_array_equal(write(old, new, index), want)


@pytest.mark.parametrize(
    "dtype, tokens, size",
    [("int8", 48, 128), ("bfloat16", 192, 64), ("bfloat16", 64, 128), ("float16", 64, 128), ("float16", 256, 64)],
)
def test_no_kernel_writes_where_xla_would_turn_the_cache_or_a_kernel_reads_it_or_none_can(
    platform, dtype, tokens, size
):
    old, new = drawn(dtype, 4, K, tokens, size), drawn(dtype, 4, K, size, seed=1)
    assert "pallas_call" not in str(
        jax.make_jaxpr(lambda *args: cache_writes.append(*args))(old, new, np.zeros(4, np.int32))
    )


def test_many_tokens_are_one_scatter_on_a_cpu_too():
    old, new = drawn("float32", 40, K, S, H), drawn("float32", 40, K, H, seed=1)
    index = np.arange(40, dtype=np.int32) % S
    assert "scatter" in jax.jit(lambda *arrays: cache_writes.append(*arrays)).lower(old, new, index).as_text()
