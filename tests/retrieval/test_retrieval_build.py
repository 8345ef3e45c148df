"""An index of documents: what is written, that it is found again, and what a build refuses."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest

from capibara.core.types import UserError
from capibara.retrieval import build
from capibara.retrieval.index import Index, IndexFolder
from tests.retrieval.conftest import SETTINGS


def test_an_index_has_all_chunks_and_says_what_it_finds(folder, embedder, documents):
    record = json.load(open(os.path.join(folder, build.RECORD)))
    chunks = list(build.read_chunks(os.path.join(folder, build.CHUNKS)))
    texts = [json.loads(line)["text"] for line in open(documents)]
    for chunk in chunks:
        assert texts[chunk["document"] - 1][chunk["start"] : chunk["end"]] == chunk["text"]
    assert record["chunks"] == len(chunks) > 400 and {chunk["document"] for chunk in chunks} == {*range(1, 401)}
    chosen = record["chosen"]
    assert chosen["recall"] - chosen["recall_error"] >= 0.9 and chosen["held_out_recall"] >= 0.85
    assert chosen["bytes"] == os.path.getsize(os.path.join(folder, build.INDEX)) < record["float32_bytes"] / 2
    assert record["model"]["weights"] == embedder.identity["weights"]
    trials = json.load(open(os.path.join(folder, build.TRIALS)))
    within = [trial for trial in trials if trial["recall"] - trial["recall_error"] >= 0.9]
    assert chosen["bytes"] == min(trial["bytes"] for trial in within)
    assert open(os.path.join(folder, build.PICTURE), "rb").read(4) == b"\x89PNG"


def test_a_chunk_is_nearest_to_itself(folder, embedder):
    index = Index(IndexFolder.open(folder), embedder)
    chunks = list(build.read_chunks(os.path.join(folder, build.CHUNKS)))[:50]
    hits = index.search_many([chunk["text"] for chunk in chunks], 3)
    first = [near[0].text == chunk["text"] for chunk, near in zip(chunks, hits)]
    assert sum(first) >= 45 and all(len(near) == 3 for near in hits)
    scores = [hit.score for hit in hits[0]]
    assert scores == sorted(scores, reverse=True)
    assert len(index.search(chunks[0]["text"], 10**6)) == len(index)


def test_a_finished_build_is_not_repeated_and_another_is_refused(folder, embedder, documents):
    again = lambda settings: build.prepare([documents], folder, settings, embedder, lambda *_: None)  # noqa: E731
    before = os.stat(os.path.join(folder, build.INDEX)).st_mtime_ns
    again(SETTINGS)
    assert os.stat(os.path.join(folder, build.INDEX)).st_mtime_ns == before
    with pytest.raises(UserError, match="other settings .chunk_tokens was 64, is 32"):
        again(dataclasses.replace(SETTINGS, chunk_tokens=32))


def test_a_build_that_was_killed_embeds_only_what_is_left(tmp_path, embedder, documents, monkeypatch):
    monkeypatch.setattr(build, "BLOCK", 128)
    counts = []

    class Counting:
        def __getattr__(self, name):
            return getattr(embedder, name)

        def __call__(self, texts, done=lambda count: None):
            if len(counts) == 2:
                raise KeyboardInterrupt
            counts.append(len(texts))
            return embedder(texts, done)

    with pytest.raises(KeyboardInterrupt):
        build.prepare([documents], str(tmp_path / "out"), SETTINGS, Counting(), lambda *_: None)
    assert counts == [128, 128]
    seen = []
    counting = Counting()
    counts.clear()
    counts.append(0), counts.append(0), counts.append(0)
    monkeypatch.setattr(Counting, "__call__", lambda self, texts, done=None: seen.append(len(texts)) or embedder(texts))
    manifest = build.prepare([documents], str(tmp_path / "out"), SETTINGS, counting, lambda *_: None)
    assert sum(seen) == manifest.counts["chunks"] - 256 + SETTINGS.queries


@pytest.mark.parametrize(
    ("content", "options", "error"),
    [
        ("", {}, "IN has no file that can be read"),
        ('{"text": "  "}\n{"text": ""}\n', {}, "IN has no document with a text"),
        ('{"text": "a b"}\n', {"chunk_tokens": 10**6}, "chunk_tokens is 1000000, must be at most"),
        ('{"text": "a b"}\n', {"ms": 1e-9}, "no index reaches IndexPreparation.recall"),
    ],
)
def test_documents_and_settings_that_do_not_fit_are_refused(tmp_path, embedder, content, options, error):
    (tmp_path / "in.jsonl").write_text(content)
    settings = dataclasses.replace(SETTINGS, **options)
    with pytest.raises(UserError, match=error):
        build.prepare([str(tmp_path / "in.jsonl")], str(tmp_path / "out"), settings, embedder, lambda *_: None)


def test_a_build_whose_goal_was_missed_takes_another_goal_without_embedding_again(tmp_path, embedder, documents):
    out, embedded = str(tmp_path / "out"), []

    class Counting:
        def __getattr__(self, name):
            return getattr(embedder, name)

        def __call__(self, texts, done=lambda count: None):
            embedded.append(len(texts))
            return embedder(texts, done)

    def prepare(**options):
        build.prepare([documents], out, dataclasses.replace(SETTINGS, **options), Counting(), lambda *_: None)

    with pytest.raises(UserError, match="no index reaches .*; lower one or raise the other"):
        prepare(ms=1e-9)
    with pytest.raises(UserError, match="other settings .overlap was 8, is 4"):
        prepare(overlap=4)
    embedded.clear()
    prepare(recall=0.5)
    assert embedded == [SETTINGS.queries]
    assert json.load(open(os.path.join(out, build.RECORD)))["settings"]["recall"] == 0.5
    with pytest.raises(UserError, match="other settings .recall was 0.5, is 0.6"):
        prepare(recall=0.6)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"k": 0}, "IndexPreparation.k is 0, must be at least 1"),
        ({"recall": 1.5}, "IndexPreparation.recall is 1.5"),
        ({"overlap": 128}, "IndexPreparation.overlap is 128, must be from 0 to 127"),
        ({"chunk_tokens": 0}, "IndexPreparation.chunk_tokens is 0"),
        ({"queries": 3}, "IndexPreparation.queries is 3, must be at least 20"),
        ({"ms": 0.0}, "IndexPreparation.ms is 0.0"),
        ({"encoding": "nonsense"}, "IndexPreparation.encoding"),
        ({"seed": -1}, "IndexPreparation.seed is -1, must be at least 0"),
    ],
)
def test_settings_are_checked(options, error):
    with pytest.raises(UserError, match=error):
        type(SETTINGS)(**options)
