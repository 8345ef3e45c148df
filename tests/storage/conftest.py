"""A store that fails as it is told, and a cache and no waiting for every test."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from collections.abc import Iterator

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from capibara.storage import remote


class FlakyStore(MemoryFileSystem):
    """A store in memory whose next reads raise `faults`, or give the first half of what they should where one is None."""

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
    monkeypatch.setattr(remote, "_FIRST_WAIT_S", 0.0)
    fsspec.register_implementation("flaky", FlakyStore, clobber=True)
    FlakyStore.faults, FlakyStore.reads = [], []
    remote._filesystem.cache_clear()
    made = FlakyStore()
    yield made
    made.store.clear()
    remote._filesystem.cache_clear()


def _training():
    file = pathlib.Path(__file__).parents[1] / "training" / "conftest.py"
    spec = importlib.util.spec_from_file_location("of_training_conftest_for_storage", file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


training = _training()
bucket_server, gs, flaky = training.bucket_server, training.gs, training.flaky  # fixtures
