"""Writes long documents with questions as JSON lines."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import string
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from capibara.builders.ruler.tasks import TASKS, Material, Phrases
from capibara.config import configurable
from capibara.core.fields import did_you_mean
from capibara.core.types import UserError
from capibara.data.tokenizers.vocabulary import Vocabulary
from capibara.storage import outputs

_SHORTEST = 128  # tokens: the facts of every task fit


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Ruler:
    """Long documents with questions, after RULER (Hsieh et al. 2024, arXiv:2404.06654).

    Attributes:
      tasks: "needle", "needles", "facts", "variables", "common_words" and "docstrings" (of the standard library).
      lengths: tokens of a document, at most; each task has `examples` of each length.
      examples: documents of a task and a length.
      seed: of the documents.
      fact, question: how "needle", "needles" and "facts" state a fact, with {key} and {value}, and ask for the value.
    """

    tasks: tuple[str, ...] = tuple(TASKS)
    lengths: tuple[int, ...] = (4096,)
    examples: int = 32
    seed: int = 0
    fact: str = "The secret word of {key} is {value}."
    question: str = "What is the secret word of {key}?"

    def __post_init__(self) -> None:
        for task in self.tasks:
            if task not in TASKS:
                known = ", ".join(TASKS)
                raise UserError(f"Ruler.tasks has {task!r}, must be of {known}{did_you_mean(task, TASKS)}")
        for name in ("tasks", "lengths"):
            if not getattr(self, name):
                raise UserError(f"Ruler.{name} is empty: name at least one")
        if min(self.lengths) < _SHORTEST:
            raise UserError(f"Ruler.lengths has {min(self.lengths)}, must be at least {_SHORTEST} tokens: try 4096")
        for name, least in (("examples", 1), ("seed", 0)):
            if (value := getattr(self, name)) < least:
                raise UserError(f"Ruler.{name} is {value}, must be at least {least}")
        for name, keys in (("fact", {"key", "value"}), ("question", {"key"})):
            text = getattr(self, name)
            try:
                fields = [field for _, field, _, _ in string.Formatter().parse(text) if field is not None]
            except ValueError:
                fields = []
            if sorted(fields) != sorted(keys):
                needed = " and ".join(f"{{{key}}}" for key in sorted(keys))
                raise UserError(f"Ruler.{name} is {text!r}, must have {needed} once and no other braces")


def write(
    settings: Ruler, vocabulary: Vocabulary, path: str, progress: Callable[[str], None] = lambda text: None
) -> int:
    """Writes a line {"task", "length", "tokens", "question", "answer", "document"} for each example; returns their number.

    Args:
      settings: of the documents.
      vocabulary: in whose tokens lengths are.
      path: the file, which replaces one that is there.
      progress: called with the progress.
    """
    count = 0
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with outputs.replacing(path) as partial, open(partial, "w", encoding="utf-8") as file:
        for line in examples(settings, vocabulary):
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            count += 1
            progress(f"{count} of {len(settings.tasks) * len(settings.lengths) * settings.examples} documents")
    return count


def examples(settings: Ruler, vocabulary: Vocabulary) -> Iterator[dict[str, Any]]:
    """The lines, which depend on the settings and the vocabulary alone, and each not on the others."""
    phrases = Phrases(settings.fact, settings.question)
    for task, length, number in itertools.product(settings.tasks, settings.lengths, range(settings.examples)):
        rng = np.random.default_rng([settings.seed, [*TASKS].index(task), length, number])
        material = TASKS[task](rng, phrases)
        document, tokens = _composed(material, length, vocabulary, rng)
        yield {"task": task, "length": length, "tokens": tokens, "question": material.question, "answer": material.answer,
               "document": document}  # fmt: skip


def _composed(material: Material, length: int, vocabulary: Vocabulary, rng: np.random.Generator) -> tuple[str, int]:
    """A document of at most `length` tokens, its facts at random places, and the number of its tokens."""
    tokens_of: dict[str, int] = {}

    def size(sentence: str) -> int:
        if sentence not in tokens_of:
            tokens_of[sentence] = len(vocabulary.encode(" " + sentence))
        return tokens_of[sentence]

    filler, room = [], length - sum(map(size, material.facts))
    while (room := room - size(sentence := next(material.filler))) >= 0:
        filler.append(sentence)
    while True:
        places = np.sort(rng.integers(0, len(filler) + 1, len(material.facts))).tolist()
        sentences = [*filler]
        for place, fact in zip(reversed(places), reversed(material.facts)):
            sentences.insert(place, fact)
        tokens = len(vocabulary.encode(text := " ".join(sentences)))
        if tokens <= length:
            return text, tokens
        if not filler:
            raise UserError(f"Ruler.lengths has {length}, and a document's facts have {tokens} tokens: raise it")
        del filler[-1 - (tokens - length) // 64 :]  # tokens of neighbours differ from those of sentences by few
