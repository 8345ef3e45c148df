"""The largest arrays that a compiled program makes, read from its text: where a runtime says only that memory is short."""

from __future__ import annotations

import math
import re

_MODULE = re.compile(r"^HloModule ([\w.-]+)", re.MULTILINE)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
# Such a computation is a part of an operation that has no memory of its own: what a fusion fuses, or a reduction applies.
_PART = re.compile(r"\b(?:calls|to_apply)=%?([\w.-]+)")
_OPERATION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (?P<types>\(.*?\)|\S+) (?P<code>[\w-]+)\(")
_ARRAY = re.compile(r"\b(?P<dtype>[a-z]+(?P<bits>\d*)\w*)\[(?P<sizes>[\d,]*)\]")
_NAME = re.compile(r'op_name="([^"]*)"')
_WITHOUT_MEMORY = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call optimization-barrier".split()
)


def name_of(text: str) -> str | None:
    """The name of a program, such as "jit_step"; None: the text is not that of a program."""
    result = _MODULE.search(text)
    return None if result is None else result[1]


def largest(text: str, most: int) -> list[str]:
    """The shapes that take most memory on a device, such as "512.0 MiB f32[1024,131072] of jit(step)/dot_general".

    Args:
      text: of a compiled program.
      most: how many.
    """
    makers: dict[str, list[str]] = {}  # shape -> the operations that make one, those of the user's program first
    sizes: dict[str, int] = {}
    parts = set(_PART.findall(text))
    is_part = False
    for line in text.splitlines():
        if (begins := _COMPUTATION.match(line)) is not None:
            is_part = begins[1] in parts
        elif not is_part and (operation := _OPERATION.match(line)) is not None:
            if operation["code"] not in _WITHOUT_MEMORY:
                name = _NAME.search(line)
                for array in _ARRAY.finditer(operation["types"]):
                    sizes[array[0]] = _bytes(array)
                    result = makers.setdefault(array[0], [])
                    result.insert(0, name[1]) if name is not None else result.append(operation["code"])
    return [_line(shape, sizes[shape], makers[shape]) for shape in sorted(sizes, key=lambda item: -sizes[item])[:most]]


def _bytes(array: re.Match[str]) -> int:
    bits = int(array["bits"] or 8)  # pred has none
    return math.prod(int(size) for size in array["sizes"].split(",") if size) * bits // 8


def _line(shape: str, size_bytes: int, makers: list[str]) -> str:
    more = f" and {len(makers) - 1} more" if len(makers) > 1 else ""
    return f"{size_bytes / 2**20:,.1f} MiB {shape} of {makers[0]}{more}"
