"""Data of Python as JSON lines in the run folder, from which the command line resumes the run, too."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from capibara.core.types import UserError
from capibara.data.text import json_lines, splits
from capibara.storage import outputs, stores

Data = Any  # paths, dicts, texts, or a table: see `write_data`


def write_data(records: Data, folder: str, name: str = "data") -> tuple[str, ...]:
    """The files of JSON lines with some data.

    Args:
      records: a path, glob or folder of JSON lines, or several; dicts; texts; a `datasets.Dataset`; a frame of pandas or a table
        of Arrow. An iterator is read once.
      folder: where what is no file is written, as NAME-HASH.jsonl.
      name: of that file.

    Returns:
      The paths.

    Raises:
      UserError: a record is no dict or text, or JSON cannot hold it.
    """
    if isinstance(records, str | os.PathLike):
        return (os.path.expanduser(os.fspath(records)),)
    rows = _rows(records)
    first = next(rows, None)
    if first is None:
        raise UserError("the data is empty: give at least one record")
    if isinstance(first, os.PathLike) or isinstance(first, str) and _is_path(first):
        return tuple(os.path.expanduser(str(item)) for item in (first, *rows))
    text = "".join(json_lines.line(number, row) for number, row in enumerate(_chained(first, rows)))
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        near = text[max(0, error.start - 20) : error.start]
        raise UserError(f"the data has a lone surrogate, half a character, after {near!r}: leave it out") from None
    path = os.path.join(folder, f"{name}-{hashlib.sha256(content).hexdigest()[:12]}.jsonl")
    if not stores.of(folder).has_local_paths:
        raise UserError(
            f"the data cannot be written into {folder}: name a run folder on this machine, or files as data"
        )
    if not os.path.exists(path):
        os.makedirs(folder, exist_ok=True)
        outputs.save(path, text)
    return (path,)


def by_splits(records: Data, validation: Data) -> tuple[Data, Data]:
    """The training data and the validation data of a `datasets.DatasetDict`, or another mapping of splits; other data as it is.

    Args:
      records: the data.
      validation: chosen by the caller; None: the mapping's validation split, if it has one.

    Raises:
      UserError: several splits are for training or for validation, or none is for training.
    """
    if not isinstance(records, Mapping):
        return records, validation
    keys = [str(key) for key in records]
    of = {split: [key for key in keys if splits.named(key) is split] for split in splits.Split}
    train, held_out = of[splits.Split.TRAIN], of[splits.Split.VALIDATION]
    if not any(of.values()):
        return records, validation
    if len(train) != 1:
        raise UserError(f"the data has the splits {', '.join(keys)}: give one, such as data[{(train or keys)[0]!r}]")
    if validation is None and len(held_out) > 1:
        raise UserError(f"the data has the splits {', '.join(keys)}: give one as eval, such as data[{held_out[0]!r}]")
    if validation is None and held_out:
        validation = records[held_out[0]]
    if validation is None and (rest := [key for key in keys if key not in train]):
        line = "the split %s is read for training, and not %s: give one as eval, such as eval=data[%r]"
        logging.getLogger(__name__).warning(line, train[0], ", ".join(rest), rest[0])
    return records[train[0]], validation


def _chained(first: object, rest: Iterator[object]) -> Iterator[object]:
    yield first
    yield from rest


def _is_path(text: str) -> bool:
    """Whether a text among several is a path, and no text to train on."""
    return (
        len(text) < 4096
        and "\n" not in text
        and (os.path.exists(text) or text.endswith((".jsonl", ".jsonl.gz", ".json")))
    )


def _rows(records: Data) -> Iterator[object]:
    """The rows of a table or an iterable."""
    if hasattr(records, "to_pylist"):  # a table of Arrow
        return iter(records.to_pylist())
    if hasattr(records, "to_dict") and hasattr(records, "columns"):  # a frame of pandas
        return iter(records.astype(object).where(records.notna(), None).to_dict("records"))
    if isinstance(records, Mapping | set | frozenset) or not isinstance(records, Iterable):
        kind = type(records).__name__
        raise UserError(
            f"the data is a {kind}, must be a path or records: give a list of dicts, or a file of JSON lines"
        )
    return iter(records)
