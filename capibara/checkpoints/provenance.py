"""Where a checkpoint comes from: versions, configuration, commit."""

from __future__ import annotations

import platform
import subprocess
from typing import Any

import jax

import capibara
from capibara.core import extras

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
        "packages": {name: version for name in _PACKAGES if (version := extras.version(name))},
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


def _git(*command: str) -> str | None:
    try:
        done = subprocess.run(["git", *command], capture_output=True, text=True, timeout=_GIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
