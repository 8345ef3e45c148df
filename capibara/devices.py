"""The devices of this process: emulated ones, those of several hosts, what JAX must know before."""

from __future__ import annotations

import contextlib
import glob
import importlib.metadata
import os

import jax

from capibara import allocator
from capibara.types import UserError


def start(device_count: int | None = None) -> None:
    """What a verb that computes does before JAX is first used: on `device_count` emulated devices, or on what there is."""
    skip_absent_tpu()
    use_compilation_cache()
    if device_count is not None:
        emulate(device_count)
    elif jax.config.jax_platforms == "cpu":
        allocator.keep_freed_memory()


def emulate(device_count: int) -> None:
    """Makes this process run on `device_count` emulated CPU devices. Call it before JAX is first used."""
    if not 1 <= device_count <= 64:
        raise UserError(f"--emulate is {device_count}, must be from 1 to 64")
    os.environ["JAX_PLATFORMS"] = "cpu"
    allocator.keep_freed_memory()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", device_count)
    os.environ["XLA_FLAGS"] = with_emulation_flags(os.environ.get("XLA_FLAGS", ""))


_EMULATION_FLAGS = {
    # In-process collectives abort when a device thread is starved for long: 64 of them on 2 cores are.
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": "300",
    "xla_cpu_collective_call_terminate_timeout_seconds": "1200",
    # With it XLA's CPU devices may come to independent collectives in different orders, and wait for each other for ever
    # (jaxlib 0.10.2; the resume tests of tests/training/test_loop.py stand still then).
    "xla_cpu_enable_concurrency_optimized_scheduler": "false",
}


def with_emulation_flags(flags: str) -> str:
    """XLA_FLAGS with what emulated devices need; what `flags` says itself stays."""
    missing = [f"--{name}={value}" for name, value in _EMULATION_FLAGS.items() if name not in flags]
    return " ".join([*flags.split(), *missing])


def has_tpu() -> bool:
    """Whether this machine has TPU chips: PCI devices of Google's vendor number."""
    for path in glob.glob("/sys/bus/pci/devices/*/vendor"):
        with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
            if file.read().strip() == "0x1ae0":
                return True
    return False


def skip_absent_tpu() -> None:
    """Keeps JAX from looking for a TPU that is not there. Call it before JAX is first used.

    With libtpu installed (to compile for slices elsewhere) JAX would load it and ask a metadata server, with seconds of
    delay and its errors on the terminal. Without it the CPU is named, too: that is how `start` knows that there is no
    other. Whoever names JAX_PLATFORMS gets what they name.
    """
    others = importlib.metadata.entry_points(group="jax_plugins")
    if not others and not os.environ.get("JAX_PLATFORMS") and not has_tpu():
        jax.config.update("jax_platforms", "cpu")


def use_compilation_cache() -> None:
    """Keeps compiled programs across starts, in JAX_COMPILATION_CACHE_DIR or the user's cache folder."""
    if not jax.config.jax_compilation_cache_dir:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        jax.config.update("jax_compilation_cache_dir", os.path.join(base, "capibara", "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def start_distributed(*, emulated: bool = False, heartbeat_s: int = 100) -> None:
    """Joins the other hosts of a slice or cluster where the environment names them; else does nothing.

    Args:
      emulated: after `emulate`: only processes that JAX_COORDINATOR_ADDRESS names join, each with its own emulated
        devices; what the environment says of a TPU slice does not count.
      heartbeat_s: seconds without a sign of life after which a process counts as dead, and the others end.
    """
    hosts = os.environ.get("TPU_WORKER_HOSTNAMES", "")
    slice_ = not emulated and (hosts.count(",") > 0 or os.environ.get("MEGASCALE_NUM_SLICES"))
    if os.environ.get("JAX_COORDINATOR_ADDRESS") or slice_:
        count, index = os.environ.get("JAX_NUM_PROCESSES"), os.environ.get("JAX_PROCESS_ID")
        jax.distributed.initialize(
            num_processes=int(count) if count else None,
            process_id=int(index) if index else None,
            heartbeat_timeout_seconds=heartbeat_s,
        )
