"""The devices of this process: emulated ones, those of several hosts, what JAX must know before."""

from __future__ import annotations

import contextlib
import glob
import importlib.metadata
import os

import jax

from capibara.core import allocator
from capibara.core.types import UserError


def start(device_count: int | None = None) -> None:
    """What a verb that computes does before JAX is first used: on `device_count` emulated devices, or on what there is."""
    skip_absent_tpu()
    use_compilation_cache()
    if device_count is not None:
        emulate(device_count)
    elif jax.config.values["jax_platforms"] == "cpu":
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


# Of TPUs, as JAX has them; a cloud machine's network card and disks are Google's, too.
_GOOGLE = "0x1ae0"
_TPUS = frozenset({"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"})


def has_tpu(bus: str = "/sys/bus/pci/devices") -> bool:
    """Whether this machine has TPU chips, by the vendor and device numbers of what is on its PCI bus."""
    for folder in glob.glob(os.path.join(glob.escape(bus), "*")):
        with contextlib.suppress(OSError):
            numbers = [
                open(os.path.join(folder, name), encoding="ascii").read().strip() for name in ("vendor", "device")
            ]
            if numbers[0] == _GOOGLE and numbers[1] in _TPUS:
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
    if not jax.config.values["jax_compilation_cache_dir"]:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        jax.config.update("jax_compilation_cache_dir", os.path.join(base, "capibara", "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
