"""Tables as files of JSON lines: Parquet and CSV files, and data sets of the Hugging Face Hub by their names."""

from __future__ import annotations

import csv
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from capibara.core import extras, limits
from capibara.core.types import UserError
from capibara.data.shards import parquet
from capibara.data.text import json_lines
from capibara.storage import outputs, stores
from capibara.storage.store import Entry

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?::([\w.-]+))?(?::([\w.\[\]%:-]+))?")
_JSON = (".jsonl", ".json", ".gz", ".zst", ".bz2", ".xz")
_TABLES = (".parquet", ".csv")
_EVERY = 10_000  # rows between two lines of the progress

Show = Callable[[str, str], None]


def with_tables(files: Sequence[str], folder: str, show: Show = lambda topic, detail: None) -> tuple[str, ...]:
    """Paths of data with tables written as JSON lines; what is no table stays.

    Args:
      files: paths, globs, or data sets of the Hub: OWNER/NAME, OWNER/NAME:SPLIT or OWNER/NAME:CONFIG:SPLIT. The values of a CSV
        file are texts.
      folder: where tables are written; what is there already is not written again.
      show: reports the progress.

    Raises:
      UserError: a table cannot be read, has no such split, or has values that JSON cannot hold.
    """
    return tuple(_as_lines(name, folder, show) for name in files)


def is_table(name: str) -> bool:
    """Whether a path or name is a table, which is read as JSON lines once it is written as such."""
    return name.lower().endswith(_TABLES) or _named(name) is not None


def files_of(name: str) -> list[str]:
    """The files of a table; of a data set of the Hub its name."""
    return [entry.url for entry in _entries(name)] if name.lower().endswith(_TABLES) else [name]


def _entries(name: str) -> Sequence[Entry]:
    if not (entries := stores.of(name).matching(name)):
        raise UserError(f"{name} does not exist: name a file, or a glob such as *{os.path.splitext(name)[1].lower()}")
    return entries


def _as_lines(name: str, folder: str, show: Show) -> str:
    """The file of JSON lines of a table; the name itself of what is none."""
    suffix = os.path.splitext(name)[1].lower()
    if suffix in _TABLES:
        entries = _entries(name)
        form, key = (_of_parquet if suffix == ".parquet" else _of_csv), " ".join(map(_version, entries))
        return _written(name, (row for entry in entries for row in form(entry)), key, folder, show)
    if (named := _named(name)) is None:
        return name
    show("reading", name)
    table = _of_hub(name, *named)
    return _written(name, table, f"{name} {table._fingerprint}", folder, show)


def _version(entry: Entry) -> str:
    """What a file's content is known by; of files on this machine their bytes, since copies of a run have other times."""
    if not stores.of(entry.url).has_local_paths:
        return repr(entry)
    with open(entry.url, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _written(name: str, rows: Iterable[Mapping[str, Any]], key: str, folder: str, show: Show) -> str:
    """The file with some rows: its name has a hash of the key, so that it is written once."""
    if not stores.of(folder).has_local_paths:
        raise UserError(
            f"{name} cannot be written into {folder}: name a run folder on this machine, or JSON lines as data"
        )
    readable = re.sub(r"[^\w.-]+", "-", name.rpartition("/")[2]).strip("-")
    path = os.path.join(folder, f"{readable}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.jsonl")
    if os.path.exists(path):
        return path
    os.makedirs(folder, exist_ok=True)
    count = 0
    with outputs.replacing(path) as partial, open(partial, "w", encoding="utf-8") as file:
        for count, row in enumerate(rows, 1):
            try:
                file.write(json_lines.line(count, row))
            except UserError as error:
                raise UserError(f"{name}: {error}") from None
            if count % _EVERY == 0:
                show("writing", f"{name}: {count:,} rows")
        if not count:
            raise UserError(f"{name} has no rows: name other data")
    return path


def _of_parquet(entry: Entry) -> Iterator[Mapping[str, Any]]:
    names = parquet.columns(entry)
    if len(set(names)) < len(names):
        raise UserError(f"{entry.url} has the columns {limits.shortened(names)}, must have each name once: rename one")
    rows = parquet.ParquetRows(block_bytes=1, columns=names)
    for start, stop in rows.blocks(entry):
        yield from (record for _, record in rows.records(entry, int(start), int(stop)) if isinstance(record, Mapping))


def _of_csv(entry: Entry) -> Iterator[Mapping[str, str]]:
    if not stores.of(entry.url).has_local_paths:
        raise UserError(f"{entry.url} is not on this machine: copy it here, or write it as Parquet")
    csv.field_size_limit(limits.LINE_BYTES)  # its own is 131,072, below the texts of books
    try:
        with open(entry.url, encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file, strict=True)
            names = next(rows, [])
            if len(set(names)) < len(names) or not all(names):
                raise UserError(
                    f"{entry.url} begins with {limits.shortened(names)}, must begin with a name for each column"
                )
            for row in filter(None, rows):
                if len(row) != len(names):
                    raise UserError(
                        f"{entry.url}:{rows.line_num} has {len(row)} values, must have {len(names)}: one for each column"
                    )
                yield dict(zip(names, row, strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{entry.url} is no CSV file in UTF-8 ({limits.cause(error)}): write it again") from None


def _named(name: str) -> tuple[str, str | None, str | None] | None:
    """The name on the Hub, configuration and split; None: it is no name, or there is such a path here."""
    match = _NAME.fullmatch(name)
    if match is None or name.endswith(_JSON) or os.path.lexists(name) or os.path.lexists(name.partition("/")[0]):
        return None
    path, first, second = match.groups()
    return (path, first, second) if second else (path, None, first)


def _of_hub(name: str, path: str, config: str | None, split: str | None) -> Any:
    """A split of a data set; where none is named `train`, or the only one."""
    datasets = extras.require("datasets", extra="hf", why=f"{name}, which is no file here, from the Hugging Face Hub")
    try:
        configs = datasets.get_dataset_config_names(path)
        config = config or _one_of("configurations", configs, "default", name, f"{path}:CONFIG:SPLIT")
        splits = datasets.get_dataset_split_names(path, config)
        if split is None:
            split = _one_of("splits", splits, "train", name, f"{path}:{config}:SPLIT")
        return datasets.load_dataset(path, config, split=split)
    except UserError:
        raise
    except Exception as error:  # pyarrow, fsspec, huggingface_hub and datasets raise many classes
        why = f"{type(error).__name__}: {limits.cause(error, 200)}"
        raise UserError(f"{name} is no file here, and cannot be read from the Hugging Face Hub ({why})") from None


def _one_of(kind: str, names: Sequence[str], usual: str, data: str, form: str) -> str:
    """The usual one of several names, or the only one; raises UserError if there is neither."""
    if usual in names or len(names) == 1:
        return usual if usual in names else names[0]
    raise UserError(f"{data} has the {kind} {', '.join(names)}: name one as {form}")
