"""Checks in the background that all processes of a run take the same decisions between steps.

All of them must save, evaluate, roll back and end after the same steps. Otherwise one waits in a save for others that wait
in a step for it, and nothing says why. So each process publishes its decisions in the coordinator's store, and a thread of
each compares them. No step waits for this; it costs a message for each decision, and one a second.
"""

from __future__ import annotations

import itertools
import json
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from capibara.multihost import peers
from capibara.multihost.exits import EXIT_FAULT

COMPARE_S = 1.0  # between two comparisons
_PUBLISHED = 64  # newest decisions that the others see; fewer are taken between a few comparisons
_KEPT = 4096  # newest decisions to compare with; another process may be some comparisons behind
_STOP_S = 5.0  # for the last comparison when a run ends
_FOLDER = "decisions"
_runs = itertools.count()  # numbers the runs of this process: all processes begin the same runs in the same order


class Decision(NamedTuple):
    """An action that follows a step, such as a save."""

    step: int
    action: str


class Decisions:
    """Within `with`, compares the decisions of this process with those of the others, if there are any.

    Args:
      end: called with one line on a difference or a failed comparison; None: this process exits, and the others with it.
    """

    def __init__(self, end: Callable[[str], None] | None = None):
        self._end = end or _end
        self._index = peers.process_info()[0] if peers.is_joined() else None
        self._folder = f"{_FOLDER}/{next(_runs)}"
        self._last: list[Decision] = []  # the newest `_KEPT` decisions, or some more
        self._first = 0  # the number of decisions before them
        self._passed: int | None = None  # since the last decision, no action followed the steps up to this one
        self._changed, self._wake, self._ended = threading.Lock(), threading.Event(), False
        self._thread = threading.Thread(target=self._compare, name="capibara-decisions", daemon=True)

    def __enter__(self) -> Decisions:
        if self._index is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)

    def record(self, step: int, action: str) -> None:
        """Records an action that this process takes between `step` and the next one."""
        with self._changed:
            self._last.append(Decision(step, action))
            if len(self._last) == 2 * _KEPT:
                del self._last[:_KEPT]
                self._first += _KEPT
            self._passed = None
        self._wake.set()

    def passed(self, step: int) -> None:
        """Records that no further action follows `step`."""
        self._passed = step

    def published(self) -> str:
        """The newest decisions as JSON, for the other processes."""
        with self._changed:
            last = self._last[-_PUBLISHED:]
            first = self._first + len(self._last) - len(last)
        return json.dumps({"index": self._index, "host": socket.gethostname(), "first": first, "made": last})

    def difference(self, other: Mapping[str, Any]) -> str | None:
        """The first difference from another process's decisions; None: none so far.

        Only decisions that both have taken are compared: the process that is behind finds a difference later.
        """
        me = f"process {self._index} on {socket.gethostname()}"
        them = f"process {other['index']} on {other['host']}"
        with self._changed:
            end = self._first + len(self._last)
            for number, theirs in enumerate((Decision(*item) for item in other["made"]), other["first"]):
                if self._first <= number < end:
                    mine = self._last[number - self._first]
                    if mine != theirs:
                        mine_says, their_says = (f"{item.action} after step {item.step}" for item in (mine, theirs))
                        return f"{me}: {mine_says}; {them}: {their_says}"
                elif number == end and self._passed is not None and self._passed >= theirs.step:
                    return f"{them}: {theirs.action} after step {theirs.step}; {me}: the next step"
        return None

    def _compare(self) -> None:
        """Compares once a second until the run ends, and once more then. If the coordinator is gone, JAX ends us."""
        others = self._folder if self._index == 0 else f"{self._folder}/0"  # process 0 is compared with all
        before = ""
        while True:
            ended = self._ended
            try:
                if (now := self.published()) != before:
                    peers.put(f"{self._folder}/{self._index}/made", now, again=True)
                    before = now
                for other in map(json.loads, peers.list_values(others)):
                    if other["index"] != self._index and (result := self.difference(other)) is not None:
                        self._end(f"the processes of this run took different decisions: {result}")
                        return
            except Exception as error:
                if not peers.is_unreachable(error):
                    traceback.print_exc()
                    cause = f"{type(error).__name__}: {' '.join(str(error).split())}"
                    self._end(f"the decisions of this run's processes cannot be compared: {cause}")
                    return
            if ended:
                return
            self._wake.wait(COMPARE_S)
            self._wake.clear()


def _end(line: str) -> None:
    print(f"error: {line}", file=sys.stderr, flush=True)
    peers.report(EXIT_FAULT, line)
    peers.exit_process(EXIT_FAULT)
