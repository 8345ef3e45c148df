"""Words for ROUGE in any script; those of a text in ASCII are rouge-score's."""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Iterator, Sequence

from capibara.core import extras

# Scripts that are written without spaces: Thai and Lao, Burmese, Khmer, kana, Han. Each character is a word.
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)


class Words:
    """A tokenizer of rouge-score that drops no letter.

    Args:
      stem: use Porter's stemmer for words in ASCII.
    """

    def __init__(self, stem: bool):
        tokenizers = extras.require("rouge_score.tokenizers", extra="evaluation", why="ROUGE")
        self._ascii = tokenizers.DefaultTokenizer(stem)

    def tokenize(self, text: str) -> list[str]:
        """The words of a text, in lower case."""
        words: list[str] = []
        for word in _words(unicodedata.normalize("NFC", text.lower())):
            words += self._ascii.tokenize(word) if word.isascii() else [word]
        return words


def _words(text: str) -> Iterator[str]:
    """Runs of letters, digits and marks; characters of scripts without spaces one by one."""
    word = ""
    for letter in text:
        unspaced = _UNSPACED.match(letter) is not None
        if unicodedata.category(letter)[0] in "LNM" and not unspaced:
            word += letter
            continue
        if word:
            yield word
            word = ""
        if unspaced and unicodedata.category(letter)[0] in "LN":
            yield letter
    if word:
        yield word


def tell_dropped(texts: Sequence[str]) -> None:
    """Warns if rouge-score's own words leave letters of the texts out."""
    letters = [letter for text in texts for letter in text if letter.isalnum()]
    dropped = [letter for letter in letters if not letter.lower().isascii()]
    if dropped:
        logging.getLogger(__name__).warning(
            "rouge.words = 'ascii' drops %d of the %d letters of the targets, such as %r: set rouge.words = 'unicode'",
            *(len(dropped), len(letters), dropped[0]),
        )
