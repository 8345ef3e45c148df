"""Keeps TensorFlow's start-up messages off the terminal."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import TextIO

# Log lines of C++ code ("I0000 00:00:1795260255.792467 20288 cudart_stub.cc:31] ..."), and absl's line before the first.
_LOG_LINE = re.compile(rb"^(WARNING: All log messages before absl::InitializeLog|[IWE]\d{4} [\d:. ]+\S+:\d+\] )")


@contextlib.contextmanager
def without_cpp_logs() -> Iterator[None]:
    """A context that drops the log lines that C++ libraries write to standard error.

    No setting of TensorFlow suppresses the lines that it logs while it is loaded (that there is no GPU). So file descriptor 2
    is redirected to a temporary file. Other output is printed at the end, and all of it if the context raises. Python's
    sys.stderr still goes to the terminal, since another thread may report an error.
    """
    python = sys.stderr
    try:
        terminal = os.dup(2)
    except OSError:  # the process has no standard error
        yield
        return
    with tempfile.TemporaryFile() as file, open(terminal, "wb", buffering=0) as sink:
        direct = open(os.dup(terminal), "w", encoding=getattr(python, "encoding", None) or "utf-8", errors="replace")
        ours = _is_descriptor_2(python)
        if ours:
            python.flush()
            direct.reconfigure(line_buffering=True)
            sys.stderr = direct
        os.dup2(file.fileno(), 2)
        pattern: re.Pattern[bytes] | None = _LOG_LINE
        try:
            yield
        except BaseException:
            pattern = None
            raise
        finally:
            os.dup2(terminal, 2)
            if ours and sys.stderr is direct:
                sys.stderr = python
            file.seek(0)
            for line in file:
                if pattern is None or not pattern.match(line):
                    sink.write(line)


def _is_descriptor_2(stream: TextIO) -> bool:
    try:
        return stream.fileno() == 2
    except (AttributeError, OSError, ValueError):
        return False
