"""The pictures of a run folder, sent to a tracker when they have changed."""

from __future__ import annotations

import os
import tempfile
import time

from capibara.monitoring.trackers.tracker import Moment, Tracker
from capibara.storage import stores
from capibara.storage.store import Entry

_EVERY_S = 300.0
_MOST_BYTES = 32 << 20
_BEGIN, _END = b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"


class Pictures:
    """Sends the .png files at the top of a run folder.

    Args:
      tracker: that gets them.
      model_dir: the run folder.
    """

    def __init__(self, tracker: Tracker, model_dir: str):
        self._tracker, self._model_dir = tracker, model_dir
        self._sent: dict[str, tuple[int, str]] = {}
        self._looked_s = time.monotonic()

    def send(self, moment: Moment, every_s: float = _EVERY_S) -> None:
        """Sends what has changed, if the last look is `every_s` ago."""
        if time.monotonic() - self._looked_s < every_s:
            return
        self._looked_s = time.monotonic()
        for entry in stores.of(self._model_dir).matching(os.path.join(_escaped(self._model_dir), "*.png")):
            seen = (entry.size, entry.version)
            name = os.path.basename(entry.url)
            if entry.size <= _MOST_BYTES and self._sent.get(name) != seen and _is_plain(entry.url):
                self._send(moment, name, entry)
                self._sent[name] = seen

    def _send(self, moment: Moment, name: str, entry: Entry) -> None:
        content = stores.of(entry.url).read(entry.url, _MOST_BYTES)
        if not (content.startswith(_BEGIN) and content.endswith(_END)):
            return  # a client that cannot open it would fail, and hold up the metrics
        if stores.of(entry.url).has_local_paths:
            self._tracker.picture(moment, name, entry.url)
            return
        with tempfile.TemporaryDirectory(prefix="capibara-picture-") as folder:
            path = os.path.join(folder, name)
            with open(path, "wb") as file:
                file.write(content)
            self._tracker.picture(moment, name, path)


def _is_plain(path: str) -> bool:
    """Whether a path is no link: in a run folder of others it may lead to any file of this machine."""
    return not (stores.of(path).has_local_paths and os.path.islink(path))


def _escaped(folder: str) -> str:
    """A folder's path as the beginning of a glob."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in folder)
