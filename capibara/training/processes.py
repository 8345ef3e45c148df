"""When the processes of this machine started."""

from __future__ import annotations

import os
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


def _alive_without_proc(pid: Any) -> str | None:
    if os.path.isdir("/proc/self"):
        return None
    try:  # macOS
        os.kill(int(pid), 0)
    except (OSError, TypeError, ValueError):
        return None
    return "unknown"
