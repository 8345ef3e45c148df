"""Unpacks files of gzip and zstd in blocks, with a bound against bombs; checks their checksums."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO, Protocol

from capibara.core import extras, limits
from capibara.core.types import UserError

COMPRESSED = (".gz", ".zst")
OTHERS = (".bz2", ".xz", ".zip", ".7z", ".lz4", ".br", ".tar")
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_BLOCK_BYTES = limits.MIB
_PIECE_BYTES = 1024  # of compressed data at a time: unpacks to at most 32 MiB, by 4-byte blocks of 128 KiB in zstd
_WINDOW_BYTES = 128 * limits.MIB  # zstd's own limit
_RATIO, _FREE_BYTES = 256, 256 * limits.MIB  # largest ratio, for what unpacks to more; logs have up to about 100


class Unreadable(Exception):
    """A file that cannot be read further; the message is to follow its name.

    Attributes:
      kind: corrupted, truncated, too_large or unreadable.
    """

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


class _Decompressor(Protocol):
    """Unpacks one member of a compressed file, as zlib's and zstandard's objects do."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def is_packed(path: str) -> bool:
    """Whether a file is compressed, by its name, and is no archive."""
    name = path.lower()
    return name.endswith(COMPRESSED) and not name.endswith(tuple(f".tar{ending}" for ending in COMPRESSED))


def plain_name(path: str) -> str:
    """The name of a file in lower case, without its folder and the ending of its compression."""
    name = os.path.basename(path).lower()
    return os.path.splitext(name)[0] if name.endswith(COMPRESSED) else name


def blocks(file: BinaryIO, path: str) -> Iterator[bytes]:
    """The content of a file, unpacked if it is compressed; what was unpacked before a failure is yielded first.

    Raises:
      Unreadable: it is corrupted, cut short, unpacks to too much, or has another compression.
      OSError: the disk fails.
    """
    head = file.read(len(_ZSTD))
    if (new := _decompressor(path, head)) is not None:
        yield from _unpacked(file, head, new)
        return
    block = head + file.read(_BLOCK_BYTES)
    while block:
        yield block
        block = file.read(_BLOCK_BYTES)


def lines(path: str | os.PathLike[str], *, blank: bool = False) -> Iterator[tuple[int, bytes]]:
    """The lines of a file, plain or compressed, as `limits.lines_of` finds them.

    Raises:
      UserError: a line is too long, or the file cannot be read or unpacked.
      FileNotFoundError: it does not exist.
    """
    with limits.opened(path) as file:
        yield from lines_of(file, os.fspath(path), blank=blank)


def lines_of(file: BinaryIO, path: str, *, blank: bool = False) -> Iterator[tuple[int, bytes]]:
    """`lines` of an open file, which may be a pipe."""
    try:
        yield from limits.lines_of(blocks(file, path), path, limits.LINE_BYTES, blank=blank)
    except Unreadable as failure:
        raise UserError(f"{path} {failure}") from None


def _decompressor(path: str, head: bytes) -> Callable[[], _Decompressor] | None:
    """Makes decompressors for a file that begins with these bytes; None: it is plain."""
    if head.startswith(_GZIP):
        return lambda: zlib.decompressobj(wbits=31)
    if head == _ZSTD:
        zstandard = extras.require("zstandard", extra="builders", why="files that end in .zst")
        return lambda: zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).decompressobj()
    if head and path.lower().endswith(COMPRESSED):
        raise Unreadable("corrupted", f"is not compressed as its name says: it begins with {head.hex(' ')}")
    if path.lower().endswith(OTHERS):
        raise Unreadable("unreadable", "this compression is not read: unpack it, or make it .gz or .zst")
    return None


def _unpacked(file: BinaryIO, head: bytes, new: Callable[[], _Decompressor]) -> Iterator[bytes]:
    """Blocks of a compressed file, whose `head` was read, of all its members; what precedes a failure is yielded first."""
    inner, is_begun, packed, unpacked = new(), False, 0, 0
    blocks: list[bytes] = []
    size, failure = 0, None
    while failure is None and (piece := head + file.read(_PIECE_BYTES)):
        head = b""
        packed += len(piece)
        while piece and failure is None:
            if not is_begun and not piece.strip(b"\0"):
                break  # gzip files may be padded
            is_begun = True
            try:
                block = inner.decompress(piece)
            except Exception as error:  # zlib.error, zstandard.ZstdError
                failure = Unreadable("corrupted", f"is corrupted ({limits.cause(error)}): get it again")
                break
            piece = inner.unused_data if inner.eof else b""
            size, unpacked = size + len(block), unpacked + len(block)
            blocks.append(block)
            if inner.eof:
                inner, is_begun = new(), False
            if unpacked > max(_FREE_BYTES, _RATIO * packed):
                failure = Unreadable("too_large", f"unpacks to more than {_RATIO} times its size: unpack it by hand")
        if size >= _BLOCK_BYTES:
            yield b"".join(blocks)
            blocks, size = [], 0
    if blocks:
        yield b"".join(blocks)
    if failure is None and is_begun:
        failure = Unreadable("truncated", "ends in the middle of its compressed data: get it again")
    if failure is not None:
        raise failure
