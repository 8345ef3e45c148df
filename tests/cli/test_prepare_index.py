"""`capibara prepare index` and `prepare raft`: flags, settings from Gin, what they print, and mistakes in one line."""

from __future__ import annotations

import json
import os

import pytest

import capibara as cb
from capibara.core.types import UserError
from capibara.multihost.exits import EXIT_SKIPPED, EXIT_USER_ERROR, run_verb
from capibara.prepare import main
from tests.retrieval.conftest import documents, embedder, folder, model  # noqa: F401 - fixtures

GIN = [
    f"--gin.IndexPreparation.{item}"
    for item in ("chunk_tokens=64", "overlap=8", "queries=40", "recall=0.5", "ms=1000.0")
]


def run(word, *arguments):
    return run_verb(main, [word, *map(str, arguments)])


def test_an_index_is_made_and_searched(documents, model, tmp_path, capfd):  # noqa: F811
    out = tmp_path / "index"
    assert run("index", documents, f"--model={model}", f"--out={out}", "--json", *GIN) == 0
    manifest = json.loads(capfd.readouterr().out)
    assert manifest["kind"] == "index" and manifest["config"]["chunk_tokens"] == 64
    assert manifest["counts"]["chunks"] == len(cb.index(out))
    assert json.loads((out / "index.json").read_text())["model"]["path"] == model
    assert os.path.getsize(out / "trials.png") > 1000


def test_python_makes_the_same_index(documents, model, tmp_path):  # noqa: F811
    settings = cb.IndexPreparation(chunk_tokens=64, overlap=8, queries=40, recall=0.5, ms=1000.0)
    manifest = cb.prepare_index(documents, str(tmp_path / "index"), model, settings)
    assert manifest["counts"]["chunks"] > 400
    for inputs, given, message in (
        (documents, {}, "settings is {}, must be cb.IndexPreparation"),
        (5, None, "inputs is 5, must be a file, folder, glob or address"),
        ([documents, 5], None, "must be a file, folder, glob or address, or a list"),
    ):
        with pytest.raises(UserError, match=message):
            cb.prepare_index(inputs, str(tmp_path / "other"), model, given)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--model is missing"),
        (["--model=none"], "none"),
        (["--gin.IndexPreparation.k=0"], "IndexPreparation.k is 0, must be at least 1"),
        (["--gin.IndexPreparation.chunk_token=3"], "chunk_token"),
    ],
)
def test_mistakes_of_an_index_are_one_line(documents, model, tmp_path, capfd, flags, words):  # noqa: F811
    flags = flags if not flags or "--model" in flags[0] else [*flags, f"--model={model}"]
    assert run("index", documents, f"--out={tmp_path / 'out'}", *flags) == EXIT_USER_ERROR
    error = capfd.readouterr().err
    assert words in error and error.count("\n") == 1, error


def test_questions_become_chats(folder, tmp_path, capfd):  # noqa: F811
    lines = [{"question": f"What is number {i}?", "answer": "so", "evidence": f"number {i}:"} for i in range(20)]
    (tmp_path / "questions.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"question": "x"}\n'
    )
    flags = [f"--index={folder}", f"--out={tmp_path / 'out'}", "--gin.RaftPreparation.k=3"]
    assert run("raft", tmp_path / "questions.jsonl", *flags) == EXIT_SKIPPED
    assert "has no text in 'answer'" in capfd.readouterr().err
    assert run("raft", tmp_path / "questions.jsonl", *flags, "--allow_skipped") == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [([], "--index is missing"), (["--index=none"], "the index none is no folder")],
)
def test_mistakes_of_chats_are_one_line(tmp_path, capfd, flags, words):
    (tmp_path / "questions.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    assert run("raft", tmp_path / "questions.jsonl", f"--out={tmp_path / 'out'}", *flags) == EXIT_USER_ERROR
    error = capfd.readouterr().err
    assert words in error and error.count("\n") == 1, error
