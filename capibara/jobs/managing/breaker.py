"""Keeps off a system that does not answer: a pause that doubles with each failure, and a circuit breaker."""

from __future__ import annotations

import dataclasses
import random
import threading

FIRST_S, LONGEST_S = 5.0, 300.0
_TRIPS = 3  # calls in a row that fail before no other is made


def pause_s(failures: int, first_s: float = FIRST_S, longest_s: float = LONGEST_S) -> float:
    """Seconds before the next try after so many failures in a row: doubled each time, from half of it up, by chance.

    Chance keeps many that failed at one moment from returning at one moment.
    """
    return random.uniform(0.5, 1.0) * min(longest_s, first_s * 2.0 ** min(failures - 1, 30))


@dataclasses.dataclass
class Breaker:
    """Of one system; threads share it.

    After three calls in a row that have failed, no call is made until a pause has passed; then one call tries. Each further
    failure doubles the pause.

    Attributes:
      first_s: the first pause.
      longest_s: the longest.
    """

    first_s: float = FIRST_S
    longest_s: float = LONGEST_S

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._failures, self._closed_until_s = 0, 0.0

    def allows(self, now_s: float) -> bool:
        """Whether a call may be made now."""
        with self._lock:
            return now_s >= self._closed_until_s

    def succeeded(self) -> None:
        """Notes that a call was answered."""
        with self._lock:
            self._failures, self._closed_until_s = 0, 0.0

    def failed(self, now_s: float, after_s: float | None = None) -> None:
        """Notes that a call was not answered.

        Args:
          now_s: the time, of a clock that nobody sets.
          after_s: the seconds that the system asks to wait; None: it does not.
        """
        with self._lock:
            self._failures += 1
            wait_s = after_s or 0.0
            if self._failures >= _TRIPS:
                wait_s = max(wait_s, pause_s(self._failures - _TRIPS + 1, self.first_s, self.longest_s))
            self._closed_until_s = max(self._closed_until_s, now_s + min(wait_s, self.longest_s))
