"""Each error line of docs/troubleshooting.md is what its command prints."""

from __future__ import annotations

import importlib
import json
import pathlib
import re
import shlex
import textwrap

import pytest

from capibara.multihost import exits

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md"
CASES = re.findall(r"^    \$ capibara (.+)\n    (error: .+)$", PAGE.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the page's file, a run of it and conversations."""
    folder = tmp_path_factory.mktemp("trouble")
    (text,) = re.findall(r"^(    # base\.gin\n(?:    .+\n)+)", PAGE.read_text(), re.MULTILINE)
    (folder / "base.gin").write_text(textwrap.dedent(text))
    turns = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}]
    (folder / "chats.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train = importlib.import_module("capibara.cli.train")
        assert exits.run_verb(train.main, ["--gin_file=base.gin", "--gin.Evaluation.max_batches=1"]) == 0
    return folder


def test_the_page_has_the_likeliest_lines():
    assert len(CASES) >= 20 and len(CASES) == PAGE.read_text().count("    $ ")


@pytest.mark.parametrize(("command", "line"), CASES, ids=range(len(CASES)))
def test_a_mistake_has_the_line_of_the_page(command, line, folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    monkeypatch.delenv("CAPIBARA_API_KEY", raising=False)
    verb, *argv = shlex.split(command)
    assert exits.run_verb(importlib.import_module(f"capibara.cli.{verb}").main, argv) == 2
    pattern = ".*".join(map(re.escape, line.split("...")))
    err = capfd.readouterr().err
    assert re.search(f"^{pattern}$", err, re.MULTILINE), err
