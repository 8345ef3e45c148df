"""Files on disk: globs, line and byte ranges, fingerprints, the split of documents by a hash, domains by extension."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from capibara.core import limits
from capibara.core.types import UserError
from capibara.data.sources import plain
from capibara.storage import copies, packed, stores
from capibara.storage.store import Entry

SPLITS = ("train", "validation")
_LINES = (".jsonl", ".ndjson", ".json", ".txt")
_SPACES = np.frombuffer(b" \t\r\v\f", np.uint8)
_COPY_BYTES = 16 << 30  # largest corpus that is copied from a bucket for random access
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


def check_fraction(fraction: float) -> None:
    """Raises UserError unless the validation fraction is between 0 and 1."""
    if not 0 < fraction < 1:
        raise UserError(f"validation_fraction ({fraction}) must lie between 0 and 1: try 0.03")


def choose_files(
    name: str, files: Sequence[str], validation_files: Sequence[str], split: str, encoding: str = plain.UTF_8
) -> tuple[str, list[str], bool]:
    """The parameter that names the split's files, their paths, and whether all of their documents are in the split."""
    check_split(split)
    if validation_files and split == "validation":
        parameter, patterns = f"{name}.validation_files", validation_files
    else:
        parameter, patterns = f"{name}.files", files
    return parameter, expand(parameter, patterns, encoding), bool(validation_files)


def expand(name: str, patterns: Sequence[str], encoding: str = plain.UTF_8) -> list[str]:
    """The files that paths and globs match, without duplicates; `name` is the parameter, for errors.

    Files in a bucket are copied to this machine, for sources that need random access; of those that are compressed, or have
    another encoding, there are plain copies.
    """
    return plain.copies_of(name, expand_packed(name, patterns), encoding)


def expand_packed(name: str, patterns: Sequence[str]) -> list[str]:
    """As `expand`, with compressed files as they are."""
    if isinstance(patterns, str):
        patterns = (patterns,)
    if not patterns:
        raise UserError(f"{name} is empty: name at least one file or glob")
    paths: list[str] = []
    for pattern in patterns:
        if os.path.isdir(pattern):
            paths += inside(name, pattern)
            continue
        store = stores.of(pattern)
        entries = store.matching(pattern)
        if not entries:
            raise UserError(f"{name} ({pattern!r}) matches no file")
        paths += [entry.url for entry in entries] if store.has_local_paths else _copies(name, pattern, entries)
    return list(dict.fromkeys(paths))


def inside(name: str, folder: str) -> list[str]:
    """The files of a folder on this machine, and of the folders in it, of texts and JSON lines; logs what it leaves out.

    Raises:
      UserError: it has none.
    """
    endings = (*_LINES, *(f".{extension}" for extension in _DOMAINS))
    wanted = tuple(ending + packing for ending in endings for packing in ("", *packed.COMPRESSED))
    found: list[str] = []
    left_out: list[str] = []
    for above, folders, names in os.walk(folder):
        folders[:] = sorted(one for one in folders if not one.startswith("."))
        for one in sorted(names):
            path = os.path.join(above, one)
            is_read = one.lower().endswith(wanted) and not one.startswith(".") and os.path.isfile(path)
            (found if is_read else left_out).append(path)
    if not found:
        raise UserError(f"{name} ({folder!r}) is a folder without a file of texts or JSON lines: name files, or a glob")
    if left_out:
        line = "%s (%s): %d files read, %d left out for their name or kind, such as %s"
        logging.getLogger(__name__).warning(line, name, folder, len(found), len(left_out), left_out[0])
    return found


def _copies(name: str, pattern: str, entries: Sequence[Entry]) -> list[str]:
    """Copies the files that an address or glob matches in a bucket to this machine."""
    size = sum(entry.size for entry in entries)
    if size > _COPY_BYTES:
        most = _COPY_BYTES >> 30
        raise UserError(
            f"{name} ({pattern!r}) has {size / 2**30:.1f} GiB, at most {most} are copied to this machine: use "
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


def line_bounds(path: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Starts and stops (without line ends), and numbers from 1, of the lines of a file that are not blank.

    Raises:
      UserError: a line is longer than limits.LINE_BYTES, or it is not a regular file.
    """
    size = limits.check_file(path)
    if not size:
        nothing = np.zeros(0, np.int64)
        return nothing, nothing, nothing
    content = np.memmap(path, np.uint8, "r")
    block = 4 << 20
    found: list[tuple[np.ndarray, ...]] = []
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
        kept = stops > starts
        # A line of only spaces and a carriage return is blank, too.
        spaced = np.flatnonzero(kept)[np.isin(content[starts[kept]], _SPACES)]
        kept[[i for i in spaced.tolist() if not content[starts[i] : stops[i]].tobytes().strip()]] = False
        found.append((starts[kept], stops[kept], np.flatnonzero(kept) + lines + 1))
        first, lines = int(stops[-1]) + 1, lines + len(stops)
    starts, stops, numbers = (np.concatenate([columns[i] for columns in found]) for i in range(3))
    return starts, stops, numbers


def null_lines(path: str, starts: np.ndarray, stops: np.ndarray, fields: Sequence[str]) -> list[int]:
    """Which of a file's lines of JSON, by their index, are objects in which one of these fields is null."""
    if not fields or not len(starts):
        return []
    names = {json.dumps(field, ensure_ascii=is_ascii) for field in fields for is_ascii in (True, False)}
    pattern = b"(?:" + b"|".join(re.escape(name.encode()) for name in sorted(names)) + rb")\s*:\s*null"
    content = np.memmap(path, np.uint8, "r")
    places = [match.start() for match in re.finditer(pattern, content.data)]
    found = []
    for i in np.unique(np.searchsorted(starts, places, side="right") - 1).tolist():
        try:
            record = limits.parse_json(content[starts[i] : stops[i]].tobytes(), finite=False)
        except ValueError:  # the reader says why
            continue
        if isinstance(record, dict) and any(record.get(field, "") is None for field in fields):
            found.append(i)
    return found


def name_hashes(names: Sequence[str]) -> np.ndarray:
    """64-bit hashes of names, [N] uint64."""
    digests = b"".join(hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=8).digest() for name in names)
    return np.frombuffer(digests, np.uint64)


def split_by_hash(keys: np.ndarray, split: str, fraction: float, name: str, noun: str = "document") -> np.ndarray:
    """The indices of the documents of `split`, in order; each split gets at least one. `noun` names them in errors."""
    check_split(split)
    if len(keys) < 2:
        raise UserError(f"{name} has {len(keys)} {noun}: none can be held out, set validation files")
    held_out = keys < np.uint64(int(fraction * 2.0**64))
    held_out[np.argmin(keys)] = True
    held_out[np.argmax(keys)] = False
    return np.flatnonzero(held_out if split == "validation" else ~held_out)


def shown(paths: Sequence[str]) -> str:
    """The first path, and how many more there are, for a message."""
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


def excerpt(line: bytes) -> str:
    """The beginning of a line, quoted, for a message."""
    text = line[:60].decode("utf-8", errors="replace").strip()
    return repr(text + "..." if len(line) > 60 else text)
