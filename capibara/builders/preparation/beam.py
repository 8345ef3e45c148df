"""The same preparation on Apache Beam: its shuffles take the place of the local build's files.

Elements are arrays of a part, not single documents, so that a runner's cost an element does not matter. Keys are integers,
which all runners hash and encode the same in every process. Only the clustering of near duplicates is one task: it holds
16 bytes for each document that has a similar one.

Runners: the DirectRunner, with several processes; the DaskRunner on a cluster of Dask; Flink, Spark and Dataflow by Beam's own
options. All of their workers must see the input and the output folder.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from capibara.builders.files.fingerprints import Input
from capibara.builders.files.manifest import Manifest
from capibara.builders.files.problems import Problems
from capibara.builders.preparation import near, shards, stages, summary, tables
from capibara.builders.preparation.bucket import BucketOutput, BucketParts
from capibara.builders.preparation.documents import CorpusPart, files_of, inputs_of, parts_of
from capibara.builders.preparation.settings import CorpusPreparation
from capibara.builders.preparation.summary import PartSummary
from capibara.builders.writing import Output, Parts
from capibara.core import extras
from capibara.core.types import UserError
from capibara.storage import stores

Arrays = tuple[np.ndarray, ...]
_Keyed = tuple[int, Any]
_Tagged = tuple[str, _Keyed]

_RUNNERS = {"DaskRunner": "apache_beam.runners.dask.dask_runner.DaskRunner"}  # that Beam does not know by name
_RESULT = "result.json"
_ALL = 0  # the key of what one task reads as a whole
_PART_BITS = 32  # a document's number: that of its part, then its number in the part
_DOCUMENT_BYTES = 512  # of the smallest documents of a usual corpus: their number decides the ranges of keys


def prepare(
    patterns: Sequence[str], out: str, settings: CorpusPreparation, runner: str, options: Sequence[str]
) -> Manifest:
    """Prepares a corpus by a Beam pipeline; the output is that of `build.prepare`.

    Args:
      patterns: files, folders, globs and addresses, which all workers must see.
      out: the output folder, which all workers must see.
      settings: what to do.
      runner: Beam's name of the runner, such as "DirectRunner".
      options: more options of Beam, such as "--direct_num_workers=2".

    Raises:
      UserError: Beam is not installed, there is no document, or the folder holds another build.
    """
    extras.require("apache_beam", extra="beam", why=f"--runner={runner}")
    problems = Problems()
    files = files_of(patterns, problems)
    with _output(out, settings, inputs_of(files)) as output:
        if (manifest := output.done()) is not None:
            return manifest
        parts = parts_of(files, settings.fields, settings.part_bytes, problems)
        if not parts:
            raise UserError(f"IN has no document (problems: {problems.total:,}): name other files")
        job = _Job(settings=settings, parts=parts, files=output.parts, scratch=output.scratch)
        _run(job, runner, options)
        return _finish(job, output, problems)


def _output(out: str, settings: CorpusPreparation, inputs: Sequence[Input]) -> Output | BucketOutput:
    """The output folder; a local one by a path that holds in all workers."""
    if not stores.of(out).has_local_paths:
        return BucketOutput(out, "corpus", settings.as_json(), inputs)
    return Output(os.path.abspath(out), "corpus", settings.as_json(), inputs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Job:
    """What every worker knows.

    Attributes:
      settings: what to do.
      parts: the corpus.
      files: where the shards are written.
      scratch: where the result is written.
    """

    settings: CorpusPreparation
    parts: Sequence[CorpusPart]
    files: Parts | BucketParts
    scratch: Parts | BucketParts

    # --- from a part to its documents

    def hash(self, part: int) -> Iterator[_Tagged]:
        """Reads a part: its summary, and the keys of its documents by range."""
        result = stages.hash_part(self.parts[part], self.settings)
        about: dict[str, Any] = {
            "part": part,
            "count": result.count,
            "keys": len(result.documents),
            "text_bytes": result.text_bytes,
        }
        about |= {"last_lines": result.last_lines, "problems": result.problems.as_json()}
        yield "summary", (_ALL, about)
        for number, inside in self._by_range(result.keys[0]):
            yield "keys", (number, (part, result.keys[:, inside], result.documents[inside]))

    def without_equal(self, of_range: tuple[int, Iterable[Any]]) -> Iterator[_Keyed]:
        """Finds exact duplicates in a range of keys; the numbers of the first ones by part."""
        keys, documents = _joined(of_range[1])
        repeated, _ = tables.repeated(keys, documents)
        yield from _by_part(np.setdiff1d(documents, repeated, assume_unique=True))

    def sketch(self, of_part: tuple[int, Iterable[np.ndarray]]) -> Iterator[_Tagged]:
        """Filters and sketches the documents of a part."""
        part, numbers = of_part[0], np.concatenate(list(of_part[1]))
        result = stages.sketch_part(self.parts[part], self.settings, _flags(numbers))
        yield "filtered", (_ALL, {"read": len(numbers), "dropped": dict(result.dropped)})
        yield "kept", (self._shard(part), ("kept", part, result.documents))
        if (settings := self.settings.near) is not None:
            yield "signatures", (part, ("signatures", result.documents, result.signatures))
            for band, key in enumerate(near.keys(result.signatures, settings)):
                for number, inside in self._by_range(key):
                    of_band = band * len(self._ranges) + number
                    yield "keys", (of_band, (part, key[None, inside], result.documents[inside]))

    # --- near duplicates

    def pairs(self, of_range: tuple[int, Iterable[Any]]) -> Iterator[_Keyed]:
        """Pairs of documents with the same key of a band, by the part of the first of the pair."""
        item, other = tables.repeated(*_joined(of_range[1]))
        for part, inside in _parts_of(item):
            yield part, ("pairs", item[inside], other[inside])

    def with_signature(self, of_part: tuple[int, Iterable[Any]]) -> Iterator[_Keyed]:
        """Adds the signature of one document to each pair; by the part of the other."""
        pairs, signatures = _split(of_part[1])
        if not pairs:
            return
        item, other = np.unique(np.concatenate([np.stack(pair) for pair in pairs], axis=1), axis=1)
        result = _rows_of(item, *signatures[0])
        for part, inside in _parts_of(other):
            yield part, ("pairs", item[inside], other[inside], result[inside])

    def similar(self, of_part: tuple[int, Iterable[Any]]) -> Iterator[_Keyed]:
        """The pairs of near duplicates."""
        pairs, signatures = _split(of_part[1])
        for item, other, result in pairs:
            assert self.settings.near is not None
            retained = near.are_similar(result, _rows_of(other, *signatures[0]), self.settings.near)
            yield _ALL, (item[retained], other[retained])

    def groups(self, everything: tuple[int, Iterable[Arrays]]) -> Iterator[_Keyed]:
        """Clusters near duplicates; the numbers of all but the first of each group by part."""
        pairs = [np.stack(pair) for pair in everything[1]]
        documents, places = np.unique(np.concatenate(pairs, axis=1), return_inverse=True)
        groups = near.Groups(np.zeros(len(documents), np.int64))
        groups.join(*places.reshape(2, -1))
        every = np.arange(len(documents))
        yield from _by_part(documents[groups.first(every) != every])

    # --- shards

    def firsts(self, everything: tuple[int, Iterable[dict[str, Any]]]) -> Iterator[_Keyed]:
        """The number in the corpus of each part's first document, by shard."""
        counts = {about["part"]: about["count"] for about in everything[1]}
        first = 0
        for part in range(len(self.parts)):
            yield self._shard(part), ("first", part, first)
            first += counts[part]

    def of_shard(self, of_part: tuple[int, np.ndarray]) -> _Keyed:
        """Documents that are dropped, by shard."""
        return self._shard(of_part[0]), ("dropped", *of_part)

    def write(self, of_shard: tuple[int, Iterable[Any]]) -> _Keyed:
        """Writes a shard; returns its counts."""
        shard, result = of_shard[0], collections.defaultdict[str, dict[int, Any]](dict)
        for name, part, value in of_shard[1]:
            result[name][part] = value
        name, parts = shards.name_of(shard, self._shards), []
        for part, numbers in sorted(result["kept"].items()):
            retained = _flags(numbers)
            retained[result["dropped"].get(part, numbers[:0])] = False
            parts.append(shards.ShardPart(part=self.parts[part], retained=retained, first=result["first"][part]))
        if not any(item.retained.any() for item in parts):
            return _ALL, {}
        if (whole := self.files.done(name)) is not None:
            return _ALL, {"shard": name, "counts": dict(whole.counts)}
        with self.files.write(name) as file:
            file.counts = shards.write(file.path, parts, self.settings)
            file.records = file.counts["rows"]
        return _ALL, {"shard": name, "counts": dict(file.counts)}

    def save(self, everything: tuple[int, Iterable[dict[str, Any]]]) -> None:
        """Writes what the driver needs for the manifest."""
        with self.scratch.write(_RESULT) as file:
            file.write(json.dumps(list(everything[1])).encode())

    @property
    def _ranges(self) -> list[tuple[int, int]]:
        total = sum(file.size for file in {piece.file for part in self.parts for piece in part.pieces})
        return tables.ranges(total // _DOCUMENT_BYTES)

    def _by_range(self, keys: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """The number of each range that has keys, and which."""
        first = keys >> np.uint64(56)
        for number, (begin, end) in enumerate(self._ranges):
            inside = np.flatnonzero((first >= begin) & (first < end))
            if len(inside):
                yield number, inside

    def _shard(self, part: int) -> int:
        return part // self.settings.shard_parts

    @property
    def _shards(self) -> int:
        return -(-len(self.parts) // self.settings.shard_parts)


def _run(job: _Job, runner: str, options: Sequence[str]) -> None:
    """Runs the pipeline, and waits for its end."""
    beam = extras.require("apache_beam", extra="beam")
    chosen = [f"--runner={_RUNNERS.get(runner, runner)}", *options]
    if runner == "DaskRunner" and not any(option.startswith("--dask_npartitions") for option in options):
        chosen.append("--dask_partition_size=1")  # else one worker gets up to 128 parts
    pipeline = beam.Pipeline(options=extras.require("apache_beam.options.pipeline_options").PipelineOptions(chosen))
    read = pipeline | beam.Create(range(len(job.parts))) | beam.Reshuffle() | "hash" >> beam.FlatMap(job.hash)
    first = _tagged(beam, read, "keys") | "equal" >> beam.GroupByKey() | beam.FlatMap(job.without_equal)
    sketched = first | "by part" >> beam.GroupByKey() | "sketch" >> beam.FlatMap(job.sketch)
    summaries = _tagged(beam, read, "summary")
    for_shards = [_tagged(beam, sketched, "kept"), summaries | "parts" >> beam.GroupByKey() | beam.FlatMap(job.firsts)]
    results = [summaries, _tagged(beam, sketched, "filtered")]
    if job.settings.near is not None:
        dropped = _similar(beam, job, sketched)
        for_shards.append(dropped | "dropped by shard" >> beam.Map(job.of_shard))
        results.append(dropped | "dropped" >> beam.Map(_count_of))
    results.append(for_shards | "shards" >> beam.Flatten() | "by shard" >> beam.GroupByKey() | beam.Map(job.write))
    # The DaskRunner runs what the last step needs, and nothing else.
    _ = results | "results" >> beam.Flatten() | "result" >> beam.GroupByKey() | "save" >> beam.Map(job.save)
    result = pipeline.run()
    result.wait_until_finish()
    if runner == "DaskRunner":
        result.client.close()


def _similar(beam: Any, job: _Job, sketched: Any) -> Any:
    """The documents that are similar to an earlier one: their numbers by part."""
    assert job.settings.near is not None
    pairs = _tagged(beam, sketched, "keys") | "same key" >> beam.GroupByKey() | "pairs" >> beam.FlatMap(job.pairs)
    if job.settings.near.similarity:
        signatures = _tagged(beam, sketched, "signatures")
        item = [pairs, signatures] | "with signatures" >> beam.Flatten() | "one" >> beam.GroupByKey()
        item = item | "signature" >> beam.FlatMap(job.with_signature)
        other = [item, signatures] | "with others" >> beam.Flatten() | "other" >> beam.GroupByKey()
        edges = other | "similar" >> beam.FlatMap(job.similar)
    else:
        edges = pairs | "edges" >> beam.Map(_edges)
    return edges | "all" >> beam.GroupByKey() | "groups" >> beam.FlatMap(job.groups)


def _tagged(beam: Any, tagged: Any, tag: str) -> Any:
    """The elements with a tag. A runner may not have outputs with tags."""
    return tagged | f"{tag} of {tagged.producer.full_label}" >> beam.FlatMap(functools.partial(_with_tag, tag))


def _with_tag(tag: str, tagged: _Tagged) -> Iterator[_Keyed]:
    if tagged[0] == tag:
        yield tagged[1]


def _edges(pairs: _Keyed) -> _Keyed:
    _, item, other = pairs[1]
    return _ALL, (item, other)


def _count_of(of_part: tuple[int, np.ndarray]) -> _Keyed:
    return _ALL, {"near_duplicates": len(of_part[1])}


def _joined(blocks: Iterable[tuple[int, np.ndarray, np.ndarray]]) -> Arrays:
    """The keys of all parts, [c, n], and the documents that have them."""
    result = [(keys, documents.astype(np.int64) | part << _PART_BITS) for part, keys, documents in blocks]
    return np.concatenate([keys for keys, _ in result], axis=1), np.concatenate([documents for _, documents in result])


def _split(values: Iterable[Any]) -> tuple[list[Arrays], list[Arrays]]:
    """The pairs and the signatures of what was grouped."""
    result = collections.defaultdict[str, list[Arrays]](list)
    for name, *arrays in values:
        result[name].append(tuple(arrays))
    return result["pairs"], result["signatures"]


def _rows_of(documents: np.ndarray, numbers: np.ndarray, signatures: np.ndarray) -> np.ndarray:
    """The signatures of documents of a part that has those of `numbers`."""
    return signatures[np.searchsorted(numbers, documents & (1 << _PART_BITS) - 1)]


def _parts_of(documents: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """The parts that documents are of, and which are of each."""
    parts = documents >> _PART_BITS
    for part in np.unique(parts).tolist():
        yield part, np.flatnonzero(parts == part)


def _by_part(documents: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """The numbers of documents in their parts, sorted, by part."""
    for part, inside in _parts_of(documents):
        yield part, np.sort(documents[inside] & (1 << _PART_BITS) - 1)


def _flags(numbers: np.ndarray) -> np.ndarray:
    """[n] bool: which numbers are there, up to the largest."""
    result = np.zeros(int(numbers.max(initial=0)) + 1, bool)
    result[numbers] = True
    return result


def _finish(job: _Job, output: Output | BucketOutput, problems: Problems) -> Manifest:
    """Writes the index and the manifest."""
    path = job.scratch.path(_RESULT)
    result = json.loads(stores.of(path).read(path))
    read = sorted((entry for entry in result if "part" in entry), key=lambda entry: entry["part"])
    names = ("count", "keys", "text_bytes", "last_lines")
    summaries = [
        PartSummary(problems=Problems.from_json(entry["problems"]), **{name: entry[name] for name in names})
        for entry in read
    ]
    counts = summary.total(job.parts, summaries, problems)
    counts.update(dict.fromkeys(("filtered", "near_duplicates", "kept", "rows", "tokens"), 0))
    counts["exact_duplicates"] = counts["documents"] - counts["blank"]
    for item in result:
        counts["near_duplicates"] += item.get("near_duplicates", 0)
        counts["exact_duplicates"] -= item.get("read", 0)
        for reason, count in item.get("dropped", {}).items():
            counts.update({f"filtered_{reason}": count, "filtered": count})
    with output.part(summary.INDEX) as part:
        of_shards = {entry["shard"]: entry["counts"] for entry in result if "shard" in entry}
        part.write(summary.index(job.settings, job.parts, summaries, of_shards))
    return output.finish(counts, problems)
