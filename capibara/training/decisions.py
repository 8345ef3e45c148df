"""What the processes of a run decide between two steps, compared while they go on.

All of them must save, evaluate, go back and end after the same steps: else one waits in a save for others that wait in a
step for it, and nothing says why. So each says what it decides, in the coordinator's store, and a thread of each looks
whether the others have decided the same. No step waits for that. It costs a message for each decision, and one a second.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from capibara import peers
from capibara.cli import EXIT_FAULT

_LOOK_S = 1.0
_KEPT = 64  # decisions of which each process tells: more than are made in the time of a few looks
_FOLDER = "decisions"


class Decision(NamedTuple):
    """After which step, and to do what."""

    step: int
    what: str


class Decisions:
    """Within `with`, the decisions of this process are compared with those of the others, if there are any.

    Args:
      differ: told of a difference, in one line; None: the process ends, and the others with it.
    """

    def __init__(self, differ: Callable[[str], None] | None = None):
        self._differ = differ or _end
        self._index = peers.place()[0] if peers.is_joined() else None
        self._made: list[Decision] = []
        self._past: int | None = None  # after this step, and since the last decision, there was nothing to decide
        self._changed, self._wake, self._ended = threading.Lock(), threading.Event(), False
        self._thread = threading.Thread(target=self._look, name="capibara-decisions", daemon=True)

    def __enter__(self) -> Decisions:
        if self._index is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._wake.set()

    def made(self, step: int, what: str) -> None:
        """After `step` this process does something else before it takes the next one."""
        with self._changed:
            self._made.append(Decision(step, what))
            self._past = None
        self._wake.set()

    def passed(self, step: int) -> None:
        """Nothing is left to be done between `step` and the next one."""
        self._past = step

    def told(self) -> str:
        """The last decisions, for the other processes."""
        with self._changed:
            first = max(len(self._made) - _KEPT, 0)
            about = {"index": self._index, "host": socket.gethostname(), "first": first, "made": self._made[first:]}
        return json.dumps(about)

    def difference(self, other: Mapping[str, Any]) -> str | None:
        """What another process decides otherwise; None: nothing so far. It sees itself what it has not decided yet."""
        with self._changed:
            made, past = list(self._made), self._past
        me = f"process {self._index} on {socket.gethostname()}"
        them = f"process {other['index']} on {other['host']}"
        for number, theirs in enumerate((Decision(*one) for one in other["made"]), other["first"]):
            if number < len(made):
                mine = made[number]
                if mine != theirs:
                    return f"{me}: {mine.what} after step {mine.step}; {them}: {theirs.what} after step {theirs.step}"
            elif number == len(made) and past is not None and past >= theirs.step:
                return f"{them}: {theirs.what} after step {theirs.step}; {me}: the next step"
        return None

    def _look(self) -> None:
        others = _FOLDER if self._index == 0 else f"{_FOLDER}/0"  # process 0 is compared with all
        said = ""
        while not self._ended:
            with contextlib.suppress(Exception):  # the coordinator is gone: JAX ends this process
                if (now := self.told()) != said:
                    peers.put(f"{_FOLDER}/{self._index}/made", now, again=True)
                    said = now
                for other in map(json.loads, peers.all_put(others)):
                    if other["index"] != self._index and (found := self.difference(other)) is not None:
                        self._differ(f"the processes of this run do not decide alike: {found}")
                        return
            self._wake.wait(_LOOK_S)
            self._wake.clear()


def _end(line: str) -> None:
    print(f"error: {line}", file=sys.stderr, flush=True)
    peers.tell(EXIT_FAULT, line)
    peers.end(EXIT_FAULT)
