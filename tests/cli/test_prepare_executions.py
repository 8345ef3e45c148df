"""`capibara prepare executions`: flags, settings from Gin, what it prints, its exit codes, and that a run reads the result."""

from __future__ import annotations

import json
import re

import pytest

from capibara.data.sources.sources import JsonlSource
from capibara.multihost.exits import EXIT_SKIPPED, EXIT_USER_ERROR, run_verb
from capibara.prepare import main
from tests.builders.executions import logs

pytest.importorskip("tree_sitter_sql")
pytest.importorskip("detect_secrets")


def run(*arguments):
    return run_verb(main, ["executions", "--num_workers=0", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path):
    logs.folder(tmp_path / "in", files=2, sessions=2)
    return tmp_path / "in"


def test_a_folder_of_logs_is_prepared(folder, tmp_path, capfd):
    (folder / "notes.txt").write_text(">>> not = a log\n")
    assert run(folder, f"--out={tmp_path / 'out'}") == 0
    printed = capfd.readouterr().out
    assert re.search(r"executions read +16\n", printed) and re.search(r"fixes +4\n", printed)
    assert run(folder, f"--out={tmp_path / 'out'}") == 0  # there is nothing to do
    assert capfd.readouterr().out == printed


def test_settings_come_from_gin(folder, tmp_path, capfd):
    (tmp_path / "logs.gin").write_text('ExecutionFilter.languages = ("python",)\nExecutionFilter.outcome = "passed"\n')
    flags = (f"--gin_file={tmp_path / 'logs.gin'}", '--gin.ExecutionChats.kinds=("fix",)', "--json")
    assert run(folder, f"--out={tmp_path / 'out'}", *flags) == 0
    manifest = json.loads(capfd.readouterr().out)
    assert manifest["config"]["filter"]["languages"] == ["python"]
    assert manifest["counts"]["conversations"] == manifest["counts"]["conversations fix"] == 4
    assert manifest["counts"]["excluded by languages"] == 4


def test_skipped_input_has_an_exit_code_of_its_own(folder, tmp_path, capfd):
    log = folder / "log0.jsonl"
    log.write_text(log.read_text() + '{"code": "x"}\n')
    assert run(folder, f"--out={tmp_path / 'out'}") == EXIT_SKIPPED
    assert f"{log}:9: malformed: is no execution: it has no outcome" in capfd.readouterr().err
    assert run(folder, f"--out={tmp_path / 'out'}", "--allow_skipped") == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--num_workers=-1"], "--num_workers (-1) must be at least 0"),
        (["--gin.ExecutionFilter.min_quality=3.0"], "ExecutionFilter.min_quality (3.0)"),
        (["--gin.ExecutionFilter.langauges=3"], "langauges"),
        (["--gin.Redaction.keep=('mail',)"], "'mail' is no kind"),
    ],
)
def test_mistakes_are_one_line(folder, tmp_path, capfd, flags, words):
    assert run(folder, f"--out={tmp_path / 'out'}", *flags) == EXIT_USER_ERROR
    error = capfd.readouterr().err
    assert (
        words in error and [line[:7] for line in error.splitlines()][-1:] == ["error: "] and error.count("error: ") == 1
    )


def test_other_settings_need_another_folder(folder, tmp_path, capfd):
    assert run(folder, f"--out={tmp_path / 'out'}") == 0
    assert run(folder, f"--out={tmp_path / 'out'}", "--gin.FixPairs.window=3") == EXIT_USER_ERROR
    assert "other settings (fixes.window was 8, is 3)" in capfd.readouterr().err


def test_a_source_reads_what_was_made(folder, tmp_path):
    (folder / "empty.jsonl").write_text("")
    assert run(folder, f"--out={tmp_path / 'out'}") == 0
    source = JsonlSource(files=(str(tmp_path / "out" / "chats" / "*.jsonl"),), field="kind", validation_fraction=0.2)
    documents = source.open("train")
    assert len(documents) > 10 and {documents[i] for i in range(len(documents))} <= {
        "task", "explain", "predict", "diagnose", "fix",
    }  # fmt: skip
