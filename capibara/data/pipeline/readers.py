"""The documents of a row's stream, in order: from a corpus with random access, or from one in blocks."""

from __future__ import annotations

import abc
import concurrent.futures
import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from capibara.core import user_modules
from capibara.core.fields import returned, short
from capibara.core.types import UserError
from capibara.data.dataset import Dataset
from capibara.data.packing.shuffle import epoch_order, permutation
from capibara.data.pipeline.examples import Assembler, Tally
from capibara.data.pipeline.stream import AnyDocument, Numbered
from capibara.data.sources.sources import Blocks, Corpus, Documents, Example

_READ_TOGETHER = 16  # documents tokenized at a time: tokenizers are faster on batches
GROUP = 1 << 32  # numbers in a stream that are reserved for a group of blocks; most of them are unused
_THREADS = 32  # threads that read blocks; they mostly wait for a bucket
_LOOKED_AT = 64  # blocks to search for text before a corpus is called empty


class Found(NamedTuple):
    """A document of a stream.

    Attributes:
      number: its number in the stream.
      position: its position in the data.
      split_number: its number in the split, from 1; 0: unknown (blocks).
      example: its content.
    """

    number: int
    position: tuple[int, ...]
    split_number: int
    example: Example


class Reader(abc.ABC):
    """Reads the documents of one stream."""

    def __init__(
        self,
        corpus: Corpus,
        dataset: Dataset,
        tally: Tally,
        *,
        index: int,
        count: int,
        shuffles: bool,
        epochs: int | None,
        need: Callable[[AnyDocument], int],
    ):
        """Opens a stream.

        Args:
          corpus: the documents.
          dataset: the configuration.
          tally: counts conversations.
          index: index of the stream, from 0.
          count: number of streams.
          shuffles: whether to shuffle each epoch.
          epochs: passes over the corpus; None: endless.
          need: the number of positions that a document needs in a row.
        """
        self._dataset, self._tally, self._need = dataset, tally, need
        self._index, self._count, self._epochs = index, count, epochs
        self._seed = dataset.seed if shuffles else None

    def read(self, begin: int) -> Iterator[Numbered]:
        """Yields the stream's documents from number `begin` on."""
        return self._checked(begin, self._groups_from(begin))

    @abc.abstractmethod
    def name(self, position: tuple[int, ...]) -> dict[str, Any]:
        """Identifies a document by its position in the data, for reports."""

    @abc.abstractmethod
    def epochs(self, number: int) -> float:
        """The passes over the corpus before document `number` of the stream; of blocks without the group that is read."""

    @abc.abstractmethod
    def _groups_from(self, begin: int) -> Iterator[list[Found]]:
        """Yields documents from number `begin` on, in groups; may begin to read before it is iterated."""

    @abc.abstractmethod
    def _is_pass(self, since: int, number: int) -> bool:
        """Whether the stream's numbers from `since` to `number` span a whole pass over the corpus."""

    @abc.abstractmethod
    def _samples(self) -> Iterator[Example]:
        """Examples by which to tell whether the corpus has text."""

    def _checked(self, begin: int, rows: Iterator[list[Found]]) -> Iterator[Numbered]:
        text, any_text = begin - 1, False  # text: the number of the last document with text
        for number, document in self._assembled(rows):
            if self._need(document) > 0:
                text, any_text = number, True
            elif self._epochs is None and self._is_pass(text, number):
                raise self._nothing_left()
            yield number, document
        if not begin and not any_text and self._tally.read:
            raise self._nothing_left()  # otherwise an evaluation would silently have no rows

    def _nothing_left(self) -> UserError:
        if self._tally.read:
            return self._tally.nothing_left(self._dataset)
        return UserError(
            "a row's stream has only empty documents: set Dataset.shuffle = True, or remove the empty ones"
        )

    def _assembled(self, groups: Iterator[list[Found]]) -> Iterator[Numbered]:
        assemble = Assembler(self._dataset, adds_end=self._dataset.append_eos, tally=self._tally)
        checked = False
        for group in groups:
            encoded = self._encoded([value.example for value in group if _is_plain(value.example)])
            for result in group:
                if result.example.row is not None:
                    yield result.number, assemble.packed(result.example.row, result.position)
                    continue
                if result.example.loss is not None:
                    yield result.number, assemble.rendered(result.example, result.split_number, result.position)
                    continue
                ids, inputs = next(encoded)
                if not len(ids) and not checked:
                    self._check_text()  # otherwise rows of end tokens would be packed
                    checked = True
                yield result.number, assemble(ids, inputs, result.example.domain, result.position)

    def _encoded(self, examples: Sequence[Example]) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """The token ids of each example's text and inputs."""
        encode = self._dataset.get_vocabulary().encode_batch
        inputs = iter(encode([example.inputs for example in examples if example.inputs is not None]))
        for ids, example in zip(encode([example.text for example in examples]), examples, strict=True):
            yield ids, None if example.inputs is None else next(inputs)

    def _check_text(self) -> None:
        """Raises UserError if all documents are empty; usually the first one shows that they are not."""
        encode = self._dataset.get_vocabulary().encode_batch
        if not any(len(encode([example.text])[0]) for example in self._samples()):
            raise UserError("the documents have no text: the corpus is empty")


def _is_plain(example: Example) -> bool:
    """Whether it is a text to tokenize."""
    return example.loss is None and example.row is None


def _checked(example: Example, documents: Documents) -> Example:
    """What a source of the user's has returned; raises UserError if it is no text."""
    name = f"{type(documents).__name__}.example"
    if not isinstance(returned(example, Example, name).text, str):
        raise UserError(f"{name} returned {short(example)}, its text must be a str: see docs/extending.md")
    return example


class DocumentReader(Reader):
    """Reads documents number index, index + count, ... of the concatenated epochs.

    Args:
      within: the numbers of the documents that are read; None: all.
      size: numbers of an epoch, at least as many as documents; those that are left are skipped.
    """

    def __init__(
        self,
        documents: Documents,
        *arguments: Any,
        within: range | None = None,
        size: int | None = None,
        **options: Any,
    ):
        super().__init__(documents, *arguments, **options)
        self._documents, self._within = documents, range(len(documents)) if within is None else within
        self._size = len(self._within) if size is None else size
        # What tells a position from those of other ranges.
        self._of_range = () if within is None else (within.start, len(within))

    def name(self, position: tuple[int, ...]) -> dict[str, Any]:
        at, *of_range = position
        start, size = of_range or (0, self._size)
        epoch, number = position_in_epoch(size, at, self._seed)
        return {"document": start + number, "epoch": epoch}

    def epochs(self, number: int) -> float:
        return number * self._count / self._size

    def _groups_from(self, begin: int) -> Iterator[list[Found]]:
        first, group, is_own = begin, 1, user_modules.own_class(self._documents) is not None
        while at_positions := positions_of(self._index, self._count, first, group, self._epochs, self._size):
            result = []
            for number, at in enumerate(at_positions, first):
                inner = position_in_epoch(self._size, at, self._seed)[1]
                if inner >= len(self._within):
                    continue
                example = self._documents.example(self._within[inner])
                example = _checked(example, self._documents) if is_own else example
                result.append(Found(number, (at, *self._of_range), self._within[inner] + 1, example))
            yield result
            first, group = first + len(at_positions), _READ_TOGETHER

    def _is_pass(self, since: int, number: int) -> bool:
        return number - since > len(self._within)

    def _samples(self) -> Iterator[Example]:
        return (self._documents.example(i) for i in self._within)


class BlockReader(Reader):
    """Reads blocks number index, index + count, ... of the concatenated epochs; shuffles the documents of a few together.

    The number of documents in a block is only known once it is read. So a document's number consists of the number of its
    group of blocks and, in the lower 32 bits, its number in the group. The next group is read in the background.
    """

    def __init__(self, blocks: Blocks, *arguments: Any, **options: Any):
        super().__init__(blocks, *arguments, **options)
        self._blocks = blocks
        self._together = 1 if self._seed is None else blocks.mix_blocks

    def name(self, position: tuple[int, ...]) -> dict[str, Any]:
        epoch, block, number = position
        return {**self._blocks.name(block), "document": number, "epoch": epoch}

    def epochs(self, number: int) -> float:
        return number // GROUP * self._together * self._count / len(self._blocks)

    def _groups_from(self, begin: int) -> Iterator[list[Found]]:
        return self._split(begin, self._start_group(begin // GROUP))

    def _split(self, begin: int, reading: list[_Reading]) -> Iterator[list[Found]]:
        group, skip = divmod(begin, GROUP)
        empty = 0
        while reading:
            following = self._start_group(group + 1)
            documents = [
                ((item.epoch, item.block, i), example)
                for item in reading
                for i, example in enumerate(item.examples.result())
            ]
            order = range(len(documents))
            if self._seed is not None:
                order = permutation(len(documents), self._seed, self._index, group).tolist()
            numbered = [(group * GROUP + i, *documents[k]) for i, k in enumerate(order)][skip:]
            size = 1 if group == begin // GROUP else _READ_TOGETHER
            at = 0
            while at < len(numbered):
                yield [Found(number, position, 0, example) for number, position, example in numbered[at : at + size]]
                at, size = at + size, _READ_TOGETHER
            empty = 0 if documents else empty + 1
            if self._epochs is None and empty > self._groups:
                raise self._nothing_left()
            reading, group, skip = following, group + 1, 0

    def _start_group(self, group: int) -> list[_Reading]:
        """Starts to read the blocks of a group in the background."""
        at_positions = positions_of(
            self._index, self._count, group * self._together, self._together, self._epochs, len(self._blocks)
        )
        result = (position_in_epoch(len(self._blocks), at, self._seed) for at in at_positions)
        return [_Reading(epoch, block, block_pool().submit(self._blocks.examples, block)) for epoch, block in result]

    @property
    def _groups(self) -> int:
        """The number of groups with as many blocks as the corpus."""
        return math.ceil(len(self._blocks) / self._together) + 1

    def _is_pass(self, since: int, number: int) -> bool:
        return number // GROUP - since // GROUP > self._groups

    def _samples(self) -> Iterator[Example]:
        for i in range(min(_LOOKED_AT, len(self._blocks))):
            yield from self._blocks.examples(i)


class _Reading(NamedTuple):
    """A block that is being read."""

    epoch: int
    block: int
    examples: concurrent.futures.Future[list[Example]]


def block_pool() -> concurrent.futures.ThreadPoolExecutor:
    """The threads that read blocks."""
    return _pool(os.getpid())


@functools.cache
def _pool(process: int) -> concurrent.futures.ThreadPoolExecutor:
    """One pool per process: threads do not survive a fork."""
    return concurrent.futures.ThreadPoolExecutor(_THREADS, "capibara-blocks")


def positions_of(index: int, count: int, number: int, most: int, epochs: int | None, size: int) -> range:
    """The positions, in the concatenated epochs of a corpus, of a stream's documents (or blocks).

    Args:
      index: index of the stream.
      count: number of streams.
      number: number in the stream of the first document.
      most: the largest number of documents.
      epochs: number of epochs; None: endless.
      size: documents in an epoch.
    """
    first = index + number * count
    stop = first + most * count
    return range(first, stop if epochs is None else min(stop, size * epochs), count)


def position_in_epoch(size: int, at: int, seed: int | None) -> tuple[int, int]:
    """The epoch, and the document's index in the corpus, at position `at` of the concatenated epochs.

    `seed` shuffles each epoch; None: not shuffled.
    """
    epoch, i = divmod(at, size)
    return epoch, i if seed is None else int(epoch_order(size, seed, epoch)[i])
