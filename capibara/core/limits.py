"""Limits on untrusted files, checked before they are read: type, size, names, JSON, archives, regular expressions.

Every reader of downloaded files checks them here first, so that a hostile file is refused by what it declares, before it
costs time or memory. The message of a Refused has no file name: the reader adds it. Imports only the standard library,
because every verb loads this module.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import math
import os
import re
import stat
import zipfile
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, Protocol

from capibara.core.types import UserError

MIB = 1 << 20
TEXT_BYTES = 64 * MIB  # of a file that is read whole, such as JSON; the largest known tokenizer.json has 34 MB
SMALL_BYTES = 4 * MIB  # of a configuration file
LINE_BYTES = 32 * MIB  # of a line of a JSON lines file
DEPTH = 128  # nesting of JSON; serde's default
VALUES = 4_000_000  # in a JSON file, counted by its brackets, commas and colons
NUMBER_CHARACTERS = 400  # tokenizers' model_max_length is 10 ** 30, a float has at most 310 digits before its point
_BOM = codecs.BOM_UTF8
_SQUARE, _NO_BRACKETS = bytes.maketrans(b"{}", b"[]"), bytes({*range(256)} - {*b"[]{}"})
_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_PAIRS = re.compile(rb"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")  # and escaped backslashes
_DIRECTORY_BYTES, _TAIL_BYTES = 16 * MIB, 1 << 17  # of a zip archive: some 150,000 members; its comment and end

Json = Any  # a parsed JSON value: the reader checks the types that it needs


class Refused(Exception):
    """The content of a file exceeds a limit; the message names it and is to follow the file's name."""


# --- files -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(path: str | os.PathLike[str], most: int | None = None) -> Iterator[BinaryIO]:
    """Opens a regular file for reading; never blocks on a pipe.

    Args:
      path: the file.
      most: the largest size in bytes; None: any.

    Raises:
      UserError: it is a pipe, device or folder, is too large, or is a link to itself.
      FileNotFoundError: it does not exist.
    """
    shown = os.fspath(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(shown) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in its name
        cause = getattr(error, "strerror", None) or error
        raise UserError(f"{shown!r} cannot be opened ({cause}): it must be a regular file") from None
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode):
        os.close(descriptor)
        raise UserError(f"{shown} is {_kind(about.st_mode)}, must be a regular file: put a copy in its place")
    with open(descriptor, "rb") as file:
        if most is not None and about.st_size > most:
            raise UserError(f"{shown} has {about.st_size:,} bytes, must have at most {most:,}: name another file")
        yield file


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    return next((name for is_kind, name in kinds if is_kind(mode)), "a device")


def check_file(path: str | os.PathLike[str], most: int | None = None) -> int:
    """Checks a file that a library opens by its name, and returns its size in bytes.

    Raises:
      OSError, UserError: as `opened`; or its size is 0 and it is not empty, or cannot be read, such as files in /proc.
    """
    with opened(path, most) as file:
        size = os.fstat(file.fileno()).st_size
        if size:
            return size
        try:
            is_empty = not file.read(1)
        except OSError as error:
            raise UserError(f"{os.fspath(path)} cannot be read ({error.strerror}): copy it again") from None
    if not is_empty:
        raise UserError(f"{os.fspath(path)} has more bytes than its size of 0 says: put a copy in its place")
    return 0


def read(path: str | os.PathLike[str], most: int = TEXT_BYTES) -> bytes:
    """The bytes of a regular file; raises as `opened`, and UserError where it cannot be read."""
    with opened(path, most) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            content = file.read(size + 1)
        except OSError as error:
            raise UserError(f"{os.fspath(path)} cannot be read ({error.strerror}): copy it again") from None
    if len(content) > size:  # such as files in /proc
        raise UserError(f"{os.fspath(path)} has more bytes than its size of {size:,} says: put a copy in its place")
    return content


def read_text(path: str | os.PathLike[str], most: int = SMALL_BYTES) -> str:
    """The text of a regular file; raises as `read`, and UserError where it is no text in UTF-8."""
    try:
        return read(path, most).decode()
    except UnicodeDecodeError as error:
        shown = os.fspath(path)
        raise UserError(f"{shown} is no text in UTF-8 ({error.reason} at byte {error.start}): copy it again") from None


def inside(folder: str, name: str, of: str, *, links: bool = True) -> str:
    """The path of a file in `folder` that another file refers to by name.

    Args:
      folder: the folder that must contain it.
      name: its name, as the other file says it.
      of: the file that refers to it, for the message.
      links: whether symbolic links may lead out of the folder, as in the cache of the Hugging Face hub.

    Raises:
      UserError: the name is absolute, leads out of the folder, or is not a valid file name.
    """
    parts = name.replace("\\", "/").split("/")
    if not _is_name(name) or os.path.isabs(name) or os.pardir in parts or "://" in name:
        raise UserError(f"{of} names the file {shortened(name)}, must be a name in its own folder: copy it again")
    path = os.path.join(folder, name)
    if not links:
        real, root = os.path.realpath(path), os.path.realpath(folder)
        if os.path.commonpath([real, root]) != root:
            raise UserError(
                f"{of} names {shortened(name)}, a link out of its folder to {real}: put a copy in its place"
            )
    return path


def _is_name(name: str) -> bool:
    """Whether it is valid as a file name."""
    try:
        return 0 < len(os.fsencode(name)) <= 1024 and "\0" not in name
    except UnicodeEncodeError:  # half a character
        return False


def own_file(folder: str, name: str) -> str:
    """The path of a file, or a folder, in a folder that may come from anyone, whose content is copied or shown.

    Raises:
      UserError: it, or a folder on its way, is a symbolic link out of the folder (other than into the hub's cache that
        contains the folder): what it leads to would be copied or shown without the user's notice.
    """
    path = os.path.join(folder, name)
    real, root = os.path.realpath(path), os.path.realpath(folder)
    if os.path.commonpath([real, root]) != root:
        above = os.path.dirname(os.path.dirname(root))  # models--OWNER--NAME/snapshots/REVISION
        roots = [
            root,
            *([os.path.join(above, "blobs")] if os.path.basename(os.path.dirname(root)) == "snapshots" else []),
        ]
        if not any(os.path.commonpath([real, item]) == item for item in roots):
            raise UserError(f"{path} is a link out of its folder to {real}: put a copy in its place")
    return path


def shortened(value: object, most: int = 80) -> str:
    """The repr of an untrusted value on one line, truncated."""
    try:
        text = repr(value[: most + 1] if isinstance(value, (str, bytes)) else value)
    except (ValueError, RecursionError):  # an integer of more than 4,300 digits
        return f"a {type(value).__name__}"
    return text if len(text) <= most + 2 else f"{text[:most]}..."


def cause(error: BaseException, most: int = 160) -> str:
    """The message of an error on one line, truncated."""
    return " ".join(str(error).split())[:most] or type(error).__name__


def host_bytes() -> int:
    """Memory in bytes of this host, or of the container where it has a limit."""
    result = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
        result = min(result, int(file.read()))
    return result


# --- JSON ------------------------------------------------------------------------------------------------------------


def parse_json(content: bytes | str, *, values: int = VALUES, finite: bool = True, unlimited: bool = False) -> Json:
    """Parses JSON within limits.

    Args:
      content: the text; the caller has checked its size.
      values: the largest number of values.
      finite: refuse NaN, infinity, overlong numbers and lone surrogates; for configuration files, not for data.
      unlimited: with `finite`, read Infinity, which Python writes, as the object that transformers 5 writes for it.

    Raises:
      ValueError: it is not JSON, is nested too deep, or has too many values; the message fits "cannot be read (...)".
    """
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    if data[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in data[:4]:
        raise ValueError("it is no text in UTF-8")
    opening = data.count(b"[") + data.count(b"{")
    if opening + data.count(b",") + data.count(b":") > values and _structure(data, b",:[{") > values:
        raise ValueError(f"it holds more than {values:,} values")
    if opening > DEPTH and _depth(data) > DEPTH:
        raise ValueError(f"it is nested deeper than {DEPTH}")
    try:
        encoding = "utf-8-sig" if data[:3] == b"\xef\xbb\xbf" else "utf-8"
        text = data.decode(encoding, "strict" if finite else "surrogatepass")
        if finite and _SURROGATE.search(data) and _SURROGATE.search(_PAIRS.sub(b"", data)):
            raise ValueError("it has a lone surrogate, half a character")
        return ((_UNLIMITED if unlimited else _STRICT) if finite else _LENIENT).decode(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is no text in UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _structure(data: bytes, characters: bytes) -> int:
    """Counts the characters outside of JSON strings."""
    plain = _STRINGS.sub(b"", data)
    return sum(plain.count(bytes([character])) for character in characters)


def _depth(data: bytes) -> int:
    """The nesting depth; counting stops above DEPTH."""
    brackets, inner = _STRINGS.sub(b"", data).translate(_SQUARE, _NO_BRACKETS), 0
    while inner <= DEPTH and len(outer := brackets.replace(b"[]", b"")) < len(brackets):  # a level at a time
        brackets, inner = outer, inner + 1
    depth = deepest = 0
    for bracket in brackets if inner <= DEPTH else b"":  # unmatched brackets are left
        depth += 1 if bracket == ord("[") else -1
        if depth > deepest:
            deepest = depth
            if deepest > DEPTH:
                break
    return inner + deepest


def _integer(text: str) -> int:
    if len(text) > NUMBER_CHARACTERS:
        raise ValueError(f"it has a number of {len(text):,} digits")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"it has {shortened(text, 20)}, which is no finite number")
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"it has {name}, which JSON does not have")


def _infinity(name: str) -> Json:
    return {"__float__": name} if name == "Infinity" else _no_constant(name)


_UNLIMITED = json.JSONDecoder(parse_int=_integer, parse_float=_finite, parse_constant=_infinity)
_STRICT = json.JSONDecoder(parse_int=_integer, parse_float=_finite, parse_constant=_no_constant)
_LENIENT = json.JSONDecoder()  # Python's own limit of an integer is 4,300 digits


def read_json(
    path: str | os.PathLike[str], most: int = TEXT_BYTES, *, values: int = VALUES, unlimited: bool = False
) -> dict[str, Json]:
    """Reads a file that contains one JSON object; `unlimited` as for `parse_json`.

    Raises:
      UserError: it cannot be read, exceeds a limit, or is not a JSON object.
      FileNotFoundError: it does not exist.
    """
    content = read(path, most)
    try:
        result = parse_json(content, values=values, unlimited=unlimited)
    except ValueError as error:
        raise UserError(f"{os.fspath(path)} cannot be read ({cause(error)}): copy it again") from None
    if not isinstance(result, dict):
        raise UserError(f"{os.fspath(path)} is no JSON object: copy it again")
    return result


def lines_of(
    blocks: Iterable[bytes], name: str, most: int = LINE_BYTES, *, blank: bool = False
) -> Iterator[tuple[int, bytes]]:
    """The lines of a file, without line ends and a byte order mark, and their numbers from 1.

    An overlong line is refused before more than a block beyond `most` bytes of it is in memory.

    Args:
      blocks: of its content.
      name: of the file, for errors.
      most: the largest length of a line in bytes.
      blank: whether blank lines are wanted, too.

    Raises:
      UserError: a line has more than `most` bytes.
    """
    number, started, size = 0, [], 0  # begun: the blocks of an unfinished line; size: its bytes
    for block in blocks:
        size += block.find(b"\n") if b"\n" in block else len(block)
        check_line(size, f"{name}:{number + 1}", most)
        started.append(block)
        if b"\n" not in block:
            continue
        result = b"".join(started).split(b"\n")
        started, size = [result.pop()], 0
        result[0] = result[0] if number else result[0].removeprefix(_BOM)
        for at, line in enumerate(result, number + 1):
            if blank or line and not line.isspace():
                check_line(len(line), f"{name}:{at}", most)
                yield at, line.removesuffix(b"\r")
        number, size = number + len(result), len(started[0])
    rest = b"".join(started)
    rest = rest if number else rest.removeprefix(_BOM)
    if rest and (blank or not rest.isspace()):
        check_line(len(rest), f"{name}:{number + 1}", most)
        yield number + 1, rest.removesuffix(b"\r")


def check_line(size: int, where: str, most: int = LINE_BYTES) -> None:
    """Raises UserError if a line has more than `most` bytes."""
    if size > most:
        raise UserError(f"{where} is longer than {most:,} bytes: split the line, or name another file")


# --- archives --------------------------------------------------------------------------------------------------------


class Readable(Protocol):
    """A stream of bytes."""

    def read(self, size: int, /) -> bytes: ...


class Bounded(io.RawIOBase):
    """A stream that raises once more than `most` bytes were read; guards against decompression bombs."""

    def __init__(self, inner: Readable, most: int, name: str, damage: tuple[type[Exception], ...] = (OSError,)):
        """`damage`: the exceptions that `inner` raises where it is corrupted; they become a UserError."""
        self._inner, self._left, self._most, self._name, self._damage = inner, most, most, name, damage

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            content = self._inner.read(len(buffer))
        except UserError:
            raise
        except self._damage as error:
            raise UserError(f"{self._name} is cut short or corrupted ({cause(error)}): get it again") from None
        self._left -= len(content)
        if self._left < 0:
            raise UserError(
                f"{self._name} unpacks to more than {self._most:,} bytes: unpack it by hand if you trust it"
            )
        buffer[: len(content)] = content
        return len(content)


class _Directory:
    """Bounds the reads of a file while zipfile reads an archive's directory, which it reads whole."""

    def __init__(self, file: BinaryIO):
        self._file, self.most = file, _DIRECTORY_BYTES

    def read(self, count: int = -1) -> bytes:
        if not self.most:
            return self._file.read(count)
        if count > self.most:
            raise zipfile.BadZipFile(f"its directory says {count:,} bytes, must have at most {self.most:,}")
        return self._file.read(count if count >= 0 else _TAIL_BYTES)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextlib.contextmanager
def zip_archive(file: BinaryIO) -> Iterator[zipfile.ZipFile]:
    """Opens a zip archive whose directory has at most 16 MiB.

    Raises:
      zipfile.BadZipFile: it is not a zip archive, or its directory is larger.
    """
    bounded = _Directory(file)
    try:
        archive = zipfile.ZipFile(bounded)
    except (ValueError, NotImplementedError, OverflowError, UnicodeDecodeError) as error:
        raise zipfile.BadZipFile(cause(error)) from None
    with archive:
        bounded.most = 0
        yield archive


# --- regular expressions ---------------------------------------------------------------------------------------------

_CLASS_OR_ESCAPE = re.compile(r"\\[pP]\{[^}]*\}|\\[xuo]\{[^}]*\}|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.", re.DOTALL)
_GROUP = re.compile(r"\?(?:[:=!>]|<[=!]|P?<\w+>|[imsxWDSPa-]+:|#[^)]*|[imsxWDSPa-]+(?=\)))")
_QUANTIFIER = re.compile(r"(?:[*+?]|\{(\d*)(,?)(\d*)\})[+?]?")
_REPEATS, _LOOSE, _CHOICES = 1024, 16, 8


def check_pattern(pattern: str, *, unbounded: int = 4, most: int = 4096) -> None:
    """Refuses a regular expression that may backtrack exponentially, or to a high polynomial degree.

    A part with an unbounded repetition must not itself contain a choice or a repetition: the rule of safe-regex. The
    patterns of all known tokenizers satisfy it.

    Args:
      pattern: the regular expression.
      unbounded: how many parts in a row may have an unbounded repetition.
      most: the largest length in characters.

    Raises:
      Refused: it breaks a rule; the message says which.
    """
    if len(pattern) > most:
        raise Refused(f"a regular expression of {len(pattern):,} characters, must have at most {most:,}")
    _Pattern(pattern, unbounded).alternatives(0)


class _Pattern:
    """Parses the groups, choices and repetitions of a pattern in the syntax of Oniguruma or Python."""

    def __init__(self, text: str, unbounded: int):
        self._text, self._at, self._unbounded = text, 0, unbounded

    def alternatives(self, depth: int) -> tuple[bool, int]:
        """Parses up to a group's end; returns whether it has a choice or repetition, and its unbounded parts in a row."""
        if depth > 32:
            raise self._refused("is nested too deep")
        varies, row, most, loose = False, 0, 0, 0
        while self._at < len(self._text) and self._text[self._at] != ")":
            if self._text[self._at] == "|":
                self._at += 1
                varies, row, most, loose = True, 0, max(row, most), 0
                continue
            inner_varies, inner_row = self._atom(depth)
            repeated, endless, possessive = self._quantifier(_CHOICES if inner_varies else _REPEATS)
            if endless and inner_varies and not possessive:
                raise self._refused("repeats a part that is itself a choice or a repetition")
            varies |= repeated or inner_varies
            loose += repeated
            if loose > _LOOSE:
                raise self._refused(f"has more than {_LOOSE} parts in a row that are optional or repeated")
            row += max(inner_row, int(endless))
            if row > self._unbounded:
                raise self._refused(f"repeats more than {self._unbounded} parts in a row without end")
        return varies, max(row, most)

    def _atom(self, depth: int) -> tuple[bool, int]:
        character = self._text[self._at]
        if character == "\\":
            self._escape()
        elif character == "[":
            self._class()
        elif character == "(":
            return self._group(depth)
        else:
            self._at += 1
        return False, 0

    def _escape(self) -> None:
        result = _CLASS_OR_ESCAPE.match(self._text, self._at)
        if result is None:
            raise self._refused("ends in a backslash")
        if result[0][1] in "123456789kg":
            raise self._refused("has a backreference")
        self._at = result.end()

    def _class(self) -> None:
        """Parses a character class; in Oniguruma one may contain others."""
        open_ = 0
        while self._at < len(self._text):
            character = self._text[self._at]
            if character == "\\":
                self._escape()
                continue
            self._at += 1
            if character == "[":
                open_ += 1
                if self._text[self._at : self._at + 1] == "^":
                    self._at += 1
                if self._text[self._at : self._at + 1] == "]":
                    self._at += 1
            elif character == "]":
                open_ -= 1
                if not open_:
                    return
        raise self._refused("has a class that does not end")

    def _group(self, depth: int) -> tuple[bool, int]:
        self._at += 1
        head = _GROUP.match(self._text, self._at)
        if head is not None:
            self._at = head.end()
        elif self._text[self._at : self._at + 1] == "?":
            raise self._refused("has an unsupported kind of group")
        result = self.alternatives(depth + 1)
        if self._text[self._at : self._at + 1] != ")":
            raise self._refused("has a group that does not end")
        self._at += 1
        return result

    def _quantifier(self, times: int) -> tuple[bool, bool, bool]:
        """Parses a quantifier; returns whether the part varies in number, is unbounded, and is possessive."""
        repeated = endless = possessive = False
        many = 1
        while (result := _QUANTIFIER.match(self._text, self._at)) is not None:
            self._at = result.end()
            least, comma, last = result[1] or "", result[2] or "", result[3] or ""
            exact = result[0][0] == "{" and not comma
            if endless and not exact:
                raise self._refused("repeats a repetition")
            if max(len(least), len(last)) < 5:
                many *= max(int(least or 1), int(last or 1))
            if max(len(least), len(last)) > 4 or many > times:
                raise self._refused(f"repeats a part more than {times} times")
            repeated |= not exact
            endless |= result[0][0] in "*+" or bool(comma and not last)
            possessive = result[0][0] != "{" and result[0].endswith("+") and len(result[0]) > 1
        return repeated, endless, possessive

    def _refused(self, why: str) -> Refused:
        return Refused(f"the regular expression {shortened(self._text)}, which {why}")
