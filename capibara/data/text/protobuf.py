"""A small reader of protocol buffers: the fields of a message, and tf.train.Example."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5
_MOST_BYTES = 10  # largest size of a varint


class Malformed(Exception):
    """The bytes are not a valid message; the text says why."""


def varint(data: bytes, at: int) -> tuple[int, int]:
    """The varint at position `at`, and the position after it."""
    value = shift = 0
    for end in range(at, min(at + _MOST_BYTES, len(data))):
        byte = data[end]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, end + 1
        shift += 7
    raise Malformed("a number does not end")


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message: field number, and an integer or bytes (also for fixed-size fields)."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = varint(data, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = varint(data, at)
        elif kind in (_EIGHT, _FOUR):
            size = 8 if kind == _EIGHT else 4
        else:
            raise Malformed(f"a field of kind {kind}")
        if at + size > len(data):
            raise Malformed("a field is longer than its message")
        yield number, data[at : at + size]
        at += size


def example(data: bytes) -> dict[str, list[Any]]:
    """The features of a tf.train.Example by name: lists of bytes, floats or integers.

    Raises:
      Malformed: the bytes are not a tf.train.Example.
    """
    result: dict[str, list[Any]] = {}
    for features in _messages(data, 1):
        for entry in _messages(features, 1):
            parts = dict(fields(entry))
            name, feature = parts.get(1, b""), parts.get(2, b"")
            if not isinstance(name, bytes) or not isinstance(feature, bytes):
                raise Malformed("a feature without a name")
            try:
                result[name.decode()] = _feature(feature)
            except (UnicodeDecodeError, struct.error) as error:
                raise Malformed(str(error)) from None
    return result


def _messages(data: bytes, number: int) -> Iterator[bytes]:
    for result, value in fields(data):
        if result == number:
            if not isinstance(value, bytes):
                raise Malformed(f"field {number} is no message")
            yield value


def _feature(data: bytes) -> list[Any]:
    """The values of a feature: BytesList 1, FloatList 2 or Int64List 3."""
    values: list[Any] = []
    for kind, content in fields(data):
        if not isinstance(content, bytes):
            raise Malformed("a feature is no list")
        for _, value in fields(content):
            if kind == 1:
                values.append(value)
            elif kind == 2:
                if not isinstance(value, bytes):
                    raise Malformed("a float of another size")
                values += struct.unpack(f"<{len(value) // 4}f", value)
            elif isinstance(value, int):  # not packed
                values.append(_signed(value))
            else:
                at = 0
                while at < len(value):
                    number, at = varint(value, at)
                    values.append(_signed(number))
    return values


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
