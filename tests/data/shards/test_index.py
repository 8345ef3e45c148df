"""The index of a corpus: what has changed is looked at again, and nothing else."""

from __future__ import annotations

import dataclasses
import os

import pytest

from capibara.data.shards import index as indexes
from capibara.data.shards.lines import TextLines

LOOKED: list[str] = []


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noted(TextLines):
    """Text whose shards are noted when they are looked at."""

    def blocks(self, shard):
        LOOKED.append(os.path.basename(shard.url))
        return super().blocks(shard)


@pytest.fixture
def write(tmp_path):
    """(name, text) -> a shard with that text, written at another time than all before."""
    times_ns = iter(range(10**18, 2 * 10**18, 10**9))

    def write(name: str, text: str) -> None:
        (tmp_path / name).write_text(text)
        at = next(times_ns)
        os.utime(tmp_path / name, ns=(at, at))

    return write


@pytest.fixture
def start(tmp_path):
    """() -> the shards that a start looks at, and the index that it has."""

    def start():
        LOOKED.clear()
        shards = indexes.listed("files", [f"{tmp_path}/*.txt"])
        return indexes.index_of(shards, Noted(block_bytes=4, document_bytes=1))

    return start


def test_a_shard_that_has_changed_is_looked_at_again_by_one_start(write, start):
    for name in ("a.txt", "b.txt", "c.txt"):
        write(name, "0123456\n")
    first = start()
    assert sorted(LOOKED) == ["a.txt", "b.txt", "c.txt"] and len(first.blocks) == 6
    write("b.txt", "6543210\n")  # as long as before
    write("c.txt", "0123456789\n")
    for looked in (["b.txt", "c.txt"], []):
        found = start()
        assert sorted(LOOKED) == looked
        assert found.blocks[:, 0].tolist() == [0, 0, 1, 1, 2, 2, 2] and found.digest() != first.digest()
    write("a.txt", "")
    for looked in (["a.txt"], []):
        assert start().blocks[:, 0].tolist() == [1, 1, 2, 2, 2] and LOOKED == looked


def test_hosts_that_share_the_folder_of_indexes_do_not_write_into_each_others(write, start, monkeypatch):
    """Containers have the same process ids."""
    write("a.txt", "0123456\n")
    savez, written = indexes.np.savez, []

    def meanwhile(file, **arrays):
        if not written:
            written.append(file.name)
            start()  # another host, from beginning to end
        savez(file, **arrays)
        written.append(file.name)

    monkeypatch.setattr(indexes.np, "savez", meanwhile)
    whole = start().digest()
    assert len(set(written)) == 2
    assert start().digest() == whole and LOOKED == []
    folder = os.path.dirname(written[0])
    assert [name.endswith(".npz") for name in os.listdir(folder)] == [True]
