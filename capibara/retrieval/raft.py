"""Training sets of questions with retrieved chunks, as in RAFT (Zhang et al. 2024, https://arxiv.org/abs/2403.10131).

OUT/train.jsonl     chats: chunks and a question, then an answer that cites its chunk; with the places of all chunks
OUT/manifest.json   inputs, settings, counts and hashes
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from capibara.builders.files import fingerprints, reading
from capibara.builders.files.manifest import Manifest
from capibara.builders.files.problems import Problems
from capibara.builders.writing import Output, Part
from capibara.config import configurable
from capibara.core.types import UserError
from capibara.retrieval.contexts import numbered
from capibara.retrieval.index import Hit, Index
from capibara.retrieval.tuning import Progress

ENDINGS = (".jsonl", ".ndjson", ".json")
TRAIN = "train.jsonl"
_SEARCHED = 256  # questions at once
_NAMES = re.compile(r"\{(context|question)\}")
NO_EVIDENCE = "no_evidence"  # a kind of problem: no chunk has the passage


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class RaftPreparation:
    r"""How questions become chats.

    Attributes:
      question, answer: the keys of a line with the question and its answer.
      evidence: the key of a line with a passage that the answer rests on, word for word; the chunk that has it is the gold chunk. A
        line without one has the nearest chunk that has its answer.
      k: chunks of a chat; those beside the gold chunk are the nearest others.
      without_gold: share of chats whose chunks leave the gold chunk out, so that the model also learns to answer without.
      prompt: the user's turn, with {context} and {question}.
      cite: whether an answer ends with the number of the gold chunk, as in "blue [2]"; one without the gold chunk cites nothing.
      seed: of the order of the chunks, and of which chats have no gold chunk.
    """

    question: str = "question"
    answer: str = "answer"
    evidence: str = "evidence"
    k: int = 4
    without_gold: float = 0.2
    prompt: str = "{context}\n\nQuestion: {question}"
    cite: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.k < 2:
            raise UserError(f"RaftPreparation.k is {self.k}, must be at least 2, the gold chunk and another: try 4")
        if not 0 <= self.without_gold <= 1:
            raise UserError(f"RaftPreparation.without_gold is {self.without_gold}, must be from 0 to 1: try 0.2")
        if self.seed < 0:
            raise UserError(f"RaftPreparation.seed is {self.seed}, must be at least 0")
        for name in ("{context}", "{question}"):
            if name not in self.prompt:
                raise UserError(f"RaftPreparation.prompt ({self.prompt!r}) has no {name}: add it")


def prepare(patterns: Sequence[str], out: str, settings: RaftPreparation, index: Index, progress: Progress) -> Manifest:
    """Makes chats of questions.

    Args:
      patterns: files, folders and globs of JSON lines.
      out: the output folder.
      settings: what to do.
      index: of the documents.
      progress: is called with a topic and a detail.

    Raises:
      UserError: no line has a question, an answer and a chunk with its evidence, or the folder holds another build.
    """
    problems = Problems()
    files = reading.expand(patterns, ENDINGS, problems, out)
    config = dataclasses.asdict(settings) | {"index": index.folder.fingerprint}
    with Output(out, "raft", config, fingerprints.inputs_of(files)) as output:
        if (manifest := output.done()) is not None:
            return manifest
        with output.part(TRAIN) as file:
            _write(file, files, settings, index, progress)
            if not file.records:
                raise UserError(
                    f"IN has no line with {settings.question!r}, {settings.answer!r} and a chunk of {index.folder.path} that has its "
                    "evidence: set RaftPreparation.question, answer and evidence"
                )
        return output.finish({}, problems)


def _write(file: Part, files: Sequence[str], settings: RaftPreparation, index: Index, progress: Progress) -> None:
    rng = np.random.default_rng(settings.seed)
    passages = Passages(index)
    lines = _lines(files, settings, file.problems)
    while block := list(itertools.islice(lines, _SEARCHED)):
        hits = index.search_many([record[settings.question] for _, _, record in block], 2 * settings.k)
        for (path, number, record), near in zip(block, hits):
            if (gold := _gold(record, settings, passages, near)) is None:
                file.problems.add(path, number, NO_EVIDENCE, "no chunk has its evidence, or its answer")
                continue
            file.write_record(_chat(record, settings, gold, near, rng))
            file.counts["chats"] += 1
        progress("making chats", f"{file.records:,} of them")


def _lines(
    files: Sequence[str], settings: RaftPreparation, problems: Problems
) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """The records with a question and an answer, with file and line."""
    for path in files:
        for record in reading.records(path, problems):
            missing = [
                name
                for name in (settings.question, settings.answer)
                if not isinstance(record.value.get(name), str) or not record.value[name].strip()
            ]
            if missing:
                problems.add(path, record.number, "no_text", f"has no text in {missing[0]!r}")
            else:
                yield path, record.number, record.value


class Passages:
    """Finds the chunk that has a passage.

    Args:
      index: of the chunks.
    """

    def __init__(self, index: Index):
        self._index = index
        texts = [_plain(index.chunk(number).text) for number in range(len(index))]
        self._starts = [0, *itertools.accumulate(len(text) + 1 for text in texts)]
        self._all = "\0".join(texts)

    def chunk(self, passage: str) -> Hit | None:
        """The first chunk with a passage, white space apart; None: there is none."""
        at = self._all.find(_plain(passage))
        return None if at < 0 else self._index.chunk(bisect.bisect_right(self._starts, at) - 1)


def _plain(text: str) -> str:
    return " ".join(text.split())


def _gold(record: dict[str, Any], settings: RaftPreparation, passages: Passages, near: Sequence[Hit]) -> Hit | None:
    evidence = record.get(settings.evidence)
    if isinstance(evidence, str) and evidence.strip():
        return passages.chunk(evidence)
    answer = _plain(record[settings.answer])
    return next((hit for hit in near if answer in _plain(hit.text)), None)


def _chat(
    record: dict[str, Any], settings: RaftPreparation, gold: Hit, near: Sequence[Hit], rng: np.random.Generator
) -> dict[str, Any]:
    others = [hit for hit in near if hit.chunk != gold.chunk]
    has_gold = rng.random() >= settings.without_gold
    chosen = [gold, *others[: settings.k - 1]] if has_gold else others[: settings.k]
    chosen = [chosen[i] for i in rng.permutation(len(chosen))]
    number = next((i for i, hit in enumerate(chosen, 1) if hit.chunk == gold.chunk), None)
    values = {"context": numbered([hit.text for hit in chosen]), "question": record[settings.question]}
    # Not str.format, nor one after the other: a chunk may have braces.
    prompt = _NAMES.sub(lambda match: values[match[1]], settings.prompt)
    answer = record[settings.answer] + (f" [{number}]" if settings.cite and number is not None else "")
    places = [
        {"chunk": hit.chunk, "path": hit.path, "document": hit.document, "start": hit.start, "end": hit.end}
        for hit in chosen
    ]
    return {
        "messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}],
        "citations": places,
        "gold": number,
    }
