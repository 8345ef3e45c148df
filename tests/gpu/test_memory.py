"""Memory of a real GPU: what its figures say, the warning before it is full, and its out-of-memory errors."""

from __future__ import annotations

import dataclasses
import time

import jax
import jax.numpy as jnp
import pytest

from capibara.core.types import UserError
from capibara.monitoring.defaults import Monitoring
from capibara.monitoring.metrics_file.loggers import MetricsFile, all_records, metrics_path
from capibara.monitoring.system import devices
from capibara.monitoring.system.sampler import SystemMetrics
from capibara.sharding import Plan
from capibara.training.stability.device_memory import out_of_memory_explained
from tests.monitoring.trackers.runs import RUN

GIB = 1 << 30
# Each of its products is small; what it keeps of all of them for the backward pass takes 10 GiB and more.
DEEP = """
include "tiny.gin"
MODEL_DIR = "deep"
BATCH_SIZE = 64
LENGTH = 1024
DecoderConfig.embed_dim = 512
DecoderConfig.num_layers = 16
DecoderConfig.num_heads = 8
DecoderConfig.mlp_dim = 2048
DecoderConfig.dtype = "bfloat16"
"""


def test_figures_follow_what_is_allocated(gpu):
    before = devices.memory()
    kept = jax.block_until_ready(jnp.ones((GIB,), jnp.uint8))
    during = devices.memory()
    del kept
    after = devices.memory()
    assert during.used_bytes[0] - before.used_bytes[0] >= GIB > after.used_bytes[0] - before.used_bytes[0]
    assert after.peak_bytes[0] >= during.used_bytes[0] and during.limit_bytes[0] > during.used_bytes[0]
    assert [len(figures) for figures in dataclasses.astuple(during)] == [1, 1, 1]


def test_memory_that_is_nearly_full_is_named_with_the_largest_arrays(gpu, tmp_path):
    twentieth = devices.memory().limit_bytes[0] // 20 // 256 * 256
    run = dataclasses.replace(RUN, model_dir=str(tmp_path / "run"), arrays={"params/table": ((twentieth,), "uint8")})
    callbacks = Monitoring(callbacks=(MetricsFile(),)).build(SystemMetrics(every_s=0.1))
    callbacks.on_train_begin(run)
    callbacks.on_spent(run.start_step, {})
    kept = [jax.block_until_ready(jnp.ones((twentieth,), jnp.uint8)) for _ in range(19)]

    def warnings():
        return [one["warning"] for one in all_records(metrics_path(run.model_dir)) if "warning" in one]

    ends_s = time.monotonic() + 20
    while not warnings() and time.monotonic() < ends_s:
        time.sleep(0.1)
    callbacks.on_train_end(0, "finished")
    (line,) = warnings()
    assert line.startswith("warning: device memory is nearly full: ") and "GiB (9" in line
    assert f"19 x uint8[{twentieth}] params/table ({19 * twentieth / 2**20:,.1f} MiB)" in line
    assert len(kept) == 19


def test_an_array_that_does_not_fit_is_one_line_with_what_there_is(gpu):
    kept = jax.block_until_ready(jnp.ones((333, 777), jnp.float32))
    with pytest.raises(UserError) as caught, out_of_memory_explained(Plan(batch_size=8), "the run"):
        jax.block_until_ready(jax.jit(lambda: jnp.ones((1 << 20, 1 << 17)))())
    text = str(caught.value)
    print(text)
    assert (
        "\n" not in text and "(RESOURCE_EXHAUSTED: " in text and "512.00GiB" in text and 'Plan.remat = "full"' in text
    )
    assert "the largest buffers: " in text and "float32[333, 777]" in text
    assert kept.nbytes > 0


def test_a_program_whose_products_cannot_be_tried_is_one_line(gpu):
    """Its compiler tries products with memory of the device."""
    rows, columns = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1 << 18, 4096), (4096, 1 << 18)))
    state = {"rows": rows, "columns": columns}
    with pytest.raises(UserError) as caught, out_of_memory_explained(Plan(batch_size=8), "the train step", state):
        jax.jit(lambda a, b: a @ b).lower(rows, columns).compile()
    text = str(caught.value)
    print(text)
    assert text.startswith("the train step does not fit into the memory of a device (RESOURCE_EXHAUSTED: ")
    assert "\n" not in text and "128.02GiB" in text and "2,048.0 MiB " in text


def failed(shell, environment, *args):
    """The error of a run that does not fit."""
    done = shell.run("train", *args, **environment)
    assert done.code == 2 and "Traceback" not in done.out + done.err
    (line,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    print(line)
    return line


def test_a_run_that_does_not_fit_names_the_arrays_of_its_step(shell, users_environment):
    (shell.folder / "deep.gin").write_text(DEEP)
    line = failed(shell, users_environment | {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".05"}, "--gin_file=deep.gin")
    assert "the run does not fit into the memory of a device (RESOURCE_EXHAUSTED: Out of memory" in line
    assert "; the largest buffers: " in line and " of jit(step)/" in line and "Plan.accumulation = 2" in line


def test_a_step_that_does_not_fit_while_it_is_compiled_says_how_much_it_needs(shell, users_environment):
    few = users_environment | {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".02"}
    line = failed(shell, few, "--gin_file=tiny.gin", "--gin.LENGTH=4096", "--gin.BATCH_SIZE=32", "--gin.MODEL_DIR=long")
    assert "the train step does not fit into the memory of a device (RESOURCE_EXHAUSTED: Out of memory" in line
    assert "GiB" in line and "; the largest buffers: " in line and 'Plan.remat = "full"' in line
