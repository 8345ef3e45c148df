"""A TCP connection from process 0 to each other process: ordered messages, and prompt notice when a process is gone.

JAX's own means are too slow for frequent messages: between two processes of one machine a message and its answer took
1.3 ms through the coordinator's store, most of it CPU time, 4.1 ms by a broadcast of the devices, and 0.02 ms here.
Waiting for a message uses no CPU. The end of a process is noticed at once, that of a host after half a minute.
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

from capibara.core.types import TryAgain
from capibara.multihost import peers
from capibara.multihost.peers import Fault

_KEY = "channel"
OPEN_S = 120.0  # for all to connect; all processes have started by then
HELLO_S = 10.0
_MOST_BYTES = 64 << 20  # of a message: the longest prompts of many requests
_LAST_S = 1.0  # wait for a message that is being sent before the last one
_OWN_S = 2.0  # for this process to fail by itself after another is gone: its own error says more
_ALIKE_S = 5.0  # the same where all processes run the same program and often meet the same fault
_STOP_S = 10.0  # for this process to end after the last message
_AGAIN = "start the command again on every host"
_GONE = 75  # EX_TEMPFAIL, as cli.EXIT_HUNG
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}

Message = Mapping[str, Any]


def connect() -> Leader | Follower | None:
    """Connects the processes after jax.distributed has; all processes call it. Returns None if there is only one.

    Raises:
      TryAgain: not all processes have connected in time.
    """
    if not peers.is_joined() or peers.process_info()[1] == 1:
        return None
    index, count, host = peers.process_info()
    return Leader(count) if index == 0 else Follower(index, host)


def watch() -> Leader | Follower | None:
    """Connects the processes so that, if one is gone, the others exit soon and name it; all processes call it.

    JAX would notice after its heartbeat, or by a failed computation, with a stack trace that does not name the process.
    For processes that send no messages and end together at JAX's own exit. A process that cannot connect is skipped,
    with a note.
    """
    if not peers.is_joined() or peers.process_info()[1] == 1:
        return None
    index, count, host = peers.process_info()
    try:
        line = Leader(count, needed=False) if index == 0 else Follower(index, host)
    except TryAgain as error:
        print(f"note: {error}; without it only JAX's heartbeat notices a process that is gone", file=sys.stderr)
        return None
    if isinstance(line, Leader):
        line.on_gone = lambda fault: _OWN_S if fault.code == _GONE else _ALIKE_S
    return line


@contextlib.contextmanager
def leading(line: Leader | None, first: Message) -> Iterator[Callable[[Message], None] | None]:
    """Sends a first message and yields the function that sends more; closes the line unless an exception is raised.

    Yields None if there is no line (one process).
    """
    if line is None:
        yield None
        return
    line.send(first)
    yield line.send
    line.close()


class Leader:
    """Process 0's end of all connections.

    Attributes:
      on_gone: called in a thread of its own when a process is gone; returns the seconds that this process has to end by
        itself.
      on_signal: called with the signal's number when another process was signalled to end.
    """

    def __init__(self, count: int, *, needed: bool = True):
        """Waits for all others; unless they are `needed`, one that does not connect is skipped with a note."""
        self.on_gone: Callable[[Fault], float] = lambda _: _OWN_S
        self.on_signal: Callable[[int], None] = lambda _: None
        self._closed, self._sending = threading.Event(), threading.Lock()
        self._lines, self._hosts = _accepted(count, needed)
        peers.expect_news()
        threading.Thread(target=self._watch, name="capibara-channel", daemon=True).start()

    def send(self, message: Message) -> None:
        """Sends a message to all other processes.

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
        """Sends the last message, after which the others end without an error."""
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
                    result = lines.read()
                    if result is None and not self._closed.is_set() and not peers.is_leaving(0.0):
                        self._end(self._lost(index), index)
                        return
                    if result is None:
                        selector.unregister(key.fileobj)
                        continue
                    for message in result:
                        self.on_signal(int(message["signal"]))
                if not selector.get_map():
                    return

    def _lost(self, index: int) -> Fault:
        fault = peers.peer_fault(0.0) or Fault(_GONE, f"process {index} on {self._hosts[index]} is gone: {_AGAIN}")
        peers.record_fault(fault)
        return fault

    def _end(self, fault: Fault, process: int) -> None:
        self._send_last({"code": fault.code, "gone": fault.line}, self._lines.keys() - {process})
        _end_if_nobody_does(fault, self.on_gone(fault))

    def _send_last(self, message: Message, to: Iterable[int]) -> None:
        """Sends after the message that is being sent, unless that one is stuck."""
        is_free = self._sending.acquire(timeout=_LAST_S)
        for index in to:
            with contextlib.suppress(OSError):
                self._lines[index].sendall(_packed(message))
        if is_free:
            self._sending.release()


class Follower:
    """Another process's end of its connection: iterate over the messages of process 0."""

    def __init__(self, index: int, host: str):
        leader = json.loads(peers.wait_for(_KEY, OPEN_S))
        self._host = leader["host"]
        try:
            self._line = socket.create_connection((host, leader["port"]), timeout=OPEN_S)
        except OSError as error:
            raise TryAgain(
                f"process {index} on {socket.gethostname()} cannot reach process 0 at {host}:{leader['port']} ({error}): "
                "let the hosts reach each other at all ports"
            ) from None
        _prepare(self._line)
        slow_aborts()
        self._line.sendall(_packed({"word": leader["word"], "index": index, "host": socket.gethostname()}))
        self._arrived: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        peers.expect_news()
        threading.Thread(target=self._read, name="capibara-channel", daemon=True).start()

    def __iter__(self) -> Iterator[Message]:
        while (message := self._arrived.get()) is not None:
            yield message

    def signal(self, number: int) -> None:
        """Reports to process 0 that this one was signalled to end."""
        with contextlib.suppress(OSError):
            self._line.sendall(_packed({"signal": number}))

    def _read(self) -> None:
        lines = _Lines(self._line)
        while (result := lines.read()) is not None:
            for message in result:
                if "stop" in message:
                    self._arrived.put(None)
                    if not peers.is_leaving(_STOP_S):
                        os._exit(0)  # this process is still in the work that process 0 has abandoned
                    return
                if "gone" in message:
                    peers.record_fault(fault := Fault(message["code"], message["gone"]))
                    _end_if_nobody_does(fault, _OWN_S)
                    return
                self._arrived.put(message)
        if peers.is_leaving(0.0):  # all processes are exiting
            return
        # At once: the coordinator is gone with process 0, and JAX aborts this process, delayed by `slow_aborts`.
        _say(f"process 0 on {self._host} is gone: {_AGAIN}")
        peers.exit_process(_GONE)


class _Lines:
    """Splits the bytes that a connection receives into messages."""

    def __init__(self, line: socket.socket):
        self._line, self._rest = line, bytearray()

    def read(self) -> list[Message] | None:
        """Waits for bytes and returns the messages that are complete; None: the other end is gone."""
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
        return [json.loads(item) for item in whole]


def slow_aborts() -> None:
    """Delays an abort of this process by some seconds, so that another thread can print why and exit first.

    JAX's client aborts the process as soon as the coordinator's connection closes, at the moment when the connection to
    process 0 closes too. Its missed_heartbeat_callback does not help: jaxlib cannot pass the argument to Python, and
    aborts as well. JAX's own message is still printed beside our line.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    # No Python may run in a signal handler. `sleep` may: it reads the signal's number, 6, as seconds.
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


def _say(line: str) -> None:
    """Prints a line in one write: JAX's threads write to stderr too."""
    sys.stderr.write(f"error: {line}\n")
    sys.stderr.flush()


def _packed(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def _accepted(count: int, needed: bool) -> tuple[dict[int, socket.socket], dict[int, str]]:
    """Waits for the connections of all other processes; returns the sockets and host names by process index."""
    dual, word = socket.has_dualstack_ipv6(), secrets.token_hex(16)
    family = socket.AF_INET6 if dual else socket.AF_INET
    lines: dict[int, socket.socket] = {}
    hosts: dict[int, str] = {}
    heard: queue.SimpleQueue[tuple[socket.socket, dict[str, Any] | None]] = queue.SimpleQueue()
    end_s = time.monotonic() + OPEN_S
    with _listening(family, dual, count) as listening:
        contact = {"port": listening.getsockname()[1], "word": word, "host": socket.gethostname()}
        peers.put(_KEY, json.dumps(contact))
        # A thread reads each connection: a stranger that connects and sends nothing must not block the others.
        threading.Thread(target=_accept, args=(listening, word, heard), daemon=True).start()
        while len(lines) < count - 1:
            try:
                item, hello = heard.get(timeout=max(end_s - time.monotonic(), 0.1))
            except queue.Empty:
                missing = ", ".join(str(index) for index in range(1, count) if index not in lines)
                error = TryAgain(
                    f"process {missing} of {count} did not connect to process 0 within {OPEN_S:g} s: let the hosts reach "
                    "each other at all ports"
                )
                if needed:
                    raise error from None
                print(f"note: {error}", file=sys.stderr)
                break
            if hello is None or not 0 < hello["index"] < count or hello["index"] in lines:
                item.close()  # not a process of this run
                continue
            lines[hello["index"]], hosts[hello["index"]] = item, hello["host"]
    return lines, hosts


@contextlib.contextmanager
def _listening(family: socket.AddressFamily, dual: bool, backlog: int) -> Iterator[socket.socket]:
    """Listens at a free port; closing it wakes a thread that waits in `accept`."""
    with socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=backlog) as listening:
        try:
            yield listening
        finally:
            with contextlib.suppress(OSError):  # a close alone leaves `accept` waiting
                listening.shutdown(socket.SHUT_RDWR)


def _accept(
    listening: socket.socket, word: str, heard: queue.SimpleQueue[tuple[socket.socket, dict[str, Any] | None]]
) -> None:
    """Accepts connections and queues the first message of each, until `listening` is closed."""

    def hear(connection: socket.socket) -> None:
        heard.put((connection, _hello(connection, word)))

    while True:
        try:
            item, _ = listening.accept()
        except OSError:
            return
        threading.Thread(target=hear, args=(item,), daemon=True).start()


def _hello(connection: socket.socket, word: str) -> dict[str, Any] | None:
    """Reads a process's index and host; None: it does not send the shared secret."""
    try:
        connection.settimeout(HELLO_S)
        heard = b""
        while b"\n" not in heard and len(heard) < 4096:
            if not (data := connection.recv(4096)):
                return None
            heard += data
        result = json.loads(heard)
        if not secrets.compare_digest(str(result["word"]), word):
            return None
        _prepare(connection)
        return {"index": int(result["index"]), "host": str(result["host"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _prepare(line: socket.socket) -> None:
    """Sets socket options: small messages are sent at once, and keep-alives notice a host that is gone."""
    line.settimeout(None)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # not everywhere
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _end_if_nobody_does(fault: Fault, within_s: float) -> None:
    """Exits after another process is gone, unless this one exits by itself in time: it may hang in a shared step."""
    if peers.is_leaving(within_s):
        return
    _say(fault.line)
    peers.report(fault.code, fault.line)
    peers.exit_process(fault.code)
