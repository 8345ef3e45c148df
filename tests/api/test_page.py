"""docs/python.md runs, block after block, on a small model of the name that it uses."""

from __future__ import annotations

import os
import pathlib
import re

import matplotlib
import pytest

from capibara.cli import train as train_verb
from capibara.multihost import exits

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "python.md"


@pytest.fixture
def there(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.symlink(f"{folder}/hf", "SmolLM2-135M-Instruct")
    os.symlink(f"{folder}/chats.jsonl", "chats.jsonl")
    return tmp_path


def blocks_of(page):
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def run(blocks, page):
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)


def test_the_blocks_before_the_first_training_run(there, capsys):
    blocks = blocks_of(PAGE)
    first = next(index for index, block in enumerate(blocks) if "cb.finetune(" in block)
    assert first >= 4
    run(blocks[:first], PAGE)
    assert "LanguageModel" in capsys.readouterr().out


def test_every_block_runs(there, capsys):
    matplotlib.use("Agg")
    blocks = blocks_of(PAGE)
    assert len(blocks) >= 10
    run(blocks, PAGE)
    written = {"mine.gguf", "adapter", "loss.png", "answers.html", "merged"}
    assert written <= {path.name for path in there.iterdir()}
    assert "2 prompts" in capsys.readouterr().out


def test_every_block_of_the_designs_names_runs(there):
    page = PAGE.with_name("design_names.md")
    blocks = blocks_of(page)
    run(blocks, page)
    assert len(blocks) == 6 and (there / "metrics.csv").read_text().startswith("step,")
    assert {path.name for path in (there / "runs").iterdir()} == {"one", "nodes"}


def test_its_gin_file_is_a_run(there, capfd):
    (text,) = re.findall(r"^    # mine.gin\n((?:    .*\n)+)", PAGE.read_text(), re.MULTILINE)
    (there / "mine.gin").write_text(re.sub("^    ", "", text, flags=re.MULTILINE))
    flags = ["--gin_file=mine.gin", "--gin.LENGTH=64", "--check"]
    assert exits.run_verb(train_verb.main, flags) == 0, capfd.readouterr().err
