"""Plain copies of text files: unpacked, and in UTF-8; a plain file of UTF-8 stands for itself.

Each copy is in the user's cache, under the file's path, size and time: a file that was replaced is copied again.
"""

from __future__ import annotations

import codecs
import hashlib
import logging
import os
from collections.abc import Sequence

from capibara.core import limits
from capibara.core.types import UserError
from capibara.storage import copies, outputs, packed

UTF_8 = "utf-8"
BOM = codecs.BOM_UTF8
_MOST_BYTES = 16 << 30  # largest copy
_origins: dict[str, str] = {}  # copy -> the file that the user named


def copies_of(name: str, paths: Sequence[str], encoding: str = UTF_8) -> list[str]:
    """The files themselves, or plain copies of those that are compressed or not in UTF-8.

    Args:
      name: the parameter that names the files, for errors.
      paths: files on this machine.
      encoding: of their text, as Python names it, such as "utf-16" or "cp1252".

    Raises:
      UserError: a file cannot be read or unpacked, is no text in this encoding, or the encoding is unknown.
    """
    encoding = checked_encoding(name, encoding)
    return [_copy(path, encoding) if encoding != UTF_8 or packed.is_packed(path) else path for path in paths]


def checked_encoding(name: str, encoding: str) -> str:
    """The canonical name of an encoding; raises UserError if it is none of texts."""
    try:
        canonical = codecs.lookup(encoding).name
        "".encode(canonical)
        return canonical
    except (LookupError, ValueError):
        source = name.partition(".")[0]
        raise UserError(
            f"{source}.encoding ({encoding!r}) is no encoding of texts: try 'utf-8', 'utf-16' or 'cp1252'"
        ) from None


def origin(path: str) -> str:
    """The file of which a path is a plain copy, or the path."""
    return _origins.get(path, path)


def decoded(content: bytes, path: str, at: int, setting: str = "encoding") -> str:
    """The text of a range of a file in UTF-8, without a byte order mark.

    Args:
      content: the range.
      path: the file, for errors.
      at: where the range begins in the file.
      setting: the parameter with the encoding.

    Raises:
      UserError: it is no text in UTF-8, or has a NUL.
    """
    begin = len(BOM) if at == 0 and content.startswith(BOM) else 0
    try:
        text = content[begin:].decode()
    except UnicodeDecodeError as error:
        raise not_text(path, error.reason, at + begin + error.start, setting) from None
    if "\0" in text:
        raise not_text(path, "a NUL", at + content.index(0), setting)
    return text


class NotText(UserError):
    """A file is no text in its encoding."""


def not_text(path: str, reason: str, at: int, setting: str, encoding: str = "UTF-8") -> NotText:
    """The error of a file that is no text."""
    return NotText(
        f"{origin(path)} is no text in {encoding} ({reason} at byte {at:,}): set {setting}, such as 'utf-16' or 'cp1252', or "
        "convert it"
    )


def _copy(path: str, encoding: str) -> str:
    try:
        about = os.stat(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): name another file") from None
    key = f"{os.path.abspath(path)}\0{about.st_size}\0{about.st_mtime_ns}\0{encoding}"
    name = os.path.basename(path)
    if packed.is_packed(path):
        name = name[: name.rindex(".")]
    digest = hashlib.blake2b(os.fsencode(key), digest_size=8).hexdigest()
    folder = os.path.join(copies.cache_folder("plain"), digest)
    copy = os.path.join(folder, name)
    _origins[copy] = path
    if os.path.exists(copy):
        return copy
    try:
        os.makedirs(folder, exist_ok=True)
        with outputs.replacing(copy) as partial:
            _write(path, partial, encoding)
            # The times of copies on all hosts are those of the file.
            os.utime(partial, ns=(about.st_mtime_ns, about.st_mtime_ns))
    except OSError as error:
        raise UserError(f"{copy} cannot be written ({error.strerror}): free the disk, or set XDG_CACHE_HOME") from error
    logging.getLogger(__name__).info("made a plain copy of %s: %s", path, copy)
    return copy


def _write(path: str, partial: str, encoding: str) -> None:
    """Writes a file's text in UTF-8, without a byte order mark."""
    decoder = codecs.getincrementaldecoder(encoding)()
    size, is_first = 0, True  # size: bytes that were given to the decoder
    with limits.opened(path) as file, open(partial, "wb") as out:

        def write(block: bytes, final: bool = False) -> None:
            nonlocal size, is_first
            waiting = len(decoder.getstate()[0])  # bytes of an unfinished character
            try:
                text = decoder.decode(block, final)
            except UnicodeError as error:  # without a reason and place: UTF-16 without a byte order mark
                reason, at = getattr(error, "reason", str(error)), size - waiting + getattr(error, "start", 0)
                raise not_text(path, reason, at, "encoding", encoding) from None
            if "\0" in text:
                at = size + max(0, block.find(0))
                raise not_text(path, "a NUL", at, "encoding", encoding)
            out.write((text.removeprefix("\ufeff") if is_first else text).encode())
            size, is_first = size + len(block), is_first and not text
            if size > _MOST_BYTES:
                raise UserError(f"{path} has more than {_MOST_BYTES >> 30} GiB: unpack it by hand, into several files")

        try:
            for block in packed.blocks(file, path):
                write(block)
        except packed.Unreadable as error:
            raise UserError(f"{path} {error}") from None
        write(b"", final=True)
