"""Who makes the steps of an engine: a thread of its own, or whoever waits for a text; and what stops them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from capibara.core.multihost import peers
from capibara.inference.engine.core import EngineCore
from capibara.inference.engine.following import Orders, Submission
from capibara.inference.engine.request import Request
from capibara.inference.server.http_errors import left_alone


class EngineLoop:
    """Makes the steps of a core, one after the other, until it is closed or one of them fails.

    `submit`, `close` and `fail` may be called from any thread. Without a thread of its own whoever calls `drive` makes a
    step, one at a time.

    Args:
      core: whose steps.

    Attributes:
      failed: whether it has ended with an error: it makes no more steps.
    """

    def __init__(self, core: EngineCore):
        self._core, self._scheduler = core, core.scheduler
        self._working = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = self.failed = False
        self._send: Callable[[dict[str, Any]], None] | None = None

    @property
    def threaded(self) -> bool:
        """Whether it has a thread."""
        return self._thread is not None

    def submit(self, request: Request) -> None:
        """Hands a request to the next step.

        Raises:
          RuntimeError: there are no more steps.
        """
        with self._scheduler.changed:
            if self._closing:
                raise RuntimeError("the engine is closed")
            self._scheduler.add(request)

    def lead(self, send: Callable[[dict[str, Any]], None] | None) -> None:
        """As `Engine.lead`."""
        self._send = send

    def follow(self, messages: Iterable[Mapping[str, Any]], submit: Callable[[Submission], None]) -> None:
        """As `Engine.follow`; `submit` hands a request to `submit` of this loop."""
        for message in messages:
            orders = Orders.of(message)
            orders.check(self._core.runner.checksum.value)
            for one in orders.submitted:
                submit(one)
            self._core.step(self._scheduler.take_new(), set(orders.cancelled), orders.allowed)

    def start(self) -> None:
        """Makes the steps in a thread until `close`."""
        if self._thread is None:
            self._core.schedule.streaming = True
            self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Cancels what there is and stops the thread."""
        with self._scheduler.changed:
            self._closing = True
            for request in self._scheduler.requests:
                request.stream.cancel()
            self._scheduler.changed.notify_all()
        if self._thread is None:
            self.run()
        else:
            self._thread.join()

    def run(self) -> None:
        """Makes steps until there is nothing to do."""
        while self.drive():
            pass

    def drive(self) -> bool:
        """Makes a step, if there is no thread that does; whether there was anything to do."""
        if self._thread is not None:
            return False
        with self._working:
            return self.step()

    def step(self) -> bool:
        """The next step of the core, which other processes are told of first."""
        with self._scheduler.changed:
            known, new = self._scheduler.requests, self._scheduler.take_new()
        cancelled = {request.number for request in known if request.stream.cancelled}
        allowed = None
        if self._send is not None:
            submitted, allowed = [request.submission for request in new], self._core.schedule.allowed()
            checksum = self._core.runner.checksum.value
            self._send(Orders(submitted, sorted(cancelled), allowed, checksum).packed())
        return self._core.step(new, cancelled, allowed)

    def _work(self) -> None:
        try:
            while True:
                if self.step():
                    continue
                with self._scheduler.changed:
                    if self._closing and not self._scheduler.waiting:
                        return
                    if not self._scheduler.waiting:
                        self._scheduler.changed.wait()
        except BaseException as error:
            if self.failed:
                return  # whoever said so knows more
            if self._send is not None and peers.told() is not None:
                self.fail(left_alone())
                return
            self.fail(error)
            self._scheduler.release_pages()
            raise

    def fail(self, error: BaseException) -> None:
        """Makes no more steps: all who wait are told why. From any thread, also while a step hangs."""
        with self._scheduler.changed:
            self._closing = self.failed = True
            left = {id(one): one for one in (*self._scheduler.requests, *self._core.runner.pending_requests())}
        for request in left.values():
            if not request.finished:
                request.stream.fail(error)
