"""Products in 8 bits: close to the exact ones, made of 8-bit products indeed, with the gradients they promise."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels.matmul.quantized import Quantization, quantize, quantized_matmul

M, K, N = 256, 128, 192
QUANTIZED = [Quantization.INT8, Quantization.FP8]
# Relative error (Frobenius) of the product, of the gradient by x and of that by w, for normally distributed operands:
# int8's step is 1/127 of a row's largest value, e4m3 keeps 3 bits of every value and e5m2 2. (In the gradient by x, a
# row of w is rounded whose columns differ by 64 times.)
BOUNDS = {Quantization.INT8: (0.011, 0.016, 0.003), Quantization.FP8: (0.04, 0.065, 0.065)}


def operands(dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    x, w, g = (jax.random.normal(k, s) for k, s in zip(keys, [(M, K), (K, N), (M, N)], strict=True))
    # Rows and columns of very different size: one scale for all would lose the small ones.
    scales = jnp.exp2(jnp.arange(M, dtype=jnp.float32) % 12 - 6)[:, None]
    return (x * scales).astype(dtype), w * jnp.exp2(jnp.arange(N, dtype=jnp.float32) % 7)[None, :], g.astype(dtype)


def product_and_gradients(quantization, x, w, g):
    y, pull = jax.vjp(lambda x, w: quantized_matmul(x, w, quantization), x, w)
    return y, *pull(g)


def relative_error(got, want):
    return float(jnp.linalg.norm(got.astype(jnp.float32) - want) / jnp.linalg.norm(want))


@pytest.mark.parametrize("quantization", QUANTIZED)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_product_and_gradients_are_close(quantization, dtype):
    x, w, g = operands(dtype)
    got = jax.jit(product_and_gradients, static_argnums=0)(quantization, x, w, g)
    assert [a.dtype for a in got] == [dtype, dtype, jnp.float32]
    x32, g32 = x.astype(jnp.float32), g.astype(jnp.float32)
    for name, a, b, bound in zip("y dx dw".split(), got, (x32 @ w, g32 @ w.T, x32.T @ g32), BOUNDS[quantization]):
        assert relative_error(a, b) < bound, (name, relative_error(a, b))
    rows = np.linalg.norm(np.float32(got[0]) - x32 @ w, axis=1) / np.linalg.norm(x32 @ w, axis=1)
    assert rows.max() < 2 * BOUNDS[quantization][0]  # in every row, also in those that are 4096 times smaller


@pytest.mark.parametrize("quantization", list(Quantization))
def test_several_dimensions_are_as_one(quantization):
    """[B, T, N, H] with [N, H, D]: values and gradients are those of the joined matrices."""
    x, w, g = operands(jnp.float32)
    want = product_and_gradients(quantization, x, w, g)
    shapes = (4, M // 4, 8, K // 8), (8, K // 8, 2, N // 2), (4, M // 4, 2, N // 2)
    y, pull = jax.vjp(
        lambda x, w: quantized_matmul(x, w, quantization, in_dims=2), x.reshape(shapes[0]), w.reshape(shapes[1])
    )
    for a, b in zip((y, *pull(g.reshape(shapes[2]))), want, strict=True):
        assert relative_error(a.reshape(b.shape), b) < 1e-6


def test_none_is_the_plain_product():
    x, w, g = operands(jnp.float32)
    for got, want in zip(product_and_gradients(Quantization.NONE, x, w, g), (x @ w, g @ w.T, x.T @ g), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("quantization", "kinds"),
    [
        (Quantization.INT8, {("i8", "i8", "i32"): 2, ("bf16", "bf16", "bf16"): 1}),
        (
            Quantization.FP8,
            {("f8E4M3FN", "f8E4M3FN", "f32"): 1, ("f8E5M2", "f8E4M3FN", "f32"): 1, ("f8E4M3FN", "f8E5M2", "f32"): 1},
        ),
    ],
)
def test_the_products_are_of_8_bit_numbers(quantization, kinds):
    text = jax.jit(product_and_gradients, static_argnums=0).lower(quantization, *operands(jnp.bfloat16)).as_text()
    kind = r"tensor<\d+x\d+x(\w+)>"
    found = re.findall(rf"dot_general.*: \({kind}, {kind}\) -> {kind}", text)
    assert {k: found.count(k) for k in found} == kinds


def test_the_compiled_program_multiplies_int8():
    def product(x, w):
        return quantized_matmul(x, w, Quantization.INT8)

    text = jax.jit(product).lower(*operands(jnp.float32)[:2]).compile().as_text()
    dots = re.findall(r"= (\S+) dot\((.*?)\)", text)
    assert len(dots) == 1 and dots[0][0].startswith(f"s32[{M},{N}]")


@pytest.mark.parametrize("kind", [jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_rounding(kind):
    x = jax.random.normal(jax.random.key(1), (16, 64)) * jnp.exp2(jnp.arange(16.0))[:, None]
    x = x.at[3].set(0.0).at[5].set(1e-30)
    values, scale = quantize(x, kind, (1,))
    assert values.dtype == kind and scale.shape == (16, 1)
    restored = values.astype(jnp.float32) * scale
    assert bool(jnp.isfinite(restored).all()) and not restored[3].any()
    largest = jnp.abs(x).max(1)
    np.testing.assert_allclose(jnp.abs(restored).max(1), largest, rtol=1e-6)  # exactly representable: no clipping
    step = {jnp.int8: 1 / 254, jnp.float8_e4m3fn: 1 / 16, jnp.float8_e5m2: 1 / 8}[kind]
    assert bool((jnp.abs(restored - x) <= step * 1.001 * largest[:, None]).all())


@pytest.mark.standard_promotion
@pytest.mark.parametrize("quantization", QUANTIZED)
def test_agrees_with_qwix(quantization):
    qwix = pytest.importorskip("qwix._src.core.dot_general_qt")
    x, w, g = operands(jnp.float32)
    forward, backward = {
        Quantization.INT8: (jnp.int8, jnp.int8),
        Quantization.FP8: (jnp.float8_e4m3fn, jnp.float8_e5m2),
    }[quantization]
    config = qwix.DotGeneralQtConfig(
        lhs_qtype=forward,
        rhs_qtype=forward,
        dlhs_grad_qtype=backward,
        drhs_grad_qtype=None if quantization is Quantization.INT8 else backward,
        use_original_residuals=True,
        dlhs_residual_qtype=forward,
        drhs_residual_qtype=None if quantization is Quantization.INT8 else forward,
    )
    y, pull = jax.vjp(lambda x, w: qwix.dot_general_qt(x, w, (((1,), (0,)), ((), ())), config), x, w)
    got = product_and_gradients(quantization, x, w, g)
    # qwix maps the largest value to 127.5 (and clips it) instead of 127: its rounding is another one.
    bound = 0.015 if quantization is Quantization.INT8 else 1e-6
    for a, b in zip(got, (y, *pull(g)), strict=True):
        assert relative_error(a, b) < bound
