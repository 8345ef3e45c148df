"""Reads the lines and JSON records of input files, plain or compressed; what cannot be read is counted and skipped."""

from __future__ import annotations

import contextlib
import glob
import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from capibara.builders.files import fingerprints
from capibara.builders.files.problems import Kind, Problems
from capibara.core import limits
from capibara.core.types import UserError
from capibara.data.text import disk, folders
from capibara.storage import packed, stores

_BOM, _WIDE = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")


class Line(NamedTuple):
    """A line of text, without its end.

    Attributes:
      path: the file, named as the user named it.
      number: from 1.
      text: the line.
    """

    path: str
    number: int
    text: str


class Record(NamedTuple):
    """A JSON object.

    Attributes:
      path: the file, named as the user named it.
      number: its line, or its number in the list of a .json file, from 1.
      value: the object.
    """

    path: str
    number: int
    value: dict[str, Any]


def expand(
    patterns: Sequence[str], endings: Sequence[str], problems: Problems, without: str | None = None
) -> list[str]:
    """The input files that the user named, sorted, without duplicates.

    Args:
      patterns: files, globs and folders; files in a bucket are copied to this machine.
      endings: the endings that files of a folder must have, such as ".jsonl"; compressed ones (.gz, .zst) are found, too.
      problems: counts what is left out, as `local_files` does.
      without: a folder whose files are no input, such as that of the output; None: there is none.

    Raises:
      UserError: a pattern matches no file, or there is none that can be read.
    """
    local = [pattern for pattern in patterns if stores.of(pattern).has_local_paths]
    remote = [pattern for pattern in patterns if pattern not in local]
    named = local + (disk.listed("IN", remote, disk.TEXTS)[0] if remote else [])
    sizes = local_files(named, endings, problems, without)
    if not sizes:
        raise nothing_to_read(problems)
    return sorted(sizes)


def nothing_to_read(problems: Problems) -> UserError:
    """The error of an input without a file that can be read."""
    first = next((f" ({problem})" for problem in problems), "")
    return UserError(f"IN has no file that can be read{first}: name at least one file, folder or glob")


def local_files(
    patterns: Collection[str], endings: Sequence[str], problems: Problems, without: str | None = None
) -> dict[str, int]:
    """The sizes in bytes of the files on this machine that paths, folders and globs name, by path.

    Args:
      patterns: what the user named.
      endings: as for `expand`.
      problems: counts what is left out: files of a folder with other endings or hidden, links to folders, files that are
        empty or cannot be opened.
      without: as for `expand`.

    Raises:
      UserError: a pattern matches no file.
    """
    besides = {*patterns, *([os.path.realpath(without)] if without else [])}
    paths = {path for pattern in patterns for path in _named(pattern, endings, besides, problems)}
    if without is not None and paths:
        above = os.path.join(os.path.realpath(without), "")
        paths = {path for path in paths if not os.path.realpath(path).startswith(above)}
        if not paths:
            raise UserError(f"IN ({', '.join(patterns)}) has no file outside of --out ({without}): name another folder")
    sizes = {}
    for path in sorted(paths):
        try:
            path.encode()
            size = fingerprints.check_file(path)
        except UnicodeEncodeError:
            problems.add(ascii(path), 0, Kind.UNREADABLE, "has a name that is no text in UTF-8: rename it")
        except UserError as error:  # a pipe, a socket, a device, a link to nothing, or no permission
            problems.add(path, 0, Kind.UNREADABLE, str(error).removeprefix(f"{path} "))
        else:
            if size:
                sizes[path] = size
            else:
                problems.add(path, 0, Kind.EMPTY, "has no byte")
    return sizes


def _named(pattern: str, endings: Sequence[str], besides: Collection[str], problems: Problems) -> list[str]:
    """The files that a path, folder or glob on this machine names; what a folder has besides is counted in `problems`."""
    if os.path.isdir(pattern):
        files = _inside(pattern, endings, besides, problems)
        if not files:
            raise UserError(f"IN ({pattern!r}) has no file that ends in {', '.join(endings)}: name another folder")
        return files
    if os.path.lexists(pattern):
        return [pattern]
    matches = sorted(glob.glob(pattern, recursive=True))
    if not matches:
        raise UserError(f"IN ({pattern!r}) matches no file")
    files = [path for path in matches if not os.path.isdir(path)]
    if "**" not in pattern:  # else what is in them is matched, too
        for path in matches:
            if os.path.isdir(path):
                problems.add(path, 0, Kind.LEFT_OUT, "is a folder that a glob matches: name it by itself")
    return files


def _inside(folder: str, endings: Sequence[str], besides: Collection[str], problems: Problems) -> list[str]:
    """The files of a folder and the folders in it that end as they must; those `besides` are named by themselves."""

    def refuse(error: OSError) -> None:
        problems.add(str(error.filename), 0, Kind.UNREADABLE, f"cannot be read ({error.strerror})")

    def leave_out(path: str, why: str) -> None:
        why += f" than {', '.join(endings)}" if why.endswith("ending") else ""
        problems.add(path, 0, Kind.LEFT_OUT, f"{why}: name it by itself")

    return folders.walked(
        folder, lambda name: packed.plain_name(name).endswith(tuple(endings)), leave_out, refuse, besides
    )


def common_folder(paths: Sequence[str]) -> str:
    """The deepest folder, absolute, in which all files are."""
    return os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])


def lines(path: str, problems: Problems, *, most: int = limits.LINE_BYTES) -> Iterator[Line]:
    """The lines of a text file, in their order, also of one that is compressed by gzip or zstd.

    A line ends at a line feed; a carriage return before it and a byte order mark are dropped. Empty lines stay. A
    line that is no text in UTF-8, has a NUL or is too long is counted in `problems` and skipped. So is the rest of a file
    that is cut short or corrupted, with the line in which it ends.

    Args:
      path: the file; in memory is at most one line and a few blocks of it.
      problems: counts what is skipped.
      most: the largest length of a line in bytes.
    """
    for number, content, _ in _raw_lines(path, problems, most):
        if (text := _text(path, number, content, problems)) is not None:
            yield Line(path, number, text)


def records(path: str, problems: Problems, *, most: int = limits.LINE_BYTES) -> Iterator[Record]:
    """The JSON objects of a file: one a line, or, where its name ends in .json, a list of them or a single one.

    Everything else is counted in `problems` and skipped, as in `lines`; blank lines are not counted. A .json file is read
    whole, unless it has a JSON object in each line.

    Args:
      path: the file.
      problems: counts what is skipped.
      most: the largest length of a line in bytes.
    """
    if _is_document(path):
        yield from _of_document(path, problems, most)
    else:
        yield from _of_lines(path, problems, most)


def kind_of(error: ValueError, is_cut: bool) -> Kind:
    """The kind of a problem of `limits.parse_json`; `is_cut`: the text begins like an object, but has no end."""
    if "no text in UTF-8" in str(error) or "lone surrogate" in str(error):
        return Kind.ENCODING
    return Kind.TRUNCATED if is_cut else Kind.MALFORMED


def _of_lines(path: str, problems: Problems, most: int) -> Iterator[Record]:
    for number, content, is_ended in _raw_lines(path, problems, most, has_empty=False):
        if not content or content.isspace():
            continue
        try:
            value = limits.parse_json(content)
        except ValueError as error:
            is_cut = not is_ended and content.lstrip().startswith(b"{")
            problems.add(path, number, kind_of(error, is_cut), limits.cause(error))
            continue
        if isinstance(value, dict):
            yield Record(path, number, value)
        else:
            problems.add(path, number, Kind.MALFORMED, f"is {_name(value)}, must be a JSON object")


def _of_document(path: str, problems: Problems, most: int) -> Iterator[Record]:
    result = Problems()
    content = _whole(path, result)
    if content is None:
        if result.counts.get(Kind.TOO_LARGE) and _first_line_is_an_object(path):
            yield from _of_lines(path, problems, most)
        else:
            problems.merge(result)
        return
    try:
        value = limits.parse_json(content)
    except ValueError as error:
        if _first_line_is_an_object(path):
            yield from _of_lines(path, problems, most)
        else:
            line = error.lineno if isinstance(error, json.JSONDecodeError) else 0
            is_cut = not content.rstrip().endswith((b"]", b"}")) and content.lstrip().startswith((b"[", b"{"))
            problems.add(path, line, kind_of(error, is_cut), limits.cause(error))
        return
    for number, item in enumerate(value if isinstance(value, list) else [value], 1):
        if isinstance(item, dict):
            yield Record(path, number, item)
        else:
            problems.add(path, number, Kind.MALFORMED, f"item {number} is {_name(item)}, must be a JSON object")


def _is_document(path: str) -> bool:
    return packed.plain_name(path).endswith(".json")


def _first_line_is_an_object(path: str) -> bool:
    """Whether a .json file has JSON lines: its first line is an object, and there is another line."""
    result = (content for _, content, _ in _raw_lines(path, Problems(), limits.LINE_BYTES) if content.strip())
    first, second = next(result, None), next(result, None)
    if first is None or second is None:
        return False
    try:
        return isinstance(limits.parse_json(first), dict)
    except ValueError:
        return False


def _whole(path: str, problems: Problems) -> bytes | None:
    """The content of a file that is read whole; None: it is counted in `problems`."""
    blocks, size = [], 0
    for block in _blocks(path, problems, lambda: 0):
        size += len(block)
        if size > limits.TEXT_BYTES:
            problems.add(path, 0, Kind.TOO_LARGE, f"more than {limits.TEXT_BYTES:,} bytes: make it a .jsonl file")
            return None
        blocks.append(block)
    return None if problems else b"".join(blocks)


def _name(value: object) -> str:
    names = {type(None): "null", list: "a list", str: "a text", bool: "a truth value"}
    return names.get(type(value), "a number")


def _text(path: str, number: int, content: bytes, problems: Problems) -> str | None:
    """The text of a line; None: it is counted in `problems`."""
    if b"\0" in content:
        problems.add(path, number, Kind.ENCODING, f"has a NUL byte at byte {content.index(0)}: it is no text")
        return None
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        message = f"no text in UTF-8: {error.reason} at byte {error.start} of the line"
        problems.add(path, number, Kind.ENCODING, message)
        return None


# --- bytes -----------------------------------------------------------------------------------------------------------


def _raw_lines(
    path: str, problems: Problems, most: int, *, has_empty: bool = True
) -> Iterator[tuple[int, bytes, bool]]:
    """The number from 1 and bytes of each line that is short enough, and whether it has a line end.

    The last line of a file that is cut short or corrupted is not yielded; without `has_empty` few of the empty ones are.
    """
    started: list[bytes] = []
    number, size = 0, 0  # started has the blocks of an unfinished line, none if it is too long; size: its bytes
    result = Problems()
    for block in _blocks(path, result, lambda: number + 1):
        head, *rest = block.split(b"\n")
        size += len(head)
        started = [*started, head] if size <= most else []
        if not rest:
            continue
        *middle, last = rest
        number += 1
        if size > most:
            problems.add(path, number, Kind.TOO_LONG, f"more than {most:,} bytes: split the line")
        else:
            yield number, b"".join(started).removeprefix(_BOM).removesuffix(b"\r"), True
        for line in middle:
            number += 1
            if len(line) > most:
                problems.add(path, number, Kind.TOO_LONG, f"more than {most:,} bytes: split the line")
            elif line or has_empty:
                yield number, line.removeprefix(_BOM).removesuffix(b"\r"), True
        started, size = [last], len(last)
    problems.merge(result)
    if size > most:
        problems.add(path, number + 1, Kind.TOO_LONG, f"more than {most:,} bytes: split the line")
    elif size and not result:
        yield number + 1, b"".join(started).removeprefix(_BOM).removesuffix(b"\r"), False


def _blocks(path: str, problems: Problems, line: Callable[[], int]) -> Iterator[bytes]:
    """The unpacked content of a file; a failure is counted in `problems`, at the line that `line` returns."""
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(limits.opened(path))
        except (UserError, FileNotFoundError) as error:
            message = "does not exist" if isinstance(error, FileNotFoundError) else str(error).removeprefix(f"{path} ")
            problems.add(path, 0, Kind.UNREADABLE, message)
            return
        try:
            if file.read(2) in _WIDE:
                problems.add(path, line(), Kind.ENCODING, "is no text in UTF-8 but in UTF-16: convert it")
                return
            file.seek(0)
            yield from packed.blocks(file, path)
        except packed.Unreadable as failure:
            problems.add(path, line(), failure.kind, str(failure))
        except OSError as error:
            problems.add(path, line(), Kind.UNREADABLE, f"cannot be read: {error.strerror or limits.cause(error)}")
