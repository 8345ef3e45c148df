"""Reads the msgpack file of a T5X checkpoint: the state as a tree, with arrays inside it or references to them.

Its structure is checked before the library unpacks it: the library allocates as many elements as a header says.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import msgpack
import numpy as np

from capibara.core import limits
from capibara.core.types import UserError

_CHUNKED = "__msgpack_chunked_array__"
_PLACEHOLDER = "PLACEHOLDER://"
_SPEC = {"driver", "kvstore"}
_ITEMS, _DEPTH, _NAME = 1_000_000, 64, 1024
_INDEX_BYTES = 2**36  # limit of a file that contains all arrays
_SHAPE_ITEMS = 64  # limit for an array inside the file: its shape, dtype and bytes

Leaf = np.ndarray | dict[str, Any]  # an array, or TensorStore's specification of one

# First byte of an item -> the struct format of its size, and its contents: "b" bytes, "e" bytes after a type, "a"
# items, "m" pairs.
_SIZED = {
    0xC4: (">B", "b"), 0xC5: (">H", "b"), 0xC6: (">I", "b"), 0xC7: (">B", "e"), 0xC8: (">H", "e"), 0xC9: (">I", "e"),
    0xD9: (">B", "b"), 0xDA: (">H", "b"), 0xDB: (">I", "b"),
    0xDC: (">H", "a"), 0xDD: (">I", "a"), 0xDE: (">H", "m"), 0xDF: (">I", "m"),
}  # fmt: skip
# First byte -> number of bytes that follow it.
_FIXED = {
    0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
    0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17,
}  # fmt: skip


def check_structure(content: bytes | memoryview, items: int = _ITEMS) -> None:
    """Checks the structure of a msgpack item.

    Raises:
      ValueError: it is deeper or has more items than any checkpoint, or is truncated.
    """
    at, count, open_ = 0, 0, [1]  # open_: remaining items of each enclosing container
    while open_:
        if not open_[-1]:
            open_.pop()
            continue
        open_[-1] -= 1
        count += 1
        if count > items or len(open_) > _DEPTH:
            raise ValueError(f"it has more than {items:,} items, or is deeper than {_DEPTH}")
        if at >= len(content):
            raise ValueError("it ends too soon")
        size, inner, at = _item(content, at)
        at += size
        if at > len(content) or inner > 2 * (len(content) - at):
            raise ValueError(f"an item says {max(size, inner):,} bytes or items, and the file ends before")
        if inner:
            open_.append(inner)


def _item(content: bytes | memoryview, at: int) -> tuple[int, int, int]:
    """For the item at an offset: its bytes, the number of items in it, and the offset of both."""
    first = content[at]
    if first < 0x80 or first >= 0xE0:
        return 0, 0, at + 1
    if first < 0xA0:
        return 0, (first & 15) * (2 if first < 0x90 else 1), at + 1
    if first < 0xC0:
        return first & 31, 0, at + 1
    if first in _FIXED:
        return _FIXED[first], 0, at + 1
    if first not in _SIZED:
        raise ValueError(f"it has the byte {first:#x}, which begins no item")
    form, kind = _SIZED[first]
    if at + 1 + struct.calcsize(form) > len(content):
        raise ValueError("it ends too soon")
    (size,) = struct.unpack_from(form, content, at + 1)
    after = at + 1 + struct.calcsize(form)
    if kind in "be":
        return size + (kind == "e"), 0, after
    return 0, size * (2 if kind == "m" else 1), after


def leaves_of(index: str, part: str = "target") -> dict[str, Leaf]:
    """The leaves under `target`, the model, or under `state`, the optimizer's state.

    Raises:
      UserError: it is no T5X checkpoint, or refers to files outside it.
    """
    content = limits.read(index, _INDEX_BYTES)
    try:
        check_structure(content)
        tree = msgpack.unpackb(content, ext_hook=_extension, raw=False, strict_map_key=False)
        tree = tree.get("optimizer", tree)
        leaves: dict[str, Leaf] = {}
        _collect(tree["target"] if part == "target" else tree.get(part, {}), "", leaves.__setitem__, index)
    except UserError:
        raise
    # MemoryError: from an array's declared size; RecursionError cannot occur, the depth is bounded.
    except (ValueError, KeyError, TypeError, AttributeError, MemoryError, msgpack.exceptions.UnpackException) as error:
        cause = limits.cause(error, 120)
        raise UserError(f"{index} is no T5X checkpoint, cut short or corrupted ({cause}): copy it again") from error
    return leaves


def zarr(path: str) -> dict[str, Any]:
    """TensorStore's specification of an array in a folder."""
    return {"driver": "zarr", "kvstore": {"driver": "file", "path": path}}


def _collect(node: object, prefix: str, put: Callable[[str, Leaf], None], index: str) -> None:
    if isinstance(node, str) and node.startswith(_PLACEHOLDER):
        put(prefix, _specification(node.removeprefix(_PLACEHOLDER), index))
    elif isinstance(node, Mapping) and _CHUNKED in node:
        parts = [node["chunks"][str(i)] for i in range(len(node["chunks"]))]
        shape = [node["shape"][str(i)] for i in range(len(node["shape"]))]
        put(prefix, np.concatenate(parts).reshape(shape))
    elif isinstance(node, Mapping) and node.keys() >= _SPEC:
        path = node["kvstore"].get("path", node.get("path"))  # outside of kvstore until TensorStore 0.1.14
        if not isinstance(path, str):
            raise ValueError(f"{prefix} has the path {limits.shortened(path)}")
        put(prefix, _specification(path, index))
    elif isinstance(node, Mapping):
        for name, inner in node.items():
            if not isinstance(name, str | int) or len(prefix) > _NAME:
                raise ValueError(f"{limits.shortened(prefix)} has no name for one of its parts, or too long ones")
            _collect(inner, f"{prefix}/{name}" if prefix else str(name), put, index)
    elif isinstance(node, (np.ndarray, int)) and not isinstance(node, bool):
        put(prefix, np.asarray(node))
    elif node is not None:
        raise ValueError(f"{prefix} is {type(node).__name__}, not an array")


def _specification(path: str, index: str) -> dict[str, Any]:
    """The specification of an array beside the index, the only location allowed."""
    limits.inside(os.path.dirname(index), path.removesuffix("/"), index, links=False)
    return zarr(path)


def _extension(code: int, data: bytes) -> Any:
    """Decodes Flax's msgpack extension types: 1 an array, 2 a complex number, 3 a scalar."""
    if code not in (1, 2, 3):
        return msgpack.ExtType(code, data)
    check_structure(data, _SHAPE_ITEMS)
    if code == 2:
        return complex(*msgpack.unpackb(data))
    shape, dtype, values = msgpack.unpackb(data, raw=True)
    kind = ml_dtypes.bfloat16 if dtype == b"bfloat16" else np.dtype(dtype.decode())
    if np.dtype(kind).hasobject:
        raise ValueError("an array of objects")
    return np.frombuffer(values, kind).reshape(shape)
