"""How a process of a verb ends: one line instead of a traceback for a user's mistake, and the exit code."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from capibara.core import bucket_faults
from capibara.core.bucket_faults import Denied
from capibara.core.multihost import peers
from capibara.core.types import TryAgain, UserError

EXIT_FAULT = 1  # as Python has it after a traceback
EXIT_USER_ERROR = 2
EXIT_HUNG = 75  # EX_TEMPFAIL of sysexits.h: the same may work when it is tried again
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_LONGEST = 2000  # characters of a message: what it quotes may come from a foreign file
_LEAVE_S = 10.0  # that one process of several has for its exit after a fault
_EXIT_S, _JOINED_EXIT_S = 10.0, 330.0  # that every process has; JAX's own exit waits 300 s for the other processes


def run_verb(main: Callable[[Sequence[str] | None], int | None], argv: Sequence[str] | None = None) -> int:
    """Runs a verb and returns its exit code.

    A UserError and a full disk become one line on stderr and exit code 2, ctrl-C exit code 130; every other
    exception is a fault of ours and keeps its traceback. One process of several that ends so does not wait for the rest,
    and tells them why.

    Args:
      main: the verb, given the arguments after its name (None: sys.argv); returns an exit code or None for 0.
      argv: passed to `main`.
    """
    try:
        with _interrupts_that_arrive():
            code = main(argv) or 0
            peers.leave()
            return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _leaving_peers(EXIT_INTERRUPTED, "interrupted")
    except BrokenPipeError:  # the reader of our output has had enough, as head has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains of it at its exit
        return EXIT_BROKEN_PIPE
    except Exception as error:
        sys.stdout.flush()
        if (known := _told(error)) is not None:
            print(f"error: {known}", file=sys.stderr)
            return _leaving_peers(EXIT_HUNG if isinstance(known, TryAgain) else EXIT_USER_ERROR, str(known))
        if not peers.is_joined():
            raise
        if (fault := peers.told()) is not None:
            print(f"error: {fault.line}", file=sys.stderr)
            return _leaving_peers(fault.code, fault.line)
        if (lost := peers.lost(_chain(error))) is not None:
            print(f"error: {lost}", file=sys.stderr)
            return _leaving_peers(EXIT_HUNG, str(lost))
        traceback.print_exc()
        return _leaving_peers(EXIT_FAULT, f"{type(error).__name__}: {' '.join(str(error).split())[:_LONGEST]}")


def run_process(main: Callable[[Sequence[str] | None], int | None], argv: Sequence[str] | None = None) -> int:
    """As `run_verb`, in a process of the verb's own, which ends soon after it, whatever threads are left.

    Use it as `sys.exit(run_process(main))`.
    """
    code = EXIT_FAULT
    try:
        code = run_verb(main, argv)
    finally:
        if peers.is_joined() and peers.has_told():
            peers.end(code)
        _leave(code)
    return code


@contextlib.contextmanager
def _interrupts_that_arrive() -> Iterator[None]:
    """Python drops what is raised in a callback of its garbage collector, and JAX has one: ctrl-C comes again after it."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        if frame is None or frame.f_code.co_name != "_xla_gc_callback":
            raise KeyboardInterrupt
        again = threading.Timer(0.05, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()

    if threading.current_thread() is not threading.main_thread() or (
        signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(code: int) -> None:
    """Ends the process soon, with this exit code.

    All that is ours is closed when a verb returns. What others have left, such as the thread of a logger that waits for its
    server, must not keep the process.
    """
    limit_s = _JOINED_EXIT_S if peers.is_joined() else _EXIT_S

    def leave() -> None:
        alive = [t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
        print(f"note: the process ends though it is not done: {', '.join(alive) or 'its exit'} hangs", file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)

    timer = threading.Timer(limit_s, leave)
    timer.daemon = True
    timer.start()


def _leaving_peers(code: int, message: str) -> int:
    """The exit code; one process of several tells the others why it ends, and does so soon, whatever its exit waits for.

    JAX's own exit waits minutes for all processes to come to theirs, while they wait for this one in the midst of a step.
    In the end it aborts them all, and the exit code is lost.
    """
    if peers.is_joined():
        peers.tell(code, message)
        timer = threading.Timer(_LEAVE_S, os._exit, [code])  # where the caller of `run_verb` does not end it
        timer.daemon = True
        timer.start()
    return code


def _told(error: BaseException) -> UserError | TryAgain | None:
    """What to print in place of a traceback: the error is the user's to mend, or it may work when it is tried again."""
    error = unwrap(error)
    if isinstance(error, TryAgain):
        return error
    if isinstance(error, UserError):
        # Who reads a file may take any error for a fault of the file: what a bucket says of itself is the cause.
        if not isinstance(error, Denied) and (fault := bucket_faults.refused(_chain(error))) is not None:
            return fault
        text = " ".join(str(error).split("\n"))
        return UserError(text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}")
    for cause in _chain(error):
        if isinstance(cause, OSError) and cause.errno in _DISK_FULL or os.strerror(errno.ENOSPC) in str(cause):
            where = getattr(cause, "filename", None)
            return UserError(
                f"disk full{f' while writing {where}' if where else ''}: free some space, then run this again"
            )
    return bucket_faults.explained(_chain(error))


def unwrap(error: BaseException) -> BaseException:
    """The exception as it was raised: Gin re-raises a proxy whose message it lengthened, one per configurable."""
    while error.__suppress_context__ and (raised := error.__context__) is not None:
        if type(error).__bases__ != (type(raised),) or type(error).__name__ != type(raised).__name__:
            break
        error = raised
    return error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
