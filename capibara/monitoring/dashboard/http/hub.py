"""Server-sent events: one hub writes to all viewers, and only as much as each one reads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from capibara.monitoring.dashboard.http.access import Refusal
from capibara.monitoring.dashboard.http.answers import json_bytes
from capibara.monitoring.dashboard.views.names import Json
from capibara.monitoring.reading.reader import Change

MOST_VIEWERS = 1_000
_MOST_ALERTS, _MOST_BYTES = 64, 1 << 18  # of one event; that wait for one viewer
EVERY_S, _LOOK_S, _PING_S = 0.9, 5.0, 15.0  # between two events; between looks at viewers; without any event
_PING = b": ping\n\n"


class Sink(Protocol):
    """Where the events of one viewer are written."""

    @property
    def unsent_bytes(self) -> int:
        """What was written and the viewer has not taken yet."""

    def push(self, content: bytes) -> None:
        """Writes without waiting."""


class _Viewer:
    """One viewer; if it reads too slowly, events are dropped, and it is to load everything again."""

    def __init__(self, runs: frozenset[str], sink: Sink):
        self.runs, self.ended = runs, asyncio.Event()
        self._sink, self._has_missed, self._written_s = sink, False, time.monotonic()

    def put(self, content: bytes, now_s: float) -> None:
        """Writes events, or a ping where nothing was written for long; `content` may be empty."""
        if self._sink.unsent_bytes + len(content) > _MOST_BYTES:
            self._has_missed = self._has_missed or bool(content)
            if self._sink.unsent_bytes:
                return
        if self._has_missed:
            content, self._has_missed = _message("resync", {}), False
        elif not content and now_s - self._written_s >= _PING_S:
            content = _PING
        if content:
            self._sink.push(content)
            self._written_s = now_s


class Hub:
    """Passes changes on to all viewers at once, but not more often than each second; belongs to one event loop.

    Args:
      describe: id of a run -> what an `update` says of it; None: it is gone. Called in a thread.
    """

    def __init__(self, describe: Callable[[str], dict[str, Json] | None]):
        self._describe = describe
        self._viewers: set[_Viewer] = set()
        self._changed, self._has_news = Change(), asyncio.Event()
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
        if self._is_ended or len(self._viewers) >= MOST_VIEWERS:
            raise Refusal(503, "there are too many viewers: close other windows", "too_many_viewers")

    def begin(self) -> None:
        """Starts to pass on; called in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._work())

    def end(self) -> None:
        """Ends the events of all viewers, and passes on no more."""
        self._is_ended = True
        for viewer in self._viewers:
            viewer.ended.set()
        if self._task is not None:
            self._task.cancel()

    def changed(self, change: Change) -> None:
        """Takes note of changes; from any thread."""
        self._soon(self._note, change)

    def alert(self, alert: dict[str, Json]) -> None:
        """Takes note of an alert; from any thread."""
        self._soon(self._note_alert, alert)

    @contextlib.contextmanager
    def watching(self, runs: Sequence[str], sink: Sink) -> Iterator[asyncio.Event]:
        """Writes events to a viewer while the block runs.

        Args:
          runs: ids of the runs whose updates it wants; empty: all.
          sink: where its events are written.

        Yields:
          What is set when there will be no more events.
        """
        viewer = _Viewer(frozenset(runs), sink)
        self._viewers.add(viewer)
        try:
            if self._is_ended:
                viewer.ended.set()
            yield viewer.ended
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
            mine += [item for item in more if item not in mine]
        self._has_news.set()

    def _note_alert(self, alert: dict[str, Json]) -> None:
        self._alerts.append(alert)
        self._has_news.set()

    async def _work(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._has_news.wait()
            self._has_news.clear()
            begin_s = time.monotonic()
            await self._tell()
            await asyncio.sleep(max(0.0, begin_s + EVERY_S - time.monotonic()))

    async def _tell(self) -> None:
        """Tells all viewers what is new."""
        change, self._changed = self._changed, Change()
        alerts, self._alerts = self._alerts[-_MOST_ALERTS:], []
        if not self._viewers:
            return
        try:
            updates = await asyncio.to_thread(self._updates, change.updated) if change.updated else {}
            self._pass_on(change, updates, alerts)
        except Exception:  # one odd run must not end the events of all others
            logging.getLogger(__name__).exception("an update could not be passed on")

    def _updates(self, ids: Sequence[str]) -> dict[str, dict[str, Json]]:
        result = {run_id: self._describe(run_id) for run_id in ids}
        return {run_id: about for run_id, about in result.items() if about is not None}

    def _pass_on(self, change: Change, updates: dict[str, dict[str, Json]], alerts: Sequence[dict[str, Json]]) -> None:
        common = b""
        if change.added or change.removed:
            common += _message("runs", {"added": list(change.added), "removed": list(change.removed)})
        common += b"".join(_message("alert", alert) for alert in alerts)
        created: dict[frozenset[str], bytes] = {}
        now_s = time.monotonic()
        for viewer in list(self._viewers):
            if viewer.runs not in created:
                chosen = [about for run_id, about in updates.items() if not viewer.runs or run_id in viewer.runs]
                again = [run_id for run_id in change.reloaded if not viewer.runs or run_id in viewer.runs]
                message = b"".join(_message("reload", {"id": run_id}) for run_id in again)
                created[viewer.runs] = message + (_message("update", {"runs": list(chosen)}) if chosen else b"")
            viewer.put(common + created[viewer.runs], now_s)


class EventStream(Response):
    """An answer without an end: the hub writes to its connection past the application, which costs 200 viewers little.

    Args:
      hub: whose events it is.
      runs: ids of the runs whose updates are wanted; empty: all.
      hello: the first event.
    """

    def __init__(self, hub: Hub, runs: Sequence[str], hello: Mapping[str, Json]):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self._hub, self._runs, self._hello = hub, tuple(runs), _message("hello", hello)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._hello, "more_body": True})
        with self._hub.watching(self._runs, scope["state"]["connection"]) as ended:
            waits = [asyncio.ensure_future(ended.wait()), asyncio.ensure_future(_closed(receive))]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for item in waits:
                    item.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _closed(receive: Receive) -> None:
    """Waits until the viewer is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _lists(change: Change) -> tuple[list[str], ...]:
    return change.added, change.removed, change.updated, change.reloaded


def _message(event: str, data: Mapping[str, Json]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event.encode(), json_bytes({**data}))
