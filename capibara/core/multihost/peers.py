"""What one process of several that ends with an error tells the others: they end with it, and say whose it was.

Else they wait in the midst of a step for one that is gone, until JAX's heartbeat aborts them with a stack trace that does
not say why. None of them comes to JAX's own exit, which waits minutes for all, and aborts where one has gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from capibara.core.types import TryAgain

_KEY = "capibara/fault"
_LOOK_S = 1.0  # between two looks
_TELL_S = 5.0  # for the word to arrive
_OWN_S = 5.0  # for an end of our own: often all processes meet the same fault
_LINGER_S = _LOOK_S + _OWN_S + 2.0  # of process 0, which keeps the word until all have read it

_NOTED_LINGER_S = 4.0  # where they were told at once
_SOON_S = 1.0  # in which the news of a peer's end comes after the error that it has caused here

_UNREACHABLE = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")  # how the errors of JAX's client begin

# In errors of computations of several processes one of which is gone: Gloo's on CPUs, NCCL's on GPUs.
_LOST = ("Gloo", "Connection closed by peer", "Connection reset by peer", "remote process exited")
_SHOWN = 200
# At a barrier: one host's disk may be slower than the others'; of a process that is dead the heartbeat tells.
_PATIENCE_S = 3600

_leaving, _told, _watched = threading.Event(), threading.Event(), threading.Event()
_noted: list[Fault] = []
_passed: Counter[str] = Counter()  # how often this process has come to each barrier
_counting = threading.Lock()


class _Client(Protocol):
    """What is used of JAX's client of the coordinator."""

    def key_value_set(self, key: str, value: str, *, allow_overwrite: bool = False) -> None: ...

    def key_value_try_get(self, key: str) -> str: ...

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str: ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...

    def wait_at_barrier(self, key: str, timeout_ms: int) -> None: ...


class Fault(NamedTuple):
    """Why another process has ended: its exit code, and a line."""

    code: int
    line: str


def is_joined() -> bool:
    """Whether this is one process of several that JAX has joined."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def tell(code: int, message: str) -> None:
    """Tells the others that this process ends, unless one has told them so before; nothing where there are none.

    Args:
      code: its exit code.
      message: why, in one line.
    """
    _leaving.set()
    _told.set()
    if not is_joined():
        return
    client, index = _client()
    word = json.dumps({"index": index, "host": socket.gethostname(), "code": code, "message": message})

    def put() -> None:
        with contextlib.suppress(Exception):  # another process was first, or the coordinator is gone
            client.key_value_set(_KEY, word)

    putting = threading.Thread(target=put, daemon=True)
    putting.start()
    putting.join(_TELL_S)


def has_told() -> bool:
    """Whether this process has told the others that it ends."""
    return _told.is_set()


def told(within_s: float = _SOON_S) -> Fault | None:
    """Why another process has ended with an error, if one has: what happens here since may be its doing.

    `within_s`: in which the news may still come, where the others are `watched`.
    """
    if not is_joined():
        return None
    end_s = time.monotonic() + (within_s if _watched.is_set() else 0.0)
    while True:
        if _noted:
            return _noted[0]
        with contextlib.suppress(Exception):  # nobody has told anything, or the coordinator is gone
            if (fault := _read(*_client())) is not None:
                return fault
        if time.monotonic() >= end_s:
            return None
        time.sleep(0.02)


def watched() -> None:
    """From now on a line to the others brings the news at once where one is gone, also one that could tell nobody."""
    _watched.set()


def note(fault: Fault) -> None:
    """Another process is gone: `told` gives this, the first that was noted."""
    _noted.append(fault)


def is_leaving(within_s: float) -> bool:
    """Whether this process ends, or begins to within so many seconds."""
    return _leaving.wait(within_s)


def place() -> tuple[int, int, str]:
    """The number of this process, how many there are, and the host at which they find process 0; once it is joined."""
    state = sys.modules["jax._src.distributed"].global_state
    return state.process_id, state.num_processes, state.coordinator_address.rpartition(":")[0].strip("[]")


def put(name: str, value: str, *, again: bool = False) -> None:
    """For `got` and `all_put`, by one of the processes; `again`: in place of what it has put there before."""
    _client()[0].key_value_set(f"capibara/{name}", value, allow_overwrite=again)


def got(name: str, timeout_s: float) -> str:
    """What another process has put by this name; waits for it."""
    return _client()[0].blocking_key_value_get(f"capibara/{name}", int(1000 * timeout_s))


def all_put(folder: str) -> list[str]:
    """What has been put by names that begin so; does not wait."""
    return [value for _, value in _client()[0].key_value_dir_get(f"capibara/{folder}/")]


def together(point: str) -> None:
    """Waits for all processes to come to this point, each of which calls it as often; not by the devices: they may train."""
    if not is_joined():
        return
    with _counting:
        number = _passed[point] = _passed[point] + 1
    _client()[0].wait_at_barrier(f"capibara/{point}/{number}", int(1000 * _PATIENCE_S))


def lost(errors: Iterable[BaseException]) -> TryAgain | None:
    """What to say of errors, each the cause of the one before, where one comes of another process's end; else None.

    One that is killed can tell nobody.
    """
    for error in errors:
        text = " ".join(str(error).split())
        if type(error).__name__ == "JaxRuntimeError" and any(word in text for word in _LOST):
            return TryAgain(
                f"another process of this run is gone ({text[:_SHOWN]}): run the same command again on every host; a run "
                "resumes from its newest checkpoint"
            )
    return None


def is_unreachable(error: Exception) -> bool:
    """Whether `put`, `got` or `all_put` raised this because the coordinator is gone or does not answer."""
    return isinstance(error, RuntimeError) and str(error).startswith(_UNREACHABLE)


def leave() -> None:
    """This process ends well: what others tell from now on is not its affair."""
    _leaving.set()


def end(code: int) -> None:
    """Ends this process after a fault of its own or another's; process 0 first waits until the others know of it."""
    _leaving.set()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if is_joined() and _client()[1] == 0:
        time.sleep(_NOTED_LINGER_S if _noted else _LINGER_S)
    os._exit(code)


def listen() -> None:
    """From now on this process ends, some seconds later, where another tells that it ends with an error."""
    threading.Thread(target=_listen, args=_client(), name="capibara-peers", daemon=True).start()


def _client() -> tuple[_Client, int]:
    state = sys.modules["jax._src.distributed"].global_state  # jax.distributed has no names for them
    return state.client, state.process_id


def _read(client: _Client, index: int) -> Fault | None:
    word = json.loads(client.key_value_try_get(_KEY))
    line = f"process {word['index']} on {word['host']} ended: {word['message']}"
    return None if word["index"] == index else Fault(word["code"], line)


def _listen(client: _Client, index: int) -> None:
    while not _leaving.wait(_LOOK_S):
        try:
            fault = _read(client, index)
        except Exception as error:
            if "NOT_FOUND" in str(error):
                continue
            return  # the coordinator is gone: JAX ends this process
        if fault is not None and not _leaving.wait(_OWN_S):
            print(f"error: {fault.line}", file=sys.stderr, flush=True)
            end(fault.code)
        return
