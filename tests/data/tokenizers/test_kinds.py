"""Tokenizers of every kind encode and decode as the tokenizers library does (0.23), and streams join to the same text.

The right values are the library's own `encode` and `decode`, called on the same file without our classes.
"""

from __future__ import annotations

import functools
import json
import random

import pytest
import tokenizers
from tokenizers import decoders, models

from capibara.data.tokenizers import decoding
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


DECODERS = {
    "bytes": [decoders.ByteFallback(), decoders.Fuse()],
    "bytes of other pieces": [decoders.Replace("Z", "<"), decoders.ByteFallback()],
    "bytes of stripped pieces": [decoders.Strip(">", 0, 1), decoders.ByteFallback()],
    "no part of bytes": [decoders.Replace("b", "x"), decoders.ByteFallback(), decoders.Fuse()],
    "several characters of the whole": [decoders.Fuse(), decoders.Replace("ab", "c")],
    "a pattern of the whole": [decoders.Fuse(), decoders.Replace(tokenizers.Regex("a+"), "c")],
    "one character of the whole": [decoders.Fuse(), decoders.Replace("a", "cd"), decoders.Strip("b", 1, 0)],
}


@pytest.mark.parametrize("name", DECODERS)
def test_streams_join_to_the_librarys_text_whatever_steps_follow_each_other(name):
    pieces = ["<0xC3>", "<0xA9>", "Z0xC3>", "Z0xA9>", "<0xC3>>", "<0xA9>>", "a", "b", "ab"]
    made = tokenizers.Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="a"))
    made.decoder = decoders.Sequence(DECODERS[name])
    lookahead = decoding.lookahead_of(json.loads(made.to_str())["decoder"], made.get_vocab())
    draw = random.Random(0)
    for _ in range(300):
        ids = draw.choices(range(len(pieces)), k=draw.randint(1, 60))
        stream = decoding.WindowStream(made.decode, lambda token: True, lookahead)
        assert "".join([*map(stream.feed, ids), stream.close()]) == made.decode(ids), ids
