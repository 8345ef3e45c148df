"""Turns a stream of documents into a stream of packed rows, with a state of four integers.

The stream packs one window of documents after the other. The documents alone decide where a window ends, so the state is
the document at which the current window begins and the number of its rows that were consumed. A restored stream reads that
window again; no buffer is saved or lost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from capibara.core.types import HostBatch, UserError
from capibara.data.packing.packing import Document, Packing, Window
from capibara.data.packing.pairs import Pairs, PairWindow
from capibara.data.packing.preferences import Answers, PreferenceWindow
from capibara.data.packing.rows import PackedDocuments, PackedWindow

AnyDocument = Document | Pairs | Answers | PackedDocuments
Numbered = tuple[int, AnyDocument]  # a document's number in the stream, and the document; numbers ascend, with gaps
AnyWindow = Window | PairWindow | PreferenceWindow | PackedWindow
D = TypeVar("D", Document, Pairs, Answers, PackedDocuments)


class State(NamedTuple):
    """The state of a stream.

    Attributes:
      document: number in the stream of the first document of the current window.
      offset: tokens of that document that belong to the previous window (CONCAT only).
      row: number of rows of the window that were consumed.
      checksum: of the window's tokens; 0 before its first row.
    """

    document: int = 0
    offset: int = 0
    row: int = 0
    checksum: int = 0


class Row(NamedTuple):
    """A packed row that is not copied yet, and the state of its stream after it.

    Attributes:
      window: the window that has the row; None: the row is padding.
      number: of the row in the window.
      state: of the stream after the row.
    """

    window: AnyWindow | None
    number: int
    state: State

    def positions(self) -> list[tuple[int, ...]]:
        """The positions in the data of the row's documents."""
        return [] if self.window is None else self.window.positions(self.number)

    def fill(self, batch: HostBatch, b: int) -> None:
        """Copies the row into row `b` of an empty batch."""
        if self.window is not None:
            self.window.fill(batch, b, self.number)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How a stream is packed.

    Attributes:
      length: positions in a row.
      packing: how documents share rows.
      pad_id: the padding id.
      window_rows: a window has tokens for at least so many rows; more reduce padding, fewer start sooner.
      window_documents: a window has at least so many documents; more shuffle better.
      shuffle_seeds: integers that choose the order of a window's rows; None: the order of the corpus.
      encoder_length: positions in a row of an encoder, for pairs; None: for other documents.
      start_id: a decoder's first input, for pairs; None: the padding id.
      most_pairs: the largest number of pairs of answers in a row; None: for other documents.
    """

    length: int
    packing: Packing
    pad_id: int
    window_rows: int
    window_documents: int
    shuffle_seeds: tuple[int, ...] | None
    encoder_length: int | None = None
    start_id: int | None = None
    most_pairs: int | None = None

    def need(self, document: AnyDocument) -> int:
        """The number of positions that a document needs in a row."""
        if isinstance(document, Answers):
            return document.need
        if isinstance(document, PackedDocuments):
            return self.length
        if isinstance(document, Document):
            return len(document.ids)
        assert self.encoder_length is not None, "pairs have an encoder"
        return document.need(self.encoder_length, self.length)

    def window(self, documents: Sequence[AnyDocument]) -> AnyWindow:
        """Packs the documents into rows."""
        length, packing, pad_id = self.length, self.packing, self.pad_id
        if self.most_pairs is not None:
            answers = _all(Answers, documents)
            return PreferenceWindow(answers, length=length, most_pairs=self.most_pairs, pad_id=pad_id)
        if any(isinstance(document, PackedDocuments) for document in documents):
            return PackedWindow(_all(PackedDocuments, documents), pad_id=pad_id)
        if self.encoder_length is None:
            return Window(_all(Document, documents), length=length, packing=packing, pad_id=pad_id)
        pairs, encoder_length = _all(Pairs, documents), self.encoder_length
        return PairWindow(
            pairs, encoder_length=encoder_length, length=length, packing=packing, pad_id=pad_id, start_id=self.start_id
        )


def _all(kind: type[D], documents: Sequence[AnyDocument]) -> list[D]:
    result = [document for document in documents if isinstance(document, kind)]
    assert len(result) == len(documents), f"a window of {kind.__name__} has others, too"
    return result


class RowStream:
    """Iterator of `Row`."""

    def __init__(
        self,
        read: Callable[[int], Iterator[Numbered]],
        layout: Layout,
        *,
        first_rows: int | None = None,
        state: State = State(),
    ):
        """Opens the stream.

        Args:
          read: (number) -> the stream's documents from this number on; called now, so that it can begin to read.
          layout: how they are packed.
          first_rows: `window_rows` of the very first window, so that the windows of many streams do not all end at
            the same step; None: as the others.
          state: where to resume.
        """
        self._layout, self._first_rows = layout, first_rows
        self._state = state
        self._documents = read(state.document)
        self._offset = state.offset  # in the first document, until that is read
        self._ahead: list[Numbered] = []  # documents that were read for the next window
        self._window: AnyWindow | None = None
        self._next = State()  # where the next window begins
        self._checksum = 0

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        while self._window is None:
            self._fill()
        row = self._state.row
        if row + 1 < len(self._window):
            self._state = self._state._replace(row=row + 1, checksum=self._checksum)
            return Row(self._window, row, self._state)
        window, self._window, self._state = self._window, None, self._next
        return Row(window, row, self._state)

    def _fill(self) -> None:
        begin, layout = self._state, self._layout
        if self._offset:
            number, document = next(self._documents)
            assert isinstance(document, Document), "no other is cut"
            self._ahead, self._offset = [(number, document.cut(self._offset))], 0
        rows = layout.window_rows
        if begin.document == 0 and begin.offset == 0 and self._first_rows is not None:
            rows = self._first_rows
        documents, self._ahead = self._ahead, []
        tokens = sum(layout.need(document) for _, document in documents)
        at_end = False
        while tokens < rows * layout.length or len(documents) < layout.window_documents:
            result = next(self._documents, None)
            if result is None:
                at_end = True
                break
            documents.append(result)
            tokens += layout.need(result[1])
        if not documents:
            raise StopIteration
        self._next = State(document=documents[-1][0] + 1)
        if layout.packing is Packing.CONCAT and not at_end:
            self._keep_whole_rows(documents, tokens, begin)
        window = layout.window([document for _, document in documents])
        if not len(window):
            self._state = self._next
            return
        self._check(window, begin)
        if layout.shuffle_seeds is not None:
            window.shuffle(*layout.shuffle_seeds, begin.document, begin.offset)
        self._window = window

    def _keep_whole_rows(self, documents: list[Numbered], tokens: int, begin: State) -> None:
        """Moves tokens that do not fill a row to the next window."""
        excess = tokens % self._layout.length
        while excess:
            number, document = documents.pop()
            assert isinstance(document, Document), "no other is cut"
            keep = max(0, len(document.ids) - excess)
            excess -= len(document.ids) - keep
            self._ahead.insert(0, (number, document.cut(keep)))
            if keep:
                documents.append((number, document.cut(0, keep)))
            offset = keep + (begin.offset if number == begin.document else 0)
            self._next = State(document=number, offset=offset)

    def _check(self, window: AnyWindow, begin: State) -> None:
        self._checksum = window.checksum
        if begin.row and (begin.checksum != self._checksum or begin.row >= len(window)):
            raise UserError(
                f"the data has changed since the state was saved: the window at document {begin.document} has checksum "
                f"{self._checksum}, not {begin.checksum}: restore the data, or start a new run"
            )


class DocumentRows:
    """Iterator of `Row` in which each document has one row, in the documents' order; its state is the next one's number.

    A number without a document, or with an empty one, is a row of padding: what a document holds does not move the others.
    """

    def __init__(self, read: Callable[[int], Iterator[Numbered]], layout: Layout, state: State = State()):
        """Opens the stream; the arguments are those of `RowStream`."""
        self._layout, self._number, self._documents = layout, state.document, read(state.document)
        self._ahead: Numbered | None = None

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        if self._ahead is None:
            self._ahead = next(self._documents)
        number, document = self._ahead
        state = State(document=self._number + 1)
        if number > self._number:
            self._number += 1
            return Row(None, 0, state)
        self._number, self._ahead = self._number + 1, None
        window = self._layout.window([document])
        return Row(window if len(window) else None, 0, state)
