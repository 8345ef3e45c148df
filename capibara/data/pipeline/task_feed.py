"""Rows of a SeqIO task or mixture.

As in T5X, a decoder reads an example's `inputs`, if it has any, before its `targets` and without loss, and the first
input of an example is the padding id. Unlike in T5X, an example longer than a row is not trimmed but cut into several
rows, unless `Dataset.inputs_length` is set. For an encoder-decoder `inputs` and `targets` are a pair, packed as by seqio's
EncDecFeatureConverter; targets without inputs get span corruption. An example's domain is its feature `domain`, or the
task's name.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from capibara.core.types import HostBatch, UserError
from capibara.data.dataset import CachedOrder, Dataset
from capibara.data.pipeline import cached as cached_task
from capibara.data.pipeline.cached import CachedBlocks, NotInBlocks, check_cached, raise_damage
from capibara.data.pipeline.examples import Assembler
from capibara.data.pipeline.feeds import Feed, Share, in_turn, layout_of, round_of
from capibara.data.pipeline.readers import GROUP
from capibara.data.pipeline.stream import Numbered, Row, RowStream, State
from capibara.data.tasks import tasks
from capibara.data.text import provenance
from capibara.data.tokenizers.vocabulary import Vocabulary


class TaskFeed(Feed):
    """Rows of a SeqIO task or mixture from `Dataset.task_shards` streams, whatever the number of hosts.

    Stream k of K reads seqio.ShardInfo(k, K) and fills rows [k * B / K, (k + 1) * B / K) of every global batch of B rows. A
    host opens the streams of its rows. SeqIO gets the same seed for all streams: if a source has fewer files than streams,
    its examples are distributed over them, which requires the same order in each. Each stream shuffles the rows of a
    window differently.
    """

    def __init__(self, dataset: Dataset, share: Share):
        super().__init__(dataset, share)
        assert dataset.mixture_or_task_name is not None
        self._task = tasks.get(dataset.mixture_or_task_name, dataset.task_module)
        self._endless = share.epochs is None
        self._shards = dataset.task_shards if self._endless else 1
        self._each = share.batch_size // self._shards  # rows per stream in a global batch
        self.first_row = share.first_row // self._each
        self._skip = share.first_row - self.first_row * self._each  # rows of the first stream on earlier hosts
        splits = tasks.splits_of(self._task)
        if share.split not in splits:
            raise UserError(
                f"SeqIO task {self._task.name!r} has no split {share.split!r} (it has: {', '.join(sorted(splits))})"
            )
        self._blocks, self._not_in_blocks = self._open_blocks() if dataset.use_cached else (None, "it is not cached")
        for feature in ("targets", "inputs"):
            if feature == "targets" or feature in self._task.output_features:
                _check_same(tasks.vocabulary_of(self._task, feature), dataset.get_vocabulary(), self._task.name)

    def _open_blocks(self) -> tuple[CachedBlocks | None, str]:
        """The blocks of a cached task; or None, and why it is not read in blocks."""
        dataset = self.dataset
        tasks.add_cache_dirs(dataset.cache_dirs)
        check_cached(self._task, self.share.split, self._lengths())
        order = dataset.cached_order
        if not self._endless or order is CachedOrder.SEQIO:
            return None, "Dataset.cached_order is 'seqio'"
        try:
            forced = order is CachedOrder.BLOCKS
            return CachedBlocks(self._task, dataset, self.share.split, self._lengths(), any_steps=forced), ""
        except NotInBlocks as error:
            if forced:
                raise UserError(
                    f"Dataset.cached_order ('blocks') with SeqIO task {self._task.name!r}: {error}: leave it out"
                ) from None
            return None, str(error)

    def initial_state(self) -> list[State]:
        return [State()] * max(1, self.share.rows // self._each)

    @functools.cached_property
    def datasets(self) -> list[provenance.Value]:
        return _datasets(self._task, self.share.split, self.dataset.use_cached)

    def settings(self) -> dict[str, Any]:
        order = {"cached_order": "blocks" if self._blocks else "seqio"} if self.dataset.use_cached else {}
        parted = {} if self.dataset.inputs_length is None else {"inputs_length": self.dataset.inputs_length}
        return {**super().settings(), "task_shards": self._shards, **order, **parted}

    def understood(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.dataset.use_cached:
            settings = {"cached_order": "seqio", **settings}
            settings = {**settings, "data": self._of_the_cache(settings.get("data"))}
        hosts = settings.get("hosts")
        if hosts is None:
            return settings
        if hosts > 1:
            raise UserError(
                f"the data state is of an older version, in which the rows depended on the number of hosts ({hosts}), and "
                "cannot be resumed: start another run from its weights, with Trainer.init_from = its folder, another "
                "MODEL_DIR and Dataset.task_shards"
            )
        return {**{name: value for name, value in settings.items() if name != "hosts"}, "task_shards": 1}

    def data_fingerprint(self) -> dict[str, Any]:
        if self._blocks is not None:
            return {"task": self._task.name, "cache": self._blocks.fingerprint()}
        parts = getattr(self._task, "tasks", [self._task])
        return {"task": self._task.name, "sources": {part.name: self._source_fingerprint(part) for part in parts}}

    def _source_fingerprint(self, task: Any) -> dict[str, Any]:
        split = self.share.split
        if split not in tasks.splits_of(task):
            return {}
        if self.dataset.use_cached and task.supports_caching:  # its source may be missing on this machine
            return cached_task.fingerprint(task, split)
        digest = hashlib.blake2b(digest_size=8)
        for shard in task.source.list_shards(split):
            digest.update(f"{os.path.basename(shard)}\0".encode())
            if os.path.isfile(shard):
                digest.update(f"{os.path.getsize(shard)}\0{os.stat(shard).st_mtime_ns}\0".encode())
        return {"examples": task.num_input_examples(split), "shards": digest.hexdigest()}

    def _of_the_cache(self, saved: object) -> Any:
        """Updates a saved fingerprint of an older version, which identified the sources of cached tasks."""
        sources = saved.get("sources", {}) if isinstance(saved, Mapping) and self._blocks is None else {}
        cached = [part for part in getattr(self._task, "tasks", [self._task]) if part.supports_caching]
        old = any("examples" in sources.get(part.name, ()) for part in cached)
        return self.data_fingerprint() if old else saved

    def batches(self, states: Sequence[State]) -> Iterator[tuple[HostBatch, Sequence[State]]]:
        begin_s, logger = time.perf_counter(), logging.getLogger(__name__)
        resumed = self._blocks is None and any(state.document for state in states)
        if resumed:
            logger.warning(
                "SeqIO task %r resumes at example %d: it reads and preprocesses all before it again (%s); a cached task "
                "whose preprocessors after the cache only map, or ShardedSource, resumes by position",
                self._task.name,
                sum(state.document for state in states),
                self._not_in_blocks,
            )
        for batch in in_turn(self._streams(states), self._each, self._skip, self.share.rows, self.dataset):
            if resumed:
                logger.warning("that took %.1f s", time.perf_counter() - begin_s)
                resumed = False
            yield batch
        if self._endless:
            raise UserError(
                f"SeqIO task {self._task.name!r} has no example for each of its {self._shards} streams in split "
                f"{self.share.split!r}: lower Dataset.task_shards, or add data"
            )

    def next_rows(self, states: Sequence[State]) -> list[Row]:
        rows = round_of(self._streams(states), self._each)
        return [row for at, row in rows if self._skip <= at < self._skip + self.share.rows]

    def name(self, position: tuple[int, ...]) -> dict[str, Any]:
        if self._blocks is not None:
            return self._blocks.name(*position)
        shard, number = position
        return {"shard": shard, "example": number}

    def _streams(self, states: Sequence[State]) -> list[RowStream]:
        return [self._stream(shard, state) for shard, state in enumerate(states, self.first_row)]

    def _stream(self, shard: int, state: State) -> RowStream:
        seeds = (self.dataset.seed, shard) if self.shuffles else None
        layout = layout_of(self.dataset, self._shards, seeds)
        # As for rows of a source: the windows of many streams must not all end at the same step.
        first_rows = math.ceil(layout.window_rows * (shard + 1) / self._shards)
        return RowStream(functools.partial(self._documents, shard), layout, first_rows=first_rows, state=state)

    def _documents(self, shard: int, begin: int) -> Iterator[Numbered]:
        assemble = Assembler(self.dataset, adds_end=False)
        result = self._read(shard, begin) if self._blocks is None else self._blocks.read(shard, begin)
        for number, example in result:
            targets = _ids(example, "targets", self._task.name)
            inputs = _ids(example, "inputs", self._task.name) if "inputs" in example else None
            if (longest := self.dataset.inputs_length) is not None:
                targets = targets[: self.dataset.length - longest]
                inputs = None if inputs is None else inputs[:longest]
            domain = example["domain"].decode() if "domain" in example else self._task.name
            position = (shard, number) if self._blocks is None else (shard, *divmod(number, GROUP))
            yield number, assemble(targets, inputs, domain, position)

    def _read(self, shard: int, begin: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields a stream's examples from number `begin` on, in SeqIO's order."""
        import tensorflow as tf

        try:
            yield from enumerate(self._examples(shard).skip(begin).as_numpy_iterator(), begin)
        except tf.errors.OpError as error:
            if self.dataset.use_cached:
                raise_damage(self._task, self.share.split, error)
            raise

    def _lengths(self) -> dict[str, int]:
        dataset = self.dataset
        return tasks.lengths(self._task, dataset.length, dataset.encoder_length, dataset.inputs_length)

    def _examples(self, shard: int) -> Any:
        """The tf.data.Dataset of a stream's examples, in an order that depends only on the seed."""
        seqio, share = tasks.load(), self.share
        import tensorflow as tf

        arguments = dict(
            sequence_length=self._lengths(),
            split=share.split,
            use_cached=self.dataset.use_cached,
            shuffle=self.shuffles,
            seed=self.dataset.seed,
            shard_info=seqio.ShardInfo(shard, self._shards) if self._shards > 1 else None,
            num_epochs=share.epochs,
            trim_output_features=False,
        )
        try:
            with tasks.BUILDING:
                return self._pipeline(arguments)
        except (ValueError, tf.errors.OpError) as error:
            raise UserError(f"SeqIO task {self._task.name!r}: {' '.join(str(error).split())}") from error

    def _pipeline(self, arguments: dict[str, Any]) -> Any:
        if self._endless or isinstance(self._task, tasks.load().Task):
            return self._task.get_dataset(**arguments)
        # A mixture stops at its first exhausted task, so an epoch reads one task after the other.
        parts = [task.get_dataset(**arguments) for task in self._task.tasks if arguments["split"] in task.splits]
        features = tuple(self._task.output_features)
        parts = [part.map(lambda example: {name: example[name] for name in features}) for part in parts]
        return functools.reduce(lambda first, second: first.concatenate(second), parts)


def _datasets(task: object, split: str, is_cached: bool) -> list[provenance.Value]:
    """The data sets of a task's or mixture's files: of the cache, or those that its sources list."""
    parts = [part for part in getattr(task, "tasks", [task]) if split in tasks.splits_of(part)]
    if is_cached:
        return provenance.of_paths(path for part in parts for path in cached_task.paths(part, split))
    return provenance.of_paths(os.fspath(shard) for part in parts for shard in part.source.list_shards(split))


def _ids(example: dict[str, Any], feature: str, name: str) -> np.ndarray:
    ids = example[feature]
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise UserError(
            f"SeqIO task {name!r}: {feature} must be a list of token ids, not {ids.dtype} {ids.shape}: "
            "add seqio.preprocessors.tokenize"
        )
    return ids.astype(np.int32, copy=False)


def _check_same(task: Vocabulary, vocabulary: Vocabulary, name: str) -> None:
    """Raises UserError unless the vocabulary of Gin has the task's ids; it may have more unused ids."""
    common = min(task.size, vocabulary.size)
    same = (
        np.array_equal(task.token_bytes()[:common], vocabulary.token_bytes()[:common])
        and not task.token_bytes()[common:].any()
        and (task.pad_id, task.eos_id) == (vocabulary.pad_id, vocabulary.eos_id)
        and task.decode(range(common)) == vocabulary.decode(range(common))
    )
    if not same:
        raise UserError(
            f"Dataset.vocabulary ({vocabulary}) differs from the one of SeqIO task {name!r} "
            f"(sizes {vocabulary.size} and {task.size}): leave Dataset.vocabulary out, or set the same"
        )
