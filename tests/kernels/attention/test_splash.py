"""The TPU kernel: values and gradients in Pallas's interpreter, and its compilation by the real TPU compiler."""

import importlib.util
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara import sharding
from capibara.kernels.attention import reference, splash
from capibara.kernels.attention.signature import AttentionInputs
from capibara.kernels.attention.spec import AttentionSpec
from capibara.models import api
from capibara.sharding import Plan, Remat, RematPolicy, Rules

CAUSAL = AttentionSpec(causal=True, window=None, soft_cap=None, scale=0.125)
WINDOW = AttentionSpec(causal=True, window=70, soft_cap=None, scale=0.125)
CAPPED = AttentionSpec(causal=True, window=None, soft_cap=5.0, scale=0.2)
BOTH_SIDES = AttentionSpec(causal=False, window=40, soft_cap=None, scale=0.125)
FULL = AttentionSpec(causal=False, window=None, soft_cap=None, scale=0.125)


def arrays(B=2, T=256, S=None, N=4, K=2, H=64):
    S = S or T
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H))
    q, k, v, dy = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes))
    # Three documents and padding; the borders are no multiples of the blocks.
    segments = {
        name: jnp.asarray(np.digitize(np.arange(length), [length // 5, length // 2, length - 20])[None], jnp.int32)
        for name, length in (("q_segments_BT", T), ("kv_segments_BS", S))
    }
    return (q, k, v), dy, {name: jnp.broadcast_to(x, (B, x.shape[1])) for name, x in segments.items()}


def value_and_grads(attend, spec, qkv, dy, arrays, **options):
    def loss(q, k, v):
        y = attend(AttentionInputs(q, k, v, **arrays), spec, **options)
        return jnp.sum(y * dy), y

    (_, y), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*qkv)
    return y, *grads


def check(got, want):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", [CAUSAL, CAPPED, BOTH_SIDES], ids=lambda spec: str(spec)[14:-1])
def test_values_and_gradients_are_those_of_the_plain_formula(spec):
    qkv, dy, segments = arrays()
    want = value_and_grads(reference.attend, spec, qkv, dy, segments)
    check(value_and_grads(splash.attend, spec, qkv, dy, segments, interpret=True), want)


def test_lengths_that_are_no_multiples_of_128_are_padded():
    qkv, dy, segments = arrays(T=200, H=40, K=1)
    want = value_and_grads(reference.attend, WINDOW, qkv, dy, segments)
    check(value_and_grads(splash.attend, WINDOW, qkv, dy, segments, interpret=True), want)


def test_cross_attention_has_its_own_number_of_keys():
    qkv, dy, segments = arrays(T=128, S=320)
    want = value_and_grads(reference.attend, FULL, qkv, dy, segments)
    check(value_and_grads(splash.attend, FULL, qkv, dy, segments, interpret=True), want)


def test_rows_in_another_order_see_by_their_row_positions():
    qkv, dy, segments = arrays()
    want = value_and_grads(reference.attend, WINDOW, qkv, dy, segments)
    row_positions = sharding.zigzag(256, 2)
    moved = {name: x[:, row_positions] for name, x in segments.items()}
    moved |= {"q_row_positions_T": row_positions, "kv_row_positions_S": row_positions}
    qkv = [x[:, row_positions] for x in qkv]
    got = value_and_grads(splash.attend, WINDOW, qkv, dy[:, row_positions], moved, interpret=True)
    check([x[:, np.argsort(row_positions)] for x in got], want)


@pytest.mark.parametrize(
    ("axes", "heads", "spec", "zigzag"),
    [
        ({"fsdp": 2, "context": 2, "tensor": 2}, 2, CAUSAL, True),
        ({"fsdp": 2, "tensor": 4}, 2, WINDOW, False),  # fewer key/value heads than shards
        ({"fsdp": 2, "context": 2, "tensor": 2}, 2, FULL, True),  # as an encoder sees
    ],
)
def test_a_mesh_changes_nothing(axes, heads, spec, zigzag):
    shards = axes.get("context", 1)
    qkv, dy, segments = arrays(T=256 * shards, N=4, K=heads)
    want = value_and_grads(reference.attend, spec, qkv, dy, segments)
    row_positions = sharding.zigzag(256 * shards, shards) if zigzag else np.arange(256 * shards)
    mesh = sharding.make_mesh(Plan(batch_size=2, **{"fsdp": 1} | axes))

    moved = {name: x[:, row_positions] for name, x in segments.items()}
    moved |= {"q_row_positions_T": row_positions, "kv_row_positions_S": row_positions} if zigzag else {}

    def attend(inputs, spec):
        with sharding.activate(mesh, Rules()):
            return splash.attend(inputs, spec, interpret=True)

    got = value_and_grads(attend, spec, [x[:, row_positions] for x in qkv], dy[:, row_positions], moved)
    check([x[:, np.argsort(row_positions)] for x in got], want)


def test_what_the_kernel_cannot_do_is_said():
    q, k, _ = (jnp.zeros(x.shape) for x in arrays()[0])
    wide = jnp.zeros((1, 256, 1, 512))

    def fits(q, k, **more):
        rows = (jnp.zeros(x.shape[:2], jnp.int32) for x in (q, k))
        return splash.unsupported_reason(AttentionInputs(q, k, k, *rows, **more), CAUSAL) is None

    assert fits(q, k)
    assert not fits(q, k, bias_NTS=jnp.zeros((4, 256, 256)))
    assert not fits(q, k[:, :128])
    assert not fits(wide, wide)


COMPILE = """
import json, sys
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from capibara import sharding
from capibara.kernels.attention.dispatch import attend
from capibara.kernels.attention.signature import AttentionInputs
from capibara.kernels.attention.spec import AttentionSpec
from capibara.planner.compiler import hlo
from capibara.planner.hardware import topology
from capibara.sharding import Plan, Remat, RematPolicy, Rules

name, cases = sys.argv[1], json.loads(sys.argv[2])
for axes, T, N, K, H, dtype, spec in cases:
    mesh = sharding.make_mesh(Plan(batch_size=4, fsdp=axes.pop("fsdp", 1), **axes), topology.slice_devices(name))
    rules = Rules()
    sharded = lambda names: NamedSharding(mesh, rules.spec(names))
    q = jax.ShapeDtypeStruct((4, T, N, H), dtype, sharding=sharded(("batch", "act_time", "act_heads", None)))
    kv_heads = "act_kv_heads" if K % mesh.shape["tensor"] == 0 else None
    k = jax.ShapeDtypeStruct((4, T, K, H), dtype, sharding=sharded(("batch", "act_time", kv_heads, None)))
    segments = jax.ShapeDtypeStruct((4, T), jnp.int32, sharding=sharded(("batch", "act_time")))
    shards = mesh.shape["context"]
    row_positions = sharding.zigzag(T, shards) if shards > 1 else None

    def loss(q, k, v, segments):
        with sharding.activate(mesh, rules):
            inputs = AttentionInputs(q, k, v, segments, segments, row_positions, row_positions)
            y = attend(inputs, AttentionSpec(**spec))
        return jnp.sum(y.astype(jnp.float32) ** 2)

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, k, segments).compile()
    print("RESULT", json.dumps(hlo.costs(hlo.parse(compiled.as_text())).kernels))
"""
CAUSAL_FIELDS = {"causal": True, "window": None, "soft_cap": None, "scale": 0.1}
CAPPED_WINDOW = {"causal": True, "window": 700, "soft_cap": 30.0, "scale": 0.1}


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize(
    ("name", "cases"),
    [
        pytest.param(
            "v5e:2x2",
            [
                [{"fsdp": 4}, 1024, 4, 2, 64, "bfloat16", CAPPED_WINDOW],
                [{"context": 2, "tensor": 2}, 2048, 4, 1, 128, "bfloat16", CAUSAL_FIELDS],
                [{"fsdp": 2, "tensor": 2}, 2048, 2, 2, 256, "float32", CAPPED_WINDOW],
            ],
            marks=pytest.mark.heavy,  # tests/slices compiles it within train steps
        ),
        pytest.param(
            "v6e:2x2",
            [[{"context": 2, "tensor": 2}, 2048, 2, 2, 256, "float32", CAPPED_WINDOW]],
            marks=pytest.mark.heavy,
        ),
    ],
)
def test_the_tpu_compiler_takes_the_kernel_forward_and_backward(name, cases):
    """Compiles in a process that has only a CPU; attend chooses the kernel by the mesh's devices."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    environment.pop("XLA_FLAGS", None)
    arguments = [sys.executable, "-c", COMPILE, name, json.dumps(cases)]
    child = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr[-2000:]
    results = [json.loads(line[7:]) for line in child.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(results) == len(cases)
    for kernels in results:
        phases = [kernel.split("_")[2] for kernel in kernels if kernel.startswith("splash")]
        assert sorted(phases) == ["dkv", "dq", "fwd"]


@pytest.mark.parametrize("platform", ["tpu", "cpu"])
def test_a_policy_that_keeps_attention_keeps_it_once(platform, monkeypatch, capsys):
    """Saved twice, in the kernel's layout and in the model's, it would be the largest array that the policy saves."""
    monkeypatch.setattr(sharding, "platform", lambda: platform)
    L, B, T, N, H = 3, 2, 256, 4, 64
    config = api.DecoderConfig(vocab_size=64, embed_dim=128, num_layers=L, num_heads=N, head_dim=H, mlp_dim=96)
    model, row = api.build(config), jnp.ones((B, T), jnp.int32)
    batch = {"tokens": row, "segment_ids": row, "positions": row}

    def loss(params):
        hidden, _ = model.hidden(params, batch, RematPolicy(Remat.SAVE, ("attention",)))
        return jnp.sum(jnp.square(hidden.astype(jnp.float32)))

    jax.ad_checkpoint.print_saved_residuals(loss, model.abstract_params)
    lines = capsys.readouterr().out.splitlines()
    kept = [line for line in lines if f"[{L},{B},{T},{N},{H}]" in line or f"[{L},{B},{N},{T},{H}]" in line]
    assert len(kept) == 1, lines


def test_the_normalisers_are_taken_with_the_output():
    """The kernel returns each 128 times; tied to the output, one is selected at once and the others are freed."""
    (q, k, v), dy, segments = arrays()

    def loss(q, k, v):
        return jnp.sum(splash.attend(AttentionInputs(q, k, v, **segments), CAUSAL, interpret=True) * dy)

    equations = [
        line for line in str(jax.make_jaxpr(jax.grad(loss))(q, k, v)).splitlines() if "optimization_barrier" in line
    ]
    B, T, N, H = q.shape
    assert len(equations) == 1
    assert f"f32[{B},{N},{T}]" in equations[0] and f"f32[{B},{N},{T},{H}]" in equations[0]
