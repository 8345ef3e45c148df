"""Memory and CPU of machines and of containers, by both versions of cgroups, from a fake /proc and /sys."""

import mmap
import os
import pathlib
import time

import pytest

from capibara.monitoring.system import host

GIB = 1 << 30
MACHINE = {
    "/proc/meminfo": "MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:    4194304 kB\n",
    "/proc/self/status": "Name:\tpython\nVmRSS:\t    2048 kB\n",
    "/proc/cpuinfo": "processor\t: 0\nmodel name\t: A Fast One\n",
    "/proc/stat": "cpu  100 0 100 800 50 0 0 0 0 0\ncpu0 1 2\n",
}
V2 = {
    "/proc/self/cgroup": "0::/pod/app\n",
    "/sys/fs/cgroup/pod/app/memory.max": "max\n",
    "/sys/fs/cgroup/pod/memory.max": f"{8 * GIB}\n",
    "/sys/fs/cgroup/pod/memory.current": f"{7 * GIB}\n",
    "/sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {2 * GIB}\nactive_file 5\n",
    "/sys/fs/cgroup/pod/app/cpu.max": "150000 100000\n",
    "/sys/fs/cgroup/pod/app/cpu.stat": "usage_usec 2500000\nuser_usec 1\n",
}
V1 = {
    "/proc/self/cgroup": "4:memory:/docker/x\n2:cpu,cpuacct:/docker/x\n",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
    "/sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * GIB}\n",
    "/sys/fs/cgroup/memory/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}\n",
    "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
    "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    "/sys/fs/cgroup/cpu,cpuacct/cpuacct.usage": "4000000000\n",
}


@pytest.fixture
def machine(monkeypatch):
    """Sets the files that there are."""

    def set_files(files):
        monkeypatch.setattr(host, "_lines", lambda path: files.get(path, "").splitlines())
        monkeypatch.setattr(os.path, "isdir", lambda path: any(name.startswith(f"{path}/") for name in files))

    return set_files


def test_a_machine_without_containers(machine):
    machine(MACHINE)
    assert host.memory() == host.Memory(used_bytes=12 * GIB, limit_bytes=16 * GIB, process_bytes=2 << 20)
    assert host.cpus() == len(os.sched_getaffinity(0)) and host.cpu_model() == "A Fast One"
    assert host._machine_cpu_s() == 200 / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    ("files", "limit", "used", "cpus", "cpu_s"), [(V2, 8, 5, 1.5, 2.5), (V1, 4, 2, 0.5, 4.0)], ids=["v2", "v1"]
)
def test_the_limit_of_the_container_is_the_limit(machine, files, limit, used, cpus, cpu_s):
    machine(MACHINE | files)
    found = host.memory()
    assert (found.limit_bytes, found.used_bytes) == (limit * GIB, used * GIB)
    assert host.cpus() == min(cpus, len(os.sched_getaffinity(0))) and host._machine_cpu_s() == cpu_s


def test_a_limit_above_the_machine_is_none(machine):
    machine(MACHINE | V1 | {"/sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n"})
    assert host.memory().limit_bytes == 16 * GIB
    machine(MACHINE | V2 | {"/sys/fs/cgroup/pod/memory.max": f"{32 * GIB}\n"})
    assert host.memory() == host.Memory(used_bytes=12 * GIB, limit_bytes=16 * GIB, process_bytes=2 << 20)


def test_where_nothing_can_be_read_nothing_is_zero(machine):
    machine({})
    assert host.memory() == host.Memory(used_bytes=None, limit_bytes=None, process_bytes=None)
    assert host.cpu_model() is None and host._machine_cpu_s() is None
    meter = host.CpuMeter()
    time.sleep(0.01)
    assert meter.read()[0] is None


@pytest.mark.skipif(not pathlib.Path("/proc/meminfo").exists(), reason="of Linux")
def test_this_machine():
    meter, before = host.CpuMeter(), host.memory()
    assert 0 < before.process_bytes < before.limit_bytes and 0 < before.used_bytes <= before.limit_bytes
    kept = mmap.mmap(-1, 64 << 20)  # not from a heap, which may have room
    kept.write(bytes(64 << 20))
    assert host.memory().process_bytes > before.process_bytes + (32 << 20)
    until_s = time.process_time() + 0.2
    while time.process_time() < until_s:
        pass
    machine_percent, own_percent = meter.read()
    assert 10 < own_percent <= 150 and 0 < machine_percent <= 100 and len(kept)
