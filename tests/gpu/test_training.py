"""Whole runs on a real GPU: losses as on a CPU, metrics of the system, and the trace of some steps in words."""

from __future__ import annotations

import json

import numpy as np
import pytest

from capibara.monitoring.metrics_file.loggers import read_metrics
from capibara.monitoring.profiling import trace

# A decoder in bfloat16 that keeps a GPU busy for some milliseconds, so that its attention is cuDNN's.
WIDE = """
include "tiny.gin"
MODEL_DIR = "wide"
TRAIN_STEPS = 40
BATCH_SIZE = 16
LENGTH = 1024
LEARNING_RATE = 1e-3
DecoderConfig.embed_dim = 1024
DecoderConfig.num_layers = 6
DecoderConfig.num_heads = 8
DecoderConfig.mlp_dim = 4096
DecoderConfig.dtype = "bfloat16"
SystemMetrics.every_s = 0.5
"""
FIRST, LAST = 31, 35


@pytest.fixture(scope="module")
def wide(shell, users_environment):
    """The folder of a run of which some steps are traced."""
    (shell.folder / "wide.gin").write_text(WIDE)
    done = shell.run("train", "--gin_file=wide.gin", f"--profile={FIRST}:{LAST}", **users_environment)
    assert done.code == 0, done.err
    print(done.out)
    return shell.folder / "wide"


def records(folder, kind):
    return [one for one in read_metrics(str(folder)) if one["kind"] == kind]


def test_losses_are_those_of_a_cpu(shell, users_environment):
    exact = {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}  # else a GPU rounds what it multiplies to 10 bits
    args = ("train", "--gin_file=tiny.gin", "--gin.TRAIN_STEPS=20")
    on_cpu = shell.start(*args, "--gin.MODEL_DIR=cpu", **(users_environment | exact | {"JAX_PLATFORMS": "cpu"}))
    on_gpu = shell.run(*args, "--gin.MODEL_DIR=gpu", **(users_environment | exact))
    assert on_gpu.code == 0, on_gpu.err
    out, err = on_cpu.communicate(timeout=300)
    assert on_cpu.returncode == 0, err
    assert "on 1 x cpu" in out and "on 1 x NVIDIA" in on_gpu.out
    cpu, gpu = ([one["loss"] for one in records(shell.folder / name, "train")] for name in ("cpu", "gpu"))
    print(f"largest relative difference {np.max(np.abs(np.divide(gpu, cpu) - 1)):.1e}; the last loss is {gpu[-1]}")
    assert len(gpu) == 20 and gpu[-1] < gpu[0]
    np.testing.assert_allclose(gpu, cpu, rtol=1e-3)


def test_the_system_is_in_the_metrics(gpu, wide):
    system = records(wide, "system")
    last = system[-1]
    print(json.dumps(last))
    used, peak, limit = (last[f"device_memory{name}_bytes"] for name in ("", "_peak", "_limit"))
    state_bytes = 3 * 4 * next(one["param_count"] for one in records(wide, "event") if one["event"] == "start")
    assert state_bytes < used <= peak < limit and limit > 2**33
    assert last["duty_cycle_percent"] is None and last["compile_s"] > 0 and last["step_s_p50"] > 0
    assert len({one["step"] for one in system}) > 1 and "devices" not in last
    (facts,) = [one["facts"] for one in records(wide, "event") if one["event"] == "facts"]
    assert facts["devices"] == f"1 x {gpu.device_kind}"
    if "H100" in gpu.device_kind or "H200" in gpu.device_kind:
        mfu = [one["mfu"] for one in records(wide, "train")]
        print(f"MFU {mfu}")
        assert all(0.01 < one < 1 for one in mfu)  # of the step with which the trace ends, too


def test_a_trace_says_where_the_time_went(wide):
    folder = wide / "profile" / f"steps-{FIRST}-{LAST}"
    found = json.loads((folder / "summary.json").read_text())
    text = (folder / "summary.txt").read_text()
    print(text)
    assert (found["devices"], found["steps"], found["collectives"]) == (1, LAST - FIRST + 1, 0)
    step_s = float(np.median([one["step_s"] for one in records(wide, "train")][10:30]))
    print(f"a step takes {step_s * 1e3:.2f} ms without the trace")
    assert 0.5 * step_s < found["step_s"] < 2 * step_s and 0.3 < found["busy"] <= 1
    categories = found["by_category"]
    assert sum(categories.values()) == pytest.approx(found["busy"], abs=0.01)
    assert max(categories, key=categories.get) == "matrix products" and categories["attention kernels"] > 0.01
    assert categories.get("other", 0.0) < 0.05 * found["busy"]
    (path,) = trace.files_of(str(folder))
    assert len(trace.read(path).steps_ns) == LAST - FIRST + 1
