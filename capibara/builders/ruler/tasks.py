"""Tasks on long documents after RULER (Hsieh et al. 2024, arXiv:2404.06654): what is asked, and what a document is made of."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from capibara.builders.ruler.docstrings import summaries
from capibara.builders.ruler.words import FILLER, KEYS, VALUES


@dataclasses.dataclass(frozen=True)
class Material:
    """What a document is made of, and the question about it.

    Attributes:
      question, answer: the question and its only answer.
      facts: sentences that the document must have, in this order.
      filler: endless further sentences, which do not change the answer.
    """

    question: str
    answer: str
    facts: tuple[str, ...]
    filler: Iterator[str]


@dataclasses.dataclass(frozen=True)
class Phrases:
    """How a fact of a key and a value is stated and asked, with {key} and {value} in braces."""

    fact: str
    question: str


Task = Callable[[np.random.Generator, Phrases], Material]


def needle(rng: np.random.Generator, phrases: Phrases) -> Material:
    """One fact among sentences of prose."""
    return _keyed(rng, phrases, 0, _prose(rng))


def needles(rng: np.random.Generator, phrases: Phrases) -> Material:
    """One of eight facts of different keys among sentences of prose."""
    return _keyed(rng, phrases, 7, _prose(rng))


def facts(rng: np.random.Generator, phrases: Phrases) -> Material:
    """One fact among facts of other keys, whose keys and values repeat."""
    material = _keyed(rng, phrases, 0, iter(()))
    others = [key for key in KEYS if phrases.question.format(key=key) != material.question]
    filler = (phrases.fact.format(key=rng.choice(others), value=rng.choice(VALUES)) for _ in itertools.count())
    return dataclasses.replace(material, filler=filler)


def variables(rng: np.random.Generator, phrases: Phrases) -> Material:
    """Variables that are assigned a number along a chain, and a second chain; asked for those with the first number."""
    del phrases
    names = [f"x{number}" for number in rng.permutation(100)[:10]]
    first, second = rng.permutation(np.arange(10, 100))[:2].tolist()
    chains = [_chain(names[:5], first), _chain(names[5:], second)]
    turns = rng.permutation([0] * 5 + [1] * 5).tolist()
    lines = tuple(next(chains[turn]) for turn in turns)
    question = f"Which variables have the value {first}? Name them in the order in which they are assigned."
    return Material(question, " ".join(names[:5]), lines, _prose(rng))


def common_words(rng: np.random.Generator, phrases: Phrases) -> Material:
    """A list of words, three of which are five times as frequent as any other."""
    del phrases
    words = rng.permutation(VALUES).tolist()
    common, others = words[:3], words[3:43]

    def listed() -> Iterator[str]:
        while True:
            yield from rng.permutation([*common * 5, *others]).tolist()

    question = "Which three words are the most frequent? Name them in alphabetical order."
    return Material(question, " ".join(sorted(common)), (), listed())


def docstrings(rng: np.random.Generator, phrases: Phrases) -> Material:
    """The standard library's functions with the first lines of their docstrings; asked for the function of one."""
    del phrases
    entries = summaries()
    names = rng.permutation([*entries]).tolist()
    name, others = names[0], names[1:]
    question = f"Which function is described by this line: {entries[name]}"
    return Material(
        question, name, (f"{name}: {entries[name]}",), itertools.cycle(f"{n}: {entries[n]}" for n in others)
    )


TASKS: dict[str, Task] = {task.__name__: task for task in (needle, needles, facts, variables, common_words, docstrings)}


def _keyed(rng: np.random.Generator, phrases: Phrases, others: int, filler: Iterator[str]) -> Material:
    """A question about one of 1 + `others` facts of different keys."""
    keys, values = rng.permutation(KEYS)[: 1 + others], rng.choice(VALUES, 1 + others)
    lines = [phrases.fact.format(key=key, value=value) for key, value in zip(keys, values)]
    rng.shuffle(lines)
    return Material(phrases.question.format(key=keys[0]), str(values[0]), tuple(lines), filler)


def _chain(names: list[str], value: int) -> Iterator[str]:
    """The assignments of a chain: of the number to the first variable, and of each variable to the next."""
    return (f"{name} = {source}." for name, source in zip(names, [str(value), *names]))


def _prose(rng: np.random.Generator) -> Iterator[str]:
    return (FILLER[i] for _ in itertools.count() for i in rng.permutation(len(FILLER)))
