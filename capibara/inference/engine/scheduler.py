"""Assigns slots and pages to requests, and holds the queue."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence

import numpy as np

from capibara.inference.engine.beam_requests import BeamSearcher
from capibara.inference.engine.cache.batching import EngineConfig, Statistics, bucket
from capibara.inference.engine.cache.pages import Pages
from capibara.inference.engine.cache.prefix import PrefixCache
from capibara.inference.engine.requests.faults import contained
from capibara.inference.engine.requests.request import Request
from capibara.inference.engine.requests.stream import Finish
from capibara.inference.engine.runner.decode import DecodeRunner
from capibara.inference.engine.runner.prefill import PrefillQueue


class RequestQueue:
    """Where an engine's requests are: in the queue, in slots, or in the beam search.

    Args:
      slots: number of slots.
      searcher: holds requests for beam search, which needs no slot.
      runner: decodes the slots.

    Attributes:
      changed: the lock under which requests move between the queue, the slots and the beam search: with it held, each
        unfinished request is in one of them. Notified when a request is added.
      slots: the request in each slot; None: free.
      lone: requests that run alone, one after the other, before all others: the first may have a slot.
    """

    def __init__(self, slots: int, searcher: BeamSearcher, runner: DecodeRunner):
        self._searcher, self._runner = searcher, runner
        self.changed = threading.Condition()
        self.slots: list[Request | None] = [None] * slots
        self.lone: deque[Request] = deque()
        self._new: list[Request] = []  # since the last step
        self._waiting: deque[Request] = deque()
        self._added = 0

    @property
    def requests(self) -> list[Request]:
        """All requests that wait or have a slot."""
        lone = [request for request in self.lone if request.slot is None]
        return [*self._new, *lone, *self._waiting, *self._searcher.waiting, *filter(None, self.slots)]

    @property
    def running(self) -> list[Request]:
        """The unfinished requests with a slot or with tokens to receive, by their numbers."""
        every = {id(item): item for item in (*filter(None, self.slots), *self._runner.pending_requests())}
        left = (item for item in every.values() if not (item.finished or item.cancelled))
        return sorted(left, key=lambda item: item.number)

    @property
    def statistics(self) -> Statistics:
        return self._runner.statistics

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a slot or a search."""
        lone = sum(request.slot is None for request in self.lone)
        return len(self._new) + len(self._waiting) + len(self._searcher.waiting) + lone

    @property
    def active(self) -> list[tuple[int, Request]]:
        """The slots whose row has been read."""
        return [(slot, item) for slot, item in enumerate(self.slots) if item is not None and item.written]

    def add(self, request: Request) -> None:
        """Numbers a request and holds it for the next step; thread-safe."""
        with self.changed:
            self._added, request.number = self._added + 1, self._added
            self._new.append(request)
            self.changed.notify_all()

    def take_new(self) -> list[Request]:
        """Requests that arrived since the last step, for `enqueue`."""
        with self.changed:
            new, self._new = self._new, []
        return new

    def enqueue(self, new: Sequence[Request]) -> None:
        with self.changed:
            self._waiting.extend(request for request in new if request.sampling.beams is None)
            self._searcher.add([request for request in new if request.sampling.beams is not None])

    def _next(self) -> Request | None:
        """The request that gets the next slot."""
        if self.lone:
            return self.lone[0] if not any(self.slots) and not self._runner.pending else None
        return self._waiting[0] if self._waiting else None


class Scheduler(RequestQueue):
    """Admits requests to slots in the order of their arrival, and frees their slots.

    All methods except `add` are called by the thread that makes the steps.

    Args:
      config: of the engine.
      length: positions of a slot.
      pages: shared by the slots; None: each slot has memory for its whole length.
      prefixes: cache of rows whose beginnings later prompts may share; None: no cache.
      prefill: reads the prompts of admitted requests.
      searcher: holds requests for beam search, which needs no slot.
      runner: decodes the slots.

    Attributes:
      finished: number of texts of users that ended without an error.
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
        super().__init__(config.slots, searcher, runner)
        self._length, self._pages, self._prefixes = length, pages, prefixes
        self._prefill, self._generation, self.finished = prefill, 0, 0

    def drop(self, numbers: set[int]) -> None:
        """Ends the cancelled requests with these numbers."""
        if not numbers:
            return
        with self.changed:
            dropped = [request for request in self._waiting if request.number in numbers]
            for request in dropped:
                self._waiting.remove(request)
            alone = [request for request in self.lone if request.number in numbers and request.slot is None]
            for request in alone:
                self.lone.remove(request)
        dropped += [*alone, *(request for request in self._searcher.waiting if request.number in numbers)]
        dropped += [request for request in self.slots if request is not None and request.number in numbers]
        for request in dropped:
            request.cancelled = True
            with contained(request):
                if not request.finished:
                    request.finish(Finish.CANCELLED)
            self._searcher.drop(request)
            self.free(request)

    def admit(self) -> None:
        """Assigns free slots to waiting requests, whose prompts are read next."""
        for slot, taken in enumerate(self.slots):
            if taken is not None:
                continue
            with self.changed:
                request = self._next()
                if request is None or (self._pages and not self._pages.begin(slot, len(request.tokens))):
                    break
                self.slots[slot], request.slot, request.generation = request, slot, self._generation
                if not self.lone:
                    self._waiting.popleft()
            with contained(request):
                self._runner.assign(slot, request)
                if request.row_length > self._length:  # it slides: its last tokens are reread for each new one
                    request.written = True
                else:
                    self._prefill.add(request)
        self.free_failed()

    def end_alone(self) -> None:
        """Ends the turn of the request that runs alone: it goes on with others, at once or after all of them."""
        with self.changed:
            request = self.lone.popleft()
        if request.slot is not None and self.lone:
            self._return(request)

    def start_over(self, lone: Sequence[Request]) -> None:
        """Returns all requests to the queue, for new slots: `lone` run alone, one after the other, before the others.

        Whatever the devices have of them is discarded; they are read again with the tokens that they have received.
        """
        with self.changed:
            running, left = self.running, [item for item in self.lone if not (item.finished or item.cancelled)]
            again = {id(item): item for item in (*running, *left)}
            self.lone = deque(lone)
            for request in lone:
                again.pop(id(request), None)
            for request in (*filter(None, self.slots), *running):
                request.slot, request.written, request.row, request.requested = None, False, None, request.received
            self.slots = [None] * len(self.slots)
            self._waiting.extendleft(sorted(again.values(), key=lambda item: -item.number))
        self._prefill.clear()
        self.release_pages()
        self._runner.restart()

    def free_failed(self) -> None:
        """Frees the slots of requests that have failed."""
        for request in self.slots:
            if request is not None and request.finished:
                self.free(request)

    def reserve(self, active: list[tuple[int, Request]], count: int) -> tuple[list[tuple[int, Request]], int]:
        """Allocates pages for the next `count` steps, for earlier requests first; returns remaining slots and steps.

        Without a free page the latest request is preempted. The first one never is: alone, it always has enough pages.
        """
        pages = self._pages
        if pages is None:
            return active, count
        for slot, request in sorted(active, key=lambda item: item[1].number):
            while request.slot is not None and not pages.grow(slot, request.row_length):
                if self._runner.pending:
                    self.receive(0)  # ended texts free pages, and all tokens of the others are then known
                else:
                    self._preempt(max(filter(None, self.slots), key=lambda item: item.number))
        active = [(slot, request) for slot, request in active if request.slot is not None]
        ahead = lambda: [(slot, request.row_length + count - 1) for slot, request in active]  # noqa: E731
        while count > 1 and not pages.fit(ahead()):  # nothing is preempted for more than one step
            count -= 1
        for slot, tokens in ahead():
            pages.grow(slot, tokens)
        return active, count

    def _preempt(self, request: Request) -> None:
        """Takes the slot of a request whose tokens are all known, and returns it to the front of the queue."""
        self.statistics.preempted += 1
        self._return(request)

    def _return(self, request: Request) -> None:
        """Moves a request, all of whose tokens are known, from its slot to the front of the queue."""
        with self.changed:  # first, so that `close` and `fail` find it in the queue or in its slot
            self._waiting.appendleft(request)
        self.free(request)
        self._remember(request)

    def receive(self, left: int) -> None:
        """Passes the tokens of all but the last `left` programs to requests, and frees the slots of those that end."""
        for request in self._runner.receive(left):
            self.finished += request.number > 0 and not request.cancelled
            self.free(request)
            self._remember(request)

    def free(self, request: Request) -> None:
        """Frees a request's slot; copies its row first if later prompts may share its beginning."""
        slot, request.slot = request.slot, None
        if slot is None:
            return
        self.slots[slot] = None
        self._prefill.drop(request)
        read, written, request.written = request.row_length - 1, request.written, False
        current = written and request.generation == self._generation
        if self._prefixes and not self._prefixes.whole and current and read <= self._length and not request.cancelled:
            with contextlib.suppress(Exception):  # only later prompts would gain from it
                row = self._runner.row(slot, bucket(max(read, 2), self._length))
                request.row = None if row is None else (row, read)
        if self._pages:
            self._pages.release(slot)
        self._runner.clear(slot)

    def _remember(self, request: Request) -> None:
        """Adds the row of a request without a slot to the prefix cache, with its known tokens."""
        if request.row is not None:
            (row, read), request.row = request.row, None
            known = min(read, len(request.tokens))
            if self._prefixes is not None and request.generation == self._generation:
                row = row | {"lengths": np.array([known], np.int32)}
                self._prefixes.keep(request.tokens[:known], row, request.sharing)

    def restart(self) -> None:
        """Handles new parameters: discards and stops using what was read with the old ones."""
        self._generation += 1
        self._prefill.restart(self._generation)
        if self._prefixes:
            self._prefixes.clear()

    def release_pages(self) -> None:
        """Frees all pages."""
        if self._pages:
            for slot in range(len(self.slots)):
                self._pages.release(slot)
