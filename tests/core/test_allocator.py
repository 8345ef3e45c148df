"""glibc's malloc after keep_freed_memory, in child processes: settings of the allocator cannot be taken back."""

import gc
import pathlib
import platform
import subprocess
import sys

import pytest

from capibara.core import allocator

ENABLED = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
GLIBC = platform.libc_ver()[0] == "glibc"


def after_setting(code: str) -> list[int]:
    """The numbers that a new process prints which has set its allocator; sizes are those of the kernel, in KiB."""
    head = (
        "from capibara.core import allocator; allocator.keep_freed_memory(); import numpy as np\n"
        "def kib(name):\n"
        "    return next(int(l.split()[1]) for l in open('/proc/self/smaps_rollup') if l.startswith(name))\n"
    )
    done = subprocess.run([sys.executable, "-c", head + code], capture_output=True, text=True, timeout=120, check=True)
    return [int(word) for word in done.stdout.split()]


@pytest.mark.skipif(not GLIBC, reason="the settings are glibc's")
def test_freed_memory_stays():
    code = "a = np.ones(2**24); del a; print(kib('Rss')); a = np.ones(2**24); print(kib('Rss'))"
    freed, again = after_setting(code)
    assert freed > 2**17  # the 128 MiB are still there
    assert again < freed + 2**12


@pytest.mark.skipif(not GLIBC, reason="the settings are glibc's")
@pytest.mark.skipif(
    not ENABLED.exists() or "[never]" in ENABLED.read_text(), reason="the kernel's transparent huge pages are off"
)
def test_arrays_lie_in_huge_pages():
    (huge,) = after_setting("a = np.ones(2**24); print(kib('AnonHugePages'))")
    assert huge > 2**16  # at least half of the 128 MiB: how many pages there are is up to the kernel


@pytest.mark.skipif(not GLIBC, reason="the settings are glibc's")
def test_addresses_that_are_not_granted_change_nothing():
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))\n"
    code = (
        limit + "from capibara.core import allocator; allocator.keep_freed_memory()\n"
        "kept = bytearray(2**26); print(len(kept))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == [str(2**26)]


@pytest.mark.parametrize("enabled", [True, False])
def test_collection_is_off_and_then_as_before(enabled):
    @allocator.without_collection()
    def fail():
        assert not gc.isenabled()
        raise ValueError

    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        for _ in range(2):  # a decorated function can be called again
            with pytest.raises(ValueError):
                fail()
            assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
