"""A folder of playbooks becomes training sets: redacted, with statistics, and the same bytes however it was built."""

from __future__ import annotations

import collections
import dataclasses
import gzip
import json
import pathlib
import re
import subprocess
import sys

import pytest

from capibara.builders.files import reading
from capibara.builders.files.problems import Problems
from capibara.builders.playbooks import build
from capibara.builders.playbooks.build import Playbooks
from capibara.builders.playbooks.filters import AgentFilter, Unknown
from capibara.builders.playbooks.reading import ENDINGS
from capibara.builders.playbooks.reading import read as read_playbook
from capibara.core.types import UserError
from capibara.data.chat.conversations import ChatJsonlSource
from capibara.data.chat.template import ChatTemplate
from tests.builders.redaction import planted

for _package in ("rensa", "detect_secrets", "openlineage.client"):
    pytest.importorskip(_package)

BOOK = """## STRATEGIES & INSIGHTS
[str-00001] helpful=5 harmful=0 :: When a query is slow, look at its plan
  before you add an index.
[str-00002] helpful=2 harmful=0 :: Verify the data types before processing

## FORMULAS
[for-00003] helpful=0 harmful=3 :: Add the discount twice to the price
"""
AGENTS = [
    {"agent_id": "ann", "graduation_score": 0.9, "interactions": 90, "success_rate": 0.8, "domain_expertise": {"sql": 0.9}},
    {"agent_id": "bob", "graduation_score": 0.2, "interactions": 5, "success_rate": 0.4, "domain_expertise": {"python": 0.6},
     "playbook": "books/b.md"},
]  # fmt: skip


def write_books(folder):
    """The playbooks of two agents, one of no agent, and the agents."""
    folder.mkdir()
    (folder / "ann.md").write_text(BOOK)
    (folder / "b.md").write_text("[b-1] helpful=7 harmful=1 :: Use a virtual environment for each project\n")
    (folder / "other.json").write_text(
        json.dumps(
            {"bullets": [{"id": "o-1", "section": "OTHERS", "content": "Write down what you tried", "helpful": 1}]}
        )
    )
    (folder / "agents.jsonl").write_text("".join(json.dumps(agent) + "\n" for agent in AGENTS))
    return folder


@pytest.fixture
def books(tmp_path):
    return write_books(tmp_path / "in")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The files of a build that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    run(write_books(folder / "in"), folder / "out")
    return tree(folder / "out")


def run(folder, out, settings=Playbooks(), **options):
    return build.build(reading.expand([str(folder)], ENDINGS, Problems()), str(out), settings, **options)


def tree(folder):
    """Every file below, with its bytes; without the lineage, which has times."""
    paths = [path for path in pathlib.Path(folder).rglob("*") if path.is_file() and path.name != "lineage.jsonl"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def without_manifest(files):
    """Of a manifest only what does not name the folder of the inputs."""
    manifest = json.loads(files["manifest.json"])
    return {**files, "manifest.json": {name: manifest[name] for name in ("files", "counts", "problems", "fingerprint")}}


def files_of(folder):
    return without_manifest(tree(folder))


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_domain_has_a_playbook_bullets_and_conversations(books, tmp_path):
    manifest = run(books, tmp_path / "out")
    names = {f"{folder}/{name}.{ending}" for name in ("general", "python", "sql")
             for folder, ending in (("playbooks", "md"), ("bullets", "jsonl"), ("chats", "jsonl"))}  # fmt: skip
    assert {*tree(tmp_path / "out")} == {*names, "statistics.json", "manifest.json"}
    assert {one.name: one.records for one in manifest.files}["playbooks/sql.md"] == 2
    assert (tmp_path / "out/playbooks/sql.md").read_text() == (
        "## STRATEGIES & INSIGHTS\n"
        "[str-00001] helpful=5 harmful=0 :: When a query is slow, look at its plan\n"
        "  before you add an index.\n"
        "[str-00002] helpful=2 harmful=0 :: Verify the data types before processing\n"
    )
    first, _ = records(tmp_path / "out/bullets/sql.jsonl")
    assert (first["sources"], first["agents"], first["quality"]) == (["ann.md:2"], ["ann"], 0.565509)
    assert {**manifest.counts} == {
        "agents": 2, "bullets": 4, "bullets read": 5, "conversations": 4, "conversations advice": 1, "conversations section": 3,
        "domains": 3, "excluded by min_helpful_share": 1,
        "files": 4, "file_bytes": sum(path.stat().st_size for path in books.iterdir()), "files_left_out": 0, "skipped": 0,
    }  # fmt: skip
    statistics = json.loads((tmp_path / "out/statistics.json").read_text())["domains"]
    assert {name: (one["read"], one["kept"], one["agents"]) for name, one in statistics.items()} == {
        "general": (1, 1, 0), "python": (1, 1, 1), "sql": (3, 2, 1)}  # fmt: skip
    assert statistics["sql"]["excluded"] == {"min_helpful_share": 1} and statistics["sql"]["helpful"] == 7
    assert statistics["sql"]["sections"] == {"STRATEGIES & INSIGHTS": {"kept": 2, "helpful": 7, "harmful": 0}}


@pytest.mark.parametrize("folder", ["playbooks", "bullets"])
def test_what_was_written_is_read_as_the_same_bullets(books, tmp_path, folder):
    run(books, tmp_path / "out")
    [path] = (tmp_path / "out" / folder).glob("sql.*")
    problems = Problems()
    found = list(read_playbook(str(path), problems, collections.Counter()))
    expected = records(tmp_path / "out/bullets/sql.jsonl")
    assert [(one.id, one.section, one.content, one.helpful, one.harmful) for one in found] == [
        tuple(record[name] for name in ("id", "section", "content", "helpful", "harmful")) for record in expected
    ]
    assert not problems


def test_a_second_build_of_a_playbook_keeps_it(books, tmp_path):
    run(books, tmp_path / "out")
    run(tmp_path / "out/playbooks/sql.md", tmp_path / "again")
    assert tree(tmp_path / "again")["playbooks/general.md"] == tree(tmp_path / "out")["playbooks/sql.md"]


def test_the_chat_source_of_training_reads_the_conversations(books, tmp_path, toy_tokenizer):
    run(books, tmp_path / "out")
    files = (str(tmp_path / "out/chats/*.jsonl"),)
    source = ChatJsonlSource(files=files, template=ChatTemplate(tokenizer=toy_tokenizer), validation_fraction=0.2)
    documents = source.open("train")
    for i in range(len(documents)):
        documents.check(i)
    assert len(documents) > 2 and any("look at its plan" in documents[i] for i in range(len(documents)))


@pytest.mark.parametrize(
    "settings, domains",
    [
        (AgentFilter(min_graduation_score=0.5), {"general", "sql"}),
        (AgentFilter(min_success_rate=0.5, unknown=Unknown.DROP), {"sql"}),
        (AgentFilter(domains=("python",)), {"general", "python"}),
        (AgentFilter(min_interactions=1000, unknown=Unknown.DROP), set()),
    ],
)
def test_the_filter_of_agents_selects_whose_bullets_are_used(books, tmp_path, settings, domains):
    run(books, tmp_path / "out", Playbooks(agents=settings))
    assert json.loads((tmp_path / "out/statistics.json").read_text())["domains"].keys() == domains


def test_copies_and_earlier_states_of_a_playbook_count_once(books, tmp_path):
    """An agent's saved states repeat its bullets, with smaller votes; another agent's equal bullet adds to them."""
    later = BOOK.replace("helpful=5", "helpful=9")
    (books / "copy_of_b.md").write_text((books / "b.md").read_text())
    (books / "state.json").write_text(json.dumps({"agent": "ann", "playbook": later}))
    (books / "third.md").write_text("[x-9] helpful=1 harmful=1 :: Verify data types before processing.\n")
    manifest = run(books, tmp_path / "out", Playbooks(agents=AgentFilter(min_graduation_score=0.0)))
    first, second = records(tmp_path / "out/bullets/sql.jsonl")
    assert (first["helpful"], second["helpful"], second["harmful"]) == (9, 2, 0)
    assert manifest.counts["earlier states of bullets"] == 3 and manifest.counts["copies of files"] == 1
    parts = ("bullets", "bullets merged", "earlier states of bullets", "bullets in copies of files")
    excluded = sum(count for name, count in manifest.counts.items() if name.startswith("excluded"))
    assert manifest.counts["bullets read"] == sum(manifest.counts.get(name, 0) for name in parts) + excluded
    [python] = records(tmp_path / "out/bullets/python.jsonl")
    assert python["helpful"] == 7


@pytest.mark.parametrize("family", ["TOKENS", "IN_CONTEXT", "PERSONAL"])
def test_no_planted_secret_is_written(books, tmp_path, family):
    made = {kind: make(planted.Make(7)) for kind, make in getattr(planted, family).items()}
    texts = {kind: (one, one) if isinstance(one, str) else one for kind, one in made.items()}
    lines, bullets = [], []
    for kind, (text, secret) in texts.items():
        content = f"Use this {kind}:\n\n{text}\n\n(this was {kind})"
        indented = content.replace("\n", "\n  ")
        lines.append(f"[b-1] helpful=7 harmful=1 :: {indented}")
        bullets.append({"id": secret, "content": content, "helpful": 1})
    (books / "b.md").write_text("\n".join(lines))
    (books / "other.json").write_text(json.dumps({"bullets": bullets}))
    assert run(books, tmp_path / "out").counts["bullets read"] == 2 * len(texts) + 3
    for name, data in tree(tmp_path / "out").items():
        for kind, (_, secret) in texts.items():
            assert secret.encode() not in data and json.dumps(secret).encode()[1:-1] not in data, (name, kind)
        if name.startswith("playbooks/python"):
            assert not [kind for kind in texts if f"(this was {kind})" not in data.decode()]


def test_no_secret_is_in_what_an_unfinished_build_leaves(books, tmp_path, monkeypatch):
    secret = planted.TOKENS["github_token"](planted.Make(1))
    (books / "ann.md").write_text(
        f"{BOOK}\n## {secret}\n[a-9] helpful={secret} harmful=0 :: x\n[{secret}] helpful=1 harmful=0 :: Use {secret}\n"
    )
    agents = [
        {**AGENTS[0], "agent_id": "ann"},
        {"agent_id": secret, "success_rate": 7},
        {"agent_id": secret, "domain_expertise": [secret]},
    ]
    (books / "agents.jsonl").write_text("".join(json.dumps(agent) + "\n" for agent in agents))
    monkeypatch.setattr(build, "_write", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(books, tmp_path / "out")
    monkeypatch.undo()
    left = tree(tmp_path / "out")
    assert any(".building" in name for name in left) and not [
        name for name, data in left.items() if secret.encode() in data
    ]
    run(books, tmp_path / "out")
    assert not [name for name, data in tree(tmp_path / "out").items() if secret.encode() in data]


# --- what is wrong with the input ------------------------------------------------------------------------------------

BAD = {
    "malformed bullet": ("z.md", b"[z-1] helpful=x harmful=0 :: text", {"malformed": 1}),
    "no bullet": ("z.md", b"Some prose\n", {}),
    "no text": ("z.md", b"", {}),
    "wrong encoding": ("z.md", "[z-1] helpful=1 harmful=0 :: café".encode("latin-1"), {"encoding": 1}),
    "UTF-16": ("z.md", BOOK.encode("utf-16"), {"encoding": 1}),
    "binary": ("z.txt", bytes(range(256)), {"encoding": 2}),
    "cut JSON": ("z.json", b'{"bullets": [{"id": "a"', {"truncated": 1}),
    "no JSON": ("z.json", b"bullets", {"malformed": 1}),
    "cut line": (
        "z.jsonl",
        b'{"id": "a", "content": "Good advice here", "helpful": 1}\n{"id": "b", "cont',
        {"truncated": 1},
    ),
    "other records": ("z.jsonl", b'{"x": 1}\n[1]\nnull\n', {"malformed": 3}),
    "infinite votes": ("z.jsonl", b'{"id": "a", "content": "x", "helpful": Infinity}\n', {"malformed": 1}),
    "nested too deep": ("z.json", b"[" * 200 + b"]" * 200, {"malformed": 1}),
    "no archive": ("z.md.gz", b"[z-1] helpful=1 harmful=0 :: text", {"corrupted": 1}),
    "cut archive": ("z.md.gz", gzip.compress(BOOK.encode())[:-12], {"truncated": 1}),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_nothing_good_is_lost(books, tmp_path, whole, name):
    file, content, counts = BAD[name]
    (books / file).write_bytes(content)
    manifest = run(books, tmp_path / "bad")
    assert manifest.problems.counts == counts
    assert all(problem.path == str(books / file) for problem in manifest.problems)
    now = tree(tmp_path / "bad")
    same = ("playbooks/sql.md", "bullets/sql.jsonl", "chats/sql.jsonl", "playbooks/python.md")
    assert {path: now[path] for path in same} == {path: whole[path] for path in same}


def test_a_folder_without_playbooks_is_the_users_mistake(tmp_path):
    (tmp_path / "in").mkdir()
    with pytest.raises(UserError, match="has no file that ends in .md"):
        run(tmp_path / "in", tmp_path / "out")


# --- the same bytes --------------------------------------------------------------------------------------------------


def test_worker_processes_write_the_same_bytes(books, tmp_path, whole):
    seen = []
    run(books, tmp_path / "out", num_workers=2, progress=lambda done, total: seen.append((done, total)))
    assert files_of(tmp_path / "out") == without_manifest(whole)
    assert seen == [(i, 4) for i in range(5)]


# Kills the build at one of its calls that rename a file, as a lost machine would.
_KILLED = """
import os, signal, sys
from capibara.builders.files import reading
from capibara.builders.playbooks import build
from capibara.builders.files.problems import Problems
folder, out, kill_at = sys.argv[1], sys.argv[2], int(sys.argv[3])
rename, left = os.replace, [kill_at]
def counted(*arguments):
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(*arguments)
os.replace = counted
build.build(reading.expand([folder], (".md", ".json", ".jsonl"), Problems()), out, build.Playbooks())
"""


@pytest.mark.parametrize("kill_at", [1, 6, 13, 20, pytest.param(27, marks=pytest.mark.heavy)])
def test_a_build_that_is_killed_is_resumed_to_the_same_bytes(books, tmp_path, whole, kill_at):
    argv = [sys.executable, "-c", _KILLED, str(books), str(tmp_path / "out"), str(kill_at)]
    assert subprocess.run(argv, timeout=120).returncode == -9
    assert not (tmp_path / "out/manifest.json").exists()
    run(books, tmp_path / "out")
    assert files_of(tmp_path / "out") == without_manifest(whole)


def test_files_that_were_read_whole_are_not_read_again(books, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_write", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(books, tmp_path / "out")
    monkeypatch.undo()
    monkeypatch.setattr(build.reading, "read", lambda *arguments: 1 / 0)
    assert run(books, tmp_path / "out").counts["bullets"] == 4


def test_other_settings_need_another_folder(books, tmp_path):
    run(books, tmp_path / "out")
    with pytest.raises(UserError, match=r"built with other settings \(agents.min_interactions was 0, is 9\)"):
        run(books, tmp_path / "out", Playbooks(agents=dataclasses.replace(AgentFilter(), min_interactions=9)))


def test_domains_have_safe_file_names_of_their_own(tmp_path):
    path = tmp_path / "a.jsonl"
    names = ["C++", "c#", "c", "../../etc", "日本", "SQL  Server", "x" * 300, ".hidden"]
    path.write_text(
        "".join(json.dumps({"id": "a", "content": "Some good advice", "domain": name}) + "\n" for name in names)
    )
    run(path, tmp_path / "out")
    files = sorted(one.name for one in (tmp_path / "out/playbooks").iterdir())
    assert len(files) == len(names) and {"c.md", "sql_server.md", "hidden.md"} < {*files}
    assert all(re.fullmatch(r"[a-z0-9_-]{1,70}\.md", name) for name in files)
