"""Grouped products: each platform's implementation against one product per group, and the TPU compiler's program."""

import functools
import importlib
import importlib.util
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels.grouped_matmul import dispatch, reference, tpu
from capibara.kernels.grouped_matmul.dispatch import padded_rows, row_tile
from capibara.kernels.grouped_matmul.kernel import Transposed

# Empty groups, groups smaller and larger than a tile, and rows that belong to none.
SIZES = {"mixed": (0, 3, 150, 1, 70), "one": (0, 0, 224, 0, 0), "none": (0, 0, 0, 0, 0), "even": (48,) * 5}


@pytest.fixture(params=["cpu", "gpu", "tpu"])
def platform(request, monkeypatch):
    """Uses a platform's implementation; Pallas's interpreter runs the TPU's kernels."""
    monkeypatch.setattr(dispatch.sharding, "platform", lambda: request.param)
    kernels = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
    for name in ("gmm", "tgmm"):
        monkeypatch.setattr(kernels, name, functools.partial(getattr(kernels, name), interpret=True))
    return request.param


@pytest.mark.standard_promotion  # the kernels that JAX has mix dtypes
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("K, N", [(24, 40), (256, 24)], ids=["by rows", "by columns"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_values_and_gradients_are_those_of_one_product_a_group(platform, sizes, K, N, transposed):
    rows = 240
    tile = row_tile(rows, len(sizes))
    assert tile == {"cpu": 16, "gpu": 16, "tpu": 128}[platform]
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (padded_rows(rows, tile), K))
    w, dy = jax.random.normal(keys[1], (len(sizes), K, N)), jax.random.normal(keys[2], (sum(sizes), N))

    def loss(product, x, w):
        y = product(x, w)[: len(dy)]
        return jnp.sum(y * dy), y

    sizes_G = jnp.array(sizes, jnp.int32)
    stored = lambda w: Transposed(jnp.swapaxes(w, 1, 2)) if transposed else w  # noqa: E731
    ours = functools.partial(loss, lambda x, w: dispatch.grouped_matmul(x, stored(w), sizes_G, tile))
    theirs = functools.partial(loss, lambda x, w: reference.matmul(x, w, sizes_G, tile, transposed=False))
    (_, y), (dx, dw) = jax.jit(jax.value_and_grad(ours, (0, 1), has_aux=True))(x, w)
    (_, want), (want_dx, want_dw) = jax.value_and_grad(theirs, (0, 1), has_aux=True)(x, w)
    for got, wanted in ((y, want), (dx[: len(dy)], want_dx[: len(dy)]), (dw, want_dw)):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_reference_is_one_product_a_group(sizes):
    x, w = (jax.random.normal(jax.random.key(0), shape) for shape in ((240, 24), (len(sizes), 24, 40)))
    dy, ends = jax.random.normal(jax.random.key(1), (240, 40)), np.cumsum(sizes)
    groups = [slice(end - size, end) for end, size in zip(ends, sizes)]
    sizes_G = jnp.array(sizes, jnp.int32)
    # Rows after the last group are undefined.
    x, dy = (a.at[ends[-1] :].set(jnp.nan) for a in (x, dy))
    y = reference.matmul(x, w, sizes_G, 8, transposed=False)[: ends[-1]]
    np.testing.assert_allclose(y, np.concatenate([x[g] @ m for g, m in zip(groups, w)]), rtol=1e-5, atol=1e-4)
    dx = reference.matmul(dy, w, sizes_G, 8, transposed=True)[: ends[-1]]
    np.testing.assert_allclose(dx, np.concatenate([dy[g] @ m.T for g, m in zip(groups, w)]), rtol=1e-5, atol=1e-4)
    dw = reference.weight_gradient(x, dy, sizes_G, 8)
    np.testing.assert_allclose(dw, [x[g].T @ dy[g] for g in groups], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "size, width", [(768, 768), (1536, 768), (2048, 1024), (2880, 1024), (5760, 640), (14_336, 1024)]
)
def test_tiles_of_a_tpu_exceed_a_matrix_least(size, width):
    """Of two halves of 768 a tile of 1024 would compute a third more."""
    assert tpu._tiling(512, size, size, jnp.bfloat16) == (512, width, width)
    assert tpu._tiling(512, 1536, 256, jnp.float32) == (512, 512, 256)


@pytest.mark.parametrize(
    "inputs, outputs, tiles",
    [(2048, 1536, (2048, 768)), (768, 2048, (768, 1024)), (2880, 720, (2880, 384)), (4096, 14_336, (4096, 512))],
)
def test_tiles_of_few_rows_have_all_inputs(inputs, outputs, tiles):
    assert tpu._tiling(128, inputs, outputs, jnp.bfloat16) == (128, *tiles)
    assert tpu._tiling(128, 14_336, 4096, jnp.bfloat16) == (128, 1024, 1024)
    least = 2 * (65_536 * inputs + 128 * inputs * outputs + 65_536 * outputs)
    counts = (65_536, 128, inputs, outputs)
    assert least < tpu.bytes_moved(*counts, 128) <= tpu.bytes_moved(*counts, 256)


COMPILE = """
import re
import jax, jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from capibara import sharding
from capibara.models.architectures.decoder import DecoderConfig
from capibara.models.parts.moe import Moe, MoeMLP
from capibara.planner.hardware import topology
from capibara.sharding import Plan, Rules

plan, rules = Plan(batch_size=4, fsdp=1, expert=4), Rules()
mesh = sharding.make_mesh(plan, topology.slice_devices("v5e:2x2"))
for dtype in ("bfloat16", "float32"):
    config = DecoderConfig(vocab_size=8, embed_dim=1024, num_layers=1, num_heads=8, mlp_dim=1024, dtype=dtype)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: MoeMLP(config, Moe(num_experts=8), nnx.Rngs(0))))
    sharded = lambda axes: NamedSharding(mesh, rules.spec(axes))
    shape = lambda s, d, axes: jax.ShapeDtypeStruct(s, d, sharding=sharded(axes))
    params = {k: shape(v.shape, jnp.float32, v.axes) for k, v in state.items()}
    x, segments = shape((4, 1024, 1024), dtype, ("batch",)), shape((4, 1024), jnp.int32, ("batch",))

    def loss(params, x, segments):
        template = jax.tree.map(lambda v: v, state)
        nnx.replace_by_pure_dict(template, params)
        with sharding.activate(mesh, rules):
            return jnp.sum(nnx.merge(graphdef, template)(x, segments)[0].astype(jnp.float32) ** 2)

    text = jax.jit(jax.grad(loss, (0, 1))).lower(params, x, segments).compile().as_text()
    kernels = re.findall(r'op_name="jit\\(loss\\)/(\\S+)/pallas_call"', text)
    exchanges = re.findall(r" ragged-all-to-all(?:-start)?\\(", text)  # libtpu 0.0.42 leaves them synchronous
    print("RESULT", len(exchanges), *sorted(set(kernels)))
"""


@pytest.mark.heavy
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_the_tpu_compiler_takes_experts_on_several_chips():
    """Tokens are exchanged by ragged all-to-all, and experts are the grouped kernels, forward and backward."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    environment.pop("XLA_FLAGS", None)
    child = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=600
    )
    assert child.returncode == 0, child.stderr[-2000:]
    results = [line.split()[1:] for line in child.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(results) == 2
    for exchanges, *kernels in results:
        assert exchanges == "6"  # rows and their gates there, results back, each way
        assert [kernel.rpartition("jit(")[2].strip(")") for kernel in kernels] == ["gmm", "gmm", "tgmm"]
