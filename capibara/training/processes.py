"""The processes of this machine: when they started, and where their ids mean the same."""

from __future__ import annotations

import os
import sys
from typing import Any


def age_s() -> float:
    """Seconds since this process was started; 0 where the system does not say."""
    try:
        with open("/proc/uptime", encoding="ascii") as file:
            return max(0.0, float(file.read().split()[0]) - int(start_of(os.getpid())) / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, TypeError, IndexError):
        return 0.0


def start_of(pid: Any) -> str | None:
    """When a process of this host started, in the kernel's ticks; None: there is none."""
    try:
        with open(f"/proc/{int(pid)}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except (OSError, TypeError, ValueError):
        return _alive_without_proc(pid)
    return None if fields[0] == "Z" else fields[19]


def boot_id() -> str | None:
    """Names this boot of this machine's kernel, alike in all its containers; "" on macOS, None: it cannot be told."""
    if not sys.platform.startswith("linux"):
        return ""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip() or None
    except (OSError, ValueError):
        return None


def pid_namespace() -> str | None:
    """Names what a process id counts in, the container as a rule; "" on macOS, None: it cannot be told."""
    if not sys.platform.startswith("linux"):
        return ""
    try:
        # A /proc that was mounted outside has other ids than ours: `start_of` would tell of another's process.
        if os.readlink("/proc/self") != str(os.getpid()):
            return None
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _alive_without_proc(pid: Any) -> str | None:
    if os.path.isdir("/proc/self"):
        return None
    try:  # macOS
        os.kill(int(pid), 0)
    except (OSError, TypeError, ValueError):
        return None
    return "unknown"
