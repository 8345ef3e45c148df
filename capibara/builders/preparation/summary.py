"""What a build says about a corpus as a whole: its counts, its problems, and the index of its shards."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Mapping, Sequence

import numpy as np

from capibara.builders.files.problems import Problems
from capibara.builders.preparation.documents import CorpusPart, moved
from capibara.builders.preparation.settings import CorpusPreparation
from capibara.core.types import UserError

INDEX = "index.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartSummary:
    """What was read of a part.

    Attributes:
      count: documents, blank ones included.
      keys: documents that are not blank.
      text_bytes: of all texts, in UTF-8.
      last_lines: lines of the part's last piece.
      problems: with lines counted from the part's first piece.
    """

    count: int
    keys: int
    text_bytes: int
    last_lines: int
    problems: Problems


def total(
    parts: Sequence[CorpusPart], summaries: Sequence[PartSummary], problems: Problems
) -> collections.Counter[str]:
    """The counts of all parts; adds their problems, at the lines of the files, to `problems`.

    Raises:
      UserError: there is no document.
    """
    counts: collections.Counter[str] = collections.Counter()
    lines = 0
    for part, summary in zip(parts, summaries, strict=True):
        first, last = part.pieces[0], part.pieces[-1]
        lines = lines if first.start else 0  # of its file, in earlier parts
        problems.merge(moved(summary.problems, first.file.url, first.file.url, lines))
        lines = summary.last_lines + (lines if first is last else 0)
        blank = summary.count - summary.keys
        counts.update(documents=summary.count, blank=blank, text_bytes=summary.text_bytes)
    if not counts["documents"]:
        first_problem = next((f", such as {problem}" for problem in problems), "")
        raise UserError(f"IN has no document (problems: {problems.total:,}{first_problem}): name other files")
    return counts


def offsets(summaries: Sequence[PartSummary]) -> np.ndarray:
    """[p + 1] int64: the number in the corpus of each part's first document, and the end."""
    return np.cumsum([0, *(summary.count for summary in summaries)])


def index(
    settings: CorpusPreparation,
    parts: Sequence[CorpusPart],
    summaries: Sequence[PartSummary],
    shards: Mapping[str, Mapping[str, int]],
) -> bytes:
    """The index of a corpus, as JSON.

    Args:
      settings: what was done.
      parts: what was read.
      summaries: of the parts.
      shards: the counts of each shard by its name.
    """
    firsts = offsets(summaries).tolist()
    about = {
        "length": settings.length,
        "vocabulary": settings.vocabulary.fingerprint(),
        "documents": firsts[-1],
        "shards": [{"name": name, **dict(sorted(counts.items()))} for name, counts in sorted(shards.items())],
        "parts": [
            {"first_document": first, "pieces": [[p.file.url, p.start, p.stop] for p in part.pieces]}
            for first, part in zip(firsts, parts)
        ],
    }
    return json.dumps(about, indent=1).encode() + b"\n"
