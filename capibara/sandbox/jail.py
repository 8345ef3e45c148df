"""The processes of a program and its tests. `sandbox` starts this file as a script; it imports only the standard library.

    supervisor (this process)      starts the others, kills them at the end, and prints the outcome
      outer, keeper                the keeper is the first process of a PID namespace, which dies with it
        program                    runs the program's text, then serves the tests' requests (`dialogue`)
      outer, keeper                another namespace: the two cannot see or reach each other
        tests                      run the text of the tests, and send the verdict to the supervisor

Program and tests each have limits, no network, another user if we are root, and a private root (`private_root`) if the
machine permits it. With bubblewrap the program's outer is bwrap, which starts this file again inside it. The job comes on
standard input and only the tests' process reads it, so the tests are never in the memory of the program's process.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import resource
import select
import signal
import socket
import stat
import sys
import time
import types
from collections.abc import Callable

_NEWNET, _NEWUSER, _NEWPID, _NEWIPC, _NEWNS = 0x40000000, 0x10000000, 0x20000000, 0x08000000, 0x00020000  # of sched.h
_PDEATHSIG, _DUMPABLE, _KEEPCAPS, _SUBREAPER, _NO_NEW_PRIVS = 1, 4, 8, 36, 38  # of prctl.h
_READS_ALL = 1 << 2  # CAP_DAC_READ_SEARCH
_FIRST_UID, _UIDS = 61184, 4000  # a range of user ids that no distribution uses
_CHANNEL = 3  # the program's file descriptor to its tests
_ENDING_S = 1.0  # for a process to end after it has closed its descriptors
_SHARED = ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/run/lock")
_RMID = 0  # of ipc.h
_Libc = ctypes.CDLL | types.SimpleNamespace


def _load_neighbour(name: str) -> types.ModuleType:
    """Loads a module next to this file, whose folder must not be on sys.path: programs could import from it."""
    folder, name_here = os.path.split(os.path.abspath(__file__))
    path = os.path.join(folder, name_here.replace("jail", name))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


wire, dialogue, program_text, private_root = map(_load_neighbour, ("wire", "dialogue", "program_text", "private_root"))


class Options:
    """Options from `sandbox`, parsed from JSON: limits, and the isolation of the program.

    They are: the limits of Sandbox; an empty folder; the paths that a private root shows; the command line of bwrap, or
    none; whether to use namespaces.
    """

    seconds: float
    memory_bytes: int
    file_bytes: int
    disk_bytes: int
    processes: int
    folder: str
    shown: list[str]
    bubblewrap: list[str]
    namespaces: bool

    def __init__(self, text: str):  # not a dataclass: importing dataclasses takes as long as all other imports
        values = json.loads(text)
        for name in Options.__annotations__:
            setattr(self, name, values[name])


class Confined:
    """Whether a process has no access to the network and to the file system."""

    def __init__(self, *, network: bool, files: bool):
        self.network, self.files = network, files

    def text(self) -> bytes:
        return json.dumps(vars(self)).encode() + b"\n"


def main(argv: list[str]) -> None:
    """Runs a program and its tests and prints {"passed", "reason", "network", "files"}."""
    options, libc = Options(argv[0]), _libc()
    if argv[1:]:  # inside bubblewrap
        _run_program(libc, options, private_root.WORK, _new_uid())
    libc.prctl(_SUBREAPER, 1, 0, 0, 0)  # orphans of the program become our children, so that we find them
    libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    uids = (_new_uid(), _new_uid())
    ours, theirs = socket.socketpair()
    until = time.monotonic() + options.seconds
    reported, tell = os.pipe()
    program = _fork(lambda: _start_program(libc, options, theirs, tell, uids[0]))
    os.close(tell)
    theirs.close()
    libc.prctl(_DUMPABLE, 0, 0, 0, 0)  # a program of the same user cannot read our memory
    heard, say = os.pipe()
    tests = _fork(lambda: _start_tests(libc, options, ours, say, uids[1]))
    os.close(say)
    ours.close()
    confined = Confined(**json.loads(_line(reported, until) or '{"network": false, "files": false}'))
    verdict = _line(heard, until)
    outcome = _outcome(verdict, program, tests, time.monotonic() >= until)
    for pid in (program, tests):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _kill_children()
    if not confined.files and not options.bubblewrap:
        _sweep(libc, {uid for uid in uids if uid is not None})
    print(json.dumps(outcome | {"network": not confined.network, "files": confined.files}))


def _outcome(verdict: bytes, program: int, tests: int, late: bool) -> dict[str, bool | str]:
    """The verdict of the tests' process; without one, a reason from the exit statuses of both."""
    if late and not verdict:
        return {"passed": False, "reason": "out of time"}
    result: dict[str, bool | str] = json.loads(verdict) if verdict else {"passed": False, "reason": ""}
    if result["passed"] or result["reason"]:
        return result
    if (ended := _wait(program, _ENDING_S)) is not None:
        return {"passed": False, "reason": _reason(ended)}
    ended = _wait(tests, _ENDING_S)
    return {"passed": False, "reason": "the tests hang" if ended is None else f"the tests: {_reason(ended)}"}


def _libc() -> _Libc:
    """Linux's functions that Python does not have; on other systems functions that do nothing."""
    if sys.platform.startswith("linux"):
        return ctypes.CDLL(None, use_errno=True)
    return types.SimpleNamespace(prctl=lambda *_: -1, unshare=lambda *_: -1, capset=lambda *_: -1)


def _fork(run: Callable[[], None]) -> int:
    pid = os.fork()
    if not pid:
        try:
            run()
        finally:
            os._exit(1)
    return pid


# The program.


def _start_program(libc: _Libc, options: Options, channel: socket.socket, tell: int, uid: int | None) -> None:
    """Starts the program's outer process."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)  # our stdin has the tests, and our stdout carries the outcome
    os.dup2(null, 1)
    if options.bubblewrap:
        if not os.getuid() and libc.unshare(_NEWNET) != 0:
            os._exit(1)
        os.write(tell, Confined(network=True, files=True).text())
        os.dup2(channel.fileno(), _CHANNEL, inheritable=True)
        os.closerange(_CHANNEL + 1, 256)
        os.execv(options.bubblewrap[0], options.bubblewrap)

    def run(confined: Confined) -> None:
        os.write(tell, confined.text())
        os.dup2(channel.fileno(), _CHANNEL)
        _run_program(libc, options, _work(confined, options, "inside"), uid)

    _confine(libc, options, run, "root")


def _run_program(libc: _Libc, options: Options, folder: str, uid: int | None) -> None:
    """Runs in the program's process; does not return."""
    os.closerange(_CHANNEL + 1, 256)
    os.umask(0o022)
    _limit(libc, options, folder, uid)
    libc.prctl(_DUMPABLE, 1, 0, 0, 0)  # otherwise it does not own its /proc/self
    pid = os.getpid()

    def run(text: str) -> dict[str, object]:
        with open("program.py", "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(text, "program.py", "exec", dont_inherit=True), module.__dict__)
        if os.getpid() != pid:  # a process that the program forked must not continue
            os._exit(0)
        return module.__dict__

    try:
        dialogue.serve(socket.socket(fileno=_CHANNEL), run, lambda _: os._exit(0))
    except wire.Broken:
        os._exit(0)
    except SystemExit as ended:
        print(f"SystemExit: {ended.code}", file=sys.stderr)  # also for code 0: the program did not run to its end
    except BaseException as error:
        os.write(2, _error_line(error).encode("utf-8", "replace") + b"\n")
    finally:
        try:
            sys.stderr.flush()
        finally:
            os._exit(1)


# The tests.


def _start_tests(libc: _Libc, options: Options, channel: socket.socket, say: int, uid: int | None) -> None:
    """Starts the outer process of the tests."""
    libc.prctl(_DUMPABLE, 1, 0, 0, 0)  # until it has written the user map of its namespace

    def run(confined: Confined) -> None:
        _run_tests(libc, options, channel, say, _work(confined, options, "tests"), uid)

    _confine(libc, options, run, "other root")


def _run_tests(libc: _Libc, options: Options, channel: socket.socket, say: int, folder: str, uid: int | None) -> None:
    """Runs in the tests' process and writes the verdict; does not return."""
    pid = os.getpid()

    def tell(**verdict: object) -> None:
        if os.getpid() == pid:
            os.write(say, json.dumps(verdict).encode() + b"\n")
        os._exit(0)

    with open(0, "rb", closefd=False) as file:
        job = json.load(file)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    _limit(libc, options, folder, uid)
    libc.prctl(_DUMPABLE, 0, 0, 0, 0)  # a program of the same user cannot read its memory
    try:
        if "text" in job:
            job = dict.fromkeys(("setup", "prompt", "entry"), "") | dict(
                zip(("code", "tests"), program_text.split(job["text"]))
            )
        dialogue.judge(channel, job, lambda why: tell(passed=False, reason=why))
        tell(passed=True, reason="")
    except SystemExit as ended:
        tell(passed=False, reason=f"SystemExit: {ended.code}")
    except BaseException as error:
        tell(passed=False, reason=_error_line(error))


def _error_line(error: BaseException) -> str:
    """An error in one line, even if there is no memory for a traceback."""
    message = "".join(str(error).split("\n")[:1])[:300]
    return f"{type(error).__name__}: {message}".rstrip(": ")


# For both.


def _confine(libc: _Libc, options: Options, run: Callable[[Confined], None], root: str) -> None:
    """Runs in the outer process: enters new namespaces as far as permitted, and starts the keeper. Does not return."""
    libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    flags = _unshare(libc) if options.namespaces else 0
    keeper = _fork(lambda: _keep(libc, options, run, flags, os.path.join(options.folder, root)))
    os.closerange(3, 256)
    os._exit(_code(os.waitpid(keeper, 0)[1]))


def _unshare(libc: _Libc) -> int:
    """Enters new namespaces as far as permitted; returns their flags."""
    namespaces = _NEWNET | _NEWPID | _NEWIPC
    uid, gid = os.getuid(), os.getgid()  # of before: a new user namespace has no names for them
    for flags in (
        namespaces | _NEWNS,
        namespaces,
        _NEWUSER | namespaces | _NEWNS,
        _NEWUSER | namespaces,
        _NEWUSER | _NEWNET,
    ):
        if libc.unshare(flags) == 0:
            if flags & _NEWUSER:
                _keep_ids(uid, gid)
            return flags
    return 0


def _keep_ids(uid: int, gid: int) -> None:
    """Maps this user to itself in a new user namespace, so that it still owns its files."""
    for name, text in {"setgroups": "deny", "uid_map": f"{uid} {uid} 1", "gid_map": f"{gid} {gid} 1"}.items():
        with contextlib.suppress(OSError), open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def _keep(libc: _Libc, options: Options, run: Callable[[Confined], None], flags: int, root: str) -> None:
    """Runs in the keeper: starts the program or tests, reaps orphans, and ends with it."""
    libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    files = False
    if flags & _NEWNS:
        with contextlib.suppress(OSError):
            os.mkdir(root)
            private_root.enter(libc, root, options.shown, options.disk_bytes)
            files = True
    runner = _fork(lambda: run(Confined(network=bool(flags & _NEWNET), files=files)))
    os.closerange(3, 256)
    while True:
        pid, status = os.wait()
        if pid == runner:
            os._exit(_code(status))


def _work(confined: Confined, options: Options, name: str) -> str:
    """The working directory of a process."""
    folder = private_root.WORK if confined.files else os.path.join(options.folder, name)
    os.makedirs(folder, exist_ok=True)
    return folder


def _limit(libc: _Libc, options: Options, folder: str, uid: int | None) -> None:
    """Sets limits, working directory and environment of a process, and drops its privileges."""
    processes = options.processes
    if os.getuid():  # the limit counts all processes of the user, in every namespace
        processes += _processes_of(os.getuid())
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # the OOM killer's first choice: memory is limited per process, not in total
    os.environ.update({"HOME": folder, "TMPDIR": folder})
    os.chdir(folder)
    if uid is not None:
        with contextlib.suppress(OSError):  # a container may not permit it: the isolation is then weaker
            _become(libc, folder, uid)
    libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    limited = {
        "CPU": int(options.seconds) + 1, "AS": options.memory_bytes, "FSIZE": options.file_bytes, "NPROC": processes,
        "NOFILE": 64, "CORE": 0, "MSGQUEUE": 2**16,
    }  # fmt: skip
    for name, value in limited.items():
        if (kind := getattr(resource, f"RLIMIT_{name}", None)) is not None:
            resource.setrlimit(kind, (value, value))


def _new_uid() -> int | None:
    """An unused user id; None: we may not change ours."""
    return None if os.getuid() else _FIRST_UID + int.from_bytes(os.urandom(4), "big") % _UIDS


def _become(libc: _Libc, folder: str, uid: int) -> None:
    """Changes the user id: root has no limit of processes, and can write anywhere."""
    with contextlib.suppress(PermissionError):  # inside bubblewrap everybody can write to the folder
        os.chown(folder, uid, uid)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.seteuid(uid)
    hidden = not os.access(os.__file__, os.R_OK, effective_ids=True)
    os.seteuid(0)
    libc.prctl(_KEEPCAPS, int(hidden), 0, 0, 0)
    os.setresuid(uid, uid, uid)
    if hidden:  # only root may read Python's library: keep the capability to read all files, not to write
        head, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(_READS_ALL, _READS_ALL, 0, 0, 0, 0)
        libc.capset(head, data)


def _processes_of(uid: int) -> int:
    """The number of a user's processes and threads in /proc."""
    count = 0
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    return count


# The end.


def _line(descriptor: int, until: float) -> bytes:
    """Reads a line; empty if none comes in time."""
    read = b""
    while not read.endswith(b"\n"):
        ready = select.select([descriptor], [], [], max(0.0, until - time.monotonic()))[0]
        part = os.read(descriptor, 4096) if ready else b""
        if not part:
            return b""
        read += part
    return read


def _wait(pid: int, seconds: float) -> int | None:
    """Waits for a process; returns its exit status, or None after `seconds`."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        result, status = os.waitpid(pid, os.WNOHANG)
        if result:
            return status
        time.sleep(0.001)
    return None


def _kill_children() -> None:
    """Kills remaining processes: without a PID namespace they have become our children."""
    while True:
        for pid in _children():
            os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)  # its own children have become ours
        except ChildProcessError:
            return


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def _sweep(libc: _Libc, uids: set[int]) -> None:
    """Removes files and System V objects that these users, whose processes are dead, have left in shared places."""
    for top in _SHARED if uids else ():
        for folder, names, files in os.walk(top):
            for name in (*files, *names):
                path = os.path.join(folder, name)
                with contextlib.suppress(OSError):
                    result = os.lstat(path)
                    if result.st_uid in uids:
                        _remove(path)
                    if name in names and (result.st_uid in uids or not result.st_mode & stat.S_IWOTH):
                        names.remove(name)  # they cannot have files below it
    for number in _left("shm", uids):
        libc.shmctl(number, _RMID, None)
    for number in _left("msg", uids):
        libc.msgctl(number, _RMID, None)
    for number in _left("sem", uids):
        libc.semctl(number, 0, _RMID)


def _remove(path: str) -> None:
    for folder, names, files in os.walk(path, topdown=False):
        for name in (*files, *names):
            inner = os.path.join(folder, name)
            if name in names and not os.path.islink(inner):
                os.rmdir(inner)
            else:
                os.unlink(inner)
    if os.path.isdir(path) and not os.path.islink(path):
        os.rmdir(path)
    else:
        os.unlink(path)


def _left(kind: str, uids: set[int]) -> list[int]:
    """The ids of System V shared memory, message queues or semaphores of these users."""
    try:
        with open(f"/proc/sysvipc/{kind}", encoding="ascii") as file:
            names, *rows = [line.split() for line in file]
    except OSError:
        return []
    owner = names.index("uid")
    return [int(row[1]) for row in rows if int(row[owner]) in uids]


def _code(status: int) -> int:
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _reason(status: int) -> str:
    """Why a program with this exit status did not pass."""
    code = _code(status)
    if code > 128:
        number = code - 128
        name = signal.Signals(number).name if number in {int(known) for known in signal.Signals} else str(number)
        return "out of CPU time" if name == "SIGXCPU" else f"killed by {name}"
    return f"exit code {code}" if code else "ended before its last line"


if __name__ == "__main__":
    main(sys.argv[1:])
