"""Prepares a corpus on this machine: exact duplicates, filters, near duplicates, then tokens in shards.

Each step writes files of keys or numbers to the output folder's scratch; no step holds more in memory than some parts, one
range of keys, and a few bytes a document. A build that was killed resumes with the files that are whole.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np

from capibara.builders.files.fingerprints import Input
from capibara.builders.files.manifest import Manifest, WholePart
from capibara.builders.files.problems import Problems
from capibara.builders.preparation import near, shards, stages, summary, tables
from capibara.builders.preparation.documents import CorpusPart, files_of, inputs_of, parts_of
from capibara.builders.preparation.settings import CorpusPreparation
from capibara.builders.preparation.summary import PartSummary
from capibara.builders.workers import Workers
from capibara.builders.writing import Output, Parts
from capibara.core import extras
from capibara.storage.store import Entry

T = TypeVar("T")
Progress = Callable[[str, str], None]

_DIGEST_COLUMNS = 2
_COMPARED = 1 << 15  # pairs whose signatures are read at a time


def prepare(
    patterns: Sequence[str], out: str, settings: CorpusPreparation, num_workers: int, progress: Progress
) -> Manifest:
    """Prepares a corpus, or finishes what an earlier run has begun.

    Args:
      patterns: files, folders, globs and addresses.
      out: the output folder.
      settings: what to do.
      num_workers: processes; 0: this one. The output does not depend on it.
      progress: is called with a topic and a detail.

    Raises:
      UserError: there is no document, or the folder holds another build.
      TryAgain: a worker was killed.
    """
    progress("hashing the input", "")
    problems = Problems()
    files = files_of(patterns, problems)
    parts = parts_of(files, settings.fields, settings.part_bytes, problems)
    count = min(num_workers, len(parts)) if len(parts) > 1 else 0
    with Workers(count, __name__) as workers:  # they start while the input is hashed
        with Output(out, "corpus", settings.as_json(), _inputs_of(files)) as output:
            if (manifest := output.done()) is not None:
                return manifest
            return _Build(output, parts, settings, workers, progress).run(problems)


def _inputs_of(files: Sequence[Entry]) -> tuple[Input, ...]:
    """`inputs_of`; meanwhile it imports what records the lineage, which takes as long as some hundred MB."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        result = pool.submit(inputs_of, files)
        extras.require("openlineage.client", extra="builders", why="lineage")
        return result.result()


@dataclasses.dataclass(frozen=True)
class KeptPart:
    """A part, and which of its documents are kept as packed bits."""

    part: CorpusPart
    bits: bytes
    count: int

    @property
    def retained(self) -> np.ndarray:
        """[n] bool."""
        return np.unpackbits(np.frombuffer(self.bits, np.uint8), count=self.count).astype(bool)


@dataclasses.dataclass(frozen=True)
class HashParts:
    """Writes the table of a part's digests, unless it is there; without filters its signatures, too: it is read once."""

    scratch: Parts
    settings: CorpusPreparation

    def __call__(self, part: CorpusPart) -> None:
        names = [_exact(part.number), _near(part.number)] if self.settings.sketches_at_once else [_exact(part.number)]
        if all(self.scratch.done(name) is not None for name in names):
            return
        if not self.settings.sketches_at_once:
            self._write(part, stages.hash_part(part, self.settings))
            return
        hashed, sketched = stages.hash_and_sketch_part(part, self.settings)
        _write_sketched(self.scratch, part, sketched, self.settings)
        self._write(part, hashed)

    def _write(self, part: CorpusPart, hashed: stages.Hashed) -> None:
        with self.scratch.write(_exact(part.number)) as file:
            file.write(tables.encoded(hashed.keys, hashed.documents))
            file.records = hashed.count
            file.counts.update(keys=len(hashed.documents), text_bytes=hashed.text_bytes, last_lines=hashed.last_lines)
            file.problems.merge(hashed.problems)


@dataclasses.dataclass(frozen=True)
class SketchParts:
    """Writes what the filters keep of a part, with tables of its bands' keys and its signatures."""

    scratch: Parts
    settings: CorpusPreparation

    def __call__(self, task: KeptPart) -> None:
        if self.scratch.done(_near(task.part.number)) is None:
            result = stages.sketch_part(task.part, self.settings, task.retained)
            _write_sketched(self.scratch, task.part, result, self.settings)


def _write_sketched(scratch: Parts, part: CorpusPart, sketched: stages.Sketched, settings: CorpusPreparation) -> None:
    with scratch.write(_near(part.number)) as file:
        file.write(sketched.documents.astype("<u4").tobytes())
        if settings.near is not None:
            for key in near.keys(sketched.signatures, settings.near):
                file.write(tables.encoded(key[None], sketched.documents))
            file.write(sketched.signatures.astype("<u4").tobytes())
        file.records = len(sketched.documents)
        file.counts.update(sketched.dropped)


@dataclasses.dataclass(frozen=True)
class FindPairs:
    """Writes the pairs of near duplicates in a range of a band's keys.

    Attributes:
      scratch: where the tables are.
      settings: what is similar.
      offsets: [p + 1] int64, the number in the corpus of each part's first document.
      counts: [p], the documents of each part that have keys.
    """

    scratch: Parts
    settings: near.NearDuplicates
    offsets: np.ndarray
    counts: Sequence[int]

    def __call__(self, task: tuple[int, tuple[int, int]]) -> None:
        band, within = task
        name = _pairs(band, within)
        if self.scratch.done(name) is not None:
            return
        with self.scratch.write(name) as file:
            keys, documents = self._keys(band, within)
            item, other = tables.repeated(keys, documents)
            if self.settings.similarity:
                similar = [self._are_similar(item[at : at + _COMPARED], other[at : at + _COMPARED])
                           for at in range(0, len(item), _COMPARED)]  # fmt: skip
                retained = np.concatenate([*similar, np.zeros(0, bool)])
                item, other = item[retained], other[retained]
            file.write(np.stack([item, other]).astype("<i8").tobytes())
            file.records = len(item)

    def _keys(self, band: int, within: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """The keys of a range, [1, n], and the documents that have them, of all parts."""
        keys, documents = [np.zeros((1, 0), np.uint64)], [np.zeros(0, np.int64)]
        for part, count in enumerate(self.counts):
            with open(self.scratch.path(_near(part)), "rb") as file:
                key, document = tables.read(file, 4 * count + band * tables.size(count), count, within)
            keys.append(key)
            documents.append(document + self.offsets[part])
        return np.concatenate(keys, axis=1), np.concatenate(documents)

    def _are_similar(self, first: np.ndarray, other: np.ndarray) -> np.ndarray:
        return near.are_similar(self._signatures(first), self._signatures(other), self.settings)

    def _signatures(self, documents: np.ndarray) -> np.ndarray:
        """The signatures of documents of any parts, [n, permutations]."""
        result = np.empty((len(documents), self.settings.permutations), np.uint32)
        part_of = np.searchsorted(self.offsets, documents, side="right") - 1
        for part in np.unique(part_of).tolist():
            here, count = np.flatnonzero(part_of == part), self.counts[part]
            path, tables_bytes = self.scratch.path(_near(part)), self.settings.bands * tables.size(count)
            numbers = np.fromfile(path, "<u4", count)
            every = np.memmap(path, "<u4", "r", 4 * count + tables_bytes, (count, self.settings.permutations))
            result[here] = every[np.searchsorted(numbers, documents[here] - self.offsets[part])]
        return result


@dataclasses.dataclass(frozen=True)
class WriteShards:
    """Writes a shard, unless it is there."""

    files: Parts
    settings: CorpusPreparation

    def __call__(self, task: tuple[str, list[tuple[KeptPart, int]]]) -> None:
        name, parts = task
        if self.files.done(name) is not None:
            return
        with self.files.write(name) as file:
            of_shard = [shards.ShardPart(part=item.part, retained=item.retained, first=first) for item, first in parts]
            file.counts = shards.write(file.path, of_shard, self.settings)
            file.records = file.counts["rows"]


class _Build:
    """The steps of one build."""

    def __init__(
        self,
        output: Output,
        parts: Sequence[CorpusPart],
        settings: CorpusPreparation,
        workers: Workers,
        progress: Progress,
    ):
        self._output, self._parts, self._settings = output, parts, settings
        self._workers, self._progress = workers, progress
        self._summaries: list[PartSummary] = []
        self._offsets = np.zeros(1, np.int64)  # see summary.offsets

    def run(self, problems: Problems) -> Manifest:
        """Runs all steps that are not done; `problems`: of files that have no parts."""
        counts = self._hash(problems)
        counts.update(dict.fromkeys(("filtered", "near_duplicates", "kept", "rows", "tokens"), 0))
        retained = self._exact(counts)
        retained = self._filter(retained, counts)
        if self._settings.near is not None:
            self._near(retained, self._settings.near, counts)
        self._shards(retained)
        return self._output.finish(counts, problems)

    def _hash(self, problems: Problems) -> collections.Counter[str]:
        self._each("reading documents", HashParts(self._output.scratch, self._settings), self._parts)
        wholes = self._wholes()
        for part in self._parts:
            about = wholes[_exact(part.number)]
            counts = {name: about.counts.get(name, 0) for name in ("keys", "text_bytes", "last_lines")}
            self._summaries.append(PartSummary(count=about.file.records, problems=about.problems, **counts))
        total = summary.total(self._parts, self._summaries, problems)
        self._offsets = summary.offsets(self._summaries)
        return total

    def _exact(self, counts: collections.Counter[str]) -> np.ndarray:
        """[n] bool: the documents that are neither blank nor equal to an earlier one."""
        retained = np.zeros(self._offsets[-1], bool)
        sizes = [item.keys for item in self._summaries]
        every = tables.ranges(sum(sizes))
        for done, within in enumerate(every):
            self._progress("finding exact duplicates", f"{done} of {len(every)}")
            keys, documents = [], []
            for part, count in enumerate(sizes):
                with open(self._output.scratch.path(_exact(part)), "rb") as file:
                    key, document = tables.read(file, 0, count, within, _DIGEST_COLUMNS)
                keys.append(key)
                documents.append(document + self._offsets[part])
            of_range = np.concatenate(documents)
            retained[of_range] = True
            retained[tables.repeated(np.concatenate(keys, axis=1), of_range)[0]] = False
        counts["exact_duplicates"] = sum(sizes) - int(np.count_nonzero(retained))
        return retained

    def _filter(self, retained: np.ndarray, counts: collections.Counter[str]) -> np.ndarray:
        """[n] bool: the documents that the filters keep."""
        if not self._settings.filters:
            return retained
        tasks = (self._kept_part(part, retained) for part in self._parts)
        self._each("filtering documents", SketchParts(self._output.scratch, self._settings), tasks)
        result, wholes = np.zeros_like(retained), self._wholes()
        for part in self._parts:
            about = wholes[_near(part.number)]
            numbers = np.fromfile(self._output.scratch.path(_near(part.number)), "<u4", about.file.records)
            result[numbers + self._offsets[part.number]] = True
            counts.update({f"filtered_{reason}": count for reason, count in about.counts.items()})
            counts["filtered"] += sum(about.counts.values())
        return result

    def _near(self, retained: np.ndarray, settings: near.NearDuplicates, counts: collections.Counter[str]) -> None:
        """Clears the documents that are similar to an earlier one."""
        wholes = self._wholes()
        sizes = [wholes[_near(part.number)].file.records for part in self._parts]
        tasks = [(band, within) for band in range(settings.bands) for within in tables.ranges(sum(sizes))]
        find = FindPairs(self._output.scratch, settings, self._offsets, sizes)
        self._each("finding near duplicates", find, tasks)
        path = os.path.join(self._output.scratch.folder, "groups")
        groups = near.Groups(np.memmap(path, np.int64, "w+", shape=(len(retained),)))
        for band, within in tasks:
            name = _pairs(band, within)
            item, other = np.fromfile(self._output.scratch.path(name), "<i8").reshape(2, -1)
            groups.join(item, other)
        before = np.count_nonzero(retained)
        for begin, end in zip(self._offsets[:-1].tolist(), self._offsets[1:].tolist()):
            retained[begin:end] &= groups.first(np.arange(begin, end)) == np.arange(begin, end)
        counts["near_duplicates"] = int(before - np.count_nonzero(retained))

    def _shards(self, retained: np.ndarray) -> None:
        together, tasks = self._settings.shard_parts, []
        groups = [self._parts[at : at + together] for at in range(0, len(self._parts), together)]
        for number, group in enumerate(groups):
            parts = [(self._kept_part(part, retained), int(self._offsets[part.number])) for part in group]
            if any(any(item.bits) for item, _ in parts):
                tasks.append((shards.name_of(number, len(groups)), parts))
        self._each("writing shards", WriteShards(self._output.parts, self._settings), tasks)
        wholes = {whole.file.name: whole.counts for whole in self._output.parts.all()}
        with self._output.part(summary.INDEX) as file:
            of_shards = {name: wholes[name] for name, _ in tasks}
            file.write(summary.index(self._settings, self._parts, self._summaries, of_shards))

    def _kept_part(self, part: CorpusPart, retained: np.ndarray) -> KeptPart:
        begin, end = self._offsets[part.number : part.number + 2].tolist()
        return KeptPart(part, np.packbits(retained[begin:end]).tobytes(), end - begin)

    def _each(self, topic: str, run: Callable[[T], None], tasks: Iterable[T]) -> None:
        tasks = list(tasks)
        done = 0

        def count() -> None:
            nonlocal done
            done += 1
            self._progress(topic, f"{done} of {len(tasks)}")

        self._progress(topic, f"0 of {len(tasks)}")
        self._workers.each(run, tasks, count)

    def _wholes(self) -> dict[str, WholePart]:
        """The files of the steps that are done, by name."""
        return {whole.file.name: whole for whole in self._output.scratch.all()}


def _exact(part: int) -> str:
    return f"exact/{part:06}"


def _near(part: int) -> str:
    return f"near/{part:06}"


def _pairs(band: int, within: tuple[int, int]) -> str:
    return f"pairs/{band:03}-{within[0]:03}-{within[1]:03}"
