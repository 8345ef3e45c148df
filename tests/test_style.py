"""No name that is not there, used before it is set, or never used; one layout: `make format` mends it."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("command", ["check", "format --check"], ids=lambda command: command.split()[0])
def test_ruff_has_nothing_to_say(command):
    folders = ["capibara", "benchmarks", "tests"]
    argv = [sys.executable, "-m", "ruff", *command.split(), "--no-cache", *folders]
    done = subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
