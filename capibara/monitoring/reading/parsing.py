"""Parses ranges of metrics.jsonl into columns, a million lines in about a second.

The lines of a run have few forms: the same keys in the same order. Lines of one form are parsed together: without its letters
a line is a row of comma-separated numbers, which pyarrow's CSV reader converts; without its digits it is the form. What has no such
form (samples, events, lists, torn lines) is parsed line by line.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from capibara.monitoring.metrics_file.loggers import AGAIN, MOST_STEPS, MOST_TIME_S
from capibara.monitoring.metrics_file.loggers import parse as parse_line
from capibara.storage import stores

# A metric that the line does not have, and one that was not finite (null): JSON has no infinity, so they cannot be mixed up.
MISSING, NOT_FINITE = math.nan, math.inf
BLOCK_BYTES = 2 << 20  # larger ones leave the processor's caches
_REQUEST_BYTES = 16 << 20  # of a bucket
LONGEST_LINE_BYTES = 16 << 20  # a longer one is skipped
_SHOWN_PROMPT = 200  # characters of a sample's prompt that are kept in memory
_FEW = 16  # lines of one form that are parsed line by line
_NUMBER_PARTS, _OTHERS = b"0123456789.-+E,", b'"abcdefghijklmnopqrstuvwxyz_{}: /'
_PLAIN_KEYS = re.compile(r"[a-z_/]+")
_MOST_METRICS = 4096  # of one kind of line
_NOT_METRICS = {"kind", "step", "time"}

Record = dict[str, Any]  # a parsed line: JSON of a run folder, whose types are checked where they are used


@dataclasses.dataclass(frozen=True)
class Rows:
    """Lines of one kind, in the order in which they were written.

    Attributes:
      steps: int64 [n].
      times: float64 [n], seconds since 1970.
      columns: metric -> float64 [n]; MISSING or NOT_FINITE where there is no number.
    """

    steps: np.ndarray
    times: np.ndarray
    columns: Mapping[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.steps)


@dataclasses.dataclass(frozen=True)
class Sample:
    """Where a sample's line is.

    Attributes:
      step, time: of the line; seconds since 1970.
      prompt: its first characters.
      start, stop: bytes of the line in metrics.jsonl.
    """

    step: int
    time: float
    prompt: str
    start: int
    stop: int


@dataclasses.dataclass
class Era:
    """What was written between two starts, or roll-backs, of a run.

    Attributes:
      again: the event that begins it; None: the range begins in the middle of an era.
      rows: kind of line -> its lines ("train", "eval", "system").
      events: all other events.
      samples: where samples are.
    """

    again: Record | None = None
    rows: dict[str, Rows] = dataclasses.field(default_factory=dict)
    events: list[Record] = dataclasses.field(default_factory=list)
    samples: list[Sample] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Range:
    """Whole lines of a metrics.jsonl.

    Attributes:
      path: the file.
      start, stop: bytes.
    """

    path: str
    start: int
    stop: int


def parse(part: Range) -> list[Era]:
    """The eras of a range; lines that are no records are skipped.

    Raises:
      UserError, TryAgain: the file cannot be read.
    """
    pieces = _Pieces()
    for start, block in _blocks(part):
        _parse_block(block, start, pieces)
    return pieces.eras()


def parse_text(content: bytes, start: int) -> list[Era]:
    """The eras of whole lines that have been read at a position; as `parse`."""
    pieces = _Pieces()
    _parse_block(content, start, pieces)
    return pieces.eras()


def blocks(path: str) -> Iterator[list[Era]]:
    """The eras of a whole file, some megabytes at a time; raises as `parse`."""
    for start, block in _blocks(Range(path, 0, stores.of(path).size(path))):
        yield parse_text(block, start)


def line_at(path: str, sample: Sample) -> Record | None:
    """The whole line of a sample; None: it is there no more."""
    return _record(stores.of(path).read_range(path, sample.start, min(sample.stop, sample.start + LONGEST_LINE_BYTES)))


def _blocks(part: Range) -> Iterator[tuple[int, bytes]]:
    """Whole lines of about BLOCK_BYTES, with the position of each block."""
    store, at, rest = stores.of(part.path), part.start, b""
    length = BLOCK_BYTES if store.has_local_paths else _REQUEST_BYTES
    while at < part.stop:
        content = store.read_range(part.path, at, min(part.stop, at + length))
        end = content.rfind(b"\n") + 1
        begin = at - len(rest)
        at += len(content)
        if not end:
            rest += content
            if len(rest) > LONGEST_LINE_BYTES:  # its end is parsed as a line, and is none
                rest = b""
            continue
        yield begin, rest + content[:end] if rest else content[:end]
        rest = content[end:]
    if rest:
        yield at - len(rest), rest


class _Pieces:
    """Collects rows by era and kind."""

    def __init__(self) -> None:
        self._eras = [Era()]
        self._rows: list[dict[str, list[Rows]]] = [{}]

    def rows(self, kind: str, rows: Rows) -> None:
        self._rows[-1].setdefault(kind, []).append(rows)

    def other(self, record: Record, start: int, stop: int) -> None:
        """Adds an event or a sample."""
        if record["kind"] == "sample":
            prompt, time = record.get("prompt"), record.get("time")
            shown = prompt[:_SHOWN_PROMPT] if isinstance(prompt, str) else ""
            self._eras[-1].samples.append(Sample(record["step"], _number(time), shown, start, stop))
        elif record.get("event") in AGAIN:
            self._eras.append(Era(again=record))
            self._rows.append({})
        else:
            self._eras[-1].events.append(record)

    def eras(self) -> list[Era]:
        for era, kinds in zip(self._eras, self._rows, strict=True):
            era.rows = {kind: joined(pieces) for kind, pieces in kinds.items()}
        first = self._eras[0]
        is_empty = first.again is None and not (first.rows or first.events or first.samples)
        return self._eras[1:] if is_empty else self._eras


def joined(pieces: Sequence[Rows]) -> Rows:
    """Rows one after the other, with the columns of all."""
    if len(pieces) == 1:
        return pieces[0]
    names = list(dict.fromkeys(name for piece in pieces for name in piece.columns))[:_MOST_METRICS]
    columns = {
        name: np.concatenate([
            piece.columns[name] if name in piece.columns else np.full(len(piece), MISSING) for piece in pieces
        ])
        for name in names
    }  # fmt: skip
    steps, times = ([getattr(piece, name) for piece in pieces] for name in ("steps", "times"))
    return Rows(np.concatenate(steps), np.concatenate(times), columns)


def _parse_block(block: bytes, start: int, pieces: _Pieces) -> None:
    numbers, forms = _numbers_and_forms(block)
    form = forms[: forms.find(b"\n") + 1]
    count = len(forms) // max(1, len(form))
    if count > _FEW and form * count == forms:
        result = _parse_alike(block, numbers, block[: block.find(b"\n")])
        if result is not None:
            pieces.rows(*result)
            return
    lines = block.split(b"\n")
    if not lines[-1]:
        lines.pop()
    groups: dict[bytes, list[int]] = {}
    for index, form in enumerate(forms.split(b"\n")[: len(lines)]):
        groups.setdefault(form, []).append(index)
    frequent, rows = _parse_groups(lines, numbers.split(b"\n"), groups)
    rare = [index for form, indices in groups.items() if form not in frequent for index in indices]
    _merge(lines, start, sorted(rare), rows, pieces)


def _numbers_and_forms(block: bytes) -> tuple[bytes, bytes]:
    """The lines without letters and quotes, and the lines without digits; an exponent counts as a part of its number."""
    copy = bytearray(block)
    view = np.frombuffer(copy, np.uint8)
    for sign in [sign for sign in b"+-" if bytes([sign]) in block]:
        signs = np.flatnonzero(view == sign)
        view[signs[view[signs - 1] == ord("e")] - 1] = ord("E")
    del view
    return bytes(copy.translate(None, _OTHERS)), bytes(copy.translate(None, _NUMBER_PARTS))


_Found = tuple[str, Rows]


def _parse_groups(
    lines: list[bytes], numbers: list[bytes], groups: Mapping[bytes, list[int]]
) -> tuple[set[bytes], list[tuple[str, np.ndarray, Rows]]]:
    """Parses frequent forms: their names, and of each the kind, the lines' indices and the rows."""
    frequent, rows = set[bytes](), list[tuple[str, np.ndarray, Rows]]()
    for form, indices in groups.items():
        if len(indices) <= _FEW:
            continue
        text = b"\n".join([numbers[index] for index in indices]) + b"\n"
        alike = functools.partial(_join, lines, indices)
        result = _parse_alike(alike, text, lines[indices[0]])
        if result is not None:
            frequent.add(form)
            rows.append((result[0], np.array(indices), result[1]))
    return frequent, rows


def _join(lines: list[bytes], indices: list[int]) -> bytes:
    return b"\n".join([lines[index] for index in indices]) + b"\n"


@functools.cache
def _has_pyarrow() -> bool:
    return importlib.util.find_spec("pyarrow") is not None


def _parse_alike(block: bytes | functools.partial[bytes], numbers: bytes, first: bytes) -> _Found | None:
    """Lines of one form; None: they cannot be parsed together.

    Args:
      block: the lines, or a function that returns them.
      numbers: the lines without letters.
      first: the first line.
    """
    if not _has_pyarrow():  # as in a report without the extra `dashboard`: line by line, in ten times the time
        return None
    record = _record(first)
    if record is None or record["kind"] in ("event", "sample") or "time" not in record:
        return None
    values = [value for key, value in record.items() if key != "kind"]
    if not all(value is None or type(value) in (int, float) for value in values) or record["time"] is None:
        return None
    kind, keys = record["kind"], list(record)
    if not (_PLAIN_KEYS.fullmatch(kind) and len(keys) < _MOST_METRICS):
        return None
    read = [key for key in keys if key != "kind"]
    if all(map(_PLAIN_KEYS.fullmatch, keys)):
        columns = _from_csv(numbers, keys, read)
    elif any(value is None for value in values):
        return None
    else:
        columns = _from_json(block if isinstance(block, bytes) else block(), read)
    if columns is None:
        return None
    steps, times = columns.pop("step"), columns.pop("time")
    if not ((np.abs(steps) < MOST_STEPS).all() and (np.abs(times) < MOST_TIME_S).all()):
        return None
    return kind, Rows(steps.astype(np.int64), times, columns)


def _from_csv(numbers: bytes, keys: list[str], read: list[str]) -> dict[str, np.ndarray] | None:
    import pyarrow
    from pyarrow import csv

    try:
        table = csv.read_csv(
            pyarrow.BufferReader(pyarrow.py_buffer(numbers)),
            read_options=csv.ReadOptions(use_threads=False, block_size=len(numbers) + 1, column_names=keys),
            parse_options=csv.ParseOptions(quote_char=False),
            convert_options=csv.ConvertOptions(
                column_types=dict.fromkeys(keys, pyarrow.float64()), include_columns=read, null_values=[""]
            ),
        )
    except pyarrow.ArrowInvalid:
        return None
    return _arrays(table, NOT_FINITE)


def _from_json(lines: bytes, read: list[str]) -> dict[str, np.ndarray] | None:
    import pyarrow
    from pyarrow import json as arrow_json

    schema = pyarrow.schema([(name, pyarrow.float64()) for name in read])
    try:
        table = arrow_json.read_json(
            pyarrow.BufferReader(pyarrow.py_buffer(lines)),
            read_options=arrow_json.ReadOptions(use_threads=False, block_size=len(lines) + 1),
            parse_options=arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
        )
    except pyarrow.ArrowInvalid:
        return None
    return _arrays(table, MISSING)


def _arrays(table: Any, absent: float) -> dict[str, np.ndarray]:
    """The columns of a pyarrow.Table, with a number in place of nulls."""
    result = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        filled = column.fill_null(absent) if column.null_count else column
        result[name] = filled.to_numpy()
    return result


def _merge(
    lines: list[bytes], start: int, rare: list[int], frequent: Sequence[tuple[str, np.ndarray, Rows]], pieces: _Pieces
) -> None:
    """Adds a block's rows in the order of its lines: those of frequent forms, and the rest line by line."""
    ends = start + np.cumsum([len(line) + 1 for line in lines])
    kinds: dict[str, list[tuple[np.ndarray, Rows]]] = {}
    for kind, indices, rows in frequent:
        kinds.setdefault(kind, []).append((indices, rows))
    breaks, single = [], dict[str, list[tuple[int, Record]]]()
    others: list[tuple[int, Record]] = []
    for index in rare:
        record = _record(lines[index])
        if record is None:
            continue
        if record["kind"] in ("event", "sample"):
            others.append((index, record))
            if record.get("event") in AGAIN:
                breaks.append(index)
        else:
            single.setdefault(record["kind"], []).append((index, record))
    for kind, records in single.items():
        indices = np.array([index for index, _ in records])
        kinds.setdefault(kind, []).append((indices, rows_of([record for _, record in records])))
    edges, at = [*breaks, len(lines)], -1
    for edge in edges:
        for kind, parts in kinds.items():
            if (inner := _between(parts, at, edge)) is not None:
                pieces.rows(kind, inner)
        for index, record in others:
            if at < index <= edge:
                stop = int(ends[index]) - 1  # the last line of a file may have no end
                pieces.other(record, stop - len(lines[index]), stop)
        at = edge


def _between(parts: Sequence[tuple[np.ndarray, Rows]], after: int, before: int) -> Rows | None:
    """The rows whose lines lie between two others, in order."""
    chosen, places = [], []
    for indices, rows in parts:
        keep = (indices > after) & (indices < before)
        if keep.all():
            chosen.append(rows)
            places.append(indices)
        elif keep.any():
            columns = {name: column[keep] for name, column in rows.columns.items()}
            chosen.append(Rows(rows.steps[keep], rows.times[keep], columns))
            places.append(indices[keep])
    if not chosen:
        return None
    if len(chosen) == 1:
        return chosen[0]
    rows, order = joined(chosen), np.argsort(np.concatenate(places), kind="stable")
    return Rows(rows.steps[order], rows.times[order], {name: column[order] for name, column in rows.columns.items()})


def rows_of(records: Sequence[Record]) -> Rows:
    """Rows of parsed lines; lists and texts in them are no metrics."""
    names = dict.fromkeys(
        name
        for record in records
        for name, value in record.items()
        if name not in _NOT_METRICS and (value is None or _is_number(value))
    )
    columns = {
        name: np.array([_number(record[name]) if name in record else MISSING for record in records])
        for name in list(names)[:_MOST_METRICS]
    }
    steps = np.array([record["step"] for record in records], np.int64)
    return Rows(steps, np.array([_number(record.get("time")) for record in records]), columns)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: object) -> float:
    if value is None:
        return NOT_FINITE
    if not _is_number(value):
        return MISSING
    try:
        number = float(value)  # type: ignore[arg-type]  # _is_number has checked it
    except OverflowError:
        return NOT_FINITE
    return number if math.isfinite(number) else NOT_FINITE


def _record(line: bytes) -> Record | None:
    return parse_line(line.decode("utf-8", errors="replace"))
