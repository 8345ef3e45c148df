"""Reads an input file of a routing set: labels its records, and writes what later steps need of them."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import os
import re

import numpy as np

from capibara.builders.files import fingerprints, reading
from capibara.builders.files.problems import Kind
from capibara.builders.preparation import near
from capibara.builders.redaction.redact import Json, Scope
from capibara.builders.routing.decontamination import NGrams, key_of_words, words
from capibara.builders.routing.labelling import facts as analysis
from capibara.builders.routing.labelling import records
from capibara.builders.routing.labelling.difficulty import Level
from capibara.builders.routing.labelling.facts import Facts
from capibara.builders.routing.labelling.labels import Label, Labels, LabelSource
from capibara.builders.routing.labelling.records import Draft, Piece
from capibara.builders.routing.rows import DTYPE, FOLDERS, Row, State, Table, digest, key_of, name, signature_dtype
from capibara.builders.routing.settings import RoutingSet, UnknownDomain
from capibara.builders.writing import Part, Parts
from capibara.core import limits
from capibara.core.types import UserError

_TOGETHER = 1000  # records whose signatures are computed and whose rows are written at a time
_PARAGRAPH = re.compile(r"\n[ \t]*\n")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reader:
    """Reads input files, one at a time; can be sent to a worker process.

    Attributes:
      parts: where the records go.
      settings: the settings.
      common: the folder that the names of files are relative to.
    """

    parts: Parts
    settings: RoutingSet
    common: str

    def __call__(self, task: tuple[int, str]) -> None:
        number, path = task
        with contextlib.ExitStack() as stack:
            parts = {folder: stack.enter_context(self.parts.write(name(folder, number))) for folder in FOLDERS}
            shown = os.path.relpath(os.path.abspath(path), self.common)
            _File(self.settings, parts, path, shown).read(self._labels, self._ngrams)

    @functools.cached_property
    def _labels(self) -> Labels:
        return Labels(self.settings.resolved)

    @functools.cached_property
    def _ngrams(self) -> NGrams:
        return self.settings.decontamination.index()


class _File:
    """What is remembered while a file is read.

    Args:
      settings: the settings.
      parts: by the names of `rows.FOLDERS`.
      path: the file, as the user named it.
      shown: its name in records.
    """

    def __init__(self, settings: RoutingSet, parts: dict[str, Part], path: str, shown: str):
        self._settings = settings
        self._parts, self._path, self._shown = parts, path, shown
        self._numbers = {item: number for number, item in enumerate(settings.names)}
        self._known = frozenset(language for domain in settings.resolved for language in domain.languages)
        self._count = 0  # records
        self._rows: list[Row] = []  # the last ones, not yet written
        self._origins, self._pieces, self._near = (Table(parts[folder]) for folder in ("origins", "pieces", "near"))
        self._texts = Table(parts["texts"], columns=2)
        self._unsigned: list[tuple[int, str]] = []  # records whose signature is not yet computed
        self._offset = 0

    def read(self, labels: Labels, ngrams: NGrams) -> None:
        """Reads the file, and writes all parts of it."""
        part = self._parts["examples"]
        for record in reading.records(self._path, part.problems):
            try:
                draft = records.read(record.value, f"{self._shown}:{record.number}", self._settings.source_fields)
            except records.Malformed as error:
                part.problems.add(record.path, record.number, Kind.MALFORMED, str(error))
                continue
            self._add(draft, record.number, labels, ngrams)
            if len(self._rows) >= _TOGETHER:
                self._flush()
        self._flush()
        for table in (self._origins, self._pieces, self._near, self._texts):
            table.flush()

    def _add(self, draft: Draft, line: int, labels: Labels, ngrams: NGrams) -> None:
        counts = self._parts["examples"].counts
        counts["records"] += 1
        counts[f"records {draft.kind}"] += 1
        row, source = self._count, key_of(draft.origins[0])
        self._count += 1
        for origin in draft.origins:
            self._origins.add(row, key_of(origin))
        raw = "\n\n".join(piece.text.strip("\n") for piece in draft.pieces)
        if (sets := ngrams.sets_in(raw)) != []:
            self._contaminated(line, sets)
            state: State | None = State.CONTAMINATED
        else:
            state = self._length(raw)
        if state is None:
            shown, redacted = _redacted(draft, self._settings.redaction.scope(), counts)
            facts = self._facts(redacted, line, labels)
            label = None if facts is None else labels.of(facts)
            state = self._judged(facts, label)
            if facts is not None and label is not None and state is State.KEPT:
                self._keep(facts, label, redacted, shown, line, source)
                return
        self._rows.append(Row(source, 0, 0, line, state))

    def _length(self, text: str) -> State | None:
        if len(text) < self._settings.min_characters:
            return State.TOO_SHORT
        return State.TOO_LONG if len(text) > self._settings.max_characters else None

    def _facts(self, draft: Draft, line: int, labels: Labels) -> Facts | None:
        """What is known of a record; None: it declares a domain that is excluded."""
        declared = draft.declared
        if declared is not None and labels.declared(declared) is None:
            if not self._settings.declares_none(declared):
                if self._settings.unknown_domain is UnknownDomain.REFUSE:
                    known = ", ".join(self._settings.names)
                    raise UserError(
                        f"{self._path}:{line}: domain {limits.shortened(declared)} is none of RoutingSet.domains ({known}): define a Domain or "
                        "add it to Domain.names, or set RoutingSet.unknown_domain = 'infer' or 'exclude'"
                    )
                if self._settings.unknown_domain is UnknownDomain.EXCLUDE:
                    return None
            declared = None
        return Facts(
            text="\n\n".join(piece.text.strip("\n") for piece in draft.pieces),
            codes=analysis.codes(draft.pieces, self._known),
            declared=declared,
            outcome=draft.outcome,
            attempts=draft.attempts,
            earlier_imports=draft.imports,
        )

    def _judged(self, facts: Facts | None, label: Label | None) -> State:
        if facts is None:
            return State.OTHER_DOMAIN
        if label is None:
            return State.NO_DOMAIN
        return State.AMBIGUOUS if label.confidence < self._settings.min_confidence else State.KEPT

    def _keep(self, facts: Facts, label: Label, draft: Draft, shown: str, line: int, source: int) -> None:
        row, part = self._count - 1, self._parts["examples"]
        score = self._settings.difficulty.of(facts)
        level = self._settings.difficulty.level(score)
        content = digest(facts.text)
        record: dict[str, Json] = {
            "id": content.hex(),
            "text": facts.text,
            "domain": label.domain,
            "label_source": str(label.source),
            "confidence": label.confidence,
            "difficulty": str(level),
            "difficulty_score": score,
            "languages": list(facts.languages),
            "kind": str(draft.kind),
            "source": shown,
            "record": f"{self._shown}:{line}",
        }
        encoded = fingerprints.canonical(record).encode() + b"\n"
        part.write(encoded)
        part.records += 1
        same = digest("".join(facts.text.casefold().split()))
        self._texts.add(row, int.from_bytes(same[:8], "little"), int.from_bytes(same[8:], "little"))
        for key in self._keys_of_pieces(facts, draft):
            self._pieces.add(row, key)
        if self._settings.splits.near is not None and len(words(facts.text)) >= self._settings.splits.link_words:
            self._unsigned.append((row, facts.text))
        self._rows.append(
            Row(
                source,
                int.from_bytes(content[:8], "little"),
                self._offset,
                line,
                State.KEPT,
                self._numbers[label.domain],
                list(LabelSource).index(label.source),
                list(Level).index(level),
            )
        )
        self._offset += len(encoded)

    def _flush(self) -> None:
        """Writes the last rows, and the signatures by which similar texts are found."""
        part, settings = self._parts["rows"], self._settings.splits.near
        part.write(np.array(self._rows, DTYPE).tobytes())
        part.records += len(self._rows)
        self._rows.clear()
        if settings is None or not self._unsigned:
            return
        rows = np.array([row for row, _ in self._unsigned], np.uint32)
        result = near.signatures([text for _, text in self._unsigned], settings)
        for keys in near.keys(result, settings):
            for row, key in zip(rows.tolist(), keys.tolist()):
                self._near.add(row, key)
        signed = np.zeros(len(rows), signature_dtype(settings))
        signed["row"], signed["signature"] = rows, result
        self._parts["signatures"].write(signed.tobytes())
        self._parts["signatures"].records += len(rows)
        self._unsigned.clear()

    def _keys_of_pieces(self, facts: Facts, draft: Draft) -> set[int]:
        """Hashes of the words of the code, messages and paragraphs that are long enough."""
        pieces = [code.text for code in facts.codes] + [piece.text for piece in draft.pieces]
        pieces += [text for piece in draft.pieces for text in _PARAGRAPH.split(piece.text)]
        result = (key_of_words(text, self._settings.splits.link_words) for text in dict.fromkeys(pieces))
        return {key for key in result if key is not None}

    def _contaminated(self, line: int, sets: list[str]) -> None:
        part = self._parts["contaminated"]
        for item in sets:
            part.write_record({"path": self._path, "line": line, "set": item})
            part.counts[f"contaminated by {item}"] += 1


def _redacted(draft: Draft, scope: Scope, counts: collections.Counter[str]) -> tuple[str, Draft]:
    """The name of the source, and the record, without secrets and personal data."""
    result: collections.Counter[str] = collections.Counter()
    texts = scope.redact_texts([draft.source, draft.declared or "", *(piece.text for piece in draft.pieces)], result)
    counts.update({f"redacted {kind}": count for kind, count in result.items()})
    source, declared, *clean = texts
    pieces: list[Piece] = [dataclasses.replace(piece, text=text) for piece, text in zip(draft.pieces, clean)]
    return source, dataclasses.replace(draft, pieces=tuple(pieces), declared=declared or None)
