"""Everything that affects a compiled step is in its cache key, and nothing else in its program's fingerprint."""

import os
import subprocess
import sys

import pytest

from capibara import config
from capibara.cli.composition.inspected_run import run_of_gin
from capibara.planner.compiler import proof
from capibara.planner.hardware import slices

V5E = slices.parse("v5e-16")
RUN = (
    "Trainer.model = @DecoderConfig()",
    "Trainer.plan = @Plan()",
    "Trainer.dataset = @Dataset()",
    "Trainer.optimizer = @Optimizer()",
    "Trainer.steps = 20",
    "Dataset.mixture_or_task_name = 'unused'",
    "Dataset.length = 2048",
)
KERNEL = """
import functools
import jax
import jax.numpy as jnp
from capibara.planner.compiler import compile as planner
from capibara.planner.compiler import proof
from jax.experimental import pallas as pl

def fingerprint():
    def double(x_ref, y_ref):  # anew each time: what was traced and lowered once is kept
        y_ref[...] = 2 * x_ref[...]

    def step(x):
        return pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    traced = jax.jit(step).trace(jax.ShapeDtypeStruct((8, 128), jnp.float32))
    return planner.fingerprint(traced.lower(lowering_platforms=("tpu",)), "v5e-4", mesh, {})

mesh = jax.sharding.Mesh(jax.devices(), "x")
with proof.without_locations():
    without = fingerprint()
print(without, fingerprint())
"""


def key(*bindings):
    config.reset()
    config.parse(["models/capibara_1b.gin"], ["Plan.fsdp = 16", "Plan.batch_size = 16", *bindings], [])
    return proof.key(run_of_gin(), V5E)


@pytest.mark.parametrize(
    "binding",
    [
        "DecoderConfig.num_layers = 8",
        "Plan.remat = 'full'",
        "Optimizer.state_dtype = 'int8'",
        "Dataset.length = 1024",
        "Trainer.steps = 10",
        "Trainer.z_loss = 1e-4",
        "Trainer.ema_decay = 0.99",
    ],
)
def test_the_key_follows_what_decides_the_step(binding):
    whole = RUN if binding.startswith("Trainer") else ()
    assert key(*whole) == key(*whole)
    assert key(*whole) != key(*whole, binding)


def test_the_key_follows_the_strategy_of_nodes():
    nodes = [
        *RUN,
        "Plan.fsdp = 4",
        "Plan.node = 4",
        "Trainer.strategy = @ConsensusConfig()",
        "ConsensusConfig.every = 10",
    ]
    assert key(*nodes) == key(*nodes) != key(*nodes, "ConsensusConfig.every = 5")


def test_a_pallas_kernel_has_the_same_fingerprint_in_every_checkout(tmp_path):
    found = []
    for name in ("one.py", "another/two.py"):
        script = tmp_path / name
        script.parent.mkdir(exist_ok=True)
        script.write_text("\n" * len(found) + KERNEL)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.split())
    (one, with_locations), (other, others) = found
    assert one == other and with_locations != others
