"""Reads the pickles of torch.save with an interpreter that supports only the opcodes that tensors need.

Python's unpickler calls what a pickle names, and hashes, compares and allocates as it says. This one makes dicts,
lists, tuples, numbers, texts and the results of `call` for names that the caller accepts. Keys are only texts and
numbers, so that hashing is safe, and every step allocates at most what its own bytes hold.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable
from typing import Any

STEPS = 4_000_000  # limit; a tensor takes about 30
_KEYS = (str, int, bytes, bool, float, type(None))
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], object]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_SIZES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_VALUES = frozenset(
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 "
    "BINBYTES SHORT_BINBYTES BINBYTES8 STRING BINSTRING SHORT_BINSTRING".split()
)

Call = Callable[[str, str, tuple[Any, ...]], Any]


class Broken(Exception):
    """A pickle that is truncated, invalid, or has opcodes that no tensor needs; the message says why."""


class Named:
    """A callable that a pickle names."""

    def __init__(self, module: str, name: str):
        self.module, self.name = module, name


def load(content: io.BytesIO, named: Callable[[str, str], Any], call: Call, stored: Callable[[Any], Any]) -> Any:
    """The next pickle in `content`.

    Args:
      content: what may be read; it is left after the pickle.
      named: (module, name) -> the value of a name that is not called, or Named; raises if the name is not allowed.
      call: (module, name, arguments) -> the result of a call.
      stored: resolves a persistent id.

    Raises:
      Broken: it cannot be read.
    """
    machine = _Machine(named, call, stored, content.tell())
    steps = 0
    try:
        for opcode, argument, at in pickletools.genops(content):
            steps += 1
            if steps > STEPS:
                raise Broken(f"its pickle has more than {STEPS:,} steps")
            if opcode.name == "STOP":
                return machine.stack.pop()
            machine.step(opcode.name, argument, at or 0)
    except (IndexError, KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        raise Broken(" ".join(str(error).split())[:160] or type(error).__name__) from error
    raise Broken("its pickle has no end")


class _Machine:
    def __init__(self, named: Callable[[str, str], Any], call: Call, stored: Callable[[Any], Any], begin: int):
        self._named, self._call, self._stored, self._begin = named, call, stored, begin
        self.stack: list[Any] = []
        self._marks: list[list[Any]] = []  # the stacks below each mark
        self._memo: dict[int, Any] = {}
        self._puts = 0

    def step(self, name: str, argument: Any, at: int) -> None:
        stack = self.stack
        if name in _VALUES:
            stack.append(argument)
        elif name in ("BINGET", "GET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name in ("BINPUT", "PUT", "LONG_BINPUT", "MEMOIZE"):
            self._put(argument, at)
        elif name == "MARK":
            self._marks.append(stack)
            self.stack = []
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in _SIZES:
            stack[-_SIZES[name] :] = [tuple(self._last(_SIZES[name]))]
        elif name in ("TUPLE", "LIST", "DICT"):
            items = self._marked()
            created: dict[str, Callable[[list[Any]], object]] = {"TUPLE": tuple, "LIST": list, "DICT": _pairs}
            self.stack.append(created[name](items))
        elif name in ("APPEND", "APPENDS", "SETITEM", "SETITEMS"):
            self._fill(name)
        else:
            self._act(name, argument)

    def _act(self, name: str, argument: Any) -> None:
        match name:
            case "GLOBAL":
                module, _, of = argument.partition(" ")
                self.stack.append(self._named(module, of))
            case "STACK_GLOBAL":
                module, of = self._last(2)
                self.stack[-2:] = [self._named(_text(module), _text(of))]
            case "REDUCE" | "NEWOBJ":
                target_class, arguments = self._last(2)
                if not isinstance(target_class, Named) or not isinstance(arguments, tuple):
                    raise Broken("it calls what is no function")
                self.stack[-2:] = [self._call(target_class.module, target_class.name, arguments)]
            case "BUILD":  # sets an OrderedDict's attributes, which are not tensors
                self.stack.pop()
                self.stack[-1]
            case "BINPERSID":
                self.stack[-1] = self._stored(self.stack[-1])
            case "POP":
                self.stack.pop()
            case "PROTO" | "FRAME":
                pass
            case _:
                raise Broken(f"its pickle has the step {name}, which no tensor needs")

    def _put(self, index: int | None, at: int) -> None:
        if index is not None and index > at - self._begin:
            raise Broken(f"its pickle has memo index {index} beyond its bytes")
        self._memo[self._puts if index is None else index] = self.stack[-1]
        self._puts += 1

    def _last(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise Broken("its pickle takes what it has not made")
        return self.stack[-count:]

    def _marked(self) -> list[Any]:
        items = self.stack
        self.stack = self._marks.pop()
        return items

    def _fill(self, name: str) -> None:
        if name.endswith("S"):
            items = self._marked()
        else:
            items = self._last(2 if name == "SETITEM" else 1)
            del self.stack[-len(items) :]
        target = self.stack[-1]
        if name.startswith("APPEND") and type(target) is list:
            target += items
        elif name.startswith("SETITEM") and type(target) is dict:
            target.update(_pairs(items))
        else:
            raise Broken(f"its pickle puts items into a {type(target).__name__}")


def _pairs(items: list[Any]) -> dict[Any, Any]:
    if len(items) % 2:
        raise Broken("its pickle has a key without a value")
    keys = items[::2]
    for key in keys:
        if type(key) not in _KEYS:
            raise Broken(f"its pickle has a {type(key).__name__} for a key")
    return dict(zip(keys, items[1::2], strict=True))


def _text(value: object) -> str:
    if type(value) is not str:
        raise Broken("its pickle names no text")
    return value
