"""The compiler's reports: JSON form and errors; and, if libtpu is installed, reports of real programs."""

import dataclasses
import importlib.util
import json
import math
import os
import subprocess
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from capibara.planner.compiler import compile as planner
from capibara.planner.compiler import hlo, proof
from capibara.planner.compiler.compile import Compiled

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
COSTS = hlo.Costs(
    matmul_flops=2e12,
    kernel_flops=1e12,
    collective_bytes=Counter({"all-gather": 8.0}),
    cycles=3e6,
    kernels=Counter({"splash_mha_fwd": 4.0, "AllocateBuffer": 2.0}),
)
REPORT = Compiled(True, 3 * 2**30, 41.5, 15 * 2**30, 1, 2, 3, 4, 5, 6, 7, chip="v5e", costs=COSTS, text="HloModule m")


def test_a_report_survives_its_json_form_but_for_the_text():
    values = json.loads(json.dumps(REPORT.to_json()))
    again = Compiled.from_json(values)
    assert again == dataclasses.replace(REPORT, text="") and "text" not in values
    assert isinstance(again.costs.kernels, Counter) and again.costs.plus(COSTS).kernels["splash_mha_fwd"] == 8


@pytest.mark.parametrize(
    "change", [{"fits": 1}, {"peak_bytes": "3"}, {"costs": 3}, {"costs": {"cycles": []}}, {"surprise": 1}]
)
def test_what_is_no_report_is_refused(change):
    with pytest.raises(ValueError, match="not a compiler report"):
        Compiled.from_json(REPORT.to_json() | change)
    with pytest.raises(ValueError, match="not a compiler report"):
        Compiled.from_json({"fits": True})
    with pytest.raises(ValueError, match="not a compiler report: a step that fits must have a peak"):
        Compiled.from_json(REPORT.to_json() | {"peak_bytes": None})


def test_figures_that_follow_from_others():
    assert REPORT.host_bytes == 5 + 6 + 7
    assert REPORT.flops == 3e12
    assert REPORT.kernels == ("splash_mha_fwd",)  # the compiler's own calls are no kernels
    assert REPORT.compiled_s == pytest.approx(3e6 / 1.5e9)
    assert dataclasses.replace(REPORT, chip=None).compiled_s is None
    assert dataclasses.replace(REPORT, costs=hlo.Costs()).compiled_s is None


def test_a_fingerprint_follows_all_that_the_compiler_is_given():
    devices = jax.devices()[:2]
    mesh = jax.sharding.Mesh(devices, "x")

    def fingerprint(factor=2.0, slice_="v5e-4", mesh=mesh, flags=None, part="loss"):
        def step(x):
            with jax.named_scope(part):  # reports name buffers by it
                return x * factor

        split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        with proof.without_locations():
            lowered = jax.jit(step).lower(jax.ShapeDtypeStruct((8,), jnp.float32, sharding=split))
        return planner.fingerprint(lowered, slice_, mesh, flags or {"a": "true"})

    same = fingerprint()
    assert same == fingerprint() and len(same) == 64
    others = [
        fingerprint(3.0),
        fingerprint(slice_="v6e-4"),
        fingerprint(mesh=jax.sharding.Mesh(devices[::-1], "x")),
        fingerprint(flags={"a": "false"}),
        fingerprint(part="head"),
    ]
    assert len({same, *others}) == 6


@pytest.mark.parametrize(
    ("message", "want"),
    [
        # libtpu 0.0.42
        ("RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (32.00G) exceeds "
         "available HBM (15.75G).", (32.0, 15.75)),
        # libtpu 0.0.50
        ("RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
         "temporaries (24.00G) exceeds available HBM (15.75G). HLO module: jit_step.", (24.0, 15.75)),
        ("RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 18.04G of "
         "15.75G hbm. Exceeded hbm capacity by 2.29G.", (18.04, 15.75)),
        ("RESOURCE_EXHAUSTED: Compilation failure: Aborting compilation early because it's unlikely to have enough "
         "memory. Requires 3.84T, has 90.96G available.", (3.84 * 1024, 90.96)),
    ],
)  # fmt: skip
def test_out_of_memory_is_a_verdict_whatever_the_compiler_calls_it(message, want):
    assert planner.out_of_memory(message)
    assert planner.hbm_need(message) == tuple(int(gib * 2**30) for gib in want)


@pytest.mark.parametrize(
    "message", ["RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem.", "INTERNAL: Mosaic failed", ""]
)
def test_other_errors_are_no_verdicts(message):
    assert not planner.out_of_memory(message)


def test_a_program_for_the_cpu_has_a_report_too():
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    report = planner.compile_train_step(jax.jit(lambda x: x @ x).lower(x), {"xla_cpu_enable_fast_math": "False"})
    assert report.fits and report.flops == 2 * 64**3 and report.compiled_s is None
    assert report.argument_bytes == report.output_bytes == 64 * 64 * 4 and report.host_bytes == 0


HOST = """
import json, sys
import jax, jax.numpy as jnp
from capibara import sharding
from capibara.planner.compiler import compile as planner
from capibara.planner.hardware import topology

mesh = sharding.make_mesh(sharding.Plan(batch_size=4), topology.slice_devices("v5e-4"))
on_device = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
on_host = on_device.with_memory_kind("pinned_host")
shape = lambda size, where: jax.ShapeDtypeStruct((size,), jnp.float32, sharding=where)
step = lambda w, g: jax.device_put(jax.device_put(w, on_device) - g, on_host)
jitted = jax.jit(step, donate_argnums=0, out_shardings=on_host)
reports = [planner.compile_train_step(jitted.lower(shape(2**26, on_host), shape(2**26, on_device)))]
reports.append(planner.compile_train_step(jax.jit(lambda a: (a + 1, a * 2)).lower(shape(2**33, on_device))))
print(json.dumps([report.to_json() for report in reports]))
"""


def environment():
    """In a child process: the flags that conftest.py sets for emulated devices are not for the TPU compiler."""
    return {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")}


@needs_libtpu
def test_host_buffers_are_apart_and_what_does_not_fit_is_no_crash():
    child = subprocess.run([sys.executable, "-c", HOST], env=environment(), capture_output=True, text=True, timeout=120)
    assert child.returncode == 0, child.stderr[-2000:]
    offloaded, too_big = map(Compiled.from_json, json.loads(child.stdout.splitlines()[-1]))
    buffer = 2**26 * 4 // 4
    assert offloaded.host_argument_bytes == offloaded.host_bytes == offloaded.argument_bytes == buffer
    # On the device are the gradient, the copy and the difference, and flags of the copies; the host's buffer is not.
    assert 3 * buffer <= offloaded.peak_bytes < 3 * buffer + 2**16
    assert not too_big.fits and too_big.peak_bytes > too_big.limit_bytes == math.floor(15.75 * 2**30)
