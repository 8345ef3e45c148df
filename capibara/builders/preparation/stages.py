"""What is done with one part of a corpus: hashed, filtered and sketched. The local build and Beam share it."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import unicodedata
from collections.abc import Callable, Iterator

import numpy as np

from capibara.builders.files.problems import Problems
from capibara.builders.preparation import filters, near
from capibara.builders.preparation.documents import CorpusPart, Document, PartReader
from capibara.builders.preparation.near import NearDuplicates
from capibara.builders.preparation.settings import CorpusPreparation

_CHARACTERS = 4 << 20  # of the documents that are sketched at a time
_DIGEST_BYTES = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hashed:
    """The documents of a part by their exact text.

    Attributes:
      keys: [2, n] uint64, a BLAKE2b hash of each document that is not blank, in NFC.
      documents: [n] uint32, its number in the part.
      count: documents, blank ones included.
      text_bytes: of all texts, in UTF-8.
      problems: what was skipped.
      last_lines: lines of the part's last piece.
    """

    keys: np.ndarray
    documents: np.ndarray
    count: int
    text_bytes: int
    problems: Problems
    last_lines: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sketched:
    """The documents of a part that the filters keep.

    Attributes:
      documents: [n] uint32, their numbers in the part.
      signatures: [n, permutations] uint32; no columns if near duplicates are kept.
      dropped: how many documents were dropped, by reason.
    """

    documents: np.ndarray
    signatures: np.ndarray
    dropped: collections.Counter[str]


def hash_part(part: CorpusPart, settings: CorpusPreparation) -> Hashed:
    """Hashes the documents of a part."""
    return _hash(part, settings, lambda number, text: None)


def hash_and_sketch_part(part: CorpusPart, settings: CorpusPreparation) -> tuple[Hashed, Sketched]:
    """Hashes the documents of a part, and makes the signatures of those that are not equal to an earlier one of the part.

    It replaces `hash_part` and `sketch_part` where there are no filters. A document that is equal to one of another part
    has a signature, which does no harm: it has the keys of the other one, so it joins nothing that the other one does not.

    Raises:
      UserError: a library is not installed.
    """
    sketcher = _Sketcher(settings.near)
    hashed = _hash(part, settings, sketcher.add)
    return hashed, sketcher.finish(collections.Counter())


def _hash(part: CorpusPart, settings: CorpusPreparation, on_new: Callable[[int, str], None]) -> Hashed:
    """Hashes the documents of a part; `on_new` gets each that is not blank, and not equal to an earlier one of the part."""
    reader = PartReader(part, settings.fields)
    digests, documents, seen = [], [], set()
    count = text_bytes = 0
    for document in reader:
        text = document.text
        content = text.encode("utf-8", "surrogatepass")
        text_bytes += len(content)
        if text and not text.isspace():
            if (same := normalized(text)) is not text:
                text, content = same, same.encode("utf-8", "surrogatepass")
            digest = hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
            digests.append(digest)
            documents.append(count)
            if digest not in seen:
                seen.add(digest)
                on_new(count, text)
        count += 1
    keys = np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2).T
    return Hashed(
        keys=keys,
        documents=np.array(documents, np.uint32),
        count=count,
        text_bytes=text_bytes,
        problems=reader.problems,
        last_lines=reader.last_lines,
    )


def kept_documents(
    part: CorpusPart, settings: CorpusPreparation, retained: np.ndarray
) -> Iterator[tuple[int, Document]]:
    """Reads the documents of a part that are still kept, and their numbers; `retained`: [n] bool, of the first n."""
    for number, document in enumerate(PartReader(part, settings.fields)):
        if number == len(retained):
            return
        if retained[number]:
            yield number, document


def sketch_part(part: CorpusPart, settings: CorpusPreparation, retained: np.ndarray) -> Sketched:
    """Filters the documents of a part, and makes the signatures of the others; `retained`: [n] bool, no exact duplicates.

    Raises:
      UserError: a library is not installed.
    """
    sketcher = _Sketcher(settings.near)
    dropped: collections.Counter[str] = collections.Counter()
    for number, document in kept_documents(part, settings, retained):
        text = filters.judge(document.text, settings.filters, dropped)
        if text is not None:
            sketcher.add(number, normalized(text))
    return sketcher.finish(dropped)


def normalized(text: str) -> str:
    """The text as duplicates are compared: in NFC, so that two spellings of one character are the same.

    NFKC would join texts that say something else, such as x\N{SUPERSCRIPT TWO} and x2.
    """
    return text if text.isascii() or unicodedata.is_normalized("NFC", text) else unicodedata.normalize("NFC", text)


class _Sketcher:
    """Makes the signatures of documents, some at a time; None: their numbers alone."""

    def __init__(self, settings: NearDuplicates | None):
        self._settings = settings
        self._documents: list[int] = []
        self._batch: list[str] = []
        self._characters = 0
        self._sketches: list[np.ndarray] = []

    def add(self, number: int, text: str) -> None:
        """Adds a document."""
        self._documents.append(number)
        if self._settings is not None:
            self._batch.append(text)
            self._characters += len(text)
            if self._characters >= _CHARACTERS:
                self._flush(self._settings)

    def finish(self, dropped: collections.Counter[str]) -> Sketched:
        """The signatures of all documents; `dropped`: what filters have dropped."""
        width = 0
        if self._settings is not None:
            width = self._settings.permutations
            self._flush(self._settings)
        signatures = np.concatenate([*self._sketches, np.zeros((0, width), np.uint32)])
        return Sketched(documents=np.array(self._documents, np.uint32), signatures=signatures, dropped=dropped)

    def _flush(self, settings: NearDuplicates) -> None:
        self._sketches.append(near.signatures(self._batch, settings))
        self._batch, self._characters = [], 0
