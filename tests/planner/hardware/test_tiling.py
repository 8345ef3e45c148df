"""The padding of a TPU's arrays: small cases by hand, and those of real states as libtpu lays them out."""

import importlib.util
import json
import math
import os
import subprocess
import sys

import pytest

from capibara.planner.hardware import tiling

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
# Shards of weights and moments: of Phi-3 mini over 16, Gemma 2 2B over 16, T5, SmolLM2, adapters, scales.
SHAPES = (
    (32, 192, 32, 96), (32, 32, 96, 192), (32, 8192, 192), (13, 2, 2304, 144), (13, 2, 144, 8, 256), (24, 64, 16, 64),
    (24, 256, 16, 64), (32128, 64), (30, 144, 3, 64), (30, 3, 64, 576), (16, 96, 2, 64), (32, 4096, 8), (26, 2304),
    (5, 1000), (4, 2, 130), (8, 3, 24, 40), (32, 32, 64, 288),
)  # fmt: skip
CHILD = """
import json, sys
import jax, jax.numpy as jnp
from capibara.planner.hardware import topology

where = jax.sharding.SingleDeviceSharding(topology.slice_devices(sys.argv[1])[0])
shapes = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where) for shape in json.loads(sys.argv[2])]
sizes = [jax.jit(lambda x: x + x).lower(shape).compile().memory_analysis().argument_size_in_bytes for shape in shapes]
print(json.dumps(sizes))
"""


@pytest.mark.parametrize(
    "shape, padded",
    [
        ((256, 128), 1),
        ((8, 100), 1.28),
        ((100, 8), 1.28),
        ((192, 32, 96), 128 / 96),
        ((2, 4, 128), 1),
        ((5, 128), 8 / 5),
    ]
    + [((7,), 1), ((), 1), ((1, 3, 1), 1), ((3, 128), 4 / 3)],
)
def test_the_two_dimensions_that_waste_least_fill_whole_tiles(shape, padded):
    assert tiling.padding(shape) == pytest.approx(padded)


@needs_libtpu
@pytest.mark.parametrize("slice_", ["v5e-4", pytest.param("v6e-4", marks=pytest.mark.heavy)])
def test_libtpu_pads_arguments_so(slice_):
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")}
    command = [sys.executable, "-c", CHILD, slice_, json.dumps(SHAPES)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr[-2000:]
    compiled = dict(zip(SHAPES, json.loads(child.stdout.splitlines()[-1]), strict=True))
    padded = {shape: round(4 * math.prod(shape) * tiling.padding(shape)) for shape in SHAPES}
    assert padded == compiled
    assert sum(padded[shape] > 4 * math.prod(shape) for shape in SHAPES) > 8
