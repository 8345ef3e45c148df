"""What JAX is told before it looks for devices; in child processes, which have not used it yet."""

import os
import shutil
import subprocess
import sys

import pytest

from capibara.core import devices
from capibara.core.types import UserError


def python(code, **environment):
    """What a new process that knows nothing of the emulated devices prints, errors included."""
    clean = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    command = [sys.executable, "-c", code]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": 600}
    return subprocess.run(command, env=clean | environment, **options).stdout


def test_emulation_is_bounded():
    with pytest.raises(UserError, match="must be from 1 to 64"):
        devices.emulate(65)


def test_emulated_devices_are_there():
    code = "import jax; from capibara.core import devices; devices.emulate(3); print(jax.device_count())"
    assert python(code).split() == ["3"]


def test_emulated_devices_take_collectives_in_one_order():
    """XLA's scheduler for concurrency lets them wait for each other for ever (tests/training/test_loop.py showed it)."""
    code = "import os; from capibara.core import devices; devices.emulate(2); print(os.environ['XLA_FLAGS'])"
    flags = python(code, XLA_FLAGS="--xla_cpu_collective_call_terminate_timeout_seconds=7").split()
    assert "--xla_cpu_enable_concurrency_optimized_scheduler=false" in flags
    assert [flag for flag in flags if "terminate" in flag] == ["--xla_cpu_collective_call_terminate_timeout_seconds=7"]


@pytest.mark.skipif(devices.has_tpu(), reason="there is a TPU")
def test_a_tpu_that_is_not_there_is_not_looked_for():
    """libtpu would be loaded, and would write of its search for a metadata server to the terminal."""
    code = "import jax; from capibara.core import devices; devices.skip_absent_tpu(); print(jax.devices()[0].platform)"
    assert python(code).split() in (["cpu"], ["gpu"])


@pytest.mark.parametrize(
    "vendor, device, is_one",
    [
        ("0x1ae0", "0x0063", True),
        ("0x1ae0", "0x006f", True),
        ("0x1ae0", "0x0042", False),  # gVNIC, the network card of every virtual machine of Google's
        ("0x1ae0", "0x001f", False),  # its disks
        ("0x10de", "0x0063", False),
    ],
)
def test_a_tpu_is_known_by_its_device_number(tmp_path, vendor, device, is_one):
    (tmp_path / "bare").mkdir()
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "vendor").write_text(f"{vendor}\n")
    (tmp_path / "one" / "device").write_text(f"{device}\n")
    assert devices.has_tpu(str(tmp_path)) is is_one


def test_a_platform_that_is_named_is_not_changed():
    code = "import jax; from capibara.core import devices; devices.skip_absent_tpu(); print(jax.config.jax_platforms)"
    assert python(code, JAX_PLATFORMS="cpu,tpu").split() == ["cpu,tpu"]


# Counts what is asked of the compiler, and what the cache answers; the environment's least time to compile is the tests'.
COUNTING = """
import atexit, collections, os
os.environ.pop("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", None)
import jax
events = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name.rpartition("/")[2]]))
atexit.register(lambda: print("COMPILED", events["compile_requests_use_cache"], events["cache_hits"]))
"""


def compiled(output):
    """(requests, answers of the cache) of a process."""
    line = next((line for line in output.splitlines() if line.startswith("COMPILED ")), None)
    assert line, output[-2000:]
    return tuple(int(word) for word in line.split()[1:])


def test_small_programs_are_compiled_once_for_all_processes(tmp_path):
    code = COUNTING + (
        "from capibara.core import devices; devices.start(2); import jax.numpy as jnp;"
        "jnp.arange(3).sum().block_until_ready()"
    )
    first, second = (compiled(python(code, JAX_COMPILATION_CACHE_DIR=str(tmp_path))) for _ in range(2))
    assert first[0] > 0 and first[1] == 0
    assert second == (first[0], first[0])


def test_the_users_least_time_to_compile_stands():
    code = "import jax; from capibara.core import devices; devices.start(1);"
    code += "print('LEAST', jax.config.jax_persistent_cache_min_compile_time_secs)"
    assert "LEAST 7.0" in python(code, JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="7")


@pytest.mark.heavy
def test_a_resumed_run_compiles_nothing(tmp_path):
    """All programs of the first process, evaluation, samples and checkpoints included, are read by the second one."""
    flags = ["--gin_file=quickstart.gin", "--emulate=2", f"--gin.MODEL_DIR='{tmp_path / 'run'}'", "--gin.TRAIN_STEPS=8"]
    flags += ["--gin.Checkpointing.every=4", "--gin.Evaluation.every=4", "--gin.Evaluation.max_batches=2"]
    flags += ["--gin.BATCH_SIZE=8", "--gin.LENGTH=64", "--gin.Sampling.max_new_tokens=8"]
    code = COUNTING + (
        f"import sys; sys.argv = ['train', *{flags!r}];"
        "import runpy; runpy.run_module('capibara.train', run_name='__main__')"
    )
    requests, answers = compiled(python(code, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "cache")))
    assert answers < requests
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "8")  # as if the run had been interrupted before it
    requests, answers = compiled(python(code, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "cache")))
    assert requests == answers > 10
