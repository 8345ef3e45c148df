"""What a run's machine, packages and source are, for the record."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import capibara
from capibara.core import extras
from capibara.monitoring.metrics_file.redaction import redact
from capibara.monitoring.system import host

_PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "seqio", "tensorflow")
_GIT_S = 10.0
_MOST_CHARACTERS = 10_000


def of_process(devices: str, processes: int) -> dict[str, Any]:
    """JSON values on this process's machine, packages, command line and git state, without secrets.

    Args:
      devices: such as "8 x TPU v5 lite".
      processes: of the run.
    """
    return {
        "host": socket.gethostname(),
        "os": platform.platform(),
        "cpu": host.cpu_model(),
        "cpus": host.cpus(),
        "memory_bytes": host.memory().limit_bytes,
        "python": platform.python_version(),
        "capibara": capibara.__version__,
        "packages": {name: version for name in _PACKAGES if (version := extras.version(name))},
        "devices": devices,
        "processes": processes,
        "command": _command(sys.orig_argv),
        "git": git_state(),
    }


def _command(arguments: Sequence[str]) -> list[str]:
    """A command line without secrets: also the values after flags such as `--token`."""
    result = list[str]()
    for before, argument in zip(["", *arguments], arguments):
        prefix = f"{before}=" if before.startswith("-") and "=" not in before else ""
        result.append(redact(prefix + argument).removeprefix(prefix))
    return result


def git_state(folder: str | None = None) -> dict[str, Any] | None:
    """The commit of a folder's repository, its branch, and what differs from the commit; None: it is in no repository.

    Args:
      folder: None: the working directory.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    status = _git(folder, "status", "--porcelain")
    diff = _git(folder, "diff", "HEAD", "--stat", "--no-color", "--no-ext-diff", "--no-textconv")
    return {
        "commit": commit,
        "branch": _git(folder, "rev-parse", "--abbrev-ref", "HEAD"),
        "remote": redact(remote) if (remote := _git(folder, "remote", "get-url", "origin")) else None,
        "dirty": None if status is None else bool(status),
        "untracked": None if status is None else sum(line.startswith("??") for line in status.splitlines()),
        "diff_stat": None if diff is None else redact(diff)[:_MOST_CHARACTERS],
    }


def _git(folder: str | None, *command: str) -> str | None:
    # Without optional locks: a `git` of the user's at the same time must not fail because of ours.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(
            ["git", *command], capture_output=True, text=True, errors="replace", timeout=_GIT_S, cwd=folder,
            env=environment, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
