"""Corpora for the tests: texts of random words, with planted duplicates."""

from __future__ import annotations

import json
import pathlib
import random

WORDS = [
    f"{a}{b}{c}" for a in ("mo", "ta", "ri", "lu", "pe") for b in ("na", "so", "ki", "ve") for c in ("", "n", "s", "rt")
]


def text(seed: int, words: int = 120) -> str:
    chosen = random.Random(seed)
    return " ".join(chosen.choice(WORDS) for _ in range(words)) + "."


def changed(one: str, seed: int, words: int = 1) -> str:
    """The text with a few other words."""
    chosen, found = random.Random(seed), one.split(" ")
    for at in chosen.sample(range(len(found)), words):
        found[at] = f"other{seed}"
    return " ".join(found)


def write_lines(path: pathlib.Path, texts: list[str], **more: object) -> pathlib.Path:
    path.write_text("".join(json.dumps({"text": one, **more}) + "\n" for one in texts))
    return path


def write_corpus(folder: pathlib.Path, documents: int = 60) -> pathlib.Path:
    """Files with as many different documents, a third of them followed by an equal one, a third by a similar one."""
    folder.mkdir()
    texts = []
    for i in range(documents):
        texts.append(text(i))
        texts += [[text(i)], [changed(text(i), i)], []][i % 3]
    half = len(texts) // 2
    write_lines(folder / "a.jsonl", texts[:half], domain="made")
    write_lines(folder / "b.jsonl", texts[half:])
    (folder / "c.md").write_text(f"{text(1000, 3000)}\n{text(1001, 3000)}\n")
    return folder
