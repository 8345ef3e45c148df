"""Converts files of conversations, also in an archive such as a package's sdist, to training and held-out JSON lines."""

from __future__ import annotations

import contextlib
import fnmatch
import gzip
import hashlib
import io
import json
import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, BinaryIO

from capibara.core import limits
from capibara.core.types import UserError
from capibara.data.chat.formats import Conversation, is_preference, read_conversation, read_preference
from capibara.data.text import disk, plain
from capibara.storage import outputs, packed

_ARCHIVES = (".tar.gz", ".tgz", ".tar", ".zip", ".whl")
_ENDINGS = (".json", ".jsonl")
_FILES = disk.Kind("conversations", (*_ENDINGS, ".tar", ".tgz", ".zip", ".whl"))
_MEMBERS, _MEMBER_BYTES = 200_000, 1 << 30  # largest number of members of an archive, and size of one
_RATIO, _FREE_BYTES = 32, 64 << 20  # largest compression ratio (text has about 10), for members above so many bytes
_LIST_BYTES, _LIST_VALUES = 256 << 20, 4_000_000  # limits of a .json file, which is read whole
_DAMAGE = (
    tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, KeyError, IndexError, RuntimeError,
    OverflowError, struct.error,
)  # fmt: skip
TRAIN_FILE, HELD_OUT_FILE = "train.jsonl", "held_out.jsonl"


def prepare_instructions(
    files: Sequence[str],
    output: str,
    *,
    members: Sequence[str] = (),
    held_out: float = 0.1,
    report: Callable[[str], None] = print,
) -> tuple[int, int]:
    """Writes `train.jsonl` and `held_out.jsonl` into the folder `output`, one conversation (or preference pair) per line.

    A hash of the first question decides the split of a conversation: it stays the same when others are added, and no
    question is in both splits.

    Args:
      files: paths or globs of .json files (a list), .jsonl files, or archives of these.
      output: a folder; existing files of these names are replaced.
      members: names or patterns of the files to read from archives.
      held_out: the fraction that is held out.
      report: called with each line of the summary.

    Returns:
      The numbers of lines of the two files.

    Raises:
      UserError: a file cannot be read or does not contain conversations, or one split would be empty.
    """
    if not 0 < held_out < 1:
        raise UserError(f"--held_out ({held_out}) must lie between 0 and 1: try 0.1")
    sides: tuple[list[str], list[str]] = ([], [])
    for path in disk.expand("--files", files, _FILES):
        for inner, content in _contents(path, members):
            name = plain.origin(path) + inner.removeprefix(path)
            lines = [_line(record, f"{name}:{number}") for number, record in _records(name, content)]
            for prompt, line in lines:
                key = hashlib.blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=8).digest()
                sides[int.from_bytes(key, "little") < held_out * 2.0**64].append(line)
            report(f"{name}: {len(lines)} conversations")
    if not all(sides):
        train, for_validation = map(len, sides)
        raise UserError(
            f"{train} conversations to train on and {for_validation} held out: add more, or change --held_out"
        )
    for name, side in zip((TRAIN_FILE, HELD_OUT_FILE), sides):
        path = os.path.join(output, name)
        try:
            os.makedirs(output, exist_ok=True)
            with outputs.replacing(path) as part, open(part, "w", encoding="utf-8", errors="surrogatepass") as file:
                file.writelines(f"{line}\n" for line in side)
        except OSError as error:
            raise UserError(f"--output={output} cannot be written ({error.strerror}): name another folder") from None
        report(f"wrote {path}: {len(side)} lines")
    return len(sides[0]), len(sides[1])


def _line(record: object, where: str) -> tuple[str, str]:
    """The first question of a conversation, and its line of JSON."""
    if is_preference(record):
        pair = read_preference(record, where)
        shared = pair.chosen
        line: dict[str, Any] = {"chosen": pair.chosen.messages, "rejected": pair.rejected.messages}
    else:
        shared = read_conversation(record, where)
        line = {"messages": shared.messages}
    line |= {"tools": shared.tools} if shared.tools else {}
    line |= {"chat_template_kwargs": shared.variables} if shared.variables else {}
    return _asked(shared), json.dumps(line, ensure_ascii=False)


def _asked(conversation: Conversation) -> str:
    return next((message["content"] for message in conversation.messages if message["role"] != "system"), "")


def _records(name: str, file: BinaryIO) -> Iterator[tuple[int, Any]]:
    """The records with their line number, or number in the list, from 1."""
    at = ""
    try:
        if packed.plain_name(name).endswith(".jsonl"):
            for number, line in limits.lines_of(iter(lambda: file.read(limits.MIB), b""), name):
                at = f"line {number}: "
                yield number, limits.parse_json(line, finite=False)
            return
        records = limits.parse_json(file.read(_LIST_BYTES), values=_LIST_VALUES, finite=False)
        if file.read(1):
            raise UserError(f"{name} is longer than {_LIST_BYTES:,} bytes: make it a .jsonl file, one record per line")
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{name} is not JSON ({at}{limits.cause(error)})") from None
    if not isinstance(records, list):
        raise UserError(f"{name} must be a list of conversations, not {type(records).__name__}")
    yield from enumerate(records, 1)


def _contents(path: str, members: Sequence[str]) -> Iterator[tuple[str, BinaryIO]]:
    """Names and contents of a file, or of the members of an archive."""
    if not path.endswith(_ARCHIVES):
        if not path.endswith(_ENDINGS):
            raise UserError(f"--files ({path!r}) must end in one of {', '.join((*_ENDINGS, *_ARCHIVES))}")
        with limits.opened(path) as file:
            yield path, file
        return
    try:
        with limits.opened(path) as archive, _opened(path, archive) as (names, read):
            known = limits.shortened(", ".join(sorted(os.path.basename(name) for name in names)) or "none", 2000)[1:-1]
            if not members:
                raise UserError(f"--members is not set: name some of the files of {path}: {known}")
            for member in members:
                result = [name for name in names if fnmatch.fnmatch(os.path.basename(name), member) or name == member]
                if not result:
                    raise UserError(f"--members ({member!r}) is none of the files of {path}: {known}")
                for name in result:
                    with read(name) as file:
                        yield f"{path}/{name}", file
    except UserError:
        raise
    # The errors of Python's readers for a corrupted archive; RuntimeError: an encrypted member.
    except _DAMAGE as error:
        raise UserError(f"{path} cannot be read as an archive: {limits.cause(error)}") from None


@contextlib.contextmanager
def _opened(path: str, file: BinaryIO) -> Iterator[tuple[list[str], Callable[[str], BinaryIO]]]:
    """The names of an archive's JSON files, and a function that opens one with a limit on its unpacked size."""
    if path.endswith((".zip", ".whl")):
        with limits.zip_archive(file) as archive:
            members = {info.filename: info for info in archive.infolist() if info.filename.endswith(_ENDINGS)}

            def read(name: str) -> BinaryIO:
                _check_size(path, name, members[name].file_size, members[name].compress_size)
                return _bounded(archive.open(name), f"{path}/{name}")

            yield list(members), read
        return
    with _tar(path, file) as tar:
        yield from _of_tar(path, tar, file)


class _Member(tarfile.TarInfo):
    """A member of a tar archive; refuses large headers, which tarfile reads whole."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if not self.isreg() and self.size > limits.MIB:
            raise tarfile.ReadError(f"a header of {self.size:,} bytes")
        return super()._proc_member(archive)  # type: ignore[misc]  # typeshed leaves private methods out


def _tar(path: str, file: BinaryIO) -> tarfile.TarFile:
    """Opens a tar archive for one sequential pass, with a limit on its unpacked size."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    inner = file if path.endswith(".tar") else gzip.GzipFile(fileobj=file)
    unpacked = io.BufferedReader(limits.Bounded(inner, max(_FREE_BYTES, _RATIO * size), path))
    return tarfile.open(fileobj=unpacked, mode="r|", tarinfo=_Member)


def _of_tar(
    path: str, archive: tarfile.TarFile, file: BinaryIO
) -> Iterator[tuple[list[str], Callable[[str], BinaryIO]]]:
    """As `_opened`, for tar: one pass over the archive for the names, and one for each member that is read."""
    sizes: dict[str, int] = {}
    for number, item in enumerate(archive):
        if number > _MEMBERS:
            raise UserError(f"{path} has more than {_MEMBERS:,} members: unpack it by hand")
        vars(archive)["members"] = []  # tarfile would keep all members in memory
        if item.isreg() and not item.issparse() and item.name.endswith(_ENDINGS):
            sizes[item.name] = item.size

    def read(name: str) -> BinaryIO:
        _check_size(path, name, sizes[name])
        again = _tar(path, file)
        for entry in again:
            vars(again)["members"] = []
            if entry.name == name and entry.isreg() and (result := again.extractfile(entry)) is not None:
                return _bounded(result, f"{path}/{name}")
        raise UserError(f"{path} has no {name} any more: the file changes while it is read")

    yield list(sizes), read


def _check_size(path: str, name: str, size: int, packed: int | None = None) -> None:
    most = _MEMBER_BYTES if packed is None else min(_MEMBER_BYTES, max(_FREE_BYTES, _RATIO * packed))
    if size > most:
        raise UserError(f"{path}/{name} unpacks to {size:,} bytes, must have at most {most:,}: unpack it by hand")


def _bounded(file: IO[bytes], name: str) -> BinaryIO:
    return io.BufferedReader(limits.Bounded(file, _MEMBER_BYTES, name, _DAMAGE))
