"""Reads the bullets and agents of a file: text (.md, .txt) or JSON (.json, .jsonl), plain, .gz or .zst."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from capibara.builders.files import reading
from capibara.builders.files.problems import Problems
from capibara.builders.playbooks.agents import Agent
from capibara.builders.playbooks.bullets import Bullet
from capibara.builders.playbooks.exports import Export
from capibara.builders.playbooks.text import Parser
from capibara.storage import packed

_JSON = (".json", ".jsonl", ".ndjson")
ENDINGS = (".md", ".txt", *_JSON)


def read(path: str, problems: Problems, counts: Counter[str]) -> Iterator[Bullet | Agent]:
    """The bullets and agents of a file, in their order.

    Args:
      path: the file; one that does not end like JSON is text.
      problems: counts what cannot be read, with file and line.
      counts: gets the number of lines outside bullets, and of bullets that are marked as invalid.
    """
    if packed.plain_name(path).endswith(_JSON):
        for record in reading.records(path, problems):
            yield from Export(record, problems, counts).read()
        return
    parser = Parser(problems)
    yield from parser.parse(reading.lines(path, problems))
    counts["lines outside bullets"] += parser.outside
