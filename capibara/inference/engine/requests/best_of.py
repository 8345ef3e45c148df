"""Draws several texts of one prompt with different seeds and picks the likeliest, as T5X's `temperature_sample`."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence

import numpy as np

from capibara.inference.engine.requests.stream import Completion, Decode, Item, Piece, Stream
from capibara.inference.sampling.sampling import Sampling


def samplings(sampling: Sampling) -> list[Sampling]:
    """The sampling of each text, with its own derived seed."""

    def seed(number: int) -> int:
        return int(np.random.SeedSequence((sampling.seed + 2**63, number)).generate_state(1, np.uint64)[0] >> 1)

    item = dataclasses.replace(sampling, num_decodes=1, num_return=1)
    return [dataclasses.replace(item, seed=seed(number)) for number in range(sampling.num_decodes)]


class BestOf(Stream):
    """A stream that returns the likeliest of several texts once all of them are finished.

    Args:
      drive: as in `Stream`.
      sampling: the request's sampling.
      texts: the streams of the single texts.
    """

    def __init__(self, drive: Callable[[], bool], sampling: Sampling, texts: Sequence[Stream]):
        super().__init__(drive)
        self._sampling, self._texts = sampling, texts
        self._completions: dict[int, Completion] = {}
        self._taking = threading.Lock()
        self.unread = texts[0].unread
        for number, text in enumerate(texts):
            text.forward(functools.partial(self._take, number))

    def cancel(self) -> None:
        super().cancel()
        for text in self._texts:
            text.cancel()

    def _take(self, number: int, item: Item) -> None:
        if isinstance(item, Piece):
            return
        if isinstance(item, BaseException):
            self.fail(item)
            return
        with self._taking:  # called by the engine's thread, or by a caller that finds a text finished already
            self._completions[number] = item
            is_last = len(self._completions) == len(self._texts)
        if is_last:
            self._choose()

    def _choose(self) -> None:
        each = [self._completions[number] for number in range(len(self._texts))]
        scores = [sum(item.drawn) + item.end_drawn for item in each]
        order = sorted(range(len(each)), key=scores.__getitem__)
        best = each[order[-1]]
        for piece in best.pieces:
            self.put(piece)
        decodes = [Decode(each[i].text, tuple(each[i].tokens), scores[i], each[i].finish, each[i].lead) for i in order]
        retained = tuple(decodes[-self._sampling.num_return :])
        self.end(best.finish, best.prompt_tokens, best.cached_tokens, best.ending, retained)
