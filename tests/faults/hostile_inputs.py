"""Hostile inputs of the builders of data sets: good records stand around what is hostile, and must not be lost."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import pathlib
import random
import zlib
from collections.abc import Callable

import zstandard

_ALL_IN_TRAIN = {"train": 1.0, "validation": 0.0, "test": 0.0}
# The words of `capibara prepare` that read foreign files, what their manifests call the records that were read, and more flags.
WORDS = {
    "playbooks": ("bullets read",),
    "executions": ("executions read",),
    "corpus": ("documents",),
    "routing": (
        "records",
        "--gin.RoutingSet.min_examples=0",
        *(f"--gin.Splits.{k}={v}" for k, v in _ALL_IN_TRAIN.items()),
    ),
}
_HARMLESS = ("with a long line", "zstd with another name", "an empty file")
_DEPTH = 100_000
_ZEROS = bytes(1 << 20)


@dataclasses.dataclass(frozen=True)
class HostileInput:
    """A hostile file or folder.

    Attributes:
      name: what it is.
      path: where it is.
      good: its records that every word must read.
      harmless: whether it may be read without a problem.
    """

    name: str
    path: str
    good: int = 0
    harmless: bool = False


def runs(path: str, out: pathlib.Path) -> dict[str, list[str]]:
    """The command lines of all words for an input."""
    common = {word: ["prepare", word, path, f"--out={out}/{word}", "--num_workers=0"] for word in WORDS}
    return {f"prepare {word}": [*common[word], *more] for word, (_, *more) in WORDS.items()}


def lost(verb: str, out: pathlib.Path, good: int) -> bool:
    """Whether the output of one of `runs` lacks good records."""
    word = verb.removeprefix("prepare ")
    manifest = out / word / "manifest.json"
    counts = json.loads(manifest.read_text())["counts"] if manifest.exists() else {}
    return counts.get(WORDS[word][0], 0) < good


def record(number: int) -> dict:
    """A record that every word reads."""
    noise = random.Random(number).randbytes(40).hex()
    bullet = {"id": f"py-{number}", "section": "PYTHON", "content": f"Close file {noise}", "helpful": 5, "harmful": 0}
    code = {"code": f"value = {number}\nprint(value)", "stdout": f"{number}\n", "language": "python", "session": noise}
    return {"text": f"import os\nprint('a text of {noise}')", "bullets": [bullet], **code}


def make(folder: pathlib.Path, *, large: bool = True) -> list[HostileInput]:
    """Writes all of them into a new folder; `large`: with those of many megabytes."""
    folder.mkdir(parents=True)
    found = []
    good = [json.dumps(record(number)).encode() + b"\n" for number in range(600)]
    packed, frame = gzip.compress(b"".join(good), mtime=0), zstandard.ZstdCompressor().compress(b"".join(good))
    cut = {".gz": packed[: len(packed) // 2], ".zst": _blocks(good)[:-200]}
    unpack = {".gz": zlib.decompressobj(31).decompress, ".zst": zstandard.ZstdDecompressor().decompressobj().decompress}
    size = (300 if large else 40) << 20
    bomb = b"".join(good[:5]) + b'{"text": "'
    inside = {
        "Latin-1": '{"text": "ä"}\n'.encode("latin-1"),
        "a NUL": b'{"text": "\0"}\n\0\0\0\n',
        "half a character": b'{"text": "\\ud800"}\n{"text": "\xed\xa0\x80"}\n',
        "a line nested deep": b'{"text":' * _DEPTH + b"1" + b"}" * _DEPTH + b"\n" + b"[" * 1000 + b"]" * 1000 + b"\n",
        "a number of 1e6 digits": b'{"text": ' + b"9" * 10**6 + b"}\n",
        "numbers that JSON does not have": b'{"text": NaN}\n{"text": -Infinity}\n{"text": 1e999}\n',
        "values of other types": b'{"text": ["a"], "code": {}, "bullets": 1}\n[]\n1\nnull\n"a"\n{}\n',
        "lines that are cut": good[0][:50] + b"\n" + good[1][5:],
        "a long line": b'{"text": "' + b"a" * (size // 4) + b'"}\n',
        "a line of many values": b'{"text": [' + b"[]," * (size >> 7) + b"1]}\n",
        "control characters": b'{"text": "\x1b[2J\r\x07"}\n\x1b]0;title\x07\n',
        "other line ends": "{}\u2028{}\u0085\x0c\x1c\n".encode(),
    }
    files: dict[str, tuple[str, bytes, int]] = {
        f"with {name}": (f"{number}.jsonl", b"".join([*good[:5], content, *good[5:9]]), 9)
        for number, (name, content) in enumerate(inside.items())
    }
    for ending, content in cut.items():
        files[f"{ending} that is cut"] = (f"cut.jsonl{ending}", content, unpack[ending](content).count(b"\n"))
    files |= {
        "gzip with a changed byte": ("changed.jsonl.gz", packed[:-3000] + b"\xff" + packed[-2999:], 5),
        "gzip with something after it": ("after.jsonl.gz", gzip.compress(b"".join(good[:9])) + b"PK\3\4 other", 9),
        "gzip in gzip": ("twice.jsonl.gz", gzip.compress(packed), 0),
        "a gzip bomb": ("bomb.jsonl.gz", _gzip_bomb(bomb, size), 5),
        "a zstd bomb": ("bomb.jsonl.zst", _zstd_bomb(bomb, size), 5),
        "a zstd frame that says 2**60 bytes": ("size.jsonl.zst", _frame_of(2**60), 0),
        "a name that says gzip": ("plain.jsonl.gz", b"".join(good[:9]), 0),
        "zstd with another name": ("named.jsonl", frame, 0),
        "UTF-16": ("wide.jsonl", b"".join(good[:9]).decode().encode("utf-16"), 0),
        "a byte order mark": ("mark.jsonl", b"\xef\xbb\xbf" + b"".join(good[:9]) + b"{bad}\n", 9),
        "a list that is cut": ("list.json", b"[" + b",".join(good[:9]), 0),
        "an empty file": ("empty.jsonl", b"", 0),
    }
    for name, (file, content, count) in files.items():
        (folder / file).write_bytes(content)
        found.append(HostileInput(name, str(folder / file), count, name in _HARMLESS))
    return found + _odd(folder / "odd", good)


def _odd(folder: pathlib.Path, good: list[bytes]) -> list[HostileInput]:
    """What is no regular file, or cannot be read, alone and beside a good file."""
    kinds: dict[str, Callable[[pathlib.Path], object]] = {
        "a pipe": os.mkfifo,
        "a folder": os.mkdir,
        "a link to itself": lambda path: path.symlink_to(path.name),
        "a link to a device": lambda path: path.symlink_to("/dev/zero"),
        "a link to nothing": lambda path: path.symlink_to("nowhere"),
        "a file whose reads fail": lambda path: path.symlink_to("/proc/self/mem"),
    }
    found = []
    for number, (name, make_one) in enumerate(kinds.items()):
        beside = folder / str(number)
        beside.mkdir(parents=True)
        (beside / "good.jsonl").write_bytes(b"".join(good[:9]))
        make_one(beside / "odd.jsonl")
        found.append(HostileInput(name, str(beside / "odd.jsonl")))
        found.append(HostileInput(f"{name} in a folder", str(beside), harmless=name == "a folder"))
    loop = folder / "loop"
    loop.mkdir()
    (loop / "good.jsonl").write_bytes(b"".join(good[:9]))
    (loop / "inside").symlink_to(loop)
    return [*found, HostileInput("a link to its own folder", str(loop), 9, harmless=True)]


def _blocks(lines: list[bytes]) -> bytes:
    """Lines in a frame of zstd with a block for some of them."""
    packer = zstandard.ZstdCompressor().compressobj()
    parts = []
    for at in range(0, len(lines), 50):
        parts += [packer.compress(b"".join(lines[at : at + 50])), packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
    return b"".join([*parts, packer.flush()])


def _gzip_bomb(head: bytes, size: int) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    parts = [packer.compress(head)]
    parts += [packer.compress(_ZEROS) for _ in range(size >> 20)]
    return b"".join([*parts, packer.flush()])


def _zstd_bomb(head: bytes, size: int) -> bytes:
    packer = zstandard.ZstdCompressor(level=19).compressobj()
    parts = [packer.compress(head), packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
    parts += [packer.compress(_ZEROS) for _ in range(size >> 20)]
    return b"".join([*parts, packer.flush()])


def _frame_of(size: int) -> bytes:
    """The head of a frame of zstd that says its content's size, then a last block of no bytes."""
    return b"\x28\xb5\x2f\xfd\xe0" + size.to_bytes(8, "little") + b"\x01\x00\x00"
