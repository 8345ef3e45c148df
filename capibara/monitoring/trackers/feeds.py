"""The feeds of a run's trackers, each in a thread: a tracker that blocks or fails holds up no other."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
import traceback
from collections.abc import Callable, Sequence

from capibara.monitoring.metrics_file.loggers import metrics_path
from capibara.monitoring.metrics_file.redaction import redact
from capibara.monitoring.summaries.progress import printable
from capibara.monitoring.trackers import lines, state
from capibara.monitoring.trackers.feed import Feed, Hooks
from capibara.monitoring.trackers.lines import Position, Tail
from capibara.monitoring.trackers.tracker import Tracker
from capibara.storage import stores

EXIT_REFUSED = 2  # of the process that feeds: to start it again would not help
STALLED_S = 60.0
_LONGEST_LABEL = 64
_LOG, _MOST_LOG_BYTES = "trackers.log", 1 << 20


class Feeds:
    """Feeds several trackers of a run.

    Args:
      trackers: as configured.
      model_dir: the run folder.
      say: called with lines for the user, from any thread.

    Attributes:
      labels: of the trackers.
    """

    def __init__(self, trackers: Sequence[Tracker], model_dir: str, say: Callable[[str], None]):
        self._model_dir, self._lock = model_dir, threading.Lock()
        self._say: Callable[[str], None] = lambda line: say(printable(line))  # names and answers may be anyone's
        state.uid(model_dir)  # before the threads ask for it
        self._scratch, self.labels = scratch_of(model_dir), labels(trackers)
        os.makedirs(self._scratch, exist_ok=True)
        self._sent: dict[str, bool] = {}
        self._stalled: set[str] = set()
        self._threads: dict[str, tuple[Feed, threading.Thread]] = {}
        for label, tracker in zip(self.labels, trackers):
            hooks = Hooks(failed=self._failed_hook(label), works=self._say, say=self._say, fault=self._note)
            feed = Feed(tracker, label, model_dir, os.path.join(self._scratch, f"{label}.files"), hooks)
            self._threads[label] = feed, threading.Thread(target=self._feed, args=[feed], name=label, daemon=True)

    def start(self) -> None:
        """Starts the threads."""
        for _, thread in self._threads.values():
            thread.start()

    def end(self) -> None:
        """The run has ended, or writes nothing more for now: the feeds end when they have sent everything."""
        for feed, _ in self._threads.values():
            feed.ending.set()

    def wait(self, within_s: float) -> bool:
        """Waits until all feeds have ended, at most so long; says which trackers do not answer. Whether all have ended."""
        limit_s = time.monotonic() + within_s
        for _, thread in self._threads.values():
            thread.join(max(0.0, limit_s - time.monotonic()))
        for label, (feed, _) in self._threads.items():
            since_s = feed.busy_since
            if since_s is not None and time.monotonic() - since_s > STALLED_S and label not in self._stalled:
                self._stalled.add(label)
                self._say(f"{label} does not answer; what it misses is sent when it does")
        return not any(thread.is_alive() for _, thread in self._threads.values())

    def unsent(self) -> dict[str, int]:
        """Lines that each tracker has not got, for those that have ended without them."""
        left = {label: unsent(self._model_dir, label) for label in self._threads if not self._sent.get(label)}
        return {label: count for label, count in left.items() if count}

    def _feed(self, feed: Feed) -> None:
        self._sent[feed.label] = feed.run()

    def _failed_hook(self, label: str) -> Callable[[str], None]:
        return lambda text: self._say(f"{label} fails: {text}")

    def _note(self, error: BaseException) -> None:
        path = os.path.join(self._scratch, _LOG)
        text = redact("".join(traceback.format_exception(error)))
        with self._lock, contextlib.suppress(OSError):  # a full disk: the line for the user says what failed
            mode = "a" if os.path.exists(path) and os.path.getsize(path) < _MOST_LOG_BYTES else "w"
            with open(path, mode, encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")


def labels(trackers: Sequence[Tracker]) -> list[str]:
    """A label for each tracker, as a part of file names: its own, with a number where it is taken."""
    result: list[str] = []
    for tracker in trackers:
        label = re.sub(r"[^\w.-]", "-", str(tracker.label)).strip(".")[:_LONGEST_LABEL] or "tracker"
        numbered = (f"{label}-{number}" for number in range(2, len(trackers) + 3))
        result.append(next(item for item in (label, *numbered) if item not in (*result, state.RUN)))
    return result


def unsent(model_dir: str, label: str) -> int:
    """Lines of a run's metrics.jsonl that a tracker has not got; the last one counts until it knows that the run has ended."""
    result, path = state.read(model_dir, label), metrics_path(model_dir)
    position = result.position if lines.is_within(path, result.position) else Position()
    left = Tail(path, position).remaining()
    return left or int(position.byte > 0 and not result.is_finished)


def scratch_of(model_dir: str) -> str:
    """A local folder for files of trackers' clients: in the run folder, or a cache folder for a run in a bucket."""
    if stores.of(model_dir).has_local_paths:
        return os.path.join(os.path.abspath(model_dir), state.FOLDER)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(cache, "capibara", state.FOLDER, state.uid(model_dir))
