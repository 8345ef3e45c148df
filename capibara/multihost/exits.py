"""Exit codes of the verbs, and one line in place of a traceback for a user's mistake."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence

from capibara.core import bucket_faults, user_modules
from capibara.core.bucket_faults import Denied
from capibara.core.errors import chain, unwrap
from capibara.core.types import TryAgain, UserError
from capibara.multihost import peers

EXIT_FAULT = 1  # Python's after a traceback
EXIT_USER_ERROR = 2
EXIT_SKIPPED = 3  # of prepare: the output is whole, but some input was malformed and was skipped
EXIT_HUNG = 75  # EX_TEMPFAIL of sysexits.h: the same may work when it is tried again
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_LONGEST = 2000  # characters of a message, which may quote an untrusted file
LEAVE_S = 10.0  # for one process of several to exit after a fault
_EXIT_S, _JOINED_EXIT_S = 10.0, 330.0  # for any process to exit; JAX's own exit waits 300 s for the other processes


def run_verb(main: Callable[[Sequence[str] | None], int | None], argv: Sequence[str] | None = None) -> int:
    """Runs a verb and returns its exit code.

    A UserError, a full disk and an error of the user's own code become one line on stderr and exit code 2, ctrl-C exit
    code 130; every other exception is a fault of capibara and keeps its traceback. If this is one process of several, it
    reports the error to the others and does not wait for them.

    Args:
      main: the verb; takes the arguments after its name (None: sys.argv) and returns an exit code, or None for 0.
      argv: passed to `main`.
    """
    try:
        with _interrupts_that_arrive():
            code = main(argv) or 0
            peers.begin_exit()
            return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _leaving_peers(EXIT_INTERRUPTED, "interrupted")
    except SystemExit as error:
        if (ended := _of_users_code(error)) is None:
            raise
        sys.stdout.flush()
        print(f"error: {ended}", file=sys.stderr)
        return _leaving_peers(EXIT_USER_ERROR, str(ended))
    except BrokenPipeError:  # the reader of our output has closed it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python reports it again at exit
        return EXIT_BROKEN_PIPE
    except BaseException as error:  # asyncio.CancelledError is no Exception, and the other processes wait all the same
        sys.stdout.flush()
        known = _expected(error)
        if known is None and (fault := peers.peer_fault()) is not None:
            print(f"error: {fault.line}", file=sys.stderr)
            return _leaving_peers(fault.code, fault.line)
        if known is None and (lost := peers.peer_lost(chain(error))) is not None:
            known = lost
        known = known or _of_users_code(error)
        if known is not None:
            print(f"error: {known}", file=sys.stderr)
            return _leaving_peers(EXIT_HUNG if isinstance(known, TryAgain) else EXIT_USER_ERROR, str(known))
        if not peers.is_joined():
            raise
        traceback.print_exc()
        return _leaving_peers(EXIT_FAULT, f"{type(error).__name__}: {' '.join(str(error).split())[:_LONGEST]}")


def run_process(main: Callable[[Sequence[str] | None], int | None], argv: Sequence[str] | None = None) -> int:
    """Runs a verb in a process of its own: as `run_verb`, but the process then exits even if other threads still run.

    Use it as `sys.exit(run_process(main))`.
    """
    code = EXIT_FAULT
    try:
        code = run_verb(main, argv)
    finally:
        if peers.is_joined() and peers.has_reported():
            peers.exit_process(code)
        _leave(code)
    return code


@contextlib.contextmanager
def _interrupts_that_arrive() -> Iterator[None]:
    """Sends SIGINT again where Python would lose it: in a destructor, or in a callback such as JAX's of the garbage collector."""
    before = sys.unraisablehook

    def hook(lost: sys.UnraisableHookArgs) -> None:
        if lost.exc_type is not KeyboardInterrupt:
            before(lost)
            return
        again = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
        again.daemon = True
        again.start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def _leave(code: int) -> None:
    """Makes the process exit with this code within a time limit.

    Everything of capibara's is closed when a verb returns. A thread of another library, such as a tracker that waits for
    its server, must not keep the process alive.
    """
    limit_s = _JOINED_EXIT_S if peers.is_joined() else _EXIT_S

    def leave() -> None:
        alive = [t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
        waited_for = f"thread {', '.join(alive)}" if alive else "Python's exit"
        print(f"note: {waited_for} does not end within {limit_s:g} s: the process exits without it", file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)

    timer = threading.Timer(limit_s, leave)
    timer.daemon = True
    timer.start()


def _leaving_peers(code: int, message: str) -> int:
    """Returns the exit code; one process of several first reports why it ends, and starts a timer for its exit.

    JAX's own exit waits minutes for all processes to exit, while they wait for this one in the middle of a step. In the
    end it aborts them all, and the exit code is lost.
    """
    if peers.is_joined():
        peers.report(code, message)
        timer = threading.Timer(LEAVE_S, os._exit, [code])  # where the caller of `run_verb` does not end it
        timer.daemon = True
        timer.start()
    return code


def _expected(error: BaseException) -> UserError | TryAgain | None:
    """The error to print as one line, without a traceback; None: it is a fault of capibara."""
    error = unwrap(error)
    if isinstance(error, TryAgain):
        return error
    if isinstance(error, UserError):
        # A reader may blame the file for any error: where a bucket has refused access, that is the cause.
        if not isinstance(error, Denied) and (fault := bucket_faults.refused(chain(error))) is not None:
            return fault
        text = " ".join(str(error).split("\n"))
        return UserError(text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}")
    for cause in chain(error):
        if isinstance(cause, OSError) and cause.errno in _DISK_FULL or os.strerror(errno.ENOSPC) in str(cause):
            where = getattr(cause, "filename", None)
            return UserError(
                f"disk full{f' while writing {where}' if where else ''}: free some space, then run this again"
            )
    return bucket_faults.explained(chain(error))


def _of_users_code(error: BaseException) -> UserError | TryAgain | None:
    """The line for an error of the user's own code; one of its network (a tracker's server) is worth another try."""
    original = unwrap(error)
    if (known := user_modules.explained(original)) is None:
        return None
    if os.environ.get(user_modules.TRACEBACK):
        traceback.print_exception(original)
    is_of_files = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
    return TryAgain(str(known)) if isinstance(original, OSError) and not isinstance(original, is_of_files) else known
