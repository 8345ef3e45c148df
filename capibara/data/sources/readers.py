"""Which documents a row's stream has, in which order: of a corpus with random access, and of one in blocks."""

from __future__ import annotations

import abc
import concurrent.futures
import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from capibara.core.types import UserError
from capibara.data.dataset import Dataset
from capibara.data.packing.examples import Assembler, Tally
from capibara.data.pipeline.shuffle import epoch_order, permutation
from capibara.data.sources.sources import Blocks, Corpus, Documents, Example
from capibara.data.sources.stream import AnyDocument, Numbered

_READ_TOGETHER = 16  # documents tokenized at a time: tokenizers are faster on several
GROUP = 1 << 32  # numbers of a stream that a group of blocks has, most of which no document has
_THREADS = 32  # that read blocks: they wait for a bucket
_LOOKED_AT = 64  # blocks of a corpus whose first document is empty, before it is called empty


class Found(NamedTuple):
    """A document in its stream.

    Attributes:
      number: in the stream.
      place: where it is in the data.
      told: its number in the split, counted from 1, where batches tell it; 0: it has none.
      example: what its source tells.
    """

    number: int
    place: tuple[int, ...]
    told: int
    example: Example


class Reader(abc.ABC):
    """Documents of stream `index` of `count`."""

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
          corpus: where the documents are.
          dataset: what is made of them.
          tally: counts conversations.
          index: which stream.
          count: of how many.
          shuffles: whether each epoch has an order of its own.
          epochs: passes over the corpus; None never ends.
          need: positions of rows that a document takes.
        """
        self._dataset, self._tally, self._need = dataset, tally, need
        self._index, self._count, self._epochs = index, count, epochs
        self._seed = dataset.seed if shuffles else None

    def read(self, begin: int) -> Iterator[Numbered]:
        """Documents from the stream's number `begin` on."""
        return self._checked(begin, self._found(begin))

    @abc.abstractmethod
    def name(self, place: tuple[int, ...]) -> dict[str, Any]:
        """How a person finds a document again."""

    @abc.abstractmethod
    def _found(self, begin: int) -> Iterator[list[Found]]:
        """Documents from number `begin` on, some at a time; may begin to read before it is iterated."""

    @abc.abstractmethod
    def _is_pass(self, since: int, number: int) -> bool:
        """Whether the documents of a stream from number `since` up to `number` are as many as all of the corpus."""

    @abc.abstractmethod
    def _samples(self) -> Iterator[Example]:
        """Examples that show whether the corpus holds text."""

    def _checked(self, begin: int, found: Iterator[list[Found]]) -> Iterator[Numbered]:
        text, any_text = begin - 1, False  # where text was last
        for number, document in self._assembled(found):
            if self._need(document) > 0:
                text, any_text = number, True
            elif self._epochs is None and self._is_pass(text, number):
                raise self._nothing_left()
            yield number, document
        if not begin and not any_text and self._tally.read:
            raise self._nothing_left()  # else an evaluation would go over no rows without a word

    def _nothing_left(self) -> UserError:
        if self._tally.read:
            return self._tally.nothing_left(self._dataset)
        return UserError("none of a row's documents holds text: set Dataset.shuffle = True, or remove the empty ones")

    def _assembled(self, groups: Iterator[list[Found]]) -> Iterator[Numbered]:
        assemble = Assembler(self._dataset, adds_end=self._dataset.append_eos, tally=self._tally)
        checked = False
        for group in groups:
            encoded = self._encoded([found.example for found in group if found.example.loss is None])
            for found in group:
                if found.example.loss is not None:
                    yield found.number, assemble.rendered(found.example, found.told, found.place)
                    continue
                ids, inputs = next(encoded)
                if not len(ids) and not checked:
                    self._check_text()  # before end tokens alone fill the rows
                    checked = True
                yield found.number, assemble(ids, inputs, found.example.domain, found.place)

    def _encoded(self, examples: Sequence[Example]) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """Token ids of each example's text and inputs."""
        encode = self._dataset.get_vocabulary().encode_batch
        inputs = iter(encode([example.inputs for example in examples if example.inputs is not None]))
        for ids, example in zip(encode([example.text for example in examples]), examples, strict=True):
            yield ids, None if example.inputs is None else next(inputs)

    def _check_text(self) -> None:
        """Refuses a corpus whose documents are all empty; where they are not, the first one mostly tells."""
        encode = self._dataset.get_vocabulary().encode_batch
        if not any(len(encode([example.text])[0]) for example in self._samples()):
            raise UserError("the documents hold no text: the corpus is empty")


class DocumentReader(Reader):
    """Numbers index, index + count, ... of the epochs in a row."""

    def __init__(self, documents: Documents, *arguments: Any, **options: Any):
        super().__init__(documents, *arguments, **options)
        self._documents = documents

    def name(self, place: tuple[int, ...]) -> dict[str, Any]:
        epoch, number = place_in_epoch(len(self._documents), place[0], self._seed)
        return {"document": number, "epoch": epoch}

    def _found(self, begin: int) -> Iterator[list[Found]]:
        first, group = begin, 1
        while at_places := places_of(self._index, self._count, first, group, self._epochs, len(self._documents)):
            found = []
            for number, at in enumerate(at_places, first):
                inner = place_in_epoch(len(self._documents), at, self._seed)[1]
                found.append(Found(number, (at,), inner + 1, self._documents.example(inner)))
            yield found
            first, group = first + len(at_places), _READ_TOGETHER

    def _is_pass(self, since: int, number: int) -> bool:
        return number - since > len(self._documents)

    def _samples(self) -> Iterator[Example]:
        return (self._documents.example(i) for i in range(len(self._documents)))


class BlockReader(Reader):
    """Blocks index, index + count, ... of the epochs in a row, some of them read together and their documents mixed.

    How many documents a block has is known when it is read: so a document's number has that of its group of blocks and,
    in the lower 32 bits, its own in the group. The next group is read while one is used.
    """

    def __init__(self, blocks: Blocks, *arguments: Any, **options: Any):
        super().__init__(blocks, *arguments, **options)
        self._blocks = blocks
        self._together = 1 if self._seed is None else blocks.mix_blocks

    def name(self, place: tuple[int, ...]) -> dict[str, Any]:
        epoch, block, number = place
        return {**self._blocks.name(block), "document": number, "epoch": epoch}

    def _found(self, begin: int) -> Iterator[list[Found]]:
        return self._split(begin, self._begun(begin // GROUP))

    def _split(self, begin: int, reading: list[_Reading]) -> Iterator[list[Found]]:
        group, skip = divmod(begin, GROUP)
        empty = 0
        while reading:
            following = self._begun(group + 1)
            documents = [
                ((one.epoch, one.block, i), example)
                for one in reading
                for i, example in enumerate(one.examples.result())
            ]
            order = range(len(documents))
            if self._seed is not None:
                order = permutation(len(documents), self._seed, self._index, group).tolist()
            numbered = [(group * GROUP + i, *documents[k]) for i, k in enumerate(order)][skip:]
            size = 1 if group == begin // GROUP else _READ_TOGETHER
            at = 0
            while at < len(numbered):
                yield [Found(number, place, 0, example) for number, place, example in numbered[at : at + size]]
                at, size = at + size, _READ_TOGETHER
            empty = 0 if documents else empty + 1
            if self._epochs is None and empty > self._groups:
                raise self._nothing_left()
            reading, group, skip = following, group + 1, 0

    def _begun(self, group: int) -> list[_Reading]:
        """Reads the blocks of a group in the background."""
        at_places = places_of(
            self._index, self._count, group * self._together, self._together, self._epochs, len(self._blocks)
        )
        found = (place_in_epoch(len(self._blocks), at, self._seed) for at in at_places)
        return [_Reading(epoch, block, block_pool().submit(self._blocks.examples, block)) for epoch, block in found]

    @property
    def _groups(self) -> int:
        """Groups of a stream that are as many blocks as the corpus."""
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
    """Of each process its own, for they do not survive a fork."""
    return concurrent.futures.ThreadPoolExecutor(_THREADS, "capibara-blocks")


def places_of(index: int, count: int, number: int, most: int, epochs: int | None, size: int) -> range:
    """The places of up to `most` documents (or blocks) of a stream from `number` on in all epochs of `size` in a row."""
    first = index + number * count
    stop = first + most * count
    return range(first, stop if epochs is None else min(stop, size * epochs), count)


def place_in_epoch(size: int, at: int, seed: int | None) -> tuple[int, int]:
    """The epoch and the number of the document at place `at` of all epochs in a row, shuffled where there is a seed."""
    epoch, i = divmod(at, size)
    return epoch, i if seed is None else int(epoch_order(size, seed, epoch)[i])
