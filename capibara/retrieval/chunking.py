"""Cuts documents into chunks of tokens."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from capibara.builders.files.problems import Problems
from capibara.builders.preparation.documents import CorpusPart, Fields, PartReader
from capibara.core import limits
from capibara.core.types import UserError
from capibara.data.tokenizers.vocabulary import TokenizerJsonVocabulary, Vocabulary


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """A part of a document.

    Attributes:
      path: the file of the document.
      document: its number in the file, from 1.
      start, end: where the chunk is in the document, in characters.
      text: the chunk.
    """

    path: str
    document: int
    start: int
    end: int
    text: str

    @classmethod
    def of_json(cls, line: bytes) -> Chunk:
        """The chunk of a line of chunks.jsonl.

        Raises:
          ValueError, TypeError: it is none.
        """
        result = cls(**limits.parse_json(line, finite=False))
        for field in dataclasses.fields(cls):
            kind = str if field.name in ("path", "text") else int
            if type(getattr(result, field.name)) is not kind:
                raise TypeError(f"its {field.name} is no {kind.__name__}")
        return result


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunking:
    """Windows of a document's tokens.

    Attributes:
      tokens: of a window; the last of a document may have fewer.
      overlap: tokens that a window shares with the one before it.

    Raises:
      UserError: a value is out of range.
    """

    tokens: int = 128
    overlap: int = 16

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise UserError(f"IndexPreparation.chunk_tokens is {self.tokens}, must be at least 1: try 128")
        if not 0 <= self.overlap < self.tokens:
            raise UserError(
                f"IndexPreparation.overlap is {self.overlap}, must be from 0 to {self.tokens - 1} (chunk_tokens less 1): try "
                f"{self.tokens // 8}"
            )

    def ranges(self, text: str, vocabulary: Vocabulary) -> Iterator[tuple[int, int]]:
        """Where the chunks of a document begin and end, in characters; those of white space alone are left out."""
        offsets = _offsets(text, vocabulary)
        for first in range(0, max(1, len(offsets) - self.overlap), self.tokens - self.overlap):
            window = offsets[first : first + self.tokens]
            start, end = (int(window[0, 0]), int(window[-1, 1])) if len(window) else (0, 0)
            if text[start:end].strip():
                yield start, end


def _offsets(text: str, vocabulary: Vocabulary) -> np.ndarray:
    """Where each token of a text begins and ends, in characters: [n, 2] int64."""
    if isinstance(vocabulary, TokenizerJsonVocabulary):
        return vocabulary.encode_rendered(text)[1]
    if not text:
        return np.zeros((0, 2), np.int64)
    # The bytes of the tokens are those of the text, but for a space that SentencePiece may put before it.
    ends_T = np.cumsum(_token_bytes(vocabulary)[vocabulary.encode(text)], dtype=np.int64)
    starts_of_characters = np.cumsum([0, *(len(character.encode("utf-8", "replace")) for character in text)])
    first_T = np.searchsorted(starts_of_characters, np.concatenate([[0], ends_T[:-1]]), "right") - 1
    return np.minimum(np.stack([first_T, np.searchsorted(starts_of_characters, ends_T)], axis=1), len(text))


@functools.lru_cache(maxsize=1)
def _token_bytes(vocabulary: Vocabulary) -> np.ndarray:
    return vocabulary.token_bytes()


def chunks_of(
    parts: Sequence[CorpusPart], fields: Fields, chunking: Chunking, vocabulary: Vocabulary, problems: Problems
) -> Iterator[Chunk]:
    """The chunks of all documents, each text once: equal ones are equally near to every query.

    Args:
      parts: the documents (`documents.parts_of`).
      fields: where they are in a record.
      chunking: how they are cut.
      vocabulary: whose tokens are counted.
      problems: counts what cannot be read.
    """
    seen: set[bytes] = set()
    path, number = "", 0
    for piece in (piece for part in parts for piece in part.pieces):
        if piece.file.url != path:
            path, number = piece.file.url, 0
        reader = PartReader(CorpusPart(number=0, pieces=(piece,)), fields)
        for document in reader:
            number += 1
            for start, end in chunking.ranges(document.text, vocabulary):
                text = document.text[start:end]
                key = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
                if key not in seen:
                    seen.add(key)
                    yield Chunk(path=path, document=number, start=start, end=end, text=text)
        problems.merge(reader.problems)


def spans(texts: Sequence[str], count: int, seed: int) -> list[str]:
    """Queries that are no chunks: of chunks drawn at random, about a third of the words, from a random one on.

    Args:
      texts: the chunks.
      count: of the queries.
      seed: of the draw.
    """
    rng = np.random.default_rng(seed)
    result = []
    for i in rng.integers(len(texts), size=count).tolist():
        words = texts[i].split()
        size = max(1, len(words) // 3)
        first = int(rng.integers(len(words) - size + 1))
        result.append(" ".join(words[first : first + size]))
    return result
