"""Brings an engine back after a program has failed, and finds the request that made it fail.

A program has rows of many requests, and writes the state of all slots, which is lost if it fails. So the state is made
anew, and all requests are read again, each with the tokens that it has received. First comes a request of the engine's
own: if even that fails, the devices are at fault. Then the requests of the failed program run alone, one after the
other, until they are past the token where it failed: if a program fails then, it is that request's fault.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Sequence

from capibara.inference.engine.cache.batching import EngineConfig
from capibara.inference.engine.requests.faults import ProgramFault, cause_of, ends_process
from capibara.inference.engine.requests.request import Request
from capibara.inference.engine.scheduler import Scheduler

_SHARED = 3  # faults of a request's programs that no request alone repeats; after them it runs alone to its end
_LOST = 3  # failures of the engine's own request, with no text finished in between, after which the devices are lost


class Recovery:
    """Recovers from failed programs; used by the thread that makes the steps.

    Args:
      scheduler: of the engine.
      config: of the engine.
      probe: makes a short request that is known to work.
    """

    def __init__(self, scheduler: Scheduler, config: EngineConfig, probe: Callable[[], Request]):
        self._scheduler, self._make_probe = scheduler, probe
        self._ahead = max(config.most_steps, config.draft_tokens + 1) + 1
        self._probe: Request | None = None  # None: the last one has passed
        self._lost = self._finished = 0

    def review(self) -> None:
        """Ends the trial of the request that runs alone, if it is past the token where its program failed."""
        while self._scheduler.lone:
            self._scheduler.receive(0)  # an error is then of this request, and all of its tokens are known
            request = self._scheduler.lone[0]
            if not (request.finished or request.slot is not None and request.received >= request.alone_until):
                return
            request.alone_until = 0
            self._scheduler.end_alone()
            if request is self._probe:
                self._probe, self._lost = None, 0

    def recover(self, error: BaseException) -> None:
        """Makes the engine ready for its next step, after a step has raised this error.

        Raises:
          BaseException: the error, if the engine's own requests fail again and again.
        """
        fault = self._first_fault(error)
        _free_frames(error)
        running, cause = self._scheduler.running, cause_of(fault)
        suspects = list(fault.requests) if isinstance(fault, ProgramFault) else running
        self._scheduler.statistics.faults += 1
        if self._probe is not None:
            self._fail_all(cause)
            return
        guilty = suspects[0] if len(suspects) == 1 and suspects[0].alone_until else None
        message = f"{type(cause).__name__}: {cause}".partition("\n")[0][:300]
        verdict = "one gets this error" if guilty else "each is tried alone"
        line = "a program of %d requests failed (%s): %s, and %d are read again"
        logging.getLogger(__name__).warning(line, len(suspects), message, verdict, len(running))
        self._probe = self._make_probe()
        self._probe.alone_until = self._probe.limit
        if guilty is None:
            again = self._marked(suspects, running)
            rest = [item for item in self._scheduler.lone if item not in running]
            self._scheduler.start_over([self._probe, *again, *rest])
            return
        for request in self._scheduler.requests:  # the fault is explained
            request.faults = request.alone_until = 0
        guilty.cancelled = True
        self._scheduler.start_over([self._probe])
        if not guilty.finished:
            guilty.fail(cause)

    def _marked(self, suspects: Sequence[Request], running: Sequence[Request]) -> list[Request]:
        """Marks the requests of a failed program; returns those that need slots, the latest first."""
        for request in suspects:
            request.faults += 1
            until = request.limit if request.faults > _SHARED else request.requested + self._ahead
            request.alone_until = min(until, request.limit)
        return sorted((suspect for suspect in suspects if suspect in running), key=lambda item: -item.number)

    def _first_fault(self, error: BaseException) -> BaseException:
        """Receives what the devices computed before the fault; returns an earlier fault that this one follows from."""
        try:
            self._scheduler.receive(0)
        except BaseException as earlier:
            if ends_process(earlier):
                raise
            return earlier if isinstance(earlier, ProgramFault) else error
        return error

    def _fail_all(self, cause: BaseException) -> None:
        """Fails all requests that run or are tried, since the engine's own failed, too."""
        self._lost = self._lost + 1 if self._scheduler.finished == self._finished else 1
        self._probe, self._finished = None, self._scheduler.finished
        failed = {id(item): item for item in (*self._scheduler.running, *self._scheduler.lone)}.values()
        for request in failed:
            request.fail(cause)
        self._scheduler.start_over([])
        if self._lost >= _LOST:
            raise cause


def _free_frames(error: BaseException | None) -> None:
    """Lets go of the arrays that local variables of an error's frames hold, since the error may be kept for long."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
