"""A tracker that skips what its service refuses for good, so that one line cannot hold up those that follow it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from capibara.monitoring.metrics_file.redaction import redact
from capibara.monitoring.trackers.tracker import Moment, Refused, Tracker

_MOST_IN_A_ROW = 20  # more of them: it is not the lines, but the run or the service
_MOST_SAID = 5
_LONGEST_ERROR = 300


class Skipping(Tracker):
    """Passes calls on to a tracker, and skips those for which it raises Refused.

    Args:
      tracker: of a run that has started.
      label: its name in messages.
      say: prints a line for the user.
      reported: the lines so far, also of earlier sessions: none is repeated.
    """

    def __init__(self, tracker: Tracker, label: str, say: Callable[[str], None], reported: set[str]):
        self._tracker, self._label, self._say, self._reported = tracker, label, say, reported
        self._in_a_row = 0

    def log(self, moment: Moment, metrics: Mapping[str, float]) -> None:
        self._try(moment, "metrics", lambda: self._tracker.log(moment, metrics))

    def text(self, moment: Moment, name: str, text: str) -> None:
        self._try(moment, name, lambda: self._tracker.text(moment, name, text))

    def facts(self, moment: Moment, facts: Mapping[str, object]) -> None:
        self._try(moment, "facts", lambda: self._tracker.facts(moment, facts))

    def picture(self, moment: Moment, name: str, path: str) -> None:
        self._try(moment, name, lambda: self._tracker.picture(moment, name, path))

    def roll_back(self, moment: Moment) -> None:
        self._try(moment, "the roll-back", lambda: self._tracker.roll_back(moment))

    def finish(self, reason: str) -> None:
        self._tracker.finish(reason)

    def _try(self, moment: Moment, action: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Refused as error:
            self._in_a_row += 1
            if self._in_a_row > _MOST_IN_A_ROW:
                raise
            about = " ".join(redact(f"{action[:60]} of step {moment.step}: {error}").split())
            line = f"{self._label} does not take {about[:_LONGEST_ERROR]}; skipped"
            if line not in self._reported and len(self._reported) < _MOST_SAID:
                self._reported.add(line)
                self._say(line)
        else:
            self._in_a_row = 0
