"""Takes the maintenance of a virtual machine of Google Cloud as SIGTERM: the run saves a checkpoint before its host is taken.

The metadata server announces it as instance/maintenance-event, and the end of a Spot machine as instance/preempted. Source:
docs.cloud.google.com/compute/docs/metadata/getting-live-migration-notice.
"""

from __future__ import annotations

import os
import signal
import threading
import urllib.request
from collections.abc import Callable
from typing import Self

_NONE = "NONE"
_EVERY_S, _TIMEOUT_S = 5.0, 3.0
_LARGEST = 1 << 10  # bytes


class Maintenance:
    """Watches for announcements in a `with` block, and sends this process SIGTERM at each new one.

    Args:
      every_s: seconds between two looks.
      say: called with a line for each announcement.
    """

    def __init__(self, *, every_s: float = _EVERY_S, say: Callable[[str], None] = print):
        self._every_s, self._say = every_s, say
        self._ended, self._announced = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="capibara-maintenance", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(2 * _TIMEOUT_S)

    def was_announced(self) -> bool:
        """Whether a SIGTERM came from here since the last call."""
        was = self._announced.is_set()
        self._announced.clear()
        return was

    @staticmethod
    def is_preempted() -> bool:
        """Whether the machine is being taken away, so that starting again is of no use."""
        return _read("preempted") == "TRUE"

    def _watch(self) -> None:
        last = _NONE
        while not self._ended.wait(self._every_s):
            event = _read("maintenance-event")
            if event is None:
                continue
            if event not in (_NONE, last):
                self._say(f"maintenance of this host is announced ({event}): the run saves a checkpoint")
                self._announced.set()
                os.kill(os.getpid(), signal.SIGTERM)
            last = event


def _read(name: str) -> str | None:
    """A value of this machine; None: the metadata server does not answer."""
    host = os.environ.get("GCE_METADATA_IP") or os.environ.get("GCE_METADATA_HOST") or "169.254.169.254"
    address = f"http://{host}/computeMetadata/v1/instance/{name}"
    request = urllib.request.Request(address, headers={"Metadata-Flavor": "Google"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy would not reach it
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as answer:
            return bytes(answer.read(_LARGEST)).decode("ascii").strip()
    except (OSError, ValueError):
        return None
