"""The systems that a manager has connections to, with what it knows of their calls."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from typing import NamedTuple

from capibara.core.types import TryAgain, UserError
from capibara.jobs.backends.backend import Backend
from capibara.jobs.managing.breaker import LONGEST_S, Breaker
from capibara.jobs.managing.lifecycle import Lifecycle, Rules
from capibara.jobs.managing.records import Record
from capibara.jobs.systems.system import Busy, System


class Places:
    """The place of each job: a system with the fields that say where; it is connected to on first use.

    Args:
      connect: opens the system of a back end.
      rules: of the lifecycle of its jobs.
      say: called with a line when a place is denied.
    """

    def __init__(self, connect: Callable[[Backend], System], rules: Rules, say: Callable[[str], None]):
        self._connect, self._rules, self._say = connect, rules, say
        self._open: dict[str, Place] = {}
        self._denied: dict[str, _Denial] = {}
        self._last_error = ""

    @staticmethod
    def of(record: Record) -> str:
        """The back end with its fields, by which the jobs of one system are found together."""
        document = json.loads(record.text)
        return json.dumps([document["backend"], document["fields"]], sort_keys=True)

    def find(self, key: str, record: Record) -> Place | None:
        """A place, by `of` and one of its jobs; None: there is no way to it at present."""
        if key in self._denied and time.monotonic() < self._denied[key].until_s:
            return None
        if key not in self._open:
            try:
                system = self._connect(record.spec()[0])
            except UserError as error:
                self.deny(key, error)
                return None
            except TryAgain as error:
                if str(error) != self._last_error:
                    self._say(f"{error}: tried again")
                self._last_error = str(error)
                return None
            self._open[key] = Place(system, Lifecycle.of(system, self._rules))
        return self._open[key]

    def deny(self, key: str, error: UserError) -> None:
        """Leaves a place alone for a while, in which the user may mend it."""
        if key not in self._denied:
            self._say(f"{error}: its jobs are not managed until then")
        self._denied[key] = _Denial(error, time.monotonic() + LONGEST_S)

    def allow(self, key: str) -> None:
        """Notes that a place has answered."""
        self._denied.pop(key, None)

    def denial(self, key: str) -> UserError | None:
        """Why a place is denied; None: it is not."""
        return self._denied[key].error if key in self._denied else None

    def close(self) -> None:
        """Closes all connections."""
        for place in self._open.values():
            place.system.close()


class _Denial(NamedTuple):
    """Why a place is left alone, and until when."""

    error: UserError
    until_s: float


@dataclasses.dataclass
class Calls:
    """Calls of one kind: lists may be answered while nothing can be made."""

    breaker: Breaker = dataclasses.field(default_factory=Breaker)
    fault: str = ""  # why the last one was not answered

    def succeeded(self) -> None:
        """Notes that one was answered."""
        self.breaker.succeeded()
        self.fault = ""

    def failed(self, error: Exception, say: Callable[[str], None]) -> None:
        """Notes that one was not answered; says why if that is new."""
        self.breaker.failed(time.monotonic(), error.after_s if isinstance(error, Busy) else None)
        fault = str(error) if isinstance(error, Busy) else f"{type(error).__name__}: {error}"
        if fault != self.fault:
            say(f"{fault}: tried again")
        self.fault = fault


@dataclasses.dataclass
class Place:
    """A system at one place, with what the manager knows of it."""

    system: System
    lifecycle: Lifecycle
    reads: Calls = dataclasses.field(default_factory=Calls)
    writes: Calls = dataclasses.field(default_factory=Calls)
