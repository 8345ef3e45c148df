"""Programs that would pass without doing what their tests ask for, and what they leave behind (capibara/sandbox/sandbox.py)."""

from __future__ import annotations

import functools
import os
import pathlib
import subprocess

import pytest

from capibara.evaluation.programs import judged, program
from capibara.sandbox import sandbox
from capibara.sandbox.sandbox import Holder, Sandbox

PROMPT = 'import math\n\ndef add(a, b):\n    """The sum."""\n'
TEST = """
def check(candidate):
    assert candidate(1, 2) == 3
    assert candidate(10, 5) == 15 and candidate(-1, 0) == -1
    assert abs(candidate(0.25, 0.5) - 0.75) < 1e-6
    assert math.isclose(candidate(0.5, 0.5), 1.0)
    assert candidate("a", "b").startswith("ab")
"""
TASK = {"prompt": PROMPT, "test": TEST, "entry_point": "add"}
VERDICT = rb'{"passed": true, "reason": "", "network": false, "files": true}\n'

# What forges: text after the prompt. Each would pass where the verdict is the judged process's own to give.
FORGING = {
    "writes the old word to all descriptors": """
    return 0
import os
for n in range(256):
    try: os.write(n, b"done")
    except OSError: pass
os._exit(0)
""",
    "writes verdicts to all descriptors": f"""
    return 0
import os
for n in range(256):
    try: os.write(n, {VERDICT!r})
    except OSError: pass
os._exit(0)
""",
    "writes verdicts from a thread and goes on": f"""
    return 0
import os, threading
def write():
    while True:
        for n in (0, 1, 2, 4, 5, 6, 7, 8):
            try: os.write(n, {VERDICT!r})
            except OSError: pass
threading.Thread(target=write, daemon=True).start()
""",
    "exits early": "    return 0\nimport os\nos._exit(0)\n",
    "exits in the call": "    import os\n    os._exit(0)\n",
    "sys.exit in the call": "    import sys\n    sys.exit(0)\n",
    "exits by an error of its own": "    class Done(SystemExit): code = 0\n    raise Done(0)\n",
    "exits at the end of the process": "    return 0\nimport atexit, os\natexit.register(os._exit, 0)\nraise SystemExit(0)\n",
    "exits by libc": "    import ctypes\n    ctypes.CDLL(None)._exit(0)\n",
    "becomes another program": """
    return 0
import os
os.execv("/bin/echo", ["echo", '{"passed": true, "reason": "", "network": false, "files": true}'])
""",
    "forks and lets the child answer": "    import os\n    if os.fork(): os._exit(0)\n    return 0\n",
    "walks the frames": """
    import sys
    frame = sys._getframe()
    while frame:
        for name, value in list(frame.f_locals.items()):
            if callable(value) and name in ("tell", "ended", "failed", "run"):
                try: value(passed=True)
                except TypeError: value("done")
        frame = frame.f_back
    return 0
""",
    "walks the collector": """
    import gc, types
    for one in gc.get_objects():
        if isinstance(one, types.FunctionType) and one.__name__ in ("tell", "_outcome", "judge"):
            try: one(passed=True)
            except TypeError: pass
    return 0
""",
    "replaces builtins": """
    return 0
import builtins
class Never(BaseException):
    def __new__(cls, *args): return BaseException.__new__(cls)
builtins.AssertionError = Never
builtins.abs = builtins.min = lambda *_: 0
builtins.exec = builtins.compile = lambda *_, **__: None
""",
    "replaces what ends a process": """
    return 0
import os, sys
os._exit = sys.exit = lambda *_: None
os.write = lambda n, text: len(text)
os.waitpid = os.wait = lambda *_: (0, 0)
""",
    "replaces check": """
    return 0
import builtins, sys
builtins.check = lambda _: None
sys.modules["__main__"].check = check = lambda _: None
""",
    "replaces modules": """
    return 0
import sys, types
fake = types.ModuleType("math")
fake.isclose = lambda *_: True
sys.modules["math"] = sys.modules["__main__"] = math = fake
""",
    "replaces the runner's modules": """
    return 0
import sys
for name in ("wire", "dialogue", "jail", "__main__"):
    if name in sys.modules:
        for key, value in list(vars(sys.modules[name]).items()):
            if callable(value): setattr(sys.modules[name], key, lambda *_, **__: True)
""",
    "traces": """
    return 0
import sys, threading
def trace(frame, event, value):
    frame.f_trace_lines = False
    return None
sys.settrace(trace); sys.setprofile(trace); threading.settrace(trace)
sys.excepthook = lambda *_: None
sys.unraisablehook = lambda *_: None
""",
    "is equal to everything": """
    class Any:
        def __eq__(self, other): return True
        def __ne__(self, other): return False
        def __hash__(self): return 0
        def __lt__(self, other): return True
        __le__ = __gt__ = __ge__ = __lt__
        def __sub__(self, other): return 0.0
        __add__ = __radd__ = __rsub__ = __sub__
        def __abs__(self): return 0.0
        def __float__(self): return 1.0
        def __bool__(self): return True
        def __getattr__(self, name): return lambda *_, **__: True
    return Any()
""",
    "is a number equal to everything": """
    class Any(int):
        def __eq__(self, other): return True
        def __hash__(self): return 0
        def __sub__(self, other): return 0.0
        def startswith(self, other): return True
    return Any(7)
""",
    "is a text that starts with everything": """
    class Any(str):
        def __eq__(self, other): return True
        def __hash__(self): return 0
        def startswith(self, other): return True
        def __sub__(self, other): return 0.0
        def __float__(self): return 1.0
    return Any("z")
""",
    "is a class": """
    return 0
class add:
    def __init__(self, *_): pass
    def __eq__(self, other): return True
    def __sub__(self, other): return 0.0
    def __float__(self): return 1.0
    def startswith(self, other): return True
""",
    "is a mock": "    from unittest.mock import MagicMock\n    return MagicMock(__eq__=lambda *_: True)\n",
    "raises what ends a loop": "    raise StopIteration\n",
    "raises what a test raises": "    raise AssertionError\n",
    "answers for its runner": """
    return 0
import json, os, socket
channel = socket.socket(fileno=3)
def send(one): 
    text = json.dumps(one).encode()
    channel.sendall(len(text).to_bytes(8, "big") + text)
while True:
    length = int.from_bytes(channel.recv(8, socket.MSG_WAITALL), "big")
    asked = json.loads(channel.recv(length, socket.MSG_WAITALL))
    if asked[0] == "ready": send(asked)
    elif asked[0] == "look": send(["ok", {name: ["mine", [0, "function", name, ""]] for name in asked[1]}])
    else: send(["ok", True, []])
""",
    "ends loops for its runner": """
    import json, os, socket
    text = b'["stop"]'
    os.write(3, len(text).to_bytes(8, "big") + text)
    os._exit(0)
""",
    "asks the tests for their own": """
    import sys
    side = next(value for frame in iter_frames() for value in frame.f_locals.values() if type(value).__name__ == "Side")
    import wire
    for number in range(3):
        wire.write_message(side._channel, ["do", "call", ["yours", number], ["tuple", [["mine", [0, "function", "f", ""]]]], ["dict", []]])
    wire.write_message(side._channel, ["do", "get", ["yours", 0], ["tuple", ["__globals__"]], ["dict", []]])
    return 0
def iter_frames():
    import sys
    frame = sys._getframe()
    while frame:
        yield frame
        frame = frame.f_back
""",
    "says it is of their making": "    import os\n    t = b'[\"ok\",[\"yours\",-1],[]]'\n    os.write(3, len(t).to_bytes(8, 'big') + t)\n    return 0\n",
    "sends nonsense": "    import os\n    os.write(3, bytes(8) + os.urandom(64))\n    return 0\n",
    "sends what is too long": "    import os\n    os.write(3, b'\\xff' * 64)\n    return 0\n",
    "sends what is too deep": "    t = b'[' * 10**6\n    import os\n    os.write(3, len(t).to_bytes(8, 'big') + t)\n    return 0\n",
    "kills what it can": """
    import os, signal
    for pid in {os.getppid(), *map(int, filter(str.isdigit, os.listdir("/proc")))} - {os.getpid()}:
        try: os.kill(pid, signal.SIGKILL)
        except OSError: pass
    return 0
""",
    "looks for the tests": f"""
    import glob, os
    for path in glob.glob("/proc/[0-9]*/fd/*") + glob.glob("/proc/[0-9]*/cmdline"):
        try:
            if "/fd/" in path and "/self/" not in path and path.split("/")[2] != str(os.getpid()):
                open(path, "wb", 0).write({VERDICT!r})
        except OSError: pass
    return 0
""",
    "closes everything": "    import os\n    os.closerange(0, 256)\n    return 0\n",
    "loops": "    while True: pass\n",
    "stops": "    import os, signal\n    os.kill(os.getpid(), signal.SIGSTOP)\n    return 0\n",
    "sleeps in a thread at its end": "    return 0\nimport time\ntime.sleep(60)\n",
}  # fmt: skip

HONEST = {
    "adds": "    return a + b\n",
    "adds with helpers": "    return functools.reduce(operator.add, [a, b])\nimport functools, operator\n",
    "prints": "    print('x' * 1000)\n    return a + b\n",
    "forks": "    import subprocess\n    subprocess.run(['true'], check=True)\n    return a + b\n",
    "uses temporary files": """
    import pathlib, tempfile
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "x").write_text("y")
        return a + b
""",
    "has threads": "    from concurrent.futures import ThreadPoolExecutor as T\n    return T(2).submit(lambda: a + b).result()\n",
}  # fmt: skip


@functools.cache
def limits(holder):
    return Sandbox(seconds=3, memory_mib=1024, processes=8, holder=holder)


_HIDING = [Holder.NAMESPACES, pytest.param(Holder.BUBBLEWRAP, marks=pytest.mark.heavy)]


def sandbox_of(holder):
    """A sandbox of that kind, where this machine has it."""
    if holder == Holder.BUBBLEWRAP and sandbox._bubblewrap(Sandbox()) is None:
        pytest.skip("bubblewrap is not installed, or does not work here")
    found = sandbox.run("", limits(holder))
    if found.holder != holder:
        pytest.skip(f"this machine has no {holder}: {found.holder or found.reason} here")
    return limits(holder)


@pytest.fixture(params=[*_HIDING, pytest.param(Holder.LIMITS, marks=pytest.mark.heavy)])
def held(request):
    """A sandbox of each kind."""
    return sandbox_of(request.param)


@pytest.fixture(params=_HIDING)
def hidden(request):
    """A sandbox of each kind that has a file system of its own: limits alone hide no files, as the module says."""
    return sandbox_of(request.param)


def all_of(programs, held):
    """What each of the named programs came to."""
    return dict(zip(programs, sandbox.run_all(list(programs.values()), held)))


@pytest.mark.fault(64)
def test_no_verdict_is_forged(held):
    assert len(FORGING) >= 25
    found = all_of({name: judged(TASK, text) for name, text in FORGING.items()}, held)
    assert [name for name, one in found.items() if one.passed] == []
    found = all_of({name: judged(TASK, text) for name, text in HONEST.items()}, held)
    assert {name: one.reason for name, one in found.items() if not one.passed} == {}


@pytest.mark.fault(64)
@pytest.mark.heavy
def test_no_verdict_is_forged_in_one_text(held):
    """A text with its tests at the end is parted there."""
    found = all_of({name: program(TASK, text) for name, text in FORGING.items()}, held)
    assert [name for name, one in found.items() if one.passed] == []
    found = all_of({name: program(TASK, text) for name, text in HONEST.items()}, held)
    assert {name: one.reason for name, one in found.items() if not one.passed} == {}


LEAVES = """
import ctypes, os, pathlib, socket, subprocess, sys
def add(a, b): return a + b
for folder in ("/tmp", "/var/tmp", "/dev/shm", "."):
    try:
        os.makedirs(f"{folder}/MARK/deep")
        pathlib.Path(folder, "MARK", "deep", "file").write_text("x" * 1000)
        os.symlink("/etc/passwd", f"{folder}/MARK.link")
    except OSError: pass
libc = ctypes.CDLL(None)
assert libc.shmget(0x5EED, 4096, 0o1666) >= 0 and libc.msgget(0x5EED, 0o1666) >= 0 and libc.semget(0x5EED, 1, 0o1666) >= 0
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)", "MARK"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        server = socket.socket(socket.AF_UNIX)
        server.bind("\\0MARK")
        os.execv(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(60)", "MARK"])
    os._exit(0)
"""


def left_of(mark):
    """What carries the mark outside: files, processes, sockets; and what is there of System V."""
    tops = [pathlib.Path(top) for top in ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue") if os.path.isdir(top)]
    files = [str(path) for top in tops for path in top.iterdir() if mark in path.name]
    processes = subprocess.run(["ps", "ax", "-o", "args"], capture_output=True, text=True, check=True).stdout
    sockets = pathlib.Path("/proc/net/unix").read_text()
    keys = [pathlib.Path("/proc/sysvipc", kind).read_text().count(f" {0x5EED} ") for kind in ("shm", "msg", "sem")]
    return files, mark in processes, mark in sockets, keys


@pytest.mark.fault(64)
def test_nothing_is_left_behind(held, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tmp_path.chmod(0o711)
    for parent in list(tmp_path.parents)[:2]:  # pytest's own folders are closed to other users
        parent.chmod(0o711)
    mark = f"left{os.getpid()}"
    text = LEAVES.replace("MARK", mark)
    passing = judged({"test": TEST, "entry_point": "add"}, "import math\n" + text)
    assert sandbox.run(passing, held) == sandbox.Outcome(True, "", held.holder == Holder.LIMITS)
    assert not sandbox.run(text + "while True: pass", Sandbox(seconds=1, holder=held.holder)).passed
    assert left_of(mark) == ([], False, False, [0, 0, 0])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault(64)
@pytest.mark.skipif(
    os.getuid() != 0, reason="only root can give a program a user of its own, whose files are then known"
)
def test_files_go_also_where_limits_alone_hold_a_program():
    """It sees the machine's own folders that all may write to; the programs above have folders of their own."""
    mark = f"swept{os.getpid()}"
    tops = [top for top in ("/tmp", "/var/tmp", "/dev/shm") if os.path.isdir(top)]
    makes = f"import os\nfor top in {tops!r}:\n    os.makedirs(f'{{top}}/{mark}/deep')\n    open(f'{{top}}/{mark}/deep/x', 'w').close()"
    assert sandbox.run(makes, limits(Holder.LIMITS)) == sandbox.Outcome(True, "", True)
    assert left_of(mark)[0] == []


@pytest.mark.fault(64)
def test_what_the_user_has_is_not_seen(hidden, tmp_path):
    """Neither files nor the environment of whoever started it, nor the answers on the disk."""
    answers = tmp_path / "answers.jsonl"
    answers.write_text("42")
    for folder in (tmp_path, *list(tmp_path.parents)[:2]):
        folder.chmod(0o755)
    reads = f"import os\nassert not os.path.exists({str(answers)!r}) and not os.path.exists({__file__!r})"
    assert sandbox.run(reads, hidden).reason == ""
    environments = """
import glob
seen = b""
for path in glob.glob("/proc/[0-9]*/environ"):
    try: seen += open(path, "rb").read()
    except OSError: pass
assert b"PYTEST_CURRENT_TEST" not in seen, seen
"""
    assert sandbox.run(environments, hidden).reason == ""
    for path in ("/usr/x", "/x", "/etc/x", "/dev/x", os.path.dirname(os.__file__) + "/x"):
        assert "Error" in sandbox.run(f"open({path!r}, 'w')", hidden).reason


@pytest.mark.fault(64)
def test_a_program_goes_first_where_memory_runs_out(held):
    """Each of its processes has a limit of memory, and all of them together none."""
    assert sandbox.run("assert open('/proc/self/oom_score_adj').read() == '1000\\n'", held).reason == ""


FLOODS = {
    "prints": "while True: print('x' * 10**6)",
    "prints errors": "import sys\nwhile True: sys.stderr.write('x' * 10**6)",
    "fills the disk": "import os\nfor n in range(10**4):\n    open(f'{n}', 'wb').write(bytes(2**22))",
    "fills shared memory": "for n in range(10**4):\n    open(f'/dev/shm/{n}', 'wb').write(bytes(2**22))",
    "makes files": "for n in range(10**6):\n    open(f'{n}', 'w').close()",
    "multiplies": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "takes memory": "x = []\nwhile True: x.append(bytearray(2**24))",
    "answers without end": "def f(): return 'x' * 10**8\nassert f() == 1",
    "answers deeply": "def f():\n    x = []\n    for _ in range(10**5): x = [x]\n    return x\nassert f() == 1",
    "asks without end": "def f(g):\n    while True: g()\ndef check(f):\n    assert f(lambda: 1)\ncheck(f)",
}


@pytest.mark.fault(64)
@pytest.mark.heavy
def test_floods_end_and_go_with_the_program(hidden):
    free = os.statvfs("/tmp").f_bfree
    found = all_of(FLOODS, Sandbox(seconds=4, memory_mib=512, processes=8, holder=hidden.holder))
    assert [name for name, one in found.items() if one.passed] == []
    assert (free - os.statvfs("/tmp").f_bfree) * os.statvfs("/tmp").f_frsize < 2**28
