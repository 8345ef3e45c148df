"""What benchmarks/ take from capibara is there: they run too long for tests, and a name that went would show in none."""

from __future__ import annotations

import ast
import importlib
import pathlib
import subprocess
import sys
import threading
import time
import types

import pytest

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "benchmarks"


def _taken(module: str, name: str):
    """What `from module import name` gives."""
    of = importlib.import_module(module)
    return getattr(of, name) if hasattr(of, name) else importlib.import_module(f"{module}.{name}")


def missing(source: str) -> list[str]:
    """Names of capibara that a script uses and that are not there, as "line 3: devices.name"."""
    nodes = list(ast.walk(ast.parse(source)))
    modules, found = {}, []
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "capibara":
            for alias in node.names:
                try:
                    taken = _taken(node.module, alias.name)
                except ModuleNotFoundError:
                    found.append(f"line {node.lineno}: {node.module}.{alias.name}")
                    continue
                if isinstance(taken, types.ModuleType):
                    modules[alias.asname or alias.name] = taken
    # A name that stands for something else as well is not looked at.
    others = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    others |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id not in others:
            if node.value.id in modules and not hasattr(modules[node.value.id], node.attr):
                found.append(f"line {node.lineno}: {node.value.id}.{node.attr}")
    return found


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: path.relative_to(FOLDER).as_posix())
def test_names_are_there(path):
    assert missing(path.read_text()) == []


def test_names_that_are_not_there_are_found():
    source = "from capibara import config, nothing\nfrom capibara.config import Lost\nconfig.build\nconfig.lost = 1\n"
    assert missing(source) == ["line 1: capibara.nothing", "line 2: capibara.config.Lost", "line 4: config.lost"]


def test_windows_are_compared_with_their_neighbours(monkeypatch):
    """A drift of the machine is no cost, and a cost is found with its interval."""
    monkeypatch.syspath_prepend(str(FOLDER))
    windows = importlib.import_module("windows")
    drift = [1.0 + 0.001 * number for number in range(41)]
    assert windows.beside_neighbours(drift) == pytest.approx([1.0] * 20)
    slowed = [value * (1.1 if number % 2 else 1.0) for number, value in enumerate(drift)]
    assert windows.beside_neighbours(slowed) == pytest.approx([1.1] * 20)
    assert windows.beside_neighbours(slowed[::2]) == pytest.approx([1.0] * 10)
    assert windows.seconds_per_step([5.0, 5.5, 6.5, 7.0]) == pytest.approx(2 / 3)
    assert windows.middle_mean([9.0, 1.0, 1.2, 1.1, 0.1]) == pytest.approx(1.1)
    low, high = windows.interval([1.0, 1.02] * 50)
    assert 1.005 < low < 1.01 < high < 1.015


def test_a_process_beside_costs_what_it_uses(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    windows = importlib.import_module("windows")
    monkeypatch.setattr(windows, "WINDOW_S", 0.2)
    monkeypatch.setattr(windows, "SETTLE_S", 0.05)
    steps, ended = [], threading.Event()

    def train():
        while not ended.wait(0.004):
            steps.append(time.time())

    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        thread = threading.Thread(target=train)
        thread.start()
        found = windows.compared({"busy": busy.pid}, 2, lambda: steps)
        state = pathlib.Path(f"/proc/{busy.pid}/stat").read_text().rpartition(")")[2].split()[0]
        busy.kill()
        ended.set()
        thread.join()
    assert found["busy_cpu_percent"] > 20 and state in "RS"  # it runs again at the end
    assert found["slower_low"] <= found["slower"] <= found["slower_high"] and found["step_ms"] >= 4
