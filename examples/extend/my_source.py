"""A data source: the help texts of the Python interpreter, from memory.

cd examples/extend && python -m capibara.train --gin_file=my_source.gin --emulate=2
"""

import dataclasses
import hashlib
import pydoc_data.topics

from capibara.config import configurable
from capibara.data.sources.sources import Documents, Example, Source


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class HelpTopics(Source):
    """One document a topic.

    Attributes:
      validation_every: each so many topics one is held out for validation.
    """

    validation_every: int = 10

    def open(self, split):
        texts = [text for _, text in sorted(pydoc_data.topics.topics.items())]
        held_out = split == "validation"
        return Texts([text for i, text in enumerate(texts) if (i % self.validation_every == 0) == held_out])


class Texts(Documents):
    """Documents with random access; `capibara.data.sources.sources.Blocks` are for those that are read in a stream."""

    def __init__(self, texts):
        self.texts = texts

    def __len__(self):
        return len(self.texts)

    def example(self, i):
        return Example(self.texts[i])

    def fingerprint(self):
        # A run resumes only where this is what it was.
        return {"documents": len(self), "digest": hashlib.sha256("\0".join(self.texts).encode()).hexdigest()}
