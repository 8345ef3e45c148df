"""Programs that run for ever, multiply, take all memory, write, lie about their end or talk to others."""

from __future__ import annotations

import os
import socket
import subprocess
import time

import pytest

from capibara.core.types import UserError
from capibara.sandbox import sandbox
from capibara.sandbox.sandbox import Sandbox

QUICK = Sandbox(seconds=2, memory_mib=512, processes=8)


def reason(program, limits=QUICK):
    outcome = sandbox.run(program, limits)
    assert not outcome.passed
    return outcome.reason


def test_a_program_that_comes_to_its_end_passes():
    body = (
        "import json, dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int\nassert json.loads('[1]') == [A(1).x]"
    )
    assert sandbox.run(body + "\nprint('x' * 10**6)\nif __name__ != '__main__': 1 / 0") == (
        sandbox.Outcome(True, "", sandbox.run("").network)
    )
    assert sandbox.run("import subprocess, sys\nassert subprocess.run(['true']).returncode == 0", QUICK).passed


@pytest.mark.parametrize(
    "program, why",
    {
        "assert 1 == 2, 'no'": "AssertionError: no",
        "def (": "SyntaxError",
        "import sys; sys.exit(0)": "SystemExit: 0",
        "import os; os._exit(0)": "ended before its last line",
        "import os; os.kill(os.getpid(), 11)": "killed by SIGSEGV",
        "raise KeyboardInterrupt": "KeyboardInterrupt",
        "x = bytearray(2**31)": "MemoryError",
        "open('a', 'wb').write(bytes(2**24))": "File too large",
        "import sys\nwhile True: sys.stderr.write('x' * 1000)": "",
        "[open('/dev/null') for _ in range(99)]\nx = [open('/dev/null') for _ in range(99)]": "Too many open files",
        "input()": "EOFError",
    }.items(),
    ids=str,
)
def test_others_do_not(program, why):
    assert why in reason(program)


def test_a_loop_is_stopped_with_all_that_it_began():
    mark = f"mark{os.getpid()}"
    program = f"""
import os, sys, signal, subprocess, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)', '{mark}'], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True: time.sleep(1)
    os._exit(0)
while True: pass
"""
    began = time.monotonic()
    assert reason(program, Sandbox(seconds=1)) == "out of time"
    assert time.monotonic() - began < 8
    assert mark not in subprocess.run(["ps", "ax", "-o", "args"], capture_output=True, text=True).stdout


def test_a_program_that_leaves_processes_behind_has_none_afterwards():
    mark = f"left{os.getpid()}"
    program = f"import subprocess\nsubprocess.Popen(['sh', '-c', 'sleep 60; : {mark}'], start_new_session=True)"
    assert sandbox.run(program, QUICK).passed
    assert mark not in subprocess.run(["ps", "ax", "-o", "args"], capture_output=True, text=True).stdout


def test_a_fork_bomb_is_held():
    program = """
import os, time
made = 0
try:
    for _ in range(100):
        if os.fork() == 0:
            time.sleep(30)
        made += 1
except BlockingIOError:
    raise SystemExit(made)
"""
    assert reason(program) == f"SystemExit: {QUICK.processes - 1}"
    assert "out of time" in reason("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass")


def test_it_cannot_write_elsewhere_nor_see_our_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "x")
    assert sandbox.run("import os\nassert not {k for k in os.environ if 'SECRET' in k}", QUICK).passed
    assert sandbox.run(
        "import os\nopen('a', 'w').write('b')\nassert sorted(os.listdir()) == ['a', 'program.py']"
    ).passed
    if os.getuid():
        pytest.skip("where we are not root it is the same user, as the module says")
    tmp_path.chmod(0o755)
    (tmp_path / "mine").write_text("x")
    for attempt in (f"open({str(tmp_path / 'new')!r}, 'w')", f"import os; os.remove({str(tmp_path / 'mine')!r})"):
        assert any(word in reason(attempt) for word in ("Permission", "No such file"))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert "Permission" in reason("import os; os.setuid(0)") or "not permitted" in reason("import os; os.setuid(0)")


def test_it_reaches_no_network():
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1)"
        outcome = sandbox.run(program, QUICK)
    if outcome.network:
        pytest.skip("this machine does not let us take the network away")
    assert not outcome.passed and ("unreachable" in outcome.reason or "refused" in outcome.reason)


def test_many_at_a_time_keep_their_order_and_leave_no_folders(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    programs = [f"assert {n} % 3" for n in range(9)]
    assert [one.passed for one in sandbox.run_all(programs, QUICK)] == [bool(n % 3) for n in range(9)]
    assert list(tmp_path.iterdir()) == []


def test_limits_are_checked():
    for name, value in {"seconds": 0.0, "memory_mib": 0, "processes": -1, "workers": 0}.items():
        with pytest.raises(UserError, match=f"Sandbox.{name} is"):
            Sandbox(**{name: value})


def test_limits_that_let_nothing_run_are_told():
    with pytest.raises(UserError, match="no program runs in the sandbox"):
        sandbox.run_all(["x = 1"], Sandbox(seconds=0.001))
