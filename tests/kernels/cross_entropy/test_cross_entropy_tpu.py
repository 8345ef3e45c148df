"""What the real TPU compiler makes of the loss at large vocabularies: the logits are never whole."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

COMPILE = """
import json, sys
import jax, jax.numpy as jnp
from capibara import sharding
from capibara.planner.compiler import compile as planner
from capibara.planner.hardware import topology
from capibara.sharding import Plan, Rules
from capibara.kernels.cross_entropy.dispatch import cross_entropy

mesh = sharding.make_mesh(Plan(batch_size=16), topology.slice_devices("v5e-4"))
rules = Rules()
place = lambda *axes: jax.sharding.NamedSharding(mesh, rules.spec(axes))
hidden = jax.ShapeDtypeStruct((16, 2048, 1024), jnp.bfloat16, sharding=place("batch", None, None))
head = jax.ShapeDtypeStruct((int(sys.argv[1]), 1024), jnp.float32, sharding=place("vocab", "embed"))
targets = jax.ShapeDtypeStruct((16, 2048), jnp.int32, sharding=place("batch"))
weights = jax.ShapeDtypeStruct((16, 2048), jnp.float32, sharding=place("batch"))

def blocked(hidden, head, targets, weights):
    with sharding.activate(mesh, rules):
        return cross_entropy(hidden, head, targets, weights)[0]

def whole(hidden, head, targets, weights):
    logits = jnp.einsum("BTD,VD->BTV", hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)
    target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.sum((jax.nn.logsumexp(logits, axis=-1) - target) * weights)

for loss in (blocked, whole):
    grad = jax.jit(jax.grad(loss, (0, 1)), out_shardings=(hidden.sharding, head.sharding))
    report = planner.compile_train_step(grad.lower(hidden, head, targets, weights))
    print("RESULT", json.dumps([report.peak_bytes, report.costs.matmul_flops]))
"""


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.heavy
@pytest.mark.parametrize("vocabulary, products", [(131_072, 3), (262_144, 4)])
def test_of_a_large_vocabulary_the_peak_is_a_third_at_most(vocabulary, products):
    """And no FLOPs are added but, by parts of the vocabulary, the logits of the second pass."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS", None)
    command = [sys.executable, "-c", COMPILE, str(vocabulary)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert child.returncode == 0, child.stderr[-2000:]
    results = [json.loads(line[7:]) for line in child.stdout.splitlines() if line.startswith("RESULT ")]
    (ours_bytes, ours_flops), (whole_bytes, whole_flops) = results
    assert whole_bytes >= 3 * ours_bytes, (whole_bytes, ours_bytes)
    product = 2 * 4 * 2048 * 1024 * vocabulary
    assert whole_flops == 3 * product and ours_flops == products * product
