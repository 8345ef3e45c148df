"""Waits for all processes of a run and compares their versions and configuration before JAX connects them.

JAX's own service waits for all processes too, but aborts each of them with a stack trace if one is missing, and does not
say which. So process 0 first listens at the coordinator's address itself and receives everyone's index, host and facts
(versions, configuration). Then it tells all of them to begin, or why not, and frees the address for JAX.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping

from capibara.core.types import TryAgain, UserError

KIND = "capibara roll call 1"
_MOST_BYTES = 4 << 20  # of a message: a configuration has some kilobytes
RETRY_S = 0.5  # between two tries to reach process 0
SAY_S = 30.0  # between two lines on which processes are missing
LINGER_S = 5.0  # in which process 0 tells latecomers why the run does not begin
_SHOWN = 200


@dataclasses.dataclass(frozen=True)
class Process:
    """One process of a run.

    Attributes:
      index: from 0.
      count: number of processes.
      facts: values that must be the same on all processes: name -> text, which may have several lines.
      host: name of its host.
      pid: its process id on the host.
    """

    index: int
    count: int
    facts: Mapping[str, str]
    host: str = dataclasses.field(default_factory=socket.gethostname)
    pid: int = dataclasses.field(default_factory=os.getpid)

    def __str__(self) -> str:
        return f"process {self.index} (pid {self.pid} on {self.host})"


def call(process: Process, address: str, timeout_s: float, say: Callable[[str], None] | None = None) -> list[Process]:
    """Returns when all processes have connected and agree; every process calls it.

    Args:
      process: this one.
      address: "HOST:PORT" at which process 0 listens; the port is free again afterwards.
      timeout_s: for all to connect.
      say: called with lines on the processes that are missing; None: prints to stderr.

    Returns:
      All processes on process 0; only this one on the others.

    Raises:
      TryAgain: not all have connected in time; the message says which.
      UserError: they differ, two have the same index, or the address cannot be used.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"the coordinator's address is {address!r}, must be HOST:PORT, such as 10.0.0.1:8476")
    say = say or (lambda line: print(line, file=sys.stderr, flush=True))
    end_s = time.monotonic() + timeout_s
    if process.index == 0:
        with _listening(int(port), address) as listening:
            return _Caller(process, listening, timeout_s, end_s, say).run()
    _answer(process, (host.strip("[]"), int(port)), timeout_s, end_s, say)
    return [process]


@contextlib.contextmanager
def _listening(port: int, address: str) -> Iterator[socket.socket]:
    try:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        listening = socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=1024)
    except OSError as error:
        raise UserError(
            f"process 0 cannot listen at the coordinator's address {address} ({error.strerror}): another program, or an "
            "earlier run, uses the port; end it, or choose another with JAX_COORDINATOR_PORT or --coordinator_address"
        ) from None
    with listening:
        listening.setblocking(False)
        yield listening


class _Refused(Exception):
    """Why the run does not begin, for all processes."""

    def __init__(self, kind: type[UserError] | type[TryAgain], message: str):
        super().__init__(message)
        self.kind = kind


class _Caller:
    """Process 0: receives the others' facts, and tells them whether the run begins."""

    def __init__(
        self, process: Process, listening: socket.socket, timeout_s: float, end_s: float, say: Callable[[str], None]
    ) -> None:
        self._process, self._listening, self._timeout_s, self._end_s, self._say = (
            process,
            listening,
            timeout_s,
            end_s,
            say,
        )
        self._present: dict[int, Process] = {0: process}
        self._heard: dict[socket.socket, bytes] = {}  # incomplete messages
        self._waiting: dict[int, socket.socket] = {}  # processes whose message is complete, by index
        self._twice = ""
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)

    def run(self) -> list[Process]:
        try:
            try:
                self._gather()
            except _Refused as refused:
                self._tell_all({"refused": refused.kind.__name__, "why": str(refused)})
                self._linger(refused)
                raise refused.kind(str(refused)) from None
            self._tell_all({"go": True})
            return [self._present[index] for index in sorted(self._present)]
        finally:
            for item in [*self._heard, *self._waiting.values()]:
                item.close()
            self._selector.close()

    def _gather(self) -> None:
        said_s = time.monotonic()
        while len(self._present) < self._process.count:
            now_s = time.monotonic()
            if now_s >= self._end_s:
                raise _Refused(TryAgain, self._who_is_missing())
            if now_s - said_s >= SAY_S:
                said_s = now_s
                self._say(
                    f"waiting for {self._missing()}: {len(self._present)} of {self._process.count} processes have connected"
                )
            for key, _ in self._selector.select(min(self._end_s - now_s, 1.0)):
                item = key.fileobj
                assert isinstance(item, socket.socket)
                self._accept() if item is self._listening else self._hear(item)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            item, _ = self._listening.accept()
            item.setblocking(False)
            self._heard[item] = b""
            self._selector.register(item, selectors.EVENT_READ)

    def _hear(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if connection not in self._heard:  # its message is complete: no data means that it is gone
            if not data:
                self._forget(connection)
            return
        self._heard[connection] += data
        if b"\n" in data:
            self._take(connection, self._heard.pop(connection))
        elif not data or len(self._heard[connection]) > _MOST_BYTES:
            del self._heard[connection]
            self._drop(connection)

    def _forget(self, connection: socket.socket) -> None:
        for index, waiting in list(self._waiting.items()):
            if waiting is connection:
                del self._waiting[index], self._present[index]
        self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()

    def _take(self, connection: socket.socket, line: bytes) -> None:
        other = _process_of(line)
        if other is None:  # not a process of a run, such as a port scanner
            self._drop(connection)
            return
        if other.count != self._process.count or not 0 < other.index < other.count:
            self._waiting[-1] = connection  # so that it gets the reason with the others
            raise _Refused(
                UserError,
                f"{other} says that there are {other.count} processes, and {self._process} that there are "
                f"{self._process.count}: start all with the same number, and each with its own index below it",
            )
        if other.index in self._present:
            self._twice = f"; {other} has the index of {self._present[other.index]}: give one of them another index"
            why = f"{self._present[other.index]} has joined already: give {other} an index of its own"
            _tell(connection, {"refused": UserError.__name__, "why": why})
            self._drop(connection)
            return
        self._present[other.index], self._waiting[other.index] = other, connection
        if differs := difference(self._process, other):
            raise _Refused(UserError, differs)

    def _missing(self) -> str:
        missing = [str(index) for index in range(self._process.count) if index not in self._present]
        more = f" and {len(missing) - 16} more" if len(missing) > 16 else ""
        return f"process{'es' * (len(missing) > 1)} {', '.join(missing[:16])}{more}"

    def _who_is_missing(self) -> str:
        present = ", ".join(f"{p.index} on {p.host}" for p in itertools.islice(self._present.values(), 16))
        return (
            f"{self._missing()} of {self._process.count} did not connect within {self._timeout_s:g} s (connected: {present})"
            f"{self._twice}: start the command on every host"
        )

    def _tell_all(self, message: Mapping[str, object]) -> None:
        for item in self._waiting.values():
            _tell(item, message)

    def _linger(self, refused: _Refused) -> None:
        """Tells processes that connect late why the run does not begin."""
        end_s = time.monotonic() + LINGER_S
        while len(self._waiting) < self._process.count - 1 and (left_s := end_s - time.monotonic()) > 0:
            for key, _ in self._selector.select(left_s):
                if key.fileobj is self._listening:
                    with contextlib.suppress(OSError):
                        item, _ = self._listening.accept()
                        _tell(item, {"refused": refused.kind.__name__, "why": str(refused)})
                        self._waiting[-len(self._waiting) - 1] = item
                else:
                    self._selector.unregister(key.fileobj)


def _answer(
    process: Process, address: tuple[str, int], timeout_s: float, end_s: float, say: Callable[[str], None]
) -> None:
    """On another process: connects to process 0 and waits for its answer."""
    said_s, shown, cause = time.monotonic(), "{}:{}".format(*address), "no answer"
    while (now_s := time.monotonic()) < end_s:
        if now_s - said_s >= SAY_S:
            said_s = now_s
            say(f"process {process.index} waits for process 0 at {shown} ({cause})")
        try:
            with socket.create_connection(address, timeout=max(min(end_s - now_s, 10.0), 0.1)) as item:
                item.sendall(json.dumps({"kind": KIND, **dataclasses.asdict(process)}).encode() + b"\n")
                word = _word(item, end_s + LINGER_S)
        except OSError as error:
            cause = error.strerror or str(error) or type(error).__name__
            word = None
        else:
            cause = "another program or an earlier run answers there" if not word else ""
        if word and word.get("go"):
            return
        if word:
            kind = TryAgain if word.get("refused") == TryAgain.__name__ else UserError
            raise kind(str(word.get("why")))
        time.sleep(RETRY_S)
    raise TryAgain(
        f"{process} did not find process 0 of {process.count} at {shown} within {timeout_s:g} s ({cause}): start the "
        "command on every host, and let the hosts reach each other at that port"
    )


def _word(connection: socket.socket, end_s: float) -> dict[str, object] | None:
    """The answer of process 0; None: the other end is gone, or is not a process 0."""
    heard = b""
    while b"\n" not in heard:
        connection.settimeout(max(end_s - time.monotonic(), 0.1))
        data = connection.recv(1 << 16)
        if not data or len(heard) > _MOST_BYTES:
            return None
        heard += data
    try:
        result = json.loads(heard)
    except (ValueError, RecursionError):
        return None
    return result if isinstance(result, dict) else None


def _tell(connection: socket.socket, message: Mapping[str, object]) -> None:
    with contextlib.suppress(OSError):
        connection.settimeout(5)
        connection.sendall(json.dumps(message).encode() + b"\n")


def _process_of(line: bytes) -> Process | None:
    """Parses a process's message; None: it is not one."""
    try:
        result = json.loads(line)
        if result.pop("kind") != KIND:
            return None
        item = Process(**result)
        texts = [item.host, *item.facts, *item.facts.values()]
        well = all(isinstance(text, str) for text in texts) and all(
            isinstance(number, int) for number in (item.index, item.count, item.pid)
        )
        return dataclasses.replace(item, host=item.host[:_SHOWN]) if well else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def difference(first: Process, other: Process) -> str | None:
    """A message on the first fact that differs between two processes; None: all are the same."""
    for name in sorted({*first.facts, *other.facts}):
        a, b = first.facts.get(name, ""), other.facts.get(name, "")
        if a == b:
            continue
        x, y = _only_in(a, b), _only_in(b, a)
        return (
            f"{other} has another {name} than {first}: {y[:_SHOWN]!r} and {x[:_SHOWN]!r}: start the same command with the "
            "same files and packages on every host"
        )
    return None


def _only_in(text: str, other: str) -> str:
    """The first line of `text` that `other` does not have."""
    known = set(other.splitlines())
    return next((line for line in text.splitlines() if line not in known), "no such line")
