"""A store that fails on demand; a cache and no retry waits for every test."""

from __future__ import annotations

from collections.abc import Iterator

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from capibara.storage import remote


class FlakyStore(MemoryFileSystem):
    """A store in memory whose next reads raise `faults`, or return half of their bytes where one is None."""

    protocol = "flaky"
    cachable = False
    faults: list[Exception | None] = []
    reads: list[tuple[str, int | None, int | None]] = []

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("flaky://", "memory://"))

    def cat_file(self, path, start=None, end=None, **options):
        self.reads.append((path, start, end))
        content = super().cat_file(path, start=start, end=end, **options)
        if self.faults:
            fault = self.faults.pop(0)
            if fault is not None:
                raise fault
            return content[: len(content) // 2]
        return content


@pytest.fixture
def store(monkeypatch, tmp_path) -> Iterator[FlakyStore]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.0)
    fsspec.register_implementation("flaky", FlakyStore, clobber=True)
    FlakyStore.faults, FlakyStore.reads = [], []
    remote._filesystem.cache_clear()
    made = FlakyStore()
    yield made
    made.store.clear()
    remote._filesystem.cache_clear()
