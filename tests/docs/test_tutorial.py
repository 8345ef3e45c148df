"""docs/tutorial.md runs, block after block, in a shell; tests/test_docs.py checks its commands in make test."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(?P<python>.*?)^```$|(?P<indented>(?:^ {4}[^\n]+\n)+)", re.MULTILINE | re.DOTALL)
SHELL = f'set -e; capibara() {{ "{sys.executable}" -m capibara "$@"; }}; '
SERVER = f'exec "{sys.executable}" -m '  # the shell becomes the server, so that a signal reaches it


def blocks() -> list[tuple[str, str]]:
    """(kind, text) of each block of the page: python, gin or shell."""
    found = []
    for block in BLOCK.finditer((ROOT / "docs" / "tutorial.md").read_text()):
        if block["python"]:
            found.append(("python", block["python"]))
        else:
            text = textwrap.dedent(block["indented"])
            found.append(("gin" if text.startswith("# ") else "shell", text))
    return found


def test_the_page_has_blocks_of_each_kind():
    kinds = [kind for kind, _ in blocks()]
    assert kinds[0] == "gin" and kinds.count("shell") >= 7 and kinds.count("python") == 1


@pytest.mark.heavy
def test_every_block_runs_in_order(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["PYTHONPATH"] = str(ROOT)
    printed, servers = [], []
    try:
        for kind, text in blocks():
            if kind == "gin":
                (tmp_path / text.split()[1]).write_text(text)
                continue
            if text.startswith("capibara serve"):
                servers.append(subprocess.Popen(["bash", "-c", SERVER + text], cwd=tmp_path, env=environment))
                continue
            argv = [sys.executable, "-c", text] if kind == "python" else ["bash", "-c", SHELL + text]
            done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
            assert done.returncode == 0, (text, done.stdout[-500:], done.stderr)
            printed.append(done.stdout)
    finally:
        for server in servers:
            server.send_signal(signal.SIGINT)
            server.wait(60)
    out = "\n".join(printed)
    assert "A lime is green." in out and "A plum is blue." in out
    assert (tmp_path / "runs" / "mine.gguf").exists() and (tmp_path / "runs" / "mine-hf" / "config.json").exists()
    assert "tokens/s" in printed[-1]
