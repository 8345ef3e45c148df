"""A status line on standard error for long jobs; a few plain lines if it is not a terminal."""

from __future__ import annotations

import sys
import time
from typing import IO, Self

_PLAIN_AFTER_S, _PLAIN_EVERY_S = 2.0, 30.0


class StatusLine:
    """Shows the latest text; as a context manager it clears the line at the end.

    Args:
      stream: where to write; None: standard error.
    """

    def __init__(self, stream: IO[str] | None = None):
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._topic, self._said_s, self._begun_s = "", 0.0, time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._write("\r\x1b[K" if self._live else "")

    def show(self, topic: str, detail: str) -> None:
        """Shows `topic, detail`; if it is not a terminal, only a new topic, and the same one again every 30 seconds."""
        now_s = time.monotonic()
        if self._live:
            self._write(f"\r\x1b[K{topic}, {detail}")
        elif now_s - self._begun_s < _PLAIN_AFTER_S:
            return  # the job has not taken long yet
        elif topic != self._topic or now_s - self._said_s >= _PLAIN_EVERY_S:
            self._topic, self._said_s = topic, now_s
            self._write(f"{topic}, {detail}\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
