"""What the pipeline uses of Apache Beam, in this process: every step pickles its function and elements, and mixes their order."""

from __future__ import annotations

import itertools
import pickle
import random
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any


class Collection:
    """The elements after a step."""

    def __init__(self, elements: Iterable[Any], label: str):
        self.elements = pickle.loads(pickle.dumps(list(elements)))
        self.producer = types.SimpleNamespace(full_label=label)

    def __or__(self, step: Step) -> Collection:
        return step.apply(self)


class Step:
    """A step; `function` makes the elements after it of those before it."""

    labels: list[str] = []

    def __init__(self, name: str, function: Callable[[list[Any]], Iterable[Any]]):
        self.label, self._function = name, function

    def __rrshift__(self, label: str) -> Step:
        return Step(label, self._function)

    def __ror__(self, collections: Sequence[Collection]) -> Collection:
        """Of several collections."""
        return self.apply(Collection([one.elements for one in collections], ""))

    def apply(self, before: Collection) -> Collection:
        assert self.label not in self.labels, f"Beam wants another label than {self.label!r}"
        self.labels.append(self.label)
        return Collection(self._function(before.elements), self.label)


class Pipeline(Collection):
    """A pipeline, which runs while it is made."""

    options: list[Sequence[str]] = []

    def __init__(self, options: Sequence[str]):
        super().__init__([], "")
        self.options.append(options)
        Step.labels.clear()

    def run(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(wait_until_finish=lambda: None)


def Create(values: Iterable[Any]) -> Step:
    return Step("Create", lambda _: values)


def Reshuffle() -> Step:
    return Step("Reshuffle", _mixed)


def FlatMap(function: Callable[[Any], Iterable[Any]]) -> Step:
    def run(elements: list[Any]) -> Iterator[Any]:
        of_worker = pickle.loads(pickle.dumps(function))
        return itertools.chain.from_iterable(map(of_worker, elements))

    return Step(f"FlatMap({getattr(function, '__name__', 'partial')})", run)


def Map(function: Callable[[Any], Any]) -> Step:
    return Step(f"Map({function.__name__})", lambda elements: map(pickle.loads(pickle.dumps(function)), elements))


def Flatten() -> Step:
    return Step("Flatten", itertools.chain.from_iterable)


def GroupByKey() -> Step:
    def group(elements: list[tuple[int, Any]]) -> Iterator[tuple[int, list[Any]]]:
        groups: dict[int, list[Any]] = {}
        for key, value in _mixed(elements):
            assert type(key) is int, "the key of every process must be encoded the same"
            groups.setdefault(key, []).append(value)
        return iter(groups.items())

    return Step("GroupByKey", group)


def _mixed(elements: list[Any]) -> list[Any]:
    return random.Random(len(elements)).sample(elements, len(elements))
