"""Tokenizers of every kind encode and decode as the tokenizers library does (0.23), and streams join to the same text.

The right values are the library's own `encode` and `decode`, called on the same file without our classes.
"""

from __future__ import annotations

import functools

import pytest
import tokenizers

from capibara.data.tokenizers.vocabulary import TokenizerJsonVocabulary, Vocabulary
from capibara.inference.sampling.text import TextStream
from tests.data.tokenizers import kinds


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A kind -> its vocabulary and the library's tokenizer."""

    @functools.cache
    def of(kind) -> tuple[TokenizerJsonVocabulary, tokenizers.Tokenizer]:
        path = str(tmp_path_factory.mktemp(kind.__name__) / "tokenizer.json")
        kind().save(path)
        return TokenizerJsonVocabulary(path=path), tokenizers.Tokenizer.from_file(path)

    return of


def joined(vocabulary: Vocabulary, ids: list[int]) -> str:
    stream = TextStream(vocabulary)
    return "".join(map(stream.feed, ids)) + stream.close()


def check(vocabulary: TokenizerJsonVocabulary, library: tokenizers.Tokenizer, count: int, seed: int) -> None:
    for text in kinds.texts(count, seed):
        ids = library.encode(text, add_special_tokens=False).ids
        assert vocabulary.encode(text) == ids, text
        want = library.decode(ids, skip_special_tokens=True)
        assert vocabulary.decode(ids) == want, text
        assert joined(vocabulary, ids) == want, text
    for ids in kinds.ids(library, count, seed):
        want = library.decode(ids, skip_special_tokens=True)
        assert vocabulary.decode(ids) == want, ids
        assert joined(vocabulary, ids) == want, ids


@pytest.mark.parametrize("kind", kinds.KINDS, ids=lambda kind: kind.__name__)
def test_text_and_ids_are_the_librarys(made, kind):
    check(*made(kind), count=60, seed=0)


@pytest.mark.heavy
@pytest.mark.parametrize("kind", kinds.KINDS, ids=lambda kind: kind.__name__)
def test_10_000_texts_and_ids_are_the_librarys(made, kind):
    check(*made(kind), count=10_000, seed=1)
