"""Where a checkpoint comes from: versions, configuration, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from typing import Any

import jax

import capibara

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "libtpu")
_GIT_S = 5.0


def about(config: str) -> dict[str, Any]:
    """What the manifests of a run's checkpoints say of it, as JSON values.

    Args:
      config: the operative Gin configuration.
    """
    return {
        "capibara": capibara.__version__,
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
        "commit": commit(),
        "config": config,
    }


def commit() -> str | None:
    """The git commit of the folder that the program runs in, "+" behind it where files differ; None: it is in none."""
    found = _git("rev-parse", "HEAD")
    if not found:
        return None
    return found + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")


def process_age_s() -> float:
    """Seconds since this process was started; 0 where the system does not say."""
    try:
        with open("/proc/self/stat", encoding="ascii") as file:
            started = float(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        with open("/proc/uptime", encoding="ascii") as file:
            return max(0.0, float(file.read().split()[0]) - started)
    except (OSError, ValueError, IndexError):
        return 0.0


def _git(*command: str) -> str | None:
    try:
        done = subprocess.run(["git", *command], capture_output=True, text=True, timeout=_GIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
