"""The supervisor: what is started again, what is not, and that nothing stays behind."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from capibara.cli import launch
from capibara.jobs import local
from capibara.jobs.local import Supervisor
from capibara.multihost import exits

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]


def child(code):
    return [sys.executable, "-S", "-c", code]


def supervise(code, **options):
    lines = []
    supervisor = Supervisor(command=child(code), pauses_s=(0.01,), say=lines.append, **options)
    return supervisor.run(), lines


def counting(file, ends):
    """A child that ends as `ends` says for its first, second, ... start."""
    return (
        f"import os, pathlib, signal, time\nfile = pathlib.Path({str(file)!r})\n"
        "with open(file, 'a') as f: f.write('x')\n"
        f"end = {ends!r}[len(file.read_text()) - 1]\n"
        "if end < 0: os.kill(os.getpid(), -end)\n"
        "raise SystemExit(end)"
    )


def test_it_is_started_again_until_it_ends_well(tmp_path):
    code, lines = supervise(counting(tmp_path / "n", [1, -9, 75, 0]), restarts=5)
    assert code == 0 and (tmp_path / "n").read_text() == "xxxx"
    assert [line.partition(" s ")[2] for line in lines] == [
        "with exit code 1; restart 1 of 5 in 0.01 s",
        "with signal SIGKILL; restart 2 of 5 in 0.01 s",
        "with exit code 75 (it hung); restart 3 of 5 in 0.01 s",
    ]


def test_starting_over_is_permitted_until_it_was_done(tmp_path):
    said = tmp_path / "said"
    code = (
        "import os\npermit = os.environ['CAPIBARA_START_OVER']\n"
        f"file = open({str(said)!r}, 'a+')\nfile.write(f'{{os.path.exists(permit):d}}')\nfile.flush()\n"
        "count = os.fstat(file.fileno()).st_size\n"
        "if count == 2: os.remove(permit)\n"
        "raise SystemExit(count < 4)"
    )
    assert supervise(code, restarts=5)[0] == 0
    assert said.read_text() == "1100"


def test_a_mistake_is_not_tried_again(tmp_path):
    assert supervise(counting(tmp_path / "n", [2]), restarts=5) == (2, [])


@pytest.mark.parametrize(("end", "code"), [(1, 1), (-9, 137)])
def test_restarts_are_used_up(tmp_path, end, code):
    found, lines = supervise(counting(tmp_path / "n", [end] * 9), restarts=2)
    assert found == code and (tmp_path / "n").read_text() == "xxx"
    assert lines[-1].endswith("not restarted: --restarts=2 are used up")


def test_where_one_of_several_ends_all_are_started_again(tmp_path):
    code = (
        "import os, pathlib, time\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "index, address = os.environ['JAX_PROCESS_ID'], os.environ['JAX_COORDINATOR_ADDRESS']\n"
        "assert os.environ['JAX_NUM_PROCESSES'] == '2' and address.startswith('127.0.0.1:')\n"
        "with open(folder / index, 'a') as f: f.write('x')\n"
        "first = len((folder / index).read_text()) == 1\n"
        "time.sleep(60 if first and index == '0' else 0.3)\n"
        "raise SystemExit(5 if first else 0)"
    )
    found, lines = supervise(code, processes=2, restarts=1)
    assert found == 0 and len(lines) == 1 and "with exit code 5; restart 1 of 1" in lines[0]
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text() == "xx"


SAVES_AT_SIGTERM = (
    "import os, pathlib, signal, time\n"
    "folder = pathlib.Path(os.environ['FOLDER'])\n"
    "def stop(*_):\n"
    "    (folder / 'saved').write_text('x')\n"
    "    os._exit(143)\n"
    "signal.signal(signal.SIGTERM, stop)\n"
    "(folder / 'pid').write_text(str(os.getpid()))\n"
    "for _ in range(1200):\n"  # one long sleep would begin anew after a signal that came just before it
    "    time.sleep(0.05)"
)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_whoever_ends_the_supervisor_the_run_saves_and_ends(tmp_path, how):
    """Nothing runs on by itself that a second supervisor would start once more."""
    code = (
        "import sys; from capibara.jobs.local import Supervisor\n"
        f"sys.exit(Supervisor(command={child(SAVES_AT_SIGTERM)!r}).run())"
    )
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "FOLDER": str(tmp_path)}
    supervisor = subprocess.Popen([sys.executable, "-c", code], env=environment)
    for _ in range(6000):
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            break
        time.sleep(0.05)
    supervisor.send_signal(how)
    assert supervisor.wait(300) == (143 if how == signal.SIGTERM else -signal.SIGKILL)
    for _ in range(6000):
        if (tmp_path / "saved").exists():
            break
        time.sleep(0.05)
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["local"], "launch needs a Gin file, or a verb after --"),
        (["local", "--emulate=8", "--", "train"], "--emulate=8 stands before --"),
        (["local", "--emulate=8"], "unrecognized arguments: --emulate=8"),
        (["local", "run.gin", "--", "train"], "run.gin stands before --"),
        (["local", "--", "trian"], "unknown verb 'trian' after --: did you mean train?"),
        (["cloud", "--", "train"], "launch has no 'cloud'"),
        (["local", "--restarts=-1", "--", "train"], "--restarts (-1) and --grace (300) must be at least 0"),
        (["local", "--processes=0", "--", "train"], "--processes (0) from 1 to 1024"),
        (["local", "--", "launch", "local"], "unknown verb 'launch' after --"),
    ],
)
def test_mistakes_are_one_line(argv, message, capsys):
    assert exits.run_verb(launch.main, argv) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and message in captured.err


def test_a_verb_is_run(capfd):
    assert exits.run_verb(launch.main, ["local", "--", "train", "--gin_file=none.gin"]) == 2
    assert "no Gin file none.gin" in capfd.readouterr().err


def test_a_free_address_is_none_that_a_connection_may_take(monkeypatch, tmp_path):
    """The system gives its own range to whoever connects, before a worker listens where it was told to."""
    lowest, highest = map(int, pathlib.Path(local.TO_ANYONE).read_text().split())
    ports = [int(local.free_address().rpartition(":")[2]) for _ in range(50)]
    assert not [port for port in ports if lowest <= port <= highest or port < 1024] and len({*ports}) > 25
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        monkeypatch.setattr(local, "_LOWEST_PORT", number)
        monkeypatch.setattr(local, "TO_ANYONE", str(tmp_path / "range"))
        (tmp_path / "range").write_text(f"{number + 4} 65535\n")  # few are left, one of which is taken
        found = {int(local.free_address().rpartition(":")[2]) for _ in range(20)}
        assert found <= {number + 1, number + 2, number + 3}
    monkeypatch.setattr(local, "TO_ANYONE", str(tmp_path / "none"))
    assert int(local.free_address().rpartition(":")[2]) > 0
