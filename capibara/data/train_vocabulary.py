"""Trains a lossless SentencePiece vocabulary: BPE with byte fallback.

There is no normalisation, spaces and line ends are kept, and digits are single tokens (https://arxiv.org/abs/1808.06226).
"""

from __future__ import annotations

import io
import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from capibara.core.types import UserError
from capibara.data.sources.sources import Corpus
from capibara.data.tokenizers.vocabulary import SentencePieceVocabulary
from capibara.storage import outputs

_LEAST_SIZE = 384  # three special ids, 256 bytes, and some characters
_CHUNK_CHARACTERS = 4096
_MEASURED_DOCUMENTS = 50
TRAINER: dict[str, Any] = dict(
    model_type="bpe",
    byte_fallback=True,
    normalization_rule_name="identity",
    remove_extra_whitespaces=False,
    add_dummy_prefix=False,
    allow_whitespace_only_pieces=True,
    split_digits=True,
    character_coverage=0.9999,
    max_sentence_length=16 * _CHUNK_CHARACTERS,
    pad_id=0,
    eos_id=1,
    unk_id=2,
    bos_id=-1,
    minloglevel=2,
)


def train_sentencepiece(
    documents: Corpus,
    output: str,
    *,
    size: int = 8192,
    sample_bytes: int = 64 << 20,
    seed: int = 0,
    report: Callable[[str], None] = print,
) -> SentencePieceVocabulary:
    """Trains on a sample of `documents` and writes the model file.

    Args:
      documents: the training split; characters outside of the sample are encoded as bytes.
      output: path of the model file, which is written atomically.
      size: number of ids; 0 is padding (and beginning), 1 the end, 2 unknown.
      sample_bytes: documents are sampled up to so many characters.
      seed: seed of the sample.
      report: called with each line of the progress.

    Returns:
      The vocabulary.

    Raises:
      UserError: the size does not fit the corpus.
    """
    import sentencepiece

    if size < _LEAST_SIZE:
        raise UserError(f"size ({size}) must be at least {_LEAST_SIZE}: 256 bytes, 3 special ids and some characters")
    report(f"reading up to {sample_bytes / 2**20:.0f} MiB of the documents, training {size} pieces")
    begin_s, model, counted = time.perf_counter(), io.BytesIO(), _Counter()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=counted(_chunks(documents.texts(seed), sample_bytes)),
            model_writer=model,
            vocab_size=size,
            num_threads=os.cpu_count() or 1,
            **TRAINER,
        )
    except RuntimeError as error:
        reason = " ".join(str(error).rpartition("]")[2].split())  # after "file(line) [condition]"
        raise UserError(f"size ({size}) does not fit this corpus: {reason}") from error
    os.makedirs(os.path.dirname(os.path.abspath(output)), exist_ok=True)
    with outputs.replacing(output) as partial, open(partial, "wb") as file:
        file.write(model.getvalue())
    report(f"trained on {counted.characters / 1e6:.1f} million characters in {time.perf_counter() - begin_s:.1f} s")
    vocabulary = SentencePieceVocabulary(path=output)
    report(_summary(vocabulary, list(itertools.islice(documents.texts(seed), _MEASURED_DOCUMENTS))))
    return vocabulary


def _summary(vocabulary: SentencePieceVocabulary, texts: list[str]) -> str:
    tokens = [vocabulary.encode(text) for text in texts]
    lossless = sum(vocabulary.decode(ids) == text for ids, text in zip(tokens, texts, strict=True))
    token_count, byte_count = sum(map(len, tokens)), sum(len(text.encode("utf-8", "replace")) for text in texts)
    return (
        f"{vocabulary.path}: {vocabulary.size} ids, {byte_count / max(1, token_count):.2f} bytes a token, "
        f"{lossless} of {len(texts)} documents come back exactly"
    )


def _chunks(texts: Iterator[str], sample_bytes: int) -> Iterator[str]:
    left = sample_bytes
    for text in texts:
        text = text.replace("\0", " ")  # the trainer's strings end at a null byte
        for begin in range(0, len(text), _CHUNK_CHARACTERS):
            yield text[begin : begin + _CHUNK_CHARACTERS]
        left -= len(text)
        if left <= 0:
            return


class _Counter:
    """Counts the characters of the texts that pass through."""

    characters = 0

    def __call__(self, texts: Iterator[str]) -> Iterator[str]:
        for text in texts:
            self.characters += len(text)
            yield text
