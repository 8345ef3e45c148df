"""A line from process 0 to each of the others: messages in their order, and the news when one of them is gone.

JAX's own ways are for what is rare: on two processes of one machine a message through the coordinator's store and its
answer took 1.3 ms, most of it processor time, a broadcast by the devices 4.1 ms, and this 0.02 ms. Whoever waits for a
message costs nothing. A process that ends is known to be gone at once, a host that does so after half a minute.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from capibara.core.multihost import peers
from capibara.core.multihost.peers import Fault
from capibara.core.types import TryAgain

_KEY = "channel"
_OPEN_S = 120.0  # for all to connect; all are there when it begins
_HELLO_S = 10.0
_MOST_BYTES = 64 << 20  # of a message: the longest prompts of many requests
_LAST_S = 1.0  # for a message that is being sent
_OWN_S = 2.0  # for an end of our own after another's, which says more
_ALIKE_S = 5.0  # and where all do the same: often they meet the same fault
_STOP_S = 10.0  # for an end after the last message
_AGAIN = "start the command again on every host"
_GONE = 75  # EX_TEMPFAIL, as cli.EXIT_HUNG
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}

Message = Mapping[str, Any]


def connect() -> Leader | Follower | None:
    """The line of this process, once JAX has joined them; all processes call it. None: this one is alone.

    Raises:
      TryAgain: not all of them have connected in time.
    """
    if not peers.is_joined() or peers.place()[1] == 1:
        return None
    index, count, host = peers.place()
    return Leader(count) if index == 0 else Follower(index, host)


def watch() -> Leader | Follower | None:
    """From now on, where a process is gone, the others end soon with a line that names it; all processes call it.

    JAX would find it after its heartbeat, or at a failed computation, with a stack trace that names nobody. For processes
    that end together, at JAX's own exit, and send nothing. One that cannot connect is left out, with a note.
    """
    if not peers.is_joined() or peers.place()[1] == 1:
        return None
    index, count, host = peers.place()
    try:
        line = Leader(count, needed=False) if index == 0 else Follower(index, host)
    except TryAgain as error:
        print(f"note: {error}; until then a process that is gone is found by JAX's heartbeat", file=sys.stderr)
        return None
    if isinstance(line, Leader):
        line.on_gone = lambda fault: _OWN_S if fault.code == _GONE else _ALIKE_S
    return line


@contextlib.contextmanager
def leading(line: Leader | None, first: Message) -> Iterator[Callable[[Message], None] | None]:
    """Sends a first message, and gives what sends more; the last one where all went well. Without a line, None."""
    if line is None:
        yield None
        return
    line.send(first)
    yield line.send
    line.close()


class Leader:
    """Process 0's end of all lines.

    Attributes:
      on_gone: told in a thread of its own when a process is gone; gives the seconds in which this one ends by itself.
      on_signal: told that another process was signalled to end, and by which number.
    """

    def __init__(self, count: int, *, needed: bool = True):
        """Waits for all others; where they are not `needed`, one that does not come is left out with a note."""
        self.on_gone: Callable[[Fault], float] = lambda _: _OWN_S
        self.on_signal: Callable[[int], None] = lambda _: None
        self._closed, self._sending = threading.Event(), threading.Lock()
        self._lines, self._hosts = _accepted(count, needed)
        peers.watched()
        threading.Thread(target=self._watch, name="capibara-channel", daemon=True).start()

    def send(self, message: Message) -> None:
        """Sends a message to all.

        Raises:
          TryAgain: one of them is gone.
        """
        data = _packed(message)
        with self._sending:
            for index, line in self._lines.items():
                try:
                    line.sendall(data)
                except OSError:
                    raise TryAgain(self._lost(index).line) from None

    def close(self) -> None:
        """The last message: the others end well."""
        if not self._closed.is_set():
            self._closed.set()
            self._send_last({"stop": True}, self._lines)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for index, line in self._lines.items():
                selector.register(line, selectors.EVENT_READ, (index, _Lines(line)))
            while True:
                for key, _ in selector.select():
                    index, lines = key.data
                    found = lines.read()
                    if found is None and not self._closed.is_set() and not peers.is_leaving(0.0):
                        self._end(self._lost(index), index)
                        return
                    if found is None:
                        selector.unregister(key.fileobj)
                        continue
                    for message in found:
                        self.on_signal(int(message["signal"]))
                if not selector.get_map():
                    return

    def _lost(self, index: int) -> Fault:
        fault = peers.told(0.0) or Fault(_GONE, f"process {index} on {self._hosts[index]} is gone: {_AGAIN}")
        peers.note(fault)
        return fault

    def _end(self, fault: Fault, gone: int) -> None:
        self._send_last({"code": fault.code, "gone": fault.line}, self._lines.keys() - {gone})
        _end_if_nobody_does(fault, self.on_gone(fault))

    def _send_last(self, message: Message, to: Iterable[int]) -> None:
        """Not in the midst of another message, unless that is stuck."""
        is_free = self._sending.acquire(timeout=_LAST_S)
        for index in to:
            with contextlib.suppress(OSError):
                self._lines[index].sendall(_packed(message))
        if is_free:
            self._sending.release()


class Follower:
    """Another process's end: iterate over the messages of process 0, until it has no more."""

    def __init__(self, index: int, host: str):
        told = json.loads(peers.got(_KEY, _OPEN_S))
        self._host = told["host"]
        try:
            self._line = socket.create_connection((host, told["port"]), timeout=_OPEN_S)
        except OSError as error:
            raise TryAgain(
                f"process {index} on {socket.gethostname()} cannot reach process 0 at {host}:{told['port']} ({error}): let "
                "the hosts reach each other at all ports"
            ) from None
        _prepare(self._line)
        slow_aborts()
        self._line.sendall(_packed({"word": told["word"], "index": index, "host": socket.gethostname()}))
        self._arrived: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        peers.watched()
        threading.Thread(target=self._read, name="capibara-channel", daemon=True).start()

    def __iter__(self) -> Iterator[Message]:
        while (message := self._arrived.get()) is not None:
            yield message

    def signal(self, number: int) -> None:
        """Tells process 0 that this one was signalled to end."""
        with contextlib.suppress(OSError):
            self._line.sendall(_packed({"signal": number}))

    def _read(self) -> None:
        lines = _Lines(self._line)
        while (found := lines.read()) is not None:
            for message in found:
                if "stop" in message:
                    self._arrived.put(None)
                    if not peers.is_leaving(_STOP_S):
                        os._exit(0)  # in the midst of what process 0 has left
                    return
                if "gone" in message:
                    peers.note(fault := Fault(message["code"], message["gone"]))
                    _end_if_nobody_does(fault, _OWN_S)
                    return
                self._arrived.put(message)
        if peers.is_leaving(0.0):  # so does process 0
            return
        # At once: the coordinator is gone with process 0, and JAX aborts whoever misses it, after `slow_aborts`.
        _say(f"process 0 on {self._host} is gone: {_AGAIN}")
        peers.end(_GONE)


class _Lines:
    """The messages that come on a line."""

    def __init__(self, line: socket.socket):
        self._line, self._rest = line, bytearray()

    def read(self) -> list[Message] | None:
        """Those that are whole, after waiting for some bytes; None: the other end is gone."""
        try:
            data = self._line.recv(1 << 16)
        except OSError:
            data = b""
        if not data or len(self._rest) > _MOST_BYTES:
            return None
        self._rest += data
        if b"\n" not in data:
            return []
        *whole, self._rest = self._rest.split(b"\n")
        return [json.loads(one) for one in whole]


def slow_aborts() -> None:
    """From now on this process stays for some seconds where a thread of it aborts, so that others say why and end it.

    JAX's client aborts as soon as the coordinator's connection closes, which process 0's line tells of at the same moment.
    Its missed_heartbeat_callback does not help: jaxlib cannot give its argument to Python, and aborts as well. What JAX
    prints of it still stands beside our line.
    """
    own = ctypes.CDLL(None)
    own.signal.argtypes, own.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    # No Python may run in a handler. `sleep` may, and takes the signal's number, 6, for seconds.
    own.signal(signal.SIGABRT, ctypes.cast(own.sleep, ctypes.c_void_p))


def _say(line: str) -> None:
    """In one piece: JAX's threads write to the same place."""
    sys.stderr.write(f"error: {line}\n")
    sys.stderr.flush()


def _packed(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def _accepted(count: int, needed: bool) -> tuple[dict[int, socket.socket], dict[int, str]]:
    """The lines of all other processes, and their hosts, by their numbers."""
    dual, word = socket.has_dualstack_ipv6(), secrets.token_hex(16)
    family = socket.AF_INET6 if dual else socket.AF_INET
    lines: dict[int, socket.socket] = {}
    hosts: dict[int, str] = {}
    heard: queue.SimpleQueue[tuple[socket.socket, dict[str, Any] | None]] = queue.SimpleQueue()
    end_s = time.monotonic() + _OPEN_S
    with _listening(family, dual, count) as listening:
        told = {"port": listening.getsockname()[1], "word": word, "host": socket.gethostname()}
        peers.put(_KEY, json.dumps(told))
        # Each is heard in a thread of its own: a stranger that connects and is silent keeps nobody waiting.
        threading.Thread(target=_accept, args=(listening, word, heard), daemon=True).start()
        while len(lines) < count - 1:
            try:
                one, hello = heard.get(timeout=max(end_s - time.monotonic(), 0.1))
            except queue.Empty:
                missing = ", ".join(str(index) for index in range(1, count) if index not in lines)
                error = TryAgain(
                    f"process {missing} of {count} did not connect to process 0 within {_OPEN_S:g} s: let the hosts reach "
                    "each other at all ports"
                )
                if needed:
                    raise error from None
                print(f"note: {error}", file=sys.stderr)
                break
            if hello is None or not 0 < hello["index"] < count or hello["index"] in lines:
                one.close()  # no process of ours
                continue
            lines[hello["index"]], hosts[hello["index"]] = one, hello["host"]
    return lines, hosts


@contextlib.contextmanager
def _listening(family: socket.AddressFamily, dual: bool, backlog: int) -> Iterator[socket.socket]:
    """A socket at a free port; whoever waits in its `accept` is told when it is closed."""
    with socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=backlog) as listening:
        try:
            yield listening
        finally:
            with contextlib.suppress(OSError):  # a close alone leaves `accept` waiting
                listening.shutdown(socket.SHUT_RDWR)


def _accept(
    listening: socket.socket, word: str, heard: queue.SimpleQueue[tuple[socket.socket, dict[str, Any] | None]]
) -> None:
    """Hears all that connect, until `listening` is closed."""

    def hear(one: socket.socket) -> None:
        heard.put((one, _hello(one, word)))

    while True:
        try:
            one, _ = listening.accept()
        except OSError:
            return
        threading.Thread(target=hear, args=(one,), daemon=True).start()


def _hello(one: socket.socket, word: str) -> dict[str, Any] | None:
    """What a process says of itself; None: it does not know the word."""
    try:
        one.settimeout(_HELLO_S)
        heard = b""
        while b"\n" not in heard and len(heard) < 4096:
            if not (data := one.recv(4096)):
                return None
            heard += data
        found = json.loads(heard)
        if not secrets.compare_digest(str(found["word"]), word):
            return None
        _prepare(one)
        return {"index": int(found["index"]), "host": str(found["host"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _prepare(line: socket.socket) -> None:
    """Small messages go at once, and a host that has gone is missed."""
    line.settimeout(None)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # not everywhere
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _end_if_nobody_does(fault: Fault, within_s: float) -> None:
    """Ends this process after another's end, where it does not do so by itself: it may hang in a step of all of them."""
    if peers.is_leaving(within_s):
        return
    _say(fault.line)
    peers.tell(fault.code, fault.line)
    peers.end(fault.code)
