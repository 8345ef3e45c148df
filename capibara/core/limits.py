"""What a file from elsewhere may be and hold before it is read: kind, size, names, JSON, archives, regular expressions.

Every reader of foreign files asks here first, so that a file is refused by what it declares and not by what it costs.
A Refused has no file's name yet: the reader that knows it says it. Needs nothing but Python: it is loaded everywhere.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import stat
import zipfile
from collections.abc import Iterator
from typing import Any, BinaryIO, Protocol

from capibara.core.types import UserError

MIB = 1 << 20
TEXT_BYTES = 64 * MIB  # of a JSON file, or another that is read whole; the largest tokenizer.json known has 34 MB
SMALL_BYTES = 4 * MIB  # of a configuration
LINE_BYTES = 32 * MIB  # of a line of JSON lines
DEPTH = 128  # of JSON, as serde has it
VALUES = 4_000_000  # in a JSON file, counted by its brackets, commas and colons
NUMBER_CHARACTERS = 400  # tokenizers' model_max_length is 10 ** 30, a float has at most 310 digits before its point
_SQUARE, _NO_BRACKETS = bytes.maketrans(b"{}", b"[]"), bytes({*range(256)} - {*b"[]{}"})
_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_PAIRS = re.compile(rb"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")  # and escaped backslashes
_DIRECTORY_BYTES, _TAIL_BYTES = 16 * MIB, 1 << 17  # of a zip archive: some 150,000 members; its comment and end

Json = Any  # what JSON can say: the reader checks the types that it needs


class Refused(Exception):
    """What a file holds is over a limit; says which, in words that go on after the file's name."""


# --- files -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(path: str | os.PathLike[str], most: int | None = None) -> Iterator[BinaryIO]:
    """Opens a regular file to read: no pipe, no device, no folder, and never waits for a writer.

    Args:
      most: bytes that it may have; None: any number.

    Raises:
      UserError: it is another thing, too large, or a link that leads to itself.
      FileNotFoundError: there is none: whether that is a mistake the caller knows.
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
            raise UserError(f"{shown} has {about.st_size:,} bytes, must have at most {most:,}: it is no such file")
        yield file


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    return next((name for is_kind, name in kinds if is_kind(mode)), "a device")


def check_file(path: str | os.PathLike[str], most: int | None = None) -> int:
    """The size of a regular file, for a library that opens it by its name; raises as `opened`."""
    with opened(path, most) as file:
        return os.fstat(file.fileno()).st_size


def read(path: str | os.PathLike[str], most: int = TEXT_BYTES) -> bytes:
    """The bytes of a regular file; raises as `opened`, and UserError where it cannot be read."""
    with opened(path, most) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            content = file.read(size + 1)
        except OSError as error:
            raise UserError(f"{os.fspath(path)} cannot be read ({error.strerror}): copy it again") from None
    if len(content) > size:  # as those in /proc
        raise UserError(f"{os.fspath(path)} has more than the {size:,} bytes that it says: put a copy in its place")
    return content


def read_text(path: str | os.PathLike[str], most: int = SMALL_BYTES) -> str:
    """The text of a regular file; raises as `read`, and UserError where it is no UTF-8."""
    try:
        return read(path, most).decode()
    except UnicodeDecodeError as error:
        shown = os.fspath(path)
        raise UserError(f"{shown} is no text in UTF-8 ({error.reason} at byte {error.start}): copy it again") from None


def inside(folder: str, name: str, of: str, *, links: bool = True) -> str:
    """The path of a name that a file gives for another beside it.

    Args:
      folder: in which it must be.
      of: the file that names it, for the message.
      links: whether links may lead out of the folder, as in the cache of Hugging Face's hub.

    Raises:
      UserError: it is absolute, leads out of the folder, or is no name.
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
    """Whether a file system may have a file of that name."""
    try:
        return 0 < len(os.fsencode(name)) <= 1024 and "\0" not in name
    except UnicodeEncodeError:  # half a character
        return False


def own_file(folder: str, name: str) -> str:
    """The path of a file in a folder, whose content is copied to wherever the model goes.

    Raises:
      UserError: it is a link out of the folder, and not into the hub's cache that the folder is in: what it leads to
        would be copied unseen.
    """
    path = os.path.join(folder, name)
    if os.path.islink(path):
        real, root = os.path.realpath(path), os.path.realpath(folder)
        above = os.path.dirname(os.path.dirname(root))  # models--OWNER--NAME/snapshots/REVISION
        roots = [
            root,
            *([os.path.join(above, "blobs")] if os.path.basename(os.path.dirname(root)) == "snapshots" else []),
        ]
        if not any(os.path.commonpath([real, one]) == one for one in roots):
            raise UserError(f"{path} is a link out of its folder to {real}: put a copy in its place")
    return path


def shortened(value: object, most: int = 80) -> str:
    """A foreign value on one line, cut."""
    try:
        text = repr(value[: most + 1] if isinstance(value, (str, bytes)) else value)
    except (ValueError, RecursionError):  # an integer of more than 4,300 digits
        return f"a {type(value).__name__}"
    return text if len(text) <= most + 2 else f"{text[:most]}..."


def cause(error: BaseException, most: int = 160) -> str:
    """What an error says, on one line."""
    return " ".join(str(error).split())[:most] or type(error).__name__


def host_bytes() -> int:
    """The memory of this host, or of the container that we are in."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
        found = min(found, int(file.read()))
    return found


# --- JSON ------------------------------------------------------------------------------------------------------------


def parse_json(content: bytes | str, *, values: int = VALUES, finite: bool = True) -> Json:
    """What a JSON text says.

    Args:
      content: its size is bounded by who has read it.
      values: how many it may hold.
      finite: whether NaN, infinity, endless numbers and lone surrogates are refused: of a configuration, not of data.

    Raises:
      ValueError: it is no JSON, or too deep, or holds too much; says so in words that fit "cannot be read (...)".
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
            raise ValueError("it has half a character, a lone surrogate")
        return (_STRICT if finite else _LENIENT).decode(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is no text in UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _structure(data: bytes, characters: bytes) -> int:
    """How often characters are outside of strings."""
    plain = _STRINGS.sub(b"", data)
    return sum(plain.count(bytes([character])) for character in characters)


def _depth(data: bytes) -> int:
    """How deep it is; up to somewhere beyond DEPTH."""
    brackets, inner = _STRINGS.sub(b"", data).translate(_SQUARE, _NO_BRACKETS), 0
    while inner <= DEPTH and len(outer := brackets.replace(b"[]", b"")) < len(brackets):  # a level at a time
        brackets, inner = outer, inner + 1
    depth = deepest = 0
    for bracket in brackets if inner <= DEPTH else b"":  # those that have no other end
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


_STRICT = json.JSONDecoder(parse_int=_integer, parse_float=_finite, parse_constant=_no_constant)
_LENIENT = json.JSONDecoder()  # Python's own limit of an integer is 4,300 digits


def read_json(path: str | os.PathLike[str], most: int = TEXT_BYTES, *, values: int = VALUES) -> dict[str, Json]:
    """What a file says that holds one JSON object.

    Raises:
      UserError: it cannot be read, is over a limit, or holds something else.
      FileNotFoundError: there is none.
    """
    content = read(path, most)
    try:
        found = parse_json(content, values=values)
    except ValueError as error:
        raise UserError(f"{os.fspath(path)} cannot be read ({cause(error)}): copy it again") from None
    if not isinstance(found, dict):
        raise UserError(f"{os.fspath(path)} is no JSON object: copy it again")
    return found


def lines(path: str | os.PathLike[str], most: int = LINE_BYTES) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers from 1, without their ends and without those in which there is nothing.

    None is held that is longer than `most` by more than a block.

    Raises:
      UserError: a line is longer; as `opened`.
      FileNotFoundError: there is none.
    """
    with opened(path) as file:
        yield from lines_of(file, os.fspath(path), most)


def lines_of(file: BinaryIO, name: str, most: int = LINE_BYTES) -> Iterator[tuple[int, bytes]]:
    """`lines` of an open file."""
    number, begun, size = 0, [], 0  # the blocks that a line has begun in, and their bytes
    while block := file.read(MIB):
        size += block.find(b"\n") if b"\n" in block else len(block)
        check_line(size, f"{name}:{number + 1}", most)
        begun.append(block)
        if b"\n" not in block:
            continue
        found = b"".join(begun).split(b"\n")
        begun, size = [found.pop()], 0
        for at, line in enumerate(found, number + 1):
            if line and line != b"\r":
                check_line(len(line), f"{name}:{at}", most)
                yield at, line.removesuffix(b"\r")
        number, size = number + len(found), len(begun[0])
    rest = b"".join(begun)
    if rest and rest != b"\r":
        yield number + 1, rest.removesuffix(b"\r")


def check_line(size: int, where: str, most: int = LINE_BYTES) -> None:
    """Raises UserError where a line is too long to be read."""
    if size > most:
        raise UserError(f"{where} is longer than {most:,} bytes: put it on several lines, or name another file")


# --- archives --------------------------------------------------------------------------------------------------------


class Readable(Protocol):
    """A stream of bytes."""

    def read(self, size: int, /) -> bytes: ...


class Bounded(io.RawIOBase):
    """A stream that gives no more than a number of bytes, whatever it unpacks to."""

    def __init__(self, inner: Readable, most: int, name: str, damage: tuple[type[Exception], ...] = (OSError,)):
        """Args beyond a stream's: damage: what the stream raises where it is corrupted; that becomes a UserError."""
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
            raise UserError(f"{self._name} unpacks to more than {self._most:,} bytes: it is refused, unpack it by hand")
        buffer[: len(content)] = content
        return len(content)


class _Directory:
    """A file whose reads are bounded while a zip archive's directory is read, which is read whole."""

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
    """A zip archive whose directory is of a usual size.

    Raises:
      zipfile.BadZipFile: it is none, or has more members than that.
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
    """Refuses a regular expression that may take more than polynomial time, or much of that.

    A part that is repeated without end must not itself hold a choice or a repetition: the rule of safe-regex. All
    patterns of known tokenizers keep it.

    Args:
      unbounded: how many parts in a row may be repeated without end.
      most: characters that it may have.

    Raises:
      Refused: it breaks a rule; says which.
    """
    if len(pattern) > most:
        raise Refused(f"a regular expression of {len(pattern):,} characters, must have at most {most:,}")
    _Pattern(pattern, unbounded).alternatives(0)


class _Pattern:
    """Reads a pattern of Oniguruma or Python as far as its groups, choices and repetitions."""

    def __init__(self, text: str, unbounded: int):
        self._text, self._at, self._unbounded = text, 0, unbounded

    def alternatives(self, depth: int) -> tuple[bool, int]:
        """Up to the end of a group: whether it holds a choice or repetition, and its unbounded parts in a row."""
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
                raise self._refused(f"has more than {_LOOSE} parts in a row that may be left out or repeated")
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
        found = _CLASS_OR_ESCAPE.match(self._text, self._at)
        if found is None:
            raise self._refused("ends in a backslash")
        if found[0][1] in "123456789kg":
            raise self._refused("refers back to what it has matched")
        self._at = found.end()

    def _class(self) -> None:
        """A class in brackets; Oniguruma's may hold others."""
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
            raise self._refused("has a group of a kind that is not known here")
        found = self.alternatives(depth + 1)
        if self._text[self._at : self._at + 1] != ")":
            raise self._refused("has a group that does not end")
        self._at += 1
        return found

    def _quantifier(self, times: int) -> tuple[bool, bool, bool]:
        """Whether a part may be repeated or left out, without end, and possessively."""
        repeated = endless = possessive = False
        many = 1
        while (found := _QUANTIFIER.match(self._text, self._at)) is not None:
            self._at = found.end()
            least, comma, last = found[1] or "", found[2] or "", found[3] or ""
            exact = found[0][0] == "{" and not comma
            if endless and not exact:
                raise self._refused("repeats a repetition")
            if max(len(least), len(last)) < 5:
                many *= max(int(least or 1), int(last or 1))
            if max(len(least), len(last)) > 4 or many > times:
                raise self._refused(f"repeats a part more than {times} times")
            repeated |= not exact
            endless |= found[0][0] in "*+" or bool(comma and not last)
            possessive = found[0][0] != "{" and found[0].endswith("+") and len(found[0]) > 1
        return repeated, endless, possessive

    def _refused(self, why: str) -> Refused:
        return Refused(f"the regular expression {shortened(self._text)}, which {why}")
