"""Prepares JAX's devices: emulated CPU devices, machines without a TPU, the compilation cache."""

from __future__ import annotations

import contextlib
import glob
import importlib.metadata
import os

import jax

from capibara.core import allocator
from capibara.core.types import UserError

MOST_EMULATED = 64


def start(device_count: int | None = None) -> None:
    """Prepares JAX for a verb that computes; call it before JAX is first used.

    Args:
      device_count: emulated CPU devices; None: the devices of this machine.
    """
    skip_absent_tpu()
    use_compilation_cache()
    if device_count is not None:
        emulate(device_count)
    elif jax.config.values["jax_platforms"] == "cpu":
        allocator.keep_freed_memory()


def emulate(device_count: int) -> None:
    """Makes this process run on `device_count` emulated CPU devices. Call it before JAX is first used."""
    if not 1 <= device_count <= MOST_EMULATED:
        raise UserError(f"--emulate is {device_count}, must be from 1 to {MOST_EMULATED}")
    os.environ["JAX_PLATFORMS"] = "cpu"
    allocator.keep_freed_memory()
    jax.config.update("jax_platforms", "cpu")
    try:
        jax.config.update("jax_num_cpu_devices", device_count)
    except RuntimeError:
        if jax.device_count() != device_count:
            raise UserError(
                f"--emulate is {device_count}, and JAX has begun with {jax.device_count()} devices: emulate {jax.device_count()}, "
                "or start another process"
            ) from None
    os.environ["XLA_FLAGS"] = with_emulation_flags(os.environ.get("XLA_FLAGS", ""))


_EMULATION_FLAGS = {
    # In-process collectives abort when a device thread is starved for long: 64 of them on 2 cores are.
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": "300",
    "xla_cpu_collective_call_terminate_timeout_seconds": "1200",
    # With this scheduler XLA's CPU devices may reach independent collectives in different orders and deadlock
    # (jaxlib 0.10.2; the resume tests of tests/training/test_loop.py hang).
    "xla_cpu_enable_concurrency_optimized_scheduler": "false",
}


def with_emulation_flags(flags: str) -> str:
    """Adds the flags that emulated devices need to XLA_FLAGS; a flag that `flags` sets keeps its value."""
    missing = [f"--{name}={value}" for name, value in _EMULATION_FLAGS.items() if name not in flags]
    return " ".join([*flags.split(), *missing])


# PCI ids of TPUs, as in JAX. The vendor alone does not identify one: a cloud machine's network card has the same.
_GOOGLE = "0x1ae0"
_TPUS = frozenset({"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"})


def has_tpu(bus: str = "/sys/bus/pci/devices") -> bool:
    """Whether this machine has TPU chips, by the vendor and device ids on its PCI bus."""
    for folder in glob.glob(os.path.join(glob.escape(bus), "*")):
        with contextlib.suppress(OSError):
            numbers = [
                open(os.path.join(folder, name), encoding="ascii").read().strip() for name in ("vendor", "device")
            ]
            if numbers[0] == _GOOGLE and numbers[1] in _TPUS:
                return True
    return False


def skip_absent_tpu() -> None:
    """Keeps JAX from looking for a TPU on a machine without one. Call it before JAX is first used.

    With libtpu installed (to compile for slices elsewhere) JAX would load it and query a metadata server, which takes
    seconds and prints errors. Without libtpu the platform is set to "cpu" as well, so that `start` knows that there is no
    accelerator. A platform that the user has chosen, by JAX_PLATFORMS or in Python, is kept.
    """
    others = importlib.metadata.entry_points(group="jax_plugins")
    if not others and not jax.config.values["jax_platforms"] and not has_tpu():
        jax.config.update("jax_platforms", "cpu")


def use_compilation_cache() -> None:
    """Keeps compiled programs across starts, in JAX_COMPILATION_CACHE_DIR or the user's cache folder.

    Small ones too: a resumed run reads all of its programs and compiles none. What the user's environment says of the
    least time to compile stands.
    """
    if not jax.config.values["jax_compilation_cache_dir"]:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        jax.config.update("jax_compilation_cache_dir", os.path.join(base, "capibara", "xla"))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
