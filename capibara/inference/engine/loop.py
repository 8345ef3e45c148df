"""Runs the steps of an engine, in its own thread or in a caller's, and stops them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from capibara.inference.engine.core import EngineCore
from capibara.inference.engine.recovery import Recovery
from capibara.inference.engine.requests.faults import ProgramFault, cause_of, ends_process
from capibara.inference.engine.requests.following import Orders, Submission
from capibara.inference.engine.requests.request import Request
from capibara.inference.engine.requests.stream import ProcessLost
from capibara.multihost import peers

_COMPILING_S = 0.02  # after which prompts are tried again whose programs are being compiled


class EngineLoop:
    """Runs a core's steps one after the other until it is closed or a step fails.

    `submit`, `close` and `fail` are thread-safe. Without a thread, callers of `drive` make the steps, one at a time.

    Args:
      core: the core.
      recovery: continues after a failed step.

    Attributes:
      failed: whether a step has failed for good; then no more steps are made.
    """

    def __init__(self, core: EngineCore, recovery: Recovery):
        self._core, self._scheduler, self._recovery = core, core.scheduler, recovery
        self._working = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = self.failed = False
        self._send: Callable[[dict[str, Any]], None] | None = None

    @property
    def threaded(self) -> bool:
        """Whether it has its own thread."""
        return self._thread is not None

    @property
    def leads(self) -> bool:
        """Whether other processes make the same steps."""
        return self._send is not None

    def submit(self, request: Request) -> None:
        """Adds a request to the next step.

        Raises:
          RuntimeError: the loop is closed.
        """
        with self._scheduler.changed:
            if self._closing:
                raise RuntimeError("the engine is closed")
            self._scheduler.add(request)

    def lead(self, send: Callable[[dict[str, Any]], None] | None) -> None:
        """See `Engine.lead`."""
        self._send = send

    def follow(self, messages: Iterable[Mapping[str, object]], submit: Callable[[Submission], None]) -> None:
        """See `Engine.follow`; `submit` processes a message's request and passes it to this loop's `submit`."""
        for message in messages:
            orders = Orders.of(message)
            orders.check(self._core.runner.checksum.value)
            for item in orders.submitted:
                submit(item)
            try:
                self._core.step(self._scheduler.take_new(), set(orders.cancelled), orders.allowed)
            except ProgramFault as fault:
                raise cause_of(fault) from None

    def start(self) -> None:
        """Starts a thread that makes steps until `close`."""
        if self._thread is None:
            self._core.schedule.streaming = True
            # Processes that make the same steps would have compiled other programs by then.
            if not (self.leads or self._core.on_mesh):
                self._core.compiler.start()
            self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Cancels all requests and stops the thread."""
        with self._scheduler.changed:
            self._closing = True
            for request in self._scheduler.requests:
                request.stream.cancel()
            self._scheduler.changed.notify_all()
        if self._thread is None:
            self.run()
        else:
            self._thread.join()
        self._core.compiler.close()

    def run(self) -> None:
        """Makes steps until there is nothing to do."""
        while self.drive():
            pass

    def drive(self) -> bool:
        """Makes one step, unless there is a thread; returns whether there was anything to do."""
        if self._thread is not None:
            return False
        with self._working:
            return self.step()

    def step(self) -> bool:
        """The core's next step; announces it to other processes first.

        If it fails, the next ones compute its requests again. With other processes the error is raised: they may not
        have seen it.
        """
        try:
            return self._step()
        except BaseException as error:
            if self._send is not None or self.failed or ends_process(error):
                raise cause_of(error) from None
            self._recovery.recover(error)
            return True

    def _step(self) -> bool:
        self._recovery.review()
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
                    if self._core.prefill.stalled:
                        self._scheduler.changed.wait(_COMPILING_S)
                    elif not self._scheduler.waiting:
                        self._scheduler.changed.wait()
        except BaseException as error:
            if self.failed:
                return  # `fail` was called with a more precise error
            if self._send is not None and peers.peer_fault() is not None:
                self.fail(ProcessLost("another process is gone: start the command again on every host"))
                return
            self.fail(error)
            self._scheduler.release_pages()
            raise

    def fail(self, error: BaseException) -> None:
        """Stops making steps: all requests get this error. Thread-safe, also while a step hangs."""
        with self._scheduler.changed:
            self._closing = self.failed = True
            left = {id(item): item for item in (*self._scheduler.requests, *self._core.runner.pending_requests())}
        for request in left.values():
            if not request.finished:
                request.stream.fail(error)
