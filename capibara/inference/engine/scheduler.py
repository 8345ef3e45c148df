"""Which requests wait, and which slot and pages each of the others has."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import numpy as np

from capibara.inference.engine.batching import EngineConfig, bucket
from capibara.inference.engine.beam_requests import BeamSearcher
from capibara.inference.engine.cache.pages import Pages
from capibara.inference.engine.cache.prefix import PrefixCache
from capibara.inference.engine.request import Request
from capibara.inference.engine.runner.decode import DecodeRunner
from capibara.inference.engine.runner.prefill import PrefillQueue
from capibara.inference.engine.stream import Finish


class Scheduler:
    """Admits requests to slots, in the order in which they came, and takes their slots away.

    All but `add` is called by the thread that makes the steps.

    Args:
      config: of the engine.
      length: positions of a slot.
      pages: that the slots share; None: each has the memory of its whole length.
      prefixes: keeps rows whose beginnings later prompts may share; None: none are kept.
      prefill: reads the prompts of requests that have a slot.
      searcher: has those that wait for a beam search, which needs no slot.
      runner: decodes the slots.

    Attributes:
      changed: the lock under which requests move between the queue, the slots and the beam search: whoever holds it
        finds each unfinished request in one of them. Notified when a request is added.
      slots: the request that has each; None: it is free.
    """

    def __init__(
        self,
        config: EngineConfig,
        length: int,
        pages: Pages | None,
        prefixes: PrefixCache | None,
        prefill: PrefillQueue,
        searcher: BeamSearcher,
        runner: DecodeRunner,
    ):
        self._length, self._pages, self._prefixes = length, pages, prefixes
        self._prefill, self._searcher, self._runner = prefill, searcher, runner
        self.changed = threading.Condition()
        self.slots: list[Request | None] = [None] * config.slots
        self._new: list[Request] = []  # since the last step
        self._waiting: deque[Request] = deque()
        self._added = self._generation = 0

    @property
    def requests(self) -> list[Request]:
        """All that wait or have a slot."""
        return [*self._new, *self._waiting, *self._searcher.waiting, *filter(None, self.slots)]

    @property
    def waiting(self) -> int:
        """How many wait for a slot or a search."""
        return len(self._new) + len(self._waiting) + len(self._searcher.waiting)

    @property
    def active(self) -> list[tuple[int, Request]]:
        """The slots whose row is read."""
        return [(slot, one) for slot, one in enumerate(self.slots) if one is not None and one.written]

    def add(self, request: Request) -> None:
        """Numbers a request and keeps it for the next step; from any thread."""
        with self.changed:
            self._added, request.number = self._added + 1, self._added
            self._new.append(request)
            self.changed.notify_all()

    def take_new(self) -> list[Request]:
        """Those that have come since the last step; `enqueue` has them wait."""
        with self.changed:
            new, self._new = self._new, []
        return new

    def enqueue(self, new: Sequence[Request]) -> None:
        with self.changed:
            self._waiting.extend(request for request in new if request.sampling.beams is None)
            self._searcher.add([request for request in new if request.sampling.beams is not None])

    def drop(self, numbers: set[int]) -> None:
        """Ends the requests of these numbers, which nobody wants any more."""
        if not numbers:
            return
        with self.changed:
            dropped = [request for request in self._waiting if request.number in numbers]
            for request in dropped:
                self._waiting.remove(request)
        dropped += [request for request in self._searcher.waiting if request.number in numbers]
        dropped += [request for request in self.slots if request is not None and request.number in numbers]
        for request in dropped:
            request.cancelled = True
            if not request.finished:
                request.finish(Finish.CANCELLED)
            self._searcher.drop(request)
            self.free(request)

    def admit(self) -> None:
        """Gives free slots to requests that wait, whose prompts are to be read then."""
        for slot, taken in enumerate(self.slots):
            if taken is not None:
                continue
            with self.changed:
                request = self._waiting[0] if self._waiting else None
                if request is None or (self._pages and not self._pages.begin(slot, len(request.tokens))):
                    break
                self.slots[slot] = self._waiting.popleft()
            request.slot, request.generation = slot, self._generation
            self._runner.assign(slot, request)
            self._prefill.add(request)

    def reserve(self, active: list[tuple[int, Request]], count: int) -> tuple[list[tuple[int, Request]], int]:
        """Gives slots the pages that the next steps write to, the first requests first; those that go on, and the steps.

        Where there is none the request that came last is preempted. The first of all never is: it goes on, and alone its
        pages suffice.
        """
        pages = self._pages
        if pages is None:
            return active, count
        for slot, request in sorted(active, key=lambda one: one[1].number):
            while request.slot is not None and not pages.grow(slot, request.row_length):
                if self._runner.pending:
                    self.receive(0)  # texts that have ended make room, and of the others all tokens are known
                else:
                    self._preempt(max(filter(None, self.slots), key=lambda one: one.number))
        active = [(slot, request) for slot, request in active if request.slot is not None]
        ahead = lambda: [(slot, request.row_length + count - 1) for slot, request in active]  # noqa: E731
        while count > 1 and not pages.fit(ahead()):  # nobody is preempted for more than one
            count -= 1
        for slot, tokens in ahead():
            pages.grow(slot, tokens)
        return active, count

    def _preempt(self, request: Request) -> None:
        """Takes the slot of a request of which all tokens are known, and lets it wait in front of the others."""
        self._runner.statistics.preempted += 1
        with self.changed:  # first: whoever closes, or fails, finds it here or in its slot
            self._waiting.appendleft(request)
        self.free(request)
        self._remember(request)

    def receive(self, left: int) -> None:
        """Gives requests the tokens of all but the last `left` programs; those that end have no slot any more."""
        for request in self._runner.receive(left):
            self.free(request)
            self._remember(request)

    def free(self, request: Request) -> None:
        """Takes the request's slot away, with a copy of its row where later prompts may begin so."""
        slot, request.slot = request.slot, None
        if slot is None:
            return
        self.slots[slot] = None
        self._prefill.drop(request)
        read, written, request.written = request.row_length - 1, request.written, False
        current = written and request.generation == self._generation
        if self._prefixes and current and read <= self._length and not request.cancelled:
            request.row = self._runner.row(slot, bucket(read, self._length)), read
        if self._pages:
            self._pages.release(slot)
        self._runner.clear(slot)

    def _remember(self, request: Request) -> None:
        """Keeps the row of a request that has no slot any more, with the tokens of it that are known."""
        if request.row is not None:
            (row, read), request.row = request.row, None
            known = min(read, len(request.tokens))
            if self._prefixes is not None and request.generation == self._generation:
                row = row | {"lengths": np.array([known], np.int32)}
                self._prefixes.keep(request.tokens[:known], row, request.adapter)

    def restart(self) -> None:
        """There are other parameters: what was read with the old ones is neither kept nor gone on with."""
        self._generation += 1
        self._prefill.restart(self._generation)
        if self._prefixes:
            self._prefixes.clear()

    def release_pages(self) -> None:
        """No slot has any more: there are no more steps."""
        if self._pages:
            for slot in range(len(self.slots)):
                self._pages.release(slot)
