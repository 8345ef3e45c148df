"""Chats with retrieved chunks: the gold chunk among others or not, citations, and lines without evidence."""

from __future__ import annotations

import json

import pytest

from capibara.core.types import UserError
from capibara.retrieval import build, raft
from capibara.retrieval.index import Index, IndexFolder
from capibara.retrieval.raft import Passages, RaftPreparation


@pytest.fixture(scope="module")
def index(folder, embedder):
    return Index(IndexFolder.open(folder), embedder)


def chats(tmp_path, index, lines, **options):
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out"
    manifest = raft.prepare(
        [str(tmp_path / "questions.jsonl")], str(out), RaftPreparation(**options), index, lambda *_: None
    )
    return [json.loads(line) for line in open(out / raft.TRAIN)], manifest


def questions(count):
    return [
        {"question": f"What is {i} with {{braces}}?", "answer": "so", "evidence": f"number  {i}:"} for i in range(count)
    ]


def test_the_gold_chunk_is_among_others_and_cited(tmp_path, index):
    rows, manifest = chats(tmp_path, index, questions(60), k=3, without_gold=0.3)
    assert manifest.counts["chats"] == 60
    golds = [row["gold"] for row in rows]
    assert 8 <= golds.count(None) <= 30 and {1, 2, 3} <= {*golds}
    for i, row in enumerate(rows):
        user, assistant = (message["content"] for message in row["messages"])
        assert len(row["citations"]) == 3 and f"Question: What is {i} with {{braces}}?" in user
        with_gold = [
            n for n, place in enumerate(row["citations"], 1) if f"number {i}:" in index.chunk(place["chunk"]).text
        ]
        if row["gold"] is None:
            assert assistant == "so" and f"number {i}:" not in user and not with_gold
        else:
            assert assistant == f"so [{row['gold']}]" and row["gold"] in with_gold
        for number, place in enumerate(row["citations"], 1):
            assert f"[{number}] {index.chunk(place['chunk']).text.strip()}" in user


@pytest.mark.parametrize("share, golds", [(0.0, 20), (1.0, 0)])
def test_shares_at_their_ends(tmp_path, index, share, golds):
    rows, _ = chats(tmp_path, index, questions(20), without_gold=share, cite=False)
    assert sum(row["gold"] is not None for row in rows) == golds
    assert all(row["messages"][1]["content"] == "so" for row in rows)


def test_lines_without_a_chunk_are_counted(tmp_path, index):
    lines = [*questions(2), {"question": "?", "answer": "so", "evidence": "nowhere"}, {"question": "only"}]
    rows, manifest = chats(tmp_path, index, lines)
    assert len(rows) == 2 and manifest.counts["skipped"] == 2
    with pytest.raises(UserError, match="IN has no line with 'question', 'answer' and a chunk"):
        (tmp_path / "second").mkdir()
        chats(tmp_path / "second", index, lines[2:])


def test_a_passage_is_found_in_its_chunk(folder, index):
    passages = Passages(index)
    for number, chunk in enumerate(build.read_chunks(f"{folder}/{build.CHUNKS}")):
        if number % 40 == 0:
            assert chunk["text"][3:40] in passages.chunk(f" {chunk['text'][3:40]}\n").text
    assert passages.chunk("not in there") is None


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"k": 1}, "RaftPreparation.k is 1, must be at least 2"),
        ({"seed": -1}, "RaftPreparation.seed is -1, must be at least 0"),
        ({"without_gold": 1.5}, "RaftPreparation.without_gold is 1.5"),
        ({"prompt": "{question}"}, "has no {context}"),
    ],
)
def test_options_are_checked(options, error):
    with pytest.raises(UserError, match=error):
        RaftPreparation(**options)
