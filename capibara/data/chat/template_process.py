"""Runs chat templates in a process of their own, which has bounds on memory and time (`template_worker` says why).

One such process serves a whole program, thread after thread; it is started when the first template is rendered, and
again after one that went beyond its bounds. A fork begins with none. Rendering there costs about 0.1 ms more.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from capibara.core.types import UserError
from capibara.data.chat import template_worker

MEMORY_MIB = 256
LONGEST_TEMPLATE_KIB = 256  # those of models have up to 30
# The bounds of time and text grow with what a template is given.
_CPU_S, _CPU_S_PER_MIB = 1.0, 2.0
_TEXT_CHARACTERS, _TEXT_PER_GIVEN = 1 << 20, 8
# Processor time is what counts: this is for a process that was stopped from outside.
WAIT_S = 20
_ENDS_WITHIN_S = 5  # after it has closed its socket
_MOST_TEMPLATES = 32  # a process with more begins anew
_TRIES = 2
_BYTES_PER_CHARACTER = 6  # of text in JSON, at most
# After these the process ends itself.
_ENDING = {
    "memory": f"it needs more than {MEMORY_MIB} MiB of memory",
    "depth": "it is nested, or calls itself, too deeply",
}
_LENGTH = template_worker.LENGTH_BYTES
_SHORT_BYTES = 1 << 20  # answers that are no text


class TemplateError(Exception):
    """A template was ended or failed.

    Args:
      message: what it said, or which bound it met.
      line: of the template, where that is known.
      is_syntax: the template cannot be compiled.
      is_bound: it was ended, for its time, memory or depth.
    """

    def __init__(self, message: str, line: int | None = None, *, is_syntax: bool = False, is_bound: bool = False):
        super().__init__(message)
        self.line, self.is_syntax, self.is_bound = line, is_syntax, is_bound


class _Lost(Exception):
    """The process was killed or stopped from outside: not by what a template did."""


@dataclasses.dataclass(frozen=True)
class Template:
    """A template's text.

    Attributes:
      text: in Jinja's language.
      date: what its strftime_now says, as year-month-day.
    """

    text: str
    date: str

    @property
    def key(self) -> str:
        """Names it."""
        return hashlib.sha256(f"{self.date}\n{self.text}".encode("utf-8", "surrogatepass")).hexdigest()


def asked_by(template: Template) -> list[str]:
    """The variables that a template asks for.

    Raises:
      TemplateError: it is too long, or no template.
    """
    if len(template.text) > LONGEST_TEMPLATE_KIB * 1024:
        raise TemplateError(f"it has {len(template.text)} characters, must have at most {LONGEST_TEMPLATE_KIB * 1024}")
    return _retried(lambda: _process.add(template))


def render(
    template: Template, key: str, shared: Mapping[str, object], each: Sequence[Mapping[str, object]]
) -> list[str | TemplateError]:
    """The texts that a template makes, or what it said instead.

    Args:
      template: one for which `asked_by` was called.
      key: its key.
      shared: what it is given each time, plain values as JSON has them.
      each: what it is given besides, for each text.

    Raises:
      TemplateError: it needs too much time or memory.
      UserError: something given is no plain value.
    """
    try:
        values = [_encode(item) for item in (shared, *each)]
    except RecursionError:
        raise TemplateError("what it is given is nested too deeply") from None
    except ValueError as error:  # a loop; a number of thousands of digits
        raise TemplateError(f"what it is given cannot be written as JSON: {error}") from None
    texts = _retried(lambda: _process.render(template, key, values))
    return [text if isinstance(text, str) else _error_of(text) for text in texts]


def _refuse_value(value: object) -> None:
    raise UserError(
        f"ChatTemplate.variables has {type(value).__name__} {value!r:.60}: templates take text, numbers, truth values, "
        "None, lists and dictionaries"
    )


_encode = json.JSONEncoder(default=_refuse_value).encode


def _retried(act: Callable[[], Any]) -> Any:
    for left in reversed(range(_TRIES)):
        try:
            return act()
        except _Lost as lost:
            if not left:
                raise TemplateError(str(lost)) from None


class _Process:
    """The process; between two calls it waits, or there is none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._asked: dict[str, list[str]] = {}

    def add(self, template: Template) -> list[str]:
        key = template.key
        with self._lock:
            self._make_known(template, key)
            return self._asked[key]

    def render(self, template: Template, key: str, values: Sequence[str]) -> list[str | dict[str, Any]]:
        shared, *each = values
        size = sum(map(len, values))
        cpu_s = _CPU_S + _CPU_S_PER_MIB * size / 2**20
        longest = _TEXT_CHARACTERS + _TEXT_PER_GIVEN * size
        # Joined as text: the values were written once.
        request = f'{{"key": "{key}", "cpu_s": {cpu_s}, "longest": {longest}, "shared": {shared}, "each": [{",".join(each)}]}}'
        with self._lock:
            self._make_known(template, key)
            return self._ask(request.encode(), cpu_s, _BYTES_PER_CHARACTER * longest * len(each))

    def close(self) -> None:
        """Ends it, whatever it does."""
        if self._socket is not None:
            self._socket.close()
        if self._running is not None:
            self._running.kill()
            self._running.wait()
        self._running, self._socket, self._asked = None, None, {}

    def forget(self) -> None:
        """Leaves it to the process that has started it, of which this is a fork: its threads are not here."""
        if self._socket is not None:
            self._socket.close()
        self._lock, self._running, self._socket, self._asked = threading.Lock(), None, None, {}

    def _make_known(self, template: Template, key: str) -> None:
        if key in self._asked and self._running is not None:
            return
        if len(self._asked) >= _MOST_TEMPLATES:
            self.close()
        source = {"key": key, "text": template.text, "date": template.date}
        cpu_s = _CPU_S + _CPU_S_PER_MIB * len(template.text) / 2**20
        self._asked[key] = self._ask(json.dumps({"source": source, "cpu_s": cpu_s}).encode(), cpu_s)

    def _start(self) -> socket.socket:
        import jinja2
        import markupsafe

        ours, theirs = socket.socketpair()
        places = {
            os.path.dirname(os.path.dirname(os.path.abspath(file))) for file in (jinja2.__file__, markupsafe.__file__)
        }
        script = os.path.abspath(template_worker.__file__)
        argv = [sys.executable, "-I", "-S", script, str(MEMORY_MIB * 2**20), *sorted(places)]
        retained = {name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"}
        with theirs:
            self._running = subprocess.Popen(
                argv, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=retained, cwd="/"
            )
        # By the kernel, which costs less than asking it before each call.
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", WAIT_S, 0))
        self._socket = ours
        return ours

    def _ask(self, request: bytes, cpu_s: float, most_bytes: int = 0) -> Any:
        """What it answers."""
        deadline_s = time.monotonic() + WAIT_S + cpu_s
        try:
            connection = self._socket or self._start()
        except OSError as error:
            raise _Lost(f"its process cannot be started: {error}") from None
        try:
            connection.sendall(len(request).to_bytes(_LENGTH, "big") + request)
            answer = _receive(connection, deadline_s, max(most_bytes, _SHORT_BYTES))
        except TimeoutError:
            self.close()
            raise _Lost(f"its process has not answered for {WAIT_S + cpu_s:.0f} s") from None
        except BlockingIOError:  # it does not read
            self.close()
            raise _Lost(f"its process has not read for {WAIT_S} s") from None
        except OSError:  # it has ended, even before it had read all
            answer = None
        except BaseException:  # half an exchange is left
            self.close()
            raise
        if answer is None:
            raise self._end_explained(cpu_s)
        try:
            reply = json.loads(answer[1:].decode("utf-8", "surrogatepass"))
        except (ValueError, RecursionError):
            self.close()
            raise TemplateError("its process says what no template should make it say", is_bound=True) from None
        if answer[:1] == template_worker.FAILS:
            if reply["kind"] in _ENDING:
                self.close()
            raise _error_of(reply)
        return reply

    def _end_explained(self, cpu_s: float) -> TemplateError | _Lost:
        running = self._running
        assert running is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(_ENDS_WITHIN_S)
        self.close()
        code = running.returncode
        if -code == signal.SIGPROF:
            return TemplateError(f"it takes more than {cpu_s:.1f} s: it loops, or does too much", is_bound=True)
        if -code in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE):
            return TemplateError(f"its process crashed with signal {-code}", is_bound=True)
        return _Lost(f"its process ended with code {code}")


def _error_of(reply: Mapping[str, Any]) -> TemplateError:
    kind = reply["kind"]
    message = _ENDING.get(kind, reply["message"])
    return TemplateError(message, reply["line"], is_syntax=kind == "syntax", is_bound=kind in _ENDING)


def _receive(connection: socket.socket, deadline_s: float, most_bytes: int) -> bytes | None:
    """An answer; None: the process has ended, or says what the worker would not."""
    got, size = bytearray(), None
    while size is None or len(got) < size:
        try:
            part = connection.recv(1 << 16)
        except BlockingIOError:
            part = None
        if part is not None and not part:
            return None
        got += part or b""
        if size is None and len(got) >= _LENGTH:
            size = _LENGTH + int.from_bytes(got[:_LENGTH], "big")
            if size > most_bytes + _LENGTH + 1:
                return None
        if len(got) != size and time.monotonic() > deadline_s:
            raise TimeoutError
    return bytes(got[_LENGTH:])


_process = _Process()
atexit.register(_process.close)
os.register_at_fork(after_in_child=_process.forget)
