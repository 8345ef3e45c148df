"""The process between us and a program that nobody has read; `sandbox` starts it, as a script, with Python's library alone.

    supervisor (this process)      starts the next one in namespaces of its own, kills them all in the end, says how it went
      keeper                       the first process of the PID namespace: whatever the program started dies with it
        program                    another user where we are root, limits set, without network

Arguments: the program's file, seconds, bytes of memory, bytes of a file, processes. The program's folder is its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import time
import types

_NEWNET, _NEWUSER, _NEWPID, _NEWIPC = 0x40000000, 0x10000000, 0x20000000, 0x08000000  # of sched.h
_PDEATHSIG, _KEEPCAPS, _SUBREAPER, _NO_NEW_PRIVS = 1, 8, 36, 38  # of prctl.h
_READS_ALL = 1 << 2  # CAP_DAC_READ_SEARCH
_FIRST_UID, _UIDS = 61184, 4000  # ids that no distribution gives to anyone
_DONE = b"done"


def main(argv: list[str]) -> None:
    """Runs the program and prints {"passed", "reason", "network"}."""
    program, seconds = argv[0], float(argv[1])
    memory, file_bytes, processes = map(int, argv[2:])
    libc = _libc()
    libc.prctl(_SUBREAPER, 1, 0, 0, 0)  # what the program leaves behind becomes ours, and can be found
    if os.getuid():
        processes += _processes_of(os.getuid())  # the limit counts all that the user has, here or in the new namespace
    own_network = _unshare(libc)
    read, write = os.pipe()
    keeper = os.fork()
    if not keeper:
        os.close(read)
        _keep(libc, program, write, seconds, memory, file_bytes, processes)
    os.close(write)
    status = _wait(keeper, time.monotonic() + seconds)
    if status is None:
        os.kill(keeper, signal.SIGKILL)
    _kill_children()
    os.set_blocking(read, False)
    try:
        said = os.read(read, len(_DONE))
    except BlockingIOError:
        said = b""
    passed = said == _DONE and status == 0
    reason = "" if passed else "out of time" if status is None else _reason(status)
    print(json.dumps({"passed": passed, "reason": reason, "network": not own_network}))


def _libc() -> ctypes.CDLL | types.SimpleNamespace:
    """What Linux has beyond Python's library; elsewhere functions that do nothing."""
    if sys.platform.startswith("linux"):
        return ctypes.CDLL(None)
    return types.SimpleNamespace(prctl=lambda *_: -1, unshare=lambda *_: -1, capset=lambda *_: -1)


def _unshare(libc: ctypes.CDLL) -> bool:
    """Leaves the machine's network and its table of processes, where that is allowed; whether the network is gone."""
    apart = _NEWNET | _NEWPID | _NEWIPC
    return any(libc.unshare(flags) == 0 for flags in (apart, _NEWUSER | apart, _NEWUSER | _NEWNET))


def _keep(libc: ctypes.CDLL, program: str, write: int, seconds: float, *limits: int) -> None:
    """The keeper: starts the program, takes up the processes that it leaves, and ends with it."""
    libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    runner = os.fork()
    if not runner:
        _enter(libc, program, write, seconds, *limits)
    os.close(write)
    while True:
        pid, status = os.wait()
        if pid == runner:
            os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


def _enter(libc: ctypes.CDLL, program: str, write: int, seconds: float, *limits: int) -> None:
    """The program's own process."""
    memory, file_bytes, processes = limits
    folder, code = os.path.dirname(program), 1
    try:
        with open(program, encoding="utf-8") as file:
            text = file.read()
        os.chdir(folder)
        if os.getuid() == 0:
            with contextlib.suppress(OSError):  # in a container that does not let us there is less between us and it
                _become_nobody(libc, folder)
        libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
        cpu = int(seconds) + 1
        limited = {"CPU": cpu, "AS": memory, "FSIZE": file_bytes, "NPROC": processes, "NOFILE": 64, "CORE": 0}
        for name, value in limited.items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # ours is how the supervisor tells the outcome
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        own = os.getpid()
        exec(compile(text, "program.py", "exec"), module.__dict__)
        if os.getpid() == own:
            os.write(write, _DONE)
            code = 0
    except SystemExit as ended:
        print(f"SystemExit: {ended.code}", file=sys.stderr)  # whatever the code: what comes after it was not run
    except BaseException as error:
        _tell(error)
    finally:
        try:
            sys.stderr.flush()
        finally:
            os._exit(code)


def _tell(error: BaseException) -> None:
    """One line, even where there is no memory left for a traceback."""
    said = "".join(str(error).split("\n")[:1])[:300]
    os.write(2, f"{type(error).__name__}: {said}".rstrip(": ").encode("utf-8", "replace") + b"\n")


def _become_nobody(libc: ctypes.CDLL, folder: str) -> None:
    """Takes an id that owns nothing but the folder. Root is under no limit of processes, and could write anywhere."""
    uid = _FIRST_UID + int.from_bytes(os.urandom(4), "big") % _UIDS
    os.chown(folder, uid, uid)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.seteuid(uid)
    hidden = not os.access(os.__file__, os.R_OK, effective_ids=True)
    os.seteuid(0)
    libc.prctl(_KEEPCAPS, int(hidden), 0, 0, 0)
    os.setresuid(uid, uid, uid)
    if hidden:  # Python's library lies where root alone may read, so all files may be read; none more is written
        head, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(_READS_ALL, _READS_ALL, 0, 0, 0, 0)
        libc.capset(head, data)


def _processes_of(uid: int) -> int:
    """Processes and threads of a user, as far as /proc shows."""
    count = 0
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    return count


def _wait(pid: int, until: float) -> int | None:
    """The exit status; None where time ran out."""
    pause = 0.001
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        time.sleep(pause)
        pause = min(pause * 2, 0.02)
    return None


def _kill_children() -> None:
    """Kills what is left: with the keeper of a namespace all of it went, else it has become a child of ours."""
    while True:
        for pid in _children():
            os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)  # one of them; by then those that it had are ours
        except ChildProcessError:
            return


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def _reason(status: int) -> str:
    """Why a program of this exit status did not pass."""
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
    if code > 128:
        number = code - 128
        name = signal.Signals(number).name if number in {int(known) for known in signal.Signals} else str(number)
        return "out of CPU time" if name == "SIGXCPU" else f"killed by {name}"
    return f"exit code {code}" if code else "ended before its last line"


if __name__ == "__main__":
    main(sys.argv[1:])
