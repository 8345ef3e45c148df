"""Reads cached SeqIO tasks in blocks, so that a resumed run seeks to its position.

seqio_cache_tasks writes a task's examples, as they are at its CacheDatasetPlaceholder, to TFRecord files. They are read here
as in ShardedSource: shuffled blocks, in groups of a few. The preprocessors after the cache run on one group at a time, each
with its own seed, and their results are shuffled. So an example depends only on its group, and a group can be reached
without reading or preprocessing others.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NoReturn

import numpy as np

from capibara.core.types import UserError
from capibara.data.dataset import Dataset
from capibara.data.packing.shuffle import bits, permutation
from capibara.data.pipeline.readers import GROUP, block_pool, position_in_epoch, positions_of
from capibara.data.shards import index as indexes
from capibara.data.shards.tfrecord import TfRecords
from capibara.data.tasks import tasks
from capibara.storage.store import Entry

_TOGETHER = 4  # blocks in a group
_LEAST_GROUPS = 16  # groups of each stream, if the cache is large enough
_SMALLEST, _LARGEST = 4 << 10, 2 << 20  # bytes of a block; not less, since a group's pipeline takes 0.1 s to build
_MADE_TOGETHER = 4  # groups of different streams that are preprocessed at a time, each by TensorFlow's own threads
_ENDLESS = 1 << 40  # nominal number of examples of a pipeline that is only inspected


class NotInBlocks(Exception):
    """A task cannot be read in blocks; the message says why."""


def check_cached(task: object, split: str, lengths: Mapping[str, int]) -> None:
    """Checks the cache of a task, or the caches of a mixture's tasks, without reading examples.

    Args:
      task: a seqio.Task or Mixture.
      split: the split to read.
      lengths: positions of each feature, for the preprocessors after the cache.

    Raises:
      UserError: it does not exist, lacks the split or a file, or has other features.
    """
    seqio = tasks.load()
    for part in _cached_parts(task):
        if not part.cache_dir:
            folders = [
                f"{folder.rstrip('/')}/{part.name.replace(':', '/')}" for folder in seqio.get_global_cache_dirs()
            ]
            raise UserError(
                f"SeqIO task {part.name!r} is not cached (Dataset.use_cached): no COMPLETED in "
                f"{', '.join(folders) or 'any folder, for none is named'}: write it with seqio_cache_tasks and name its "
                "output_cache_dir in Dataset.cache_dirs, or leave Dataset.use_cached out"
            )
        if split in part.splits:
            about = _info(part, split)
            _files(part, split, about)
            with contextlib.suppress(NotInBlocks):  # a ragged feature: SeqIO can read it
                _of_no_record(part, _parser(about), lengths)


def raise_damage(task: Any, split: str, error: Exception) -> NoReturn:
    """Raises a UserError that names the file of a cache that TensorFlow could not read, or with TensorFlow's error."""
    import tensorflow as tf

    for part in _cached_parts(task):
        if split in part.splits:
            files, reader = _files(part, split, _info(part, split)), TfRecords(block_bytes=_LARGEST)
            index = indexes.index_of(files, reader)
            if isinstance(error, tf.errors.DataLossError):  # read again, to name the record
                for file, start, stop in index.blocks.tolist():
                    reader.records(index.shards[file], start, stop)
    if isinstance(error, tf.errors.DataLossError):
        reason = str(error.message).splitlines()[0].rpartition("}}")[2].partition("[Op:")[0].strip()
        raise UserError(
            f"SeqIO task {task.name!r}: a record of its cache is corrupted ({reason}): write it again with seqio_cache_tasks"
        ) from error
    raise error


def fingerprint(task: object, split: str) -> dict[str, Any]:
    """A JSON value that identifies the cache of one task: equal only for files of the same names and sizes."""
    digest = hashlib.blake2b(digest_size=8)
    for file in _files(task, split, _info(task, split)):
        digest.update(f"{os.path.basename(file.url)}\0{file.size}\0".encode())
    return {"cache": digest.hexdigest()}


def paths(task: Any, split: str) -> list[str]:
    """The files of the cache of one task; empty: it has none."""
    return [file.url for file in _files(task, split, _info(task, split))] if task.supports_caching else []


def _cached_parts(task: object) -> list[Any]:
    return [part for part in getattr(task, "tasks", [task]) if part.supports_caching]


class CachedBlocks:
    """The blocks of one split of a cached task, in streams."""

    def __init__(self, task: Any, dataset: Dataset, split: str, lengths: Mapping[str, int], *, any_steps: bool):
        """Opens the cache.

        Args:
          task: a seqio.Task or Mixture.
          dataset: its number of streams and its seed.
          split: the split of the task.
          lengths: positions of each feature, for the preprocessors.
          any_steps: whether preprocessors after the cache may change the number of examples.

        Raises:
          NotInBlocks: it cannot be read in blocks.
          UserError: a file of the cache is cut short.
        """
        seqio = tasks.load()
        if not isinstance(task, seqio.Task):
            raise NotInBlocks("a mixture draws its examples from several tasks")
        if not task.supports_caching:
            raise NotInBlocks("the task has no CacheDatasetPlaceholder")
        self._task, self._lengths, self._count = task, lengths, dataset.task_shards
        self._seed, self._shuffles = dataset.seed, dataset.shuffle and split == "train"
        self._pool = ThreadPoolExecutor(_MADE_TOGETHER, "capibara-cached")
        about = _info(task, split)
        self._parse = _parser(about)
        if not self._only_maps() and not any_steps:
            raise NotInBlocks("its preprocessors after the cache change the number of examples")
        files = _files(task, split, about)
        size = sum(file.size for file in files) // (_TOGETHER * _LEAST_GROUPS * self._count)
        size = min(max(1 << max(size, 1).bit_length() - 1, _SMALLEST), _LARGEST)
        self._format = TfRecords(block_bytes=size)
        self._index = indexes.index_of(files, self._format)
        if len(self._index.blocks) < self._count:
            raise NotInBlocks(f"the cache has {len(self._index.blocks)} blocks for {self._count} streams")

    def fingerprint(self) -> dict[str, Any]:
        """A JSON value that is equal only for the same blocks."""
        index = self._index
        return {"bytes": index.size, "blocks": len(index.blocks), "together": _TOGETHER, "digest": index.digest()}

    def read(self, stream: int, begin: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields a stream's examples from number `begin` on; a number is GROUP * (group) + (number in the group)."""
        group, skip = divmod(begin, GROUP)
        making, empty = self._read_group(stream, group), 0
        while True:
            examples, making = making.result(), self._read_group(stream, group + 1)
            order = range(len(examples))
            if self._shuffles:
                order = permutation(len(examples), self._seed, stream, group).tolist()
            for i in order[skip:]:
                yield group * GROUP + skip, examples[i]
                skip += 1
            empty = 0 if len(examples) else empty + 1
            if empty * _TOGETHER > len(self._index.blocks):
                raise UserError(f"SeqIO task {self._task.name!r}: stream {stream} of its cache has no example")
            group, skip = group + 1, 0

    def name(self, stream: int, group: int, number: int) -> dict[str, Any]:
        """Identifies an example by its group's blocks and its number among their examples, for reports."""
        files, blocks = self._index.names(), self._index.blocks[self._blocks(stream, group)]
        return {"shard": stream, "blocks": [f"{files[file]}@{start}" for file, start, _ in blocks], "example": number}

    def _blocks(self, stream: int, group: int) -> list[int]:
        size, seed = len(self._index.blocks), self._seed if self._shuffles else None
        positions = positions_of(stream, self._count, group * _TOGETHER, _TOGETHER, None, size)
        return [position_in_epoch(size, at, seed)[1] for at in positions]

    def _read_group(self, stream: int, group: int) -> Future[list[dict[str, Any]]]:
        """Reads and preprocesses a group in the background."""
        reading = [block_pool().submit(self._records, block) for block in self._blocks(stream, group)]

        def make() -> list[dict[str, Any]]:
            return self._preprocessed([record for future in reading for record in future.result()], stream, group)

        return self._pool.submit(make)

    def _records(self, block: int) -> list[bytes]:
        file, start, stop = map(int, self._index.blocks[block])
        records = self._format.records(self._index.shards[file], start, stop)
        return [record for _, record in records if isinstance(record, bytes)]

    def _preprocessed(self, records: list[bytes], stream: int, group: int) -> list[dict[str, Any]]:
        """Applies the preprocessors after the cache to a group's examples."""
        if not records:
            return []
        import tensorflow as tf

        seed = int(bits(1, self._seed, stream, group)[0] >> np.uint64(33))
        data = tf.data.Dataset.from_tensor_slices(records).map(self._parse, num_parallel_calls=tf.data.AUTOTUNE)
        features = (*self._task.output_features, "domain")
        return [
            {name: example[name] for name in features if name in example}
            for example in self._after_cache(data, seed).as_numpy_iterator()
        ]

    def _after_cache(self, data: object, seed: int) -> Any:
        return _after_cache(self._task, data, self._lengths, seed)

    def _only_maps(self) -> bool:
        """Whether the preprocessors after the cache only map, by the number of examples that tf.data expects."""
        return int(_of_no_record(self._task, self._parse, self._lengths).cardinality()) == _ENDLESS


def _after_cache(task: Any, data: Any, lengths: Mapping[str, int], seed: int) -> Any:
    with tasks.BUILDING:
        return task.preprocess_postcache(data, sequence_length=lengths, seed=seed)


def _of_no_record(task: Any, parse: Callable[[Any], dict[str, Any]], lengths: Mapping[str, int]) -> Any:
    """Builds the pipeline of the preprocessors after the cache for a nominal number of examples, without reading any.

    Raises:
      UserError: they do not accept the cache's features, or do not produce the task's output features.
    """
    import tensorflow as tf

    data = tf.data.Dataset.range(_ENDLESS).map(lambda _: parse(tf.constant(b"")))
    again = "write the cache again with seqio_cache_tasks, or correct them"
    try:
        data = _after_cache(task, data, lengths, 0)
    except (ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        reason = f"no feature {reason}" if isinstance(error, KeyError) else reason
        raise UserError(
            f"SeqIO task {task.name!r}: its preprocessors do not accept the features of its cache ({reason}): {again}"
        ) from error
    for name, feature in task.output_features.items():
        if feature.required and name not in data.element_spec:
            raise UserError(
                f"SeqIO task {task.name!r} has no feature {name!r} after its preprocessors (it has: "
                f"{', '.join(data.element_spec)}): {again}"
            )
        spec = data.element_spec.get(name)
        if isinstance(spec, tf.TensorSpec) and spec.dtype != feature.dtype:
            raise UserError(
                f"SeqIO task {task.name!r}: the feature {name!r} of its cache is {spec.dtype.name}, must be "
                f"{tf.as_dtype(feature.dtype).name}: {again}"
            )
    return data


def _files(task: Any, split: str, about: Mapping[str, Any]) -> list[Entry]:
    """All files of a split; raises UserError if one is missing."""
    prefix, count = tasks.load().get_cached_tfrecord_prefix(task.cache_dir, split), about["num_shards"]
    files = indexes.listed(f"the cache of SeqIO task {task.name!r}", [f"{prefix}-*-of-{count:05}"])
    if len(files) != count:
        there = {os.path.basename(file.url) for file in files}
        names = (f"{os.path.basename(prefix)}-{number:05}-of-{count:05}" for number in range(count))
        missing = next((name for name in names if name not in there), "a file")
        raise UserError(
            f"SeqIO task {task.name!r}: {missing} is missing in {task.cache_dir}, which has {len(files)} of {count} files: "
            "copy it again"
        )
    return files


def _info(task: Any, split: str) -> dict[str, Any]:
    """The description of a split by seqio_cache_tasks."""
    import tensorflow as tf

    path = tasks.load().get_cached_info_path(task.cache_dir, split)
    try:
        with tf.io.gfile.GFile(path) as file:
            about = json.load(file)
        if int(about["num_shards"]) > 0 and about["features"].keys():
            return about
        reason = "no shards or no features"
    except tf.errors.NotFoundError:
        paths = tf.io.gfile.glob(tasks.load().get_cached_info_path(task.cache_dir, "*"))
        splits = sorted(os.path.basename(path).removeprefix("info.").removesuffix(".json") for path in paths)
        raise UserError(
            f"the cache of SeqIO task {task.name!r} in {task.cache_dir} has no split {split!r} (it has: "
            f"{', '.join(splits) or 'none'}): write it again with seqio_cache_tasks"
        ) from None
    except (tf.errors.OpError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = str(getattr(error, "message", error)).splitlines()[0]
    raise UserError(f"{path} cannot be read ({reason}): write the cache again with seqio_cache_tasks")


def _parser(about: Mapping[str, Any]) -> Callable[[Any], dict[str, Any]]:
    """A function from a serialized tf.train.Example to its features, as SeqIO reads a cache."""
    import tensorflow as tf

    features, types = {}, {}
    for name, feature in about["features"].items():
        shape, dtype = feature["shape"], feature["dtype"]
        if any(size is None for size in shape[1:]):
            raise NotInBlocks(f"its feature {name!r} is ragged")
        stored = "int64" if dtype in ("int32", "bool") else dtype
        if shape and shape[0] is None:
            features[name] = tf.io.FixedLenSequenceFeature(shape[1:], stored, allow_missing=True)
        else:
            features[name] = tf.io.FixedLenFeature(shape, stored)
        # Caches without a version store int32 as int64.
        types[name] = "int32" if dtype == "int64" and "seqio_version" not in about else dtype

    def parse(serialized: object) -> dict[str, Any]:
        example = tf.io.parse_single_example(serialized, features)
        return {_renamed(name): tf.cast(value, types[name]) for name, value in example.items()}

    return parse


def _renamed(feature: str) -> str:
    """The current name of a feature of an older cache."""
    return f"{feature.removesuffix('plaintext')}pretokenized" if feature.endswith("_plaintext") else feature
