"""Memory and CPU of this machine, or of the container that limits them: read from /proc and cgroups, v1 and v2.

None stands for what cannot be read here, never 0.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator

_UNLIMITED_BYTES = 1 << 60  # cgroup v1 has a huge number for "no limit"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of the container, or of the machine.

    Attributes:
      used_bytes: without the page cache that can be dropped.
      limit_bytes: of the container, if it has a limit; else of the machine.
      process_bytes: resident memory of this process.
    """

    used_bytes: int | None
    limit_bytes: int | None
    process_bytes: int | None


def memory() -> Memory:
    """Memory in use now."""
    result = _meminfo()
    total, available = result.get("MemTotal"), result.get("MemAvailable")
    used = None if total is None or available is None else total - available
    for group, limit in _limits("memory", ("memory.max", "memory.limit_in_bytes")):
        if limit < (_UNLIMITED_BYTES if total is None else total):
            total, used = limit, _used_in(group)
    return Memory(used_bytes=used, limit_bytes=total, process_bytes=_status_bytes("VmRSS"))


def cpus() -> float | None:
    """CPUs that this process may use: of its affinity, at most its container's quota."""
    if hasattr(os, "sched_getaffinity"):
        count: float | None = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count()
    for group in _groups("cpu"):
        quota = _quota(group)
        if quota is not None and (count is None or quota < count):
            count = quota
    return count


class CpuMeter:
    """Measures CPU use between two calls of `read`."""

    def __init__(self) -> None:
        self._last = self._now()

    def read(self) -> tuple[float | None, float | None]:
        """Percent since the last call: of all CPUs that may be used (100: all), and of this process (100: one CPU)."""
        before, self._last = self._last, self._now()
        wall_s = self._last[0] - before[0]
        if wall_s <= 0:
            return None, None
        process_percent = 100 * (self._last[1] - before[1]) / wall_s
        if self._last[2] is None or before[2] is None or not (count := cpus()):
            return None, process_percent
        return min(100.0, 100 * (self._last[2] - before[2]) / (wall_s * count)), process_percent

    @staticmethod
    def _now() -> tuple[float, float, float | None]:
        times = os.times()
        return time.monotonic(), times.user + times.system, _machine_cpu_s()


def cpu_model() -> str | None:
    """The processor's name; None: unknown."""
    for line in _lines("/proc/cpuinfo"):
        if line.lower().startswith("model name"):
            return line.partition(":")[2].strip() or None
    return None


def _machine_cpu_s() -> float | None:
    """CPU seconds of the container since it was made, or of the machine since it was started."""
    for group in _groups("cpuacct", "cpu"):
        for line in _lines(os.path.join(group, "cpu.stat")):
            if line.startswith("usage_usec "):
                return int(line.split()[1]) / 1e6
        if (usage := _number(os.path.join(group, "cpuacct.usage"))) is not None:
            return usage / 1e9
    for line in _lines("/proc/stat"):
        if line.startswith("cpu "):
            fields = [int(field) for field in line.split()[1:9]]
            return (sum(fields) - fields[3] - fields[4]) / os.sysconf(
                "SC_CLK_TCK"
            )  # without idle and waiting for disks
    return None


def _quota(group: str) -> float | None:
    fields = next(iter(_lines(os.path.join(group, "cpu.max"))), "").split()
    if len(fields) == 2 and fields[0].isdecimal():
        return int(fields[0]) / int(fields[1])
    quota, period = (_number(os.path.join(group, f"cpu.cfs_{name}_us")) for name in ("quota", "period"))
    return quota / period if quota and period and quota > 0 else None


def _limits(controller: str, names: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """The cgroups of this process, inner first, with the limit that a file of them has."""
    for group in _groups(controller):
        for name in names:
            if (limit := _number(os.path.join(group, name))) is not None and limit < _UNLIMITED_BYTES:
                yield group, limit


def _used_in(group: str) -> int | None:
    """Memory that a cgroup uses, without inactive page cache, which the kernel drops before it kills a process."""
    for name in ("memory.current", "memory.usage_in_bytes"):
        if (used := _number(os.path.join(group, name))) is not None:
            stat = dict(line.split(" ", 1) for line in _lines(os.path.join(group, "memory.stat")) if " " in line)
            return max(0, used - int(stat.get("total_inactive_file", stat.get("inactive_file", 0))))
    return None


def _groups(*controllers: str) -> Iterator[str]:
    """The folders of this process's cgroups that have one of the controllers, inner first, up to the root."""
    for line in _lines("/proc/self/cgroup"):
        _, names, path = (line.split(":", 2) + ["", ""])[:3]
        if names and not {*names.split(",")} & {*controllers}:
            continue
        roots = [f"/sys/fs/cgroup/{names}", *(f"/sys/fs/cgroup/{name}" for name in names.split(","))] if names else []
        root = next((item for item in roots if os.path.isdir(item)), None) if names else "/sys/fs/cgroup"
        if root is None:
            continue
        inner = path.strip("/")
        while inner and not inner.startswith(".."):
            yield os.path.join(root, inner)
            inner = os.path.dirname(inner)
        yield root  # in a container of its own namespace its group is the root


def _meminfo() -> dict[str, int]:
    pairs = (line.partition(":")[::2] for line in _lines("/proc/meminfo"))
    return {name: int(value.split()[0]) * 1024 for name, value in pairs if value.split()[:1]}


def _status_bytes(name: str) -> int | None:
    for line in _lines("/proc/self/status"):
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def _number(path: str) -> int | None:
    text = next(iter(_lines(path)), "").strip()
    return int(text) if text.lstrip("-").isdecimal() else None


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []
