"""Reports an error of one process to the others of the run, which then exit and name the process and its error.

Without the report they would wait in the middle of a step for the process that is gone, until JAX's heartbeat aborts them
with a stack trace that does not say why. They also skip JAX's own exit, which waits minutes for all processes, and aborts
if one is gone.
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

KEY = "capibara/fault"
LOOK_S = 1.0  # between two polls
_TELL_S = 5.0  # for the report to arrive
OWN_S = 5.0  # for this process to fail by itself: often all processes meet the same fault
_LINGER_S = LOOK_S + OWN_S + 2.0  # process 0, whose store has the report, stays until all have read it

_KNOWN_LINGER_S = 4.0  # the same where a channel has told the others already
_SOON_S = 1.0  # a report may arrive this much later than the error that the other's end causes here
# A process that has an error itself waits `_SOON_S` for others', and closes its run, before it reports.
_REPORT_S = 10.0

_UNREACHABLE = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")  # how the errors of JAX's client begin

# Found in the errors of a collective if a process is gone: Gloo's on CPUs, NCCL's on GPUs.
_LOST = ("Gloo", "Connection closed by peer", "Connection reset by peer", "remote process exited")
_SHOWN = 200
# At a barrier: one host's disk may be slower than others; the heartbeat finds a process that is dead.
_PATIENCE_S = 3600

_leaving, _reported = threading.Event(), threading.Event()
_news_expected, _report_expected = threading.Event(), threading.Event()
_faults: list[Fault] = []
_passed: Counter[str] = Counter()  # how often this process has reached each barrier
_counting = threading.Lock()


class _Client(Protocol):
    """The methods that are used of JAX's client of the coordinator."""

    def key_value_set(self, key: str, value: str, *, allow_overwrite: bool = False) -> None: ...

    def key_value_try_get(self, key: str) -> str: ...

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str: ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...

    def wait_at_barrier(self, key: str, timeout_ms: int) -> None: ...


class Fault(NamedTuple):
    """Why another process has ended: its exit code and a line for the user."""

    code: int
    line: str


def is_joined() -> bool:
    """Whether this is one process of several that jax.distributed has connected."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def report(code: int, message: str) -> None:
    """Reports to the other processes that this one ends with an error; the first report of a run is kept.

    Args:
      code: its exit code.
      message: why, in one line.
    """
    _leaving.set()
    _reported.set()
    if not is_joined():
        return
    client, index = _client()
    word = json.dumps({"index": index, "host": socket.gethostname(), "code": code, "message": message})

    def put() -> None:
        with contextlib.suppress(Exception):  # another process was first, or the coordinator is gone
            client.key_value_set(KEY, word)

    putting = threading.Thread(target=put, daemon=True)
    putting.start()
    putting.join(_TELL_S)


def has_reported() -> bool:
    """Whether this process has reported that it ends (`report`)."""
    return _reported.is_set()


def peer_fault(within_s: float | None = None) -> Fault | None:
    """The fault with which another process has ended, which may be the cause of an error here; None: none is known.

    Args:
      within_s: seconds to wait for the report; None: as long as one is to be expected (`expect_news`, `expect_report`).
    """
    if not is_joined():
        return None
    if within_s is None:
        within_s = _REPORT_S if _report_expected.is_set() else _SOON_S if _news_expected.is_set() else 0.0
    end_s = time.monotonic() + within_s
    while True:
        if _faults:
            return _faults[0]
        with contextlib.suppress(Exception):  # there is no report, or the coordinator is gone
            if (fault := _read(*_client())) is not None:
                return fault
        if time.monotonic() >= end_s:
            return None
        time.sleep(0.02)


def expect_news() -> None:
    """Declares that a channel notices at once if another process is gone, also one that was killed without a report."""
    _news_expected.set()


def expect_report() -> None:
    """Declares that another process has an error, which it is going to report."""
    _report_expected.set()


def record_fault(fault: Fault) -> None:
    """Records that another process is gone; `peer_fault` returns the first that was recorded."""
    _faults.append(fault)


def is_leaving(within_s: float) -> bool:
    """Whether this process is exiting, or begins to exit within so many seconds."""
    return _leaving.wait(within_s)


def process_info() -> tuple[int, int, str]:
    """This process's index, the number of processes, and the host of process 0; call it when `is_joined`."""
    state = sys.modules["jax._src.distributed"].global_state
    return state.process_id, state.num_processes, state.coordinator_address.rpartition(":")[0].strip("[]")


def put(name: str, value: str, *, again: bool = False) -> None:
    """Stores a value on the coordinator for `wait_for` and `list_values`; `again`: it may replace an earlier one."""
    _client()[0].key_value_set(f"capibara/{name}", value, allow_overwrite=again)


def wait_for(name: str, timeout_s: float) -> str:
    """The value that a process has put under this name; waits for it."""
    return _client()[0].blocking_key_value_get(f"capibara/{name}", int(1000 * timeout_s))


def list_values(folder: str) -> list[str]:
    """The values whose names are in a folder (FOLDER/...); does not wait."""
    return [value for _, value in _client()[0].key_value_dir_get(f"capibara/{folder}/")]


def together(point: str) -> None:
    """Waits for all processes to reach this point, which all must do equally often; it does not use the devices."""
    if not is_joined():
        return
    with _counting:
        number = _passed[point] = _passed[point] + 1
    _client()[0].wait_at_barrier(f"capibara/{point}/{number}", int(1000 * _PATIENCE_S))


def peer_lost(errors: Iterable[BaseException]) -> TryAgain | None:
    """The error to print if a chain of errors comes from the end of another process that could not report it; else None.

    Args:
      errors: each the cause of the one before.
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
    """Whether `put`, `wait_for` or `list_values` raised this because the coordinator is gone or does not answer."""
    return isinstance(error, RuntimeError) and str(error).startswith(_UNREACHABLE)


def begin_exit() -> None:
    """Declares that this process ends without an error; reports of others are ignored from now on."""
    _leaving.set()


def exit_process(code: int) -> None:
    """Exits after a fault of this process or another; process 0 first waits until the others have read the report."""
    _leaving.set()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if is_joined() and _client()[1] == 0:
        time.sleep(_KNOWN_LINGER_S if _faults else _LINGER_S)
    os._exit(code)


def listen() -> None:
    """Starts a thread that exits this process some seconds after another has reported an error."""
    threading.Thread(target=_listen, args=_client(), name="capibara-peers", daemon=True).start()


def _client() -> tuple[_Client, int]:
    state = sys.modules["jax._src.distributed"].global_state  # not exported by jax.distributed
    return state.client, state.process_id


def _read(client: _Client, index: int) -> Fault | None:
    word = json.loads(client.key_value_try_get(KEY))
    line = f"process {word['index']} on {word['host']} ended: {word['message']}"
    return None if word["index"] == index else Fault(word["code"], line)


def _listen(client: _Client, index: int) -> None:
    while not _leaving.wait(LOOK_S):
        try:
            fault = _read(client, index)
        except Exception as error:
            if "NOT_FOUND" in str(error):
                continue
            return  # the coordinator is gone: JAX ends this process
        if fault is not None and not _leaving.wait(OWN_S):
            print(f"error: {fault.line}", file=sys.stderr, flush=True)
            exit_process(fault.code)
        return
