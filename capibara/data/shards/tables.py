"""Tables as files of JSON lines: Parquet, CSV and Arrow files, folders of them, and data sets of the Hugging Face Hub."""

from __future__ import annotations

import csv
import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from capibara.core import extras, limits
from capibara.core.types import UserError
from capibara.data.shards import parquet
from capibara.data.text import disk, folders, json_lines, splits
from capibara.data.text.splits import Split, Use
from capibara.storage import outputs, stores
from capibara.storage.store import Entry

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?::([\w.-]+))?(?::([\w.\[\]%:-]+))?")
_JSON = (".jsonl", ".json", ".gz", ".zst", ".bz2", ".xz")
_TABLES = (".parquet", ".csv", ".arrow")
_SAVED = ("dataset_dict.json", "state.json")  # one is in a folder that datasets' save_to_disk has written
_EVERY = 10_000  # rows between two lines of the progress
_ROWS = 1000  # that are values of Python at a time

Show = Callable[[str, str], None]


def with_tables(
    files: Sequence[str], folder: str, show: Show = lambda topic, detail: None, use: Use = Use.TRAINING
) -> tuple[str, ...]:
    """Paths of data with tables written as JSON lines; what is no table stays.

    Args:
      files: paths, globs, folders, or data sets of the Hub: OWNER/NAME, OWNER/NAME:SPLIT or OWNER/NAME:CONFIG:SPLIT. The values of
        a CSV file are texts.
      folder: where tables are written; what is there already is not written again.
      show: reports the progress.
      use: what folders are read for.

    Raises:
      UserError: a table cannot be read, has no such split, or has values that JSON cannot hold.
    """
    return tuple(path for name in files for path in _as_lines(name, folder, show, use))


def held_out(files: Sequence[str], folder: str, show: Show = lambda topic, detail: None) -> tuple[str, ...]:
    """The validation splits of the folders of tables among training files, as JSON lines; arguments as for `with_tables`."""
    result: list[str] = []
    for name in filter(is_folder, files):
        if _is_saved(name):
            result += [
                _of_table(_title(name, key), table, folder, show)
                for key, table in _saved(name).items()
                if splits.named(key) is Split.VALIDATION
            ]
        else:
            result += [_of_file(member.path, folder, show) for member in folders.held_out(name, [name], _is_file)]
    return tuple(result)


def is_table(name: str) -> bool:
    """Whether a path or name is a table, which is read as JSON lines once it is written as such."""
    return name.lower().endswith(_TABLES) or is_folder(name) or _named(name) is not None


def is_folder(name: str) -> bool:
    """Whether a path is a folder of tables on this machine: one of `save_to_disk`, or one without JSON lines."""
    if not os.path.isdir(name):
        return False
    return _is_saved(name) or bool(_below(name, _is_file)) and not _below(name, disk.RECORDS.has)


def files_of(name: str, use: Use = Use.EVALUATION) -> list[str]:
    """The files of a table, of a folder those that are read; of other data sets the name."""
    if os.path.isdir(name) and not _is_saved(name):
        return [member.path for member in folders.of_use(name, name, _is_file, use)]
    return [entry.url for entry in _entries(name)] if name.lower().endswith(_TABLES) else [name]


def _is_file(name: str) -> bool:
    return name.lower().endswith(_TABLES)


def _is_saved(name: str) -> bool:
    """Whether datasets' save_to_disk has written a folder."""
    return any(os.path.isfile(os.path.join(name, file)) for file in _SAVED) and bool(
        _below(name, lambda file: file.endswith(".arrow"))
    )


def _below(name: str, is_read: Callable[[str], bool]) -> list[str]:
    return folders.walked(name, is_read, lambda path, why: None, lambda error: None)


def _entries(name: str) -> Sequence[Entry]:
    if not (entries := stores.of(name).matching(name)):
        raise UserError(f"{name} does not exist: name a file, or a glob such as *{os.path.splitext(name)[1].lower()}")
    return entries


def _as_lines(name: str, folder: str, show: Show, use: Use) -> list[str]:
    """The files of JSON lines of a table; the name itself of what is none."""
    if is_folder(name):
        if _is_saved(name):
            tables = _saved(name)
            return [_of_table(_title(name, key), tables[key], folder, show) for key in _chosen(name, [*tables], use)]
        members, _ = folders.inside("the data", name, _is_file, "tables", use)
        return [_of_file(member.path, folder, show) for member in members]
    if _is_file(name):
        return [_of_file(name, folder, show)]
    if (named := _named(name)) is None:
        return [name]
    show("reading", name)
    return [_of_table(name, _of_hub(name, *named), folder, show)]


def _of_file(name: str, folder: str, show: Show) -> str:
    entries, form = _entries(name), _FORMS[os.path.splitext(name)[1].lower()]
    key = " ".join(map(_version, entries))
    return _written(name, (row for entry in entries for row in form(entry)), key, folder, show)


def _of_table(name: str, table: Any, folder: str, show: Show) -> str:
    """The file of a `datasets.Dataset`."""
    return _written(name, table, f"{name} {table._fingerprint}", folder, show)


def _chosen(name: str, keys: Sequence[str], use: Use) -> list[str]:
    """The splits that are read of a saved data set."""
    labels = {key: splits.named(key) for key in keys}
    split = next((split for split in use.value if split in labels.values()), None)
    result = [key for key in keys if split is not None and labels[key] is split]
    is_of_others = not result and (len(keys) > 1 or use is Use.TRAINING and labels[keys[0]] is not None)
    if is_of_others or use is Use.TRAINING and len(result) > 1:  # which may have other columns
        raise UserError(f"{name} has the splits {', '.join(keys)}: name the folder of one, such as {name}/{keys[0]}")
    if result and len(result) < len(keys):
        others = ", ".join(key for key in keys if key not in result)
        line = "%s: the split %s is read for %s, and not %s: name the folder of a split to choose it"
        logging.getLogger(__name__).warning(line, name, ", ".join(result), use.name.lower(), others)
    return result or list(keys)


def _saved(name: str) -> dict[str, Any]:
    """The splits of a folder of `save_to_disk`; the key of a data set without splits is empty."""
    datasets = extras.require("datasets", extra="hf", why=f"{name}, which datasets has saved")
    try:
        result = datasets.load_from_disk(name)
    except Exception as error:  # pyarrow and datasets raise many classes
        why = f"{type(error).__name__}: {limits.cause(error, 200)}"
        raise UserError(f"{name} is no data set that can be read ({why}): save it again") from None
    return dict(result) if isinstance(result, dict) else {"": result}


def _title(name: str, key: str) -> str:
    return f"{name}:{key}" if key else os.path.normpath(name)


def _version(entry: Entry) -> str:
    """What a file's content is known by; of files on this machine their bytes, since copies of a run have other times."""
    if not stores.of(entry.url).has_local_paths:
        return repr(entry)
    with open(entry.url, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _written(name: str, rows: Iterable[Mapping[str, object]], key: str, folder: str, show: Show) -> str:
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


def _of_arrow(entry: Entry) -> Iterator[Mapping[str, Any]]:
    """Rows of a file of Arrow's stream or file format, as datasets and pyarrow write them."""
    import pyarrow as pa

    if not stores.of(entry.url).has_local_paths:
        raise UserError(f"{entry.url} is not on this machine: copy it here, or write it as Parquet")
    try:
        with pa.memory_map(entry.url) as source:
            is_file = source.read(6) == b"ARROW1"
            source.seek(0)
            reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
            batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
            for batch in batches:
                for start in range(0, batch.num_rows, _ROWS):
                    yield from batch.slice(start, _ROWS).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{entry.url} is no Arrow file ({limits.cause(error)}): write it again") from None


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


_FORMS: Mapping[str, Callable[[Entry], Iterator[Mapping[str, Any]]]] = {
    ".parquet": _of_parquet,
    ".csv": _of_csv,
    ".arrow": _of_arrow,
}


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
