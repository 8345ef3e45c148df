"""Processes of this machine: start times, lock holders, and the boot and namespace in which a process id is unique."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any


def age_s() -> float:
    """Seconds since this process was started; 0 where /proc is missing."""
    try:
        with open("/proc/uptime", encoding="ascii") as file:
            up_s, start = float(file.read().split()[0]), start_of(os.getpid())
            return 0.0 if start is None else max(0.0, up_s - int(start) / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0


def start_of(pid: object) -> str | None:
    """When a process of this host started, in the kernel's ticks; None: it does not exist."""
    fields = _stat(pid)
    if fields is None:
        return _alive_without_proc(pid)
    return None if fields[0] == "Z" else fields[19]


def _stat(pid: Any) -> list[str] | None:
    """The fields after the name in /proc/PID/stat; None: the process does not exist."""
    try:
        with open(f"/proc/{int(pid)}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except (OSError, TypeError, ValueError):
        return None


def is_stopped(pid: object) -> bool:
    """Whether a process of this host is stopped, by SIGSTOP, ctrl-Z or a debugger."""
    return (_stat(pid) or [""])[0] in ("T", "t")


def lock_holder(descriptor: int) -> int | None:
    """The process that holds the lock (flock) of an open file; None: unknown."""
    about = os.fstat(descriptor)
    device = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}"
    try:
        with open("/proc/locks", encoding="ascii") as file:
            lines = [line.split() for line in file]
    except (OSError, ValueError):
        return None
    # "1: FLOCK ADVISORY WRITE 4242 fe:01:131 0 EOF"; "1: -> FLOCK ..." waits for it.
    held = [fields for fields in lines if len(fields) > 5 and fields[1] == "FLOCK"]
    exact = [int(fields[4]) for fields in held if fields[5] == f"{device}:{about.st_ino}"]
    # Some file systems (btrfs, overlayfs) report another device in /proc/locks than by fstat.
    similar = [int(fields[4]) for fields in held if fields[5].rpartition(":")[2] == str(about.st_ino)]
    for pid in [*exact, *similar]:
        if pid > 0 and start_of(pid) is not None:
            return pid
    return _opener(about) if exact or similar else None


def _opener(about: os.stat_result) -> int | None:
    """A process that has a locked file open: the one that locked it has ended, and a child inherited the lock."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"/proc/{name}/fd") if int(name) != os.getpid() else ():
                result = os.stat(f"/proc/{name}/fd/{descriptor}")
                if (result.st_dev, result.st_ino) == (about.st_dev, about.st_ino):
                    return int(name)
    return None


def boot_id() -> str | None:
    """Identifies this boot of the kernel, the same in all containers; "" on macOS, None: unknown."""
    if not sys.platform.startswith("linux"):
        return ""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip() or None
    except (OSError, ValueError):
        return None


def pid_namespace() -> str | None:
    """Identifies the namespace of process ids, usually the container's; "" on macOS, None: unknown."""
    if not sys.platform.startswith("linux"):
        return ""
    try:
        # A /proc of another namespace has other ids than ours: `start_of` would find the wrong process.
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
