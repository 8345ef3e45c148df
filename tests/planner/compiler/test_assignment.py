"""The HBM that a program needs: what the compiler's report says, and that this is where the compiler's limit lies."""

import importlib.util
import json
import math
import os
import subprocess
import sys

import pytest

from capibara.planner.compiler import assignment

REPORT = """Memory Space: default (color=0)
Total bytes: 1013188096 (966.25MiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  128.00MiB( 17%);  128.00MiB;    134430720;                6; 2×pred[], 4×bf16[65536,1024]
Memory Space: vmem (color=1)
Total bytes: 104857600 (100.00MiB)
Memory Space: cmem (color=5)
Total bytes: 3221225472 (3.00GiB)
"""


def test_the_report_of_hbm_is_that_of_no_other_memory(tmp_path):
    assert assignment.hbm_bytes(str(tmp_path)) is None
    (tmp_path / "module_0000.jit_step.after_optimizations-memory-usage-report.txt").write_text(REPORT, encoding="utf-8")
    assert assignment.hbm_bytes(str(tmp_path)) == 1013188096


# A stack of layers whose inputs, 3 GiB, are in the host's memory: more than all that is in HBM. Its arrays are as large as
# the vector memory: libtpu also refuses a program whose arrays would fit HBM only once some of them are there.
LIMIT = """
import json, sys
import jax, jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from capibara import sharding
from capibara.planner.compiler import compile as planner
from capibara.planner.hardware import topology

mesh = sharding.make_mesh(sharding.Plan(batch_size=4), topology.slice_devices("v5e-4"))
placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
policy = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=["x"], offload_src="device", offload_dst="pinned_host"
)

def layer(x, w):
    x = checkpoint_name(x, "x")
    return x + jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]), None

def loss(w, x):
    y, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy, prevent_cse=False), x, w)
    return jnp.sum(y.astype(jnp.float32) ** 2)

def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=placed)

step = jax.jit(jax.grad(loss), out_shardings=placed).lower(shape(24, 2, 1024, 1024), shape(65536, 1024))

def report(mib):
    return planner.compile_train_step(step, {"xla_tpu_max_hbm_size_mib": str(mib)})

too_small, enough = 768, 896
while enough - too_small > 1:
    middle = (too_small + enough) // 2
    if (compiled := report(middle)).fits:
        enough, fits = middle, compiled
    else:
        too_small = middle
print(json.dumps({"fits": fits.to_json(), "smallest": enough}))
"""


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_program_compiles_with_the_hbm_that_its_report_says_and_with_no_mebibyte_less():
    environment = {n: v for n, v in os.environ.items() if n not in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")}
    child = subprocess.run([sys.executable, "-c", LIMIT], env=environment, capture_output=True, text=True, timeout=900)
    assert child.returncode == 0, child.stderr[-2000:]
    values = json.loads(child.stdout.splitlines()[-1])
    fits = values["fits"]
    assert values["smallest"] == math.ceil((fits["peak_bytes"] + fits["code_bytes"]) / 2**20)
    assert 769 < values["smallest"] < 896
    assert fits["host_temporary_bytes"] == 24 * 65536 * 1024 * 2 > fits["peak_bytes"]
