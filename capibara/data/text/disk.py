"""Files on disk: globs, line and byte ranges, fingerprints, the split of documents by a hash, domains by extension."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from capibara.core import limits
from capibara.core.types import TryAgain, UserError
from capibara.data.text import folders, plain, splits
from capibara.data.text.folders import Member
from capibara.data.text.splits import Use
from capibara.storage import copies, packed, stores
from capibara.storage.store import Entry

SPLITS = ("train", "validation")
_SPACES = np.frombuffer(b" \t\r\v\f", np.uint8)
COPY_BYTES = 16 << 30  # largest corpus that is copied from a bucket for random access
_HASH_WHOLE_BYTES = 256 << 20  # corpora up to this size are fingerprinted by content, larger ones by size and time

# Domains by extension; any other extension is itself the name of the domain.
_DOMAINS = {
    **dict.fromkeys(("py", "pyi", "ipynb"), "python"),
    **dict.fromkeys(("js", "mjs", "cjs", "jsx"), "javascript"),
    **dict.fromkeys(("ts", "tsx"), "typescript"),
    **dict.fromkeys(("c", "h"), "c"),
    **dict.fromkeys(("cc", "cpp", "cxx", "hpp", "hh"), "cpp"),
    **dict.fromkeys(("sh", "bash"), "shell"),
    **dict.fromkeys(("md", "markdown"), "markdown"),
    **dict.fromkeys(("htm", "html"), "html"),
    **dict.fromkeys(("yml", "yaml"), "yaml"),
    "rs": "rust",
    "rb": "ruby",
    "kt": "kotlin",
}


class Kind(NamedTuple):
    """The files of a folder that are read.

    Attributes:
      noun: what they have, for errors.
      endings: of their names, before those of compression.
      has_splits: whether folders of them are data sets, whose names say which files are for training. Folders of texts, such
        as programs with their tests, are not.
    """

    noun: str
    endings: tuple[str, ...]
    has_splits: bool = False

    def has(self, name: str) -> bool:
        """Whether a file is one of them, by its name."""
        is_metadata = self.has_splits and name in splits.METADATA
        return packed.plain_name(name).endswith(self.endings) and not is_metadata


RECORDS = Kind("JSON lines", (".jsonl", ".ndjson", ".json"), has_splits=True)
TEXTS = Kind("texts or JSON lines", (*RECORDS.endings, ".txt", *(f".{extension}" for extension in _DOMAINS)))


def domain_of(path: str) -> str | None:
    """The domain of a file by its extension: "python" for x.py, "sql" for x.sql; None: it has none."""
    extension = os.path.splitext(path)[1][1:].lower()
    return _DOMAINS.get(extension, extension) or None


def fingerprint(paths: Sequence[str], names: Sequence[str], count: int, extra: bytes = b"") -> dict[str, Any]:
    """Identifies a set of files: a hash of names, sizes in bytes and `extra`, and the number of documents."""
    digest = hashlib.blake2b(extra, digest_size=8)
    sizes = [os.path.getsize(path) for path in paths]
    for path, name, size in zip(paths, names, sizes, strict=True):
        digest.update(f"{name}\0{size}\0".encode())
        if sum(sizes) <= _HASH_WHOLE_BYTES:
            with limits.opened(path) as file:
                while block := file.read(limits.MIB):
                    digest.update(block)
        else:
            digest.update(str(os.stat(path).st_mtime_ns).encode())
    return {"documents": count, "files": len(paths), "bytes": sum(sizes), "digest": digest.hexdigest()}


def check_split(split: str) -> None:
    """Raises UserError if there is no such split."""
    if split not in SPLITS:
        raise UserError(f"split ({split!r}) must be one of {', '.join(SPLITS)}")


def check_fraction(fraction: float, name: str) -> None:
    """Raises UserError unless the validation fraction of the source `name` is between 0 and 1."""
    if not 0 < fraction < 1:
        raise UserError(f"{name}.validation_fraction ({fraction}) must lie between 0 and 1: try 0.03")


class Files(NamedTuple):
    """The files of a split.

    Attributes:
      parameter: names them, for errors.
      paths: on this machine.
      is_explicit: whether all of their documents are in the split.
      left_out: what folders have besides.
    """

    parameter: str
    paths: list[str]
    is_explicit: bool
    left_out: int

    def counts(self) -> dict[str, Any]:
        """Their counts, by the fields of Counts; files without a byte are left out."""
        sizes = [os.path.getsize(plain.origin(path)) for path in self.paths]
        empty = sum(not os.path.getsize(path) for path in self.paths)
        return {"files": len(sizes) - empty, "bytes": sum(sizes), "files_left_out": self.left_out + empty}


def choose_files(
    name: str,
    files: Sequence[str],
    validation_files: Sequence[str],
    split: str,
    encoding: str = plain.UTF_8,
    kind: Kind = TEXTS,
) -> Files:
    """The files of a split; `kind` names those of a folder."""
    check_split(split)
    of_split = bool(validation_files) and split == "validation"
    parameter = f"{name}.validation_files" if of_split else f"{name}.files"
    held_out = [] if validation_files or not kind.has_splits else folders.held_out(parameter, _several(files), kind.has)
    if of_split:
        paths, left_out = listed(parameter, validation_files, kind, Use.VALIDATION)
        tell_overlap(name, files, validation_files, kind.has, lambda folder: kind.has_splits)
    elif held_out and split == "validation":
        paths, left_out = _of_members(parameter, held_out), 0
    else:
        paths, left_out = listed(parameter, files, kind)
    return Files(parameter, plain.copies_of(parameter, paths, encoding), bool(validation_files or held_out), left_out)


def tell_overlap(
    name: str,
    files: Sequence[str],
    validation_files: Sequence[str],
    is_read: Callable[[str], bool],
    has_splits: Callable[[str], bool],
) -> None:
    """Warns of files of the source `name` that are for training and for validation.

    `has_splits`: whether a folder is a data set with splits. Nothing is read or copied, and training files that are not on this
    machine, which only evaluates, are no mistake.
    """
    held_out = _addresses(validation_files, is_read, has_splits, Use.VALIDATION)
    local = [pattern for pattern in _several(files) if stores.of(pattern).has_local_paths]
    is_local = all(stores.of(path).has_local_paths for path in held_out)
    common = held_out.keys() & _addresses(local if is_local else files, is_read, has_splits, Use.TRAINING).keys()
    if common:
        line = "%s.validation_files and files have %d in common, such as %s: their loss is that of training documents"
        logging.getLogger(__name__).warning(line, name, len(common), min(held_out[address] for address in common))


def _addresses(
    patterns: Sequence[str], is_read: Callable[[str], bool], has_splits: Callable[[str], bool], use: Use
) -> dict[str, str]:
    """The files that patterns name, by their addresses without links; those that cannot be listed are none."""
    by_address: dict[str, str] = {}
    for pattern in _several(patterns):
        store, paths = stores.of(pattern), list[str]()
        with contextlib.suppress(UserError, TryAgain):
            if folders.is_folder(pattern):
                of_folder = use if has_splits(pattern) else Use.ALL
                paths = [member.path for member in folders.of_use("", pattern, is_read, of_folder)]
            else:
                paths = [entry.url for entry in store.matching(pattern)]
        by_address |= {os.path.realpath(path) if store.has_local_paths else path: path for path in paths}
    return by_address


def _several(patterns: Sequence[str]) -> Sequence[str]:
    return (patterns,) if isinstance(patterns, str) else patterns


def expand(name: str, patterns: Sequence[str], kind: Kind) -> list[str]:
    """The files that paths, folders and globs name, without duplicates, and plain copies of those that are compressed.

    Args:
      name: the parameter, for errors.
      patterns: what it names. Files in a bucket are copied to this machine, for sources that need random access.
      kind: the files of a folder that are read.
    """
    return plain.copies_of(name, listed(name, patterns, kind)[0])


def listed(name: str, patterns: Sequence[str], kind: Kind, use: Use = Use.TRAINING) -> tuple[list[str], int]:
    """As `expand`, with compressed files as they are; and how much folders have besides."""
    if not patterns:
        raise UserError(f"{name} is empty: name at least one file or glob")
    paths: list[str] = []
    left_out = 0
    for pattern in _several(patterns):
        store = stores.of(pattern)
        if folders.is_folder(pattern):
            members, besides = folders.inside(name, pattern, kind.has, kind.noun, use if kind.has_splits else Use.ALL)
            left_out += besides
        else:
            is_local = store.has_local_paths
            members = [Member(entry.url, entry.url, None if is_local else entry) for entry in store.matching(pattern)]
        if not members:
            raise UserError(_no_file(name, pattern))
        paths += _of_members(name, members)
    return list(dict.fromkeys(paths)), left_out


def _of_members(name: str, members: Sequence[Member]) -> list[str]:
    """The paths on this machine, to which files in a bucket are copied."""
    entries = [member.entry for member in members if member.entry is not None]
    local = [member.path for member in members if member.entry is None]
    return list(dict.fromkeys([*local, *(_copies(name, entries) if entries else [])]))


def _no_file(name: str, pattern: str) -> str:
    if os.path.lexists(pattern):
        fault = "is a link to nothing" if not os.path.exists(pattern) else "is no regular file"
        return f"{name} ({pattern!r}) {fault}: name a file, a folder or a glob"
    return f"{name} ({pattern!r}) matches no file"


def _copies(name: str, entries: Sequence[Entry]) -> list[str]:
    """Copies files in a bucket to this machine."""
    size = sum(entry.size for entry in entries)
    if size > COPY_BYTES:
        most = COPY_BYTES >> 30
        raise UserError(
            f"{name} ({shown([entry.url for entry in entries])}) has {size / 2**30:.1f} GiB, at most {most} are copied to this machine: use "
            "@ShardedSource(), which streams the files"
        )
    return copies.local_files(entries)


def line_ranges(path: str, target_bytes: int) -> list[tuple[int, int]]:
    """Byte ranges of about `target_bytes` that end at line ends or, in a file without lines, between characters."""
    size = limits.check_file(path)
    ranges, start = [], 0
    with limits.opened(path) as file:
        while start < size:
            stop = min(start + target_bytes, size)
            if stop < size:
                file.seek(stop)
                ahead = file.read(target_bytes)
                newline = ahead.find(b"\n")
                if newline >= 0:
                    stop += newline + 1
                else:
                    while stop < size and ahead and ahead[0] & 0xC0 == 0x80:
                        stop, ahead = stop + 1, ahead[1:]
            ranges.append((start, stop))
            start = stop
    return ranges


def line_bounds(path: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Starts and stops (without line ends), and numbers from 1, of the lines of a file that are not blank; and how many are.

    Raises:
      UserError: a line is longer than limits.LINE_BYTES, or it is not a regular file.
    """
    size = limits.check_file(path)
    if not size:
        nothing = np.zeros(0, np.int64)
        return nothing, nothing, nothing, 0
    content = np.memmap(path, np.uint8, "r")
    block = 4 << 20
    columns_of_blocks: list[tuple[np.ndarray, ...]] = []
    first, lines = 0, 0  # start of the line in which the current block ends, and the number of lines before it
    for begin in range(0, size, block):
        stops = np.flatnonzero(content[begin : begin + block] == 0x0A) + begin
        if begin + block >= size and (not len(stops) or stops[-1] != size - 1):
            stops = np.append(stops, size)
        if not len(stops):
            limits.check_line(min(begin + block, size) - first, f"{path}:{lines + 1}")
            continue
        starts = np.concatenate([[first], stops[:-1] + 1])
        longest = int(np.argmax(stops - starts))
        limits.check_line(int(stops[longest] - starts[longest]), f"{path}:{lines + longest + 1}")
        retained = stops > starts
        # A line of only spaces and a carriage return is blank, too.
        spaced = np.flatnonzero(retained)[np.isin(content[starts[retained]], _SPACES)]
        retained[[i for i in spaced.tolist() if not content[starts[i] : stops[i]].tobytes().strip()]] = False
        columns_of_blocks.append((starts[retained], stops[retained], np.flatnonzero(retained) + lines + 1))
        first, lines = int(stops[-1]) + 1, lines + len(stops)
    starts, stops, numbers = (np.concatenate([columns[i] for columns in columns_of_blocks]) for i in range(3))
    return starts, stops, numbers, lines - len(starts)


def null_lines(path: str, starts: np.ndarray, stops: np.ndarray, fields: Sequence[str]) -> list[int]:
    """Which of a file's lines of JSON, by their index, are objects in which one of these fields is null."""
    if not fields or not len(starts):
        return []
    names = {json.dumps(field, ensure_ascii=is_ascii) for field in fields for is_ascii in (True, False)}
    pattern = b"(?:" + b"|".join(re.escape(name.encode()) for name in sorted(names)) + rb")\s*:\s*null"
    content = np.memmap(path, np.uint8, "r")
    places = [match.start() for match in re.finditer(pattern, content.data)]
    result = []
    for i in np.unique(np.searchsorted(starts, places, side="right") - 1).tolist():
        try:
            record = limits.parse_json(content[starts[i] : stops[i]].tobytes(), finite=False)
        except ValueError:  # the reader says why
            continue
        if isinstance(record, dict) and any(record.get(field, "") is None for field in fields):
            result.append(i)
    return result


def name_hashes(names: Sequence[str]) -> np.ndarray:
    """64-bit hashes of names, [N] uint64."""
    digests = b"".join(hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=8).digest() for name in names)
    return np.frombuffer(digests, np.uint64)


def split_by_hash(
    keys: np.ndarray, split: str, fraction: float, name: str, noun: str = "document", instead: str = "validation_files"
) -> np.ndarray:
    """The indices of the documents of `split`, in order; each split gets at least one.

    Args:
      keys: [N] uint64, a hash of each document.
      split: "train" or "validation".
      fraction: of the documents that is held out.
      name: the parameter that names the documents, for errors.
      noun: what they are, for errors.
      instead: the parameter that names documents for validation.

    Raises:
      UserError: there are not two documents.
    """
    check_split(split)
    if len(keys) < 2:
        raise UserError(f"{name} has {len(keys)} {noun}: none can be held out, set {name.partition('.')[0]}.{instead}")
    held_out = keys < np.uint64(int(fraction * 2.0**64))
    held_out[np.argmin(keys)] = True
    held_out[np.argmax(keys)] = False
    return np.flatnonzero(held_out if split == "validation" else ~held_out)


def kind(value: object) -> str:
    """The kind of a value as JSON names it, for errors."""
    kinds = {
        bool: "a truth value",
        str: "a string",
        list: "a list",
        dict: "an object",
        int: "a number",
        float: "a number",
    }
    return "null" if value is None else kinds.get(type(value), type(value).__name__)


def shown(paths: Sequence[str]) -> str:
    """The first path, and how many more there are, for a message."""
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


def excerpt(line: bytes) -> str:
    """The beginning of a line, quoted, for a message."""
    text = line[:60].decode("utf-8", errors="replace").strip()
    return repr(text + "..." if len(line) > 60 else text)
