"""A tokenizer: an id for each word of a list, and one for each byte of all else.

cd examples/extend && python -m capibara.train --gin_file=my_tokenizer.gin --emulate=2
"""

import dataclasses
import functools
import os
import re

from capibara.config import configurable
from capibara.data.tokenizers.vocabulary import OwnFiles, Vocabulary


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class WordVocabulary(Vocabulary):
    """Padding, the end of a document, 256 bytes, then the words of a file.

    Attributes:
      path: a file with a word a line.
      size_multiple, extra_ids: see Vocabulary.
    """

    path: str
    size_multiple: int = 128
    extra_ids: int = 0

    pad_id = bos_id = 0
    eos_id = 1
    path_fields = ("path",)

    @functools.cached_property
    def words(self):
        with open(self.path, encoding="utf-8") as file:
            return file.read().split()

    @functools.cached_property
    def pieces(self):
        return [b"", b"", *(bytes([i]) for i in range(256)), *(word.encode() for word in self.words)]

    def encode(self, text):
        ids, known = [], {word: 258 + i for i, word in enumerate(self.words)}
        for part in self._split.split(text):
            ids += [known[part]] if part in known else [2 + byte for byte in part.encode()]
        return ids

    @functools.cached_property
    def _split(self):
        longest_first = sorted(map(re.escape, self.words), key=len, reverse=True)
        return re.compile(f"({'|'.join(longest_first)})")

    def own_files(self):
        # The run folder keeps the list, so that it can be moved to a machine that does not have it.
        name = os.path.basename(self.path)
        with open(self.path, "rb") as file:
            return OwnFiles({name: file.read()}, {self.path: f"tokenizer/{name}"}, (name,))
