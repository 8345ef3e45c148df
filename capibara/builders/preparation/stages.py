"""What is done with one part of a corpus: hashed, filtered and sketched. The local build and Beam share it."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Iterator

import numpy as np

from capibara.builders.preparation import filters, near
from capibara.builders.preparation.documents import CorpusPart, Document, PartReader
from capibara.builders.preparation.settings import CorpusPreparation
from capibara.builders.problems import Problems

_CHARACTERS = 4 << 20  # of the documents that are sketched at a time
_DIGEST_BYTES = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hashed:
    """The documents of a part by their exact text.

    Attributes:
      keys: [2, n] uint64, a BLAKE2b hash of each document that is not blank.
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
    reader = PartReader(part, settings.fields)
    digests, documents, count, text_bytes = [], [], 0, 0
    for document in reader:
        content = document.text.encode("utf-8", "surrogatepass")
        text_bytes += len(content)
        if document.text.strip():
            digests.append(hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest())
            documents.append(count)
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


def kept_documents(part: CorpusPart, settings: CorpusPreparation, kept: np.ndarray) -> Iterator[tuple[int, Document]]:
    """Reads the documents of a part that are still kept, and their numbers; `kept`: [n] bool, of the first n."""
    for number, document in enumerate(PartReader(part, settings.fields)):
        if number == len(kept):
            return
        if kept[number]:
            yield number, document


def sketch_part(part: CorpusPart, settings: CorpusPreparation, kept: np.ndarray) -> Sketched:
    """Filters the documents of a part, and makes the signatures of the others; `kept`: [n] bool, no exact duplicates.

    Raises:
      UserError: a library is not installed.
    """
    found, documents, batch, characters = [], [], [], 0
    dropped: collections.Counter[str] = collections.Counter()
    for number, document in kept_documents(part, settings, kept):
        text = filters.judge(document.text, settings.filters, dropped)
        if text is None:
            continue
        documents.append(number)
        if settings.near is not None:
            batch.append(text)
            characters += len(text)
        if settings.near is not None and characters >= _CHARACTERS:
            found.append(near.signatures(batch, settings.near))
            batch, characters = [], 0
    if settings.near is not None and batch:
        found.append(near.signatures(batch, settings.near))
    width = 0 if settings.near is None else settings.near.permutations
    return Sketched(
        documents=np.array(documents, np.uint32),
        signatures=np.concatenate([*found, np.zeros((0, width), np.uint32)]),
        dropped=dropped,
    )
