"""Server-sent events: one hub for all viewers, whose queues are bounded, so that a slow or dead one costs nothing."""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from capibara.monitoring.dashboard.http.access import Refusal
from capibara.monitoring.dashboard.http.answers import json_bytes
from capibara.monitoring.dashboard.reading.reader import Change
from capibara.monitoring.dashboard.views.names import Json

_MOST_VIEWERS = 1_000
_MOST_EVENTS, _MOST_BYTES = 64, 1 << 18  # that wait for one viewer
_EVERY_S, _PING_S = 1.0, 15.0
_PING = b": ping\n\n"


class _Viewer:
    """One viewer's queue; when it is full, everything is dropped and the viewer is to load anew."""

    def __init__(self, runs: frozenset[str]):
        self.runs = runs
        self._waiting: collections.deque[bytes] = collections.deque()
        self._bytes = 0
        self._arrived, self._is_ended = asyncio.Event(), False

    def put(self, message: bytes) -> None:
        if len(self._waiting) >= _MOST_EVENTS or self._bytes + len(message) > _MOST_BYTES:
            self._waiting.clear()
            self._bytes, message = 0, _message("resync", {})
        self._waiting.append(message)
        self._bytes += len(message)
        self._arrived.set()

    def end(self) -> None:
        """Ends the messages."""
        self._is_ended = True
        self._arrived.set()

    async def messages(self) -> AsyncIterator[bytes]:
        """What arrived, in pieces; a ping where nothing has for long."""
        while not self._is_ended:
            try:
                async with asyncio.timeout(_PING_S):
                    await self._arrived.wait()
            except TimeoutError:
                yield _PING
                continue
            self._arrived.clear()
            content = b"".join(self._waiting)
            self._waiting.clear()
            self._bytes = 0
            yield content


class Hub:
    """Passes changes on to all viewers, at most once a second; belongs to one event loop.

    Args:
      describe: id of a run -> what an `update` says of it; None: it is gone. Called in a thread.
    """

    def __init__(self, describe: Callable[[str], dict[str, Json] | None]):
        self._describe = describe
        self._viewers: set[_Viewer] = set()
        self._changed = Change()
        self._alerts: list[dict[str, Json]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_ended = False

    @property
    def viewers(self) -> int:
        """How many are connected."""
        return len(self._viewers)

    def check_room(self) -> None:
        """Raises Refusal if there are too many viewers."""
        if self._is_ended or len(self._viewers) >= _MOST_VIEWERS:
            raise Refusal(503, "there are too many viewers: close other windows", "too_many_viewers")

    def begin(self) -> None:
        """Starts to pass on; called in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._work())

    def end(self) -> None:
        """Ends the events of all viewers, and passes on no more."""
        self._is_ended = True
        for viewer in self._viewers:
            viewer.end()
        if self._task is not None:
            self._task.cancel()

    def changed(self, change: Change) -> None:
        """Takes note of changes; from any thread."""
        self._soon(self._note, change)

    def alert(self, alert: dict[str, Json]) -> None:
        """Takes note of an alert; from any thread."""
        self._soon(self._alerts.append, alert)

    async def events(self, runs: Sequence[str], hello: Mapping[str, Json]) -> AsyncIterator[bytes]:
        """The events for one viewer, without end.

        Args:
          runs: ids of the runs whose updates it wants; empty: all.
          hello: the first event.
        """
        viewer = _Viewer(frozenset(runs))
        self._viewers.add(viewer)
        try:
            yield _message("hello", hello)
            async for content in viewer.messages():
                yield content
        finally:
            self._viewers.discard(viewer)

    def _soon(self, call: Callable[..., object], *arguments: object) -> None:
        if self._loop is not None and not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(call, *arguments)
            except RuntimeError:  # closed in this moment
                pass

    def _note(self, change: Change) -> None:
        for mine, more in zip(_lists(self._changed), _lists(change), strict=True):
            mine += [one for one in more if one not in mine]

    async def _work(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            change, self._changed = self._changed, Change()
            alerts, self._alerts = self._alerts[-_MOST_EVENTS:], []
            if not self._viewers:
                continue
            try:
                updates = await asyncio.to_thread(self._updates, change.updated)
                self._pass_on(change, updates, alerts)
            except Exception:  # one odd run must not end the events of all others
                logging.getLogger(__name__).exception("an update could not be passed on")

    def _updates(self, ids: Sequence[str]) -> dict[str, dict[str, Json]]:
        found = {run_id: self._describe(run_id) for run_id in ids}
        return {run_id: about for run_id, about in found.items() if about is not None}

    def _pass_on(self, change: Change, updates: dict[str, dict[str, Json]], alerts: Sequence[dict[str, Json]]) -> None:
        common = b""
        if change.added or change.removed:
            common += _message("runs", {"added": list(change.added), "removed": list(change.removed)})
        common += b"".join(_message("alert", alert) for alert in alerts)
        made: dict[frozenset[str], bytes] = {}
        for viewer in list(self._viewers):
            if viewer.runs not in made:
                chosen = [about for run_id, about in updates.items() if not viewer.runs or run_id in viewer.runs]
                again = [run_id for run_id in change.reloaded if not viewer.runs or run_id in viewer.runs]
                message = b"".join(_message("reload", {"id": run_id}) for run_id in again)
                made[viewer.runs] = message + (_message("update", {"runs": list(chosen)}) if chosen else b"")
            if content := common + made[viewer.runs]:
                viewer.put(content)


def _lists(change: Change) -> tuple[list[str], ...]:
    return change.added, change.removed, change.updated, change.reloaded


def _message(event: str, data: Mapping[str, Json]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event.encode(), json_bytes({**data}))
