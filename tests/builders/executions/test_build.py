"""Logs become training sets: nothing good is lost, no secret is written, and the bytes are the same however often it is killed."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import textwrap

import pytest

from capibara.builders.executions.build import ExecutionLogs, build
from capibara.builders.executions.chats import ExecutionChats
from capibara.builders.executions.filters import ExecutionFilter, Outcome
from capibara.data.chat.formats import read_conversation
from tests.builders.executions import logs

pytest.importorskip("tree_sitter_sql")
pytest.importorskip("detect_secrets")


def tree(folder) -> dict[str, bytes]:
    """The files of a data set; lineage has times."""
    folder = pathlib.Path(folder)
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "lineage.jsonl"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(files)}


def records(folder, kind) -> list[dict]:
    return [json.loads(line) for path in sorted(pathlib.Path(folder, kind).glob("*")) for line in path.open()]


def made(tmp_path, settings=ExecutionLogs(), paths=None):
    out = str(tmp_path / "out")
    return out, build(paths or logs.folder(tmp_path / "in"), out, settings)


def test_a_log_becomes_executions_fixes_and_conversations(tmp_path):
    out, manifest = made(tmp_path)
    counts = manifest.counts
    assert counts["executions"] == counts["executions read"] == 60
    assert (counts["fixes"], counts["logs"], counts["language shell"]) == (15, 3, 15)
    assert not manifest.problems
    executions, fixes, conversations = (records(out, kind) for kind in ("executions", "fixes", "chats"))
    assert len(executions) == 60 and len(conversations) == counts["conversations"] > 60
    assert executions[0]["source"] == "log0.jsonl:1"
    assert executions[1]["patterns"] == {"function": 1} and executions[1]["functions"] == ["area"]
    assert executions[0]["explanation"].startswith(
        "The code fails with `NameError: name 'heigth' is not defined` in line 2"
    )
    assert fixes[0]["before"]["source"] == "log0.jsonl:1" and fixes[0]["after"]["source"] == "log0.jsonl:2"
    assert "does not define it" in fixes[0]["cause"] and "Line 2 becomes" in fixes[0]["explanation"]
    assert {chat["kind"] for chat in conversations} == {"task", "explain", "predict", "diagnose", "fix"}
    for chat in conversations:
        assert [one["role"] for one in read_conversation(chat, "here").messages] == ["user", "assistant"]


def test_no_secret_is_written(tmp_path):
    found, hidden = logs.secret_session()
    out, manifest = made(tmp_path, paths=[logs.write(tmp_path / "log.jsonl", found)])
    assert manifest.counts["executions"] == len(found)
    written = b"\n".join(path.read_bytes() for path in pathlib.Path(out).rglob("*") if path.is_file()).decode()
    for secret in hidden:
        pieces = [secret, *(secret[i : i + 12] for i in range(0, len(secret) - 12, 6))]
        assert not [piece for piece in pieces if piece in written], secret
    assert sum(count for name, count in manifest.counts.items() if name.startswith("redacted ")) > 5 * len(found)


def test_what_is_malformed_is_counted_and_the_rest_is_kept(tmp_path):
    good = [json.dumps(one) for one in logs.session(0)]
    path = tmp_path / "log.jsonl"
    path.write_bytes(
        "\n".join([good[0], "{bad", good[1], '{"code": 1}', *good[2:]]).encode() + b'\n{"code": "\xff"}\n{"cut'
    )
    _, manifest = made(tmp_path, paths=[str(path)])
    assert manifest.counts["executions"] == 4 and manifest.counts["fixes"] == 1
    found = [(one.line, one.kind) for one in manifest.problems]
    assert sorted(found) == [(2, "malformed"), (4, "malformed"), (7, "encoding"), (8, "truncated")]
    assert all(one.path == str(path) for one in manifest.problems)


def test_filters_exclude_and_are_counted(tmp_path):
    settings = ExecutionLogs(filter=ExecutionFilter(languages=("python",), outcome=Outcome.PASSED))
    out, manifest = made(tmp_path, settings)
    assert manifest.counts["excluded by languages"] == 15 and manifest.counts["excluded by outcome"] == 15
    assert {one["passed"] for one in records(out, "executions")} == {True}
    assert len(records(out, "fixes")) == 15  # the failing run of a pair is kept in the pair
    assert "diagnose" not in {chat["kind"] for chat in records(out, "chats")}


def test_a_fix_of_low_quality_is_excluded(tmp_path):
    out, manifest = made(tmp_path, ExecutionLogs(filter=ExecutionFilter(min_quality=0.99)))
    assert "fixes" not in manifest.counts and not records(out, "fixes")


def test_a_conversation_is_written_once_per_log(tmp_path):
    session = logs.session(0)
    paths = [logs.write(tmp_path / "log.jsonl", [*session, *session])]
    out, manifest = made(tmp_path, ExecutionLogs(chats=ExecutionChats(min_sentences=1)), paths)
    texts = [json.dumps(chat["messages"]) for chat in records(out, "chats")]
    assert len(texts) == len({*texts}) and manifest.counts["conversations repeated"] == len(texts)
    assert manifest.counts["executions"] == 8


def test_workers_write_the_same_bytes(tmp_path):
    paths = logs.folder(tmp_path / "in")
    build(paths, str(tmp_path / "one"), ExecutionLogs())
    done = []
    build(
        paths,
        str(tmp_path / "two"),
        ExecutionLogs(),
        num_workers=2,
        progress=lambda count, total: done.append((count, total)),
    )
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    assert done == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_the_place_of_the_logs_does_not_change_what_is_made_of_them(tmp_path):
    for name in ("one", "other"):
        build(logs.folder(tmp_path / name / "in"), str(tmp_path / name / "out"), ExecutionLogs())
    one, other = (tree(tmp_path / name / "out") for name in ("one", "other"))
    for name in one.keys() - {"manifest.json"}:
        assert one[name] == other[name]


_KILLS = """
    import os, pathlib, signal
    from capibara.builders.executions.build import ExecutionLogs, build
    from capibara.builders.writing import Part
    from tests.builders.executions import logs
    from tests.builders.executions.test_build import tree

    root = pathlib.Path({root!r})
    paths = logs.folder(root / "in")
    build(paths, str(root / "whole"), ExecutionLogs())
    expected = tree(root / "whole")

    def run(folder, kill_at):
        child = os.fork()
        if child:
            return os.waitpid(child, 0)[1]
        left, write, replace = kill_at, Part.write, os.replace

        def count():
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        def write_and_count(part, data):
            write(part, data)
            part._file.flush()
            count()

        def count_and_replace(*names):
            count()
            replace(*names)

        Part.write, os.replace = write_and_count, count_and_replace
        build(paths, str(folder), ExecutionLogs())
        os._exit(0)

    at = 1
    while True:
        folder = root / f"killed{{at}}"
        if run(folder, at) == 0:
            break
        assert run(folder, -1) == 0
        assert tree(folder) == expected, at
        at += {stride}
    often, at = root / "often", 5
    while run(often, at) != 0:
        at += 7
    assert tree(often) == expected
    print(at)
"""


@pytest.mark.parametrize("stride", [41, pytest.param(1, marks=pytest.mark.heavy)])
def test_a_build_that_is_killed_anywhere_is_resumed_to_the_same_bytes(tmp_path, stride):
    code = textwrap.dedent(_KILLS).format(root=str(tmp_path), stride=stride)
    checkout = pathlib.Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=checkout)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5
