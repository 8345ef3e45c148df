"""The wire format between a program and its tests, which do not trust the program: plain data as JSON.

Reading a message executes nothing (unlike pickle): a value is None, a bool, a number, a text, or a list of a tag and its
parts. `dialogue` and `jail` load this file in separate processes; it imports only the standard library.
"""

from __future__ import annotations

import binascii
import collections
import json
import socket
import sys
from collections.abc import Callable, Iterator, Mapping

LONGEST = 64 * 2**20  # bytes of a message
CANNOT_CROSS = "which cannot cross to the program's process"
_EXACT = 2**53  # integers below this are JSON numbers
Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Refer = Callable[[object], Json]
Resolve = Callable[[str, Json], object]

# Types that may be referred to by name: none of them executes code.
TYPES: Mapping[str, type] = {
    kind.__name__: kind
    for kind in (
        bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict, range, object, type(None),
    )
}  # fmt: skip
_MADE_OF_LIST: Mapping[str, Callable[[list[object]], object]] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": collections.deque,
}  # fmt: skip
_MADE_OF_PAIRS: Mapping[str, Callable[[dict[object, object]], object]] = {
    "dict": dict, "Counter": collections.Counter, "OrderedDict": collections.OrderedDict,
}  # fmt: skip
_KEYS, _ITEMS = type(dict[object, object]().keys()), type(dict[object, object]().items())
_DATES = ("date", "datetime", "time")
_NUMPY_KINDS = "?bhilqBHILQefdFD"


class Broken(Exception):
    """The other side is gone, or its message is invalid."""


class NotPlain(TypeError):
    """The value is not plain data and cannot be sent."""


def encode(value: object, refer: Refer) -> Json:
    """The JSON form of a value; `refer` makes a reference to one that is not plain data, or raises NotPlain."""
    kind = type(value)
    if value is None or isinstance(value, (bool, str, float)) and kind in (bool, str, float):
        return value
    if isinstance(value, int):
        number = int(value)
        return number if -_EXACT < number < _EXACT else ["int", hex(number)]  # Python limits decimal digits
    if isinstance(value, str):
        return str.__str__(value)
    for parent in (list, tuple, set, frozenset, collections.deque):
        if isinstance(value, parent):
            iterate: Callable[[object], Iterator[object]] = vars(parent)["__iter__"]  # not that of a subclass
            return [parent.__name__, [encode(item, refer) for item in iterate(value)]]
    if isinstance(value, dict):
        name = kind.__name__ if kind in (collections.Counter, collections.OrderedDict) else "dict"
        return [name, [[encode(key, refer), encode(item, refer)] for key, item in dict.items(value)]]
    return _rarer(value, refer)


def _rarer(value: object, refer: Refer) -> Json:
    if isinstance(value, float):
        return float(value)
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, (bytes, bytearray)):
        name = "bytes" if isinstance(value, bytes) else "bytearray"
        return [name, _base64(value)]
    if isinstance(value, range):
        return ["range", *(encode(item, refer) for item in (value.start, value.stop, value.step))]
    if isinstance(value, (_KEYS, _ITEMS)):
        name = "keys" if isinstance(value, _KEYS) else "items"
        return [name, [encode(item, refer) for item in value]]
    if value is Ellipsis or value is NotImplemented:
        return ["constant", str(value)]
    if isinstance(value, type) and TYPES.get(value.__name__) is value:
        return ["type", value.__name__]
    return _of_library(value, refer) or _of_numpy(value) or refer(value)


def _of_library(value: object, refer: Refer) -> Json:
    """Encodes values of modules that are slow to import, if they were imported; None: it is not one."""
    if (fractions := sys.modules.get("fractions")) and isinstance(value, fractions.Fraction):
        return ["Fraction", encode(value.numerator, refer), encode(value.denominator, refer)]
    if (decimal := sys.modules.get("decimal")) and isinstance(value, decimal.Decimal):
        return ["Decimal", str(value)]
    if datetime := sys.modules.get("datetime"):
        name = type(value).__name__
        is_date = name in _DATES and type(value) is getattr(datetime, name)
        if is_date and getattr(value, "tzinfo", None) is None and (written := getattr(value, "isoformat", None)):
            return [name, written()]
        if isinstance(value, datetime.timedelta) and type(value) is datetime.timedelta:
            return ["timedelta", value.days, value.seconds, value.microseconds]
    return None


def _of_numpy(value: object) -> Json:
    """Encodes numeric arrays and scalars, if numpy was imported; None: it is neither."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic)) or value.dtype.char not in _NUMPY_KINDS:
        return None
    data = _base64(numpy.ascontiguousarray(value).tobytes())
    return ["numpy", value.dtype.str, list(value.shape) if isinstance(value, numpy.ndarray) else None, data]


def decode(value: Json, resolve: Resolve) -> object:
    """The value of a JSON form; `resolve` returns the object of a reference.

    Raises:
      ValueError: it is not a valid form. Also LookupError, TypeError, ArithmeticError and OverflowError.
    """
    if not isinstance(value, list):
        if isinstance(value, dict):
            raise ValueError("no value")
        return value
    tag, *parts = value
    if not isinstance(tag, str):
        raise ValueError("no tag")
    if tag in _MADE_OF_LIST:
        return _MADE_OF_LIST[tag]([decode(item, resolve) for item in as_list(parts[0])])
    if tag in _MADE_OF_PAIRS:
        pairs = [(decode(key, resolve), decode(item, resolve)) for key, item in map(as_list, as_list(parts[0]))]
        return _MADE_OF_PAIRS[tag](dict(pairs))
    if tag == "int":
        return int(as_text(parts[0]), 16)
    if tag in ("bytes", "bytearray"):
        return TYPES[tag](binascii.a2b_base64(as_text(parts[0])))
    if tag == "complex":
        real, imaginary = parts
        return complex(_as_number(real), _as_number(imaginary))
    if tag == "range":
        start, stop, step = (as_int(decode(part, resolve)) for part in parts)
        return range(start, stop, step)
    if tag in ("Fraction", "Decimal", "timedelta", *_DATES):
        return _library(tag, [decode(part, resolve) for part in parts])
    if tag in ("keys", "items"):
        held = [decode(item, resolve) for item in as_list(parts[0])]
        return dict.fromkeys(held).keys() if tag == "keys" else dict(map(_as_pair, held)).items()
    if tag == "constant":
        return {"Ellipsis": Ellipsis, "NotImplemented": NotImplemented}[as_text(parts[0])]
    if tag == "type":
        return TYPES[as_text(parts[0])]
    if tag == "numpy":
        kind, shape, data = parts
        return _numpy(as_text(kind), None if shape is None else [*map(as_int, as_list(shape))], as_text(data))
    return resolve(tag, parts[0])


def as_list(value: Json) -> list[Json]:
    """Checks that a value is a list.

    Raises:
      TypeError: it is not.
    """
    if not isinstance(value, list):
        raise TypeError("no list")
    return value


def as_text(value: Json) -> str:
    """Checks that a value is a text; raises as `as_list`."""
    if not isinstance(value, str):
        raise TypeError("no text")
    return value


def as_int(value: object) -> int:
    """Checks that a value is an integer; raises as `as_list`."""
    if not isinstance(value, int):
        raise TypeError("no whole number")
    return value


def _as_number(value: Json) -> float:
    if not isinstance(value, (int, float)):
        raise TypeError("no number")
    return value


def _as_pair(value: object) -> tuple[object, object]:
    if not isinstance(value, tuple) or len(value) != 2:
        raise TypeError("no pair")
    return value


def _library(tag: str, parts: list[object]) -> object:
    import datetime
    import decimal
    import fractions

    if tag in _DATES:
        return getattr(datetime, tag).fromisoformat(*parts)
    created: dict[str, Callable[..., object]] = {
        "Fraction": fractions.Fraction,
        "Decimal": decimal.Decimal,
        "timedelta": datetime.timedelta,
    }
    return created[tag](*parts)


def _base64(data: bytes | bytearray) -> str:
    return binascii.b2a_base64(data, newline=False).decode()


def _numpy(kind: str, shape: list[int] | None, data: str) -> object:
    import numpy

    dtype = numpy.dtype(kind)
    if dtype.char not in _NUMPY_KINDS:
        raise ValueError(f"no numbers: {kind}")
    array = numpy.frombuffer(binascii.a2b_base64(data), dtype).copy()
    return array[0] if shape is None else array.reshape(shape)


def write_message(channel: socket.socket, message: Json) -> None:
    """Sends a message: its length in eight bytes, then JSON.

    Raises:
      Broken: the other side is gone.
      NotPlain: it is too long.
    """
    text = json.dumps(message, separators=(",", ":")).encode("ascii")
    if len(text) > LONGEST:
        raise NotPlain(f"a value of {len(text)} bytes: at most {LONGEST} cross")
    try:
        channel.sendall(len(text).to_bytes(8, "big") + text)
    except OSError as error:
        raise Broken(str(error)) from None


def read_message(channel: socket.socket) -> list[Json]:
    """Reads the next message.

    Raises:
      Broken: the other side is gone, or the message is invalid.
    """
    length = int.from_bytes(_bytes(channel, 8), "big")
    if length > LONGEST:
        raise Broken(f"a message of {length} bytes")
    text = _bytes(channel, length)
    try:
        result = json.loads(text)
    except (ValueError, RecursionError):
        raise Broken("no JSON") from None
    if not isinstance(result, list) or not result or not isinstance(result[0], str):
        raise Broken("no message")
    return result


def _bytes(channel: socket.socket, count: int) -> bytes:
    read = bytearray()
    while len(read) < count:
        try:
            part = channel.recv(min(count - len(read), 2**20))
        except OSError as error:
            raise Broken(str(error)) from None
        if not part:
            raise Broken("the other side has ended")
        read += part
    return bytes(read)
