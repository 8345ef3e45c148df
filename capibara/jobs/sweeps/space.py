"""What a sweep varies: Gin bindings, each with a list of values or a range, as text.

    LEARNING_RATE = [1e-3, 3e-4, 1e-4]     one of these values
    LEARNING_RATE = log(1e-4, 1e-2)        a number between the two, its logarithm uniform
    DROPOUT_RATE = uniform(0, 0.5)         a number between the two
    LAYERS = int(2, 8)                     a whole number, both ends included

A value is kept as the text that Gin reads, such as 0.001. The text is parsed, never evaluated.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import math
import re
import sys
from collections.abc import Sequence

from capibara.core import fields
from capibara.core.types import UserError

# As Gin's: scopes with slashes, modules and parameters with dots.
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*([./][A-Za-z_][A-Za-z0-9_]*)*")
_LONGEST = 10_000  # characters
_LARGEST = 1 << 53  # of a whole number: all below it are floats, too
_RUN_FOLDER = ("MODEL_DIR", "model_dir")  # each trial has its own
_FORMS = "[value, ...], log(low, high), uniform(low, high) or int(low, high)"


class Kind(enum.StrEnum):
    """Which values a parameter has.

    Attributes:
      VALUES: those of a list.
      LOG: numbers of a range, their logarithms uniform.
      UNIFORM: numbers of a range.
      INT: whole numbers of a range, both ends included.
    """

    VALUES = "values"
    LOG = "log"
    UNIFORM = "uniform"
    INT = "int"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """A binding that a sweep varies.

    Attributes:
      name: what is bound.
      kind: which values it has.
      values: of a list, as Gin text.
      low, high: the ends of a range.
    """

    name: str
    kind: Kind
    values: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0

    @property
    def size(self) -> int | None:
        """How many values it has; None: a range of floats."""
        if self.kind is Kind.VALUES:
            return len(self.values)
        return int(self.high) - int(self.low) + 1 if self.kind is Kind.INT else None

    @property
    def text(self) -> str:
        """The text from which `parse` makes it."""
        if self.kind is Kind.VALUES:
            return f"{self.name} = [{', '.join(self.values)}]"
        return f"{self.name} = {self.kind}({self.low!r}, {self.high!r})"

    def value(self, index: int) -> str:
        """The value of this index, from 0 to `size` - 1."""
        return self.values[index] if self.kind is Kind.VALUES else repr(int(self.low) + index)

    def sample(self, quantile: float) -> str:
        """The value at a quantile, at least 0 and below 1."""
        if (size := self.size) is not None:
            return self.value(min(int(quantile * size), size - 1))
        if self.kind is Kind.UNIFORM:
            return self.rounded(self.low + (self.high - self.low) * quantile)
        low, high = math.log(self.low), math.log(self.high)
        return self.rounded(math.exp(low + (high - low) * quantile))

    def rounded(self, number: float) -> str:
        """A number of its range in a few digits: what they omit is less than a hundred-thousandth of the range."""
        span = self.high - self.low
        if self.kind is Kind.LOG:
            span = number * (math.log(self.high) - math.log(self.low))
        number = round(number, 5 - math.floor(math.log10(max(span, sys.float_info.min))))
        return repr(float(min(max(number, self.low), self.high)))


Space = tuple[Parameter, ...]


def parse(text: str) -> Parameter:
    """The parameter that a text such as `LEARNING_RATE = log(1e-4, 1e-2)` describes.

    Raises:
      UserError: it describes none.
    """
    name, equals, right = (part.strip() for part in text.partition("="))
    shown = fields.short(text)
    if not equals or not _NAME.fullmatch(name):
        raise UserError(f"--vary={shown} must be NAME = {_FORMS}, NAME as in a Gin file")
    if name.rpartition(".")[2] in _RUN_FOLDER:
        raise UserError(f"--vary={shown}: the sweep itself sets {name}, to a folder for each trial: remove it")
    if len(text) > _LONGEST:
        raise UserError(f"--vary={shown} has {len(text):,} characters, must have at most {_LONGEST:,}")
    try:
        node = ast.parse(right, mode="eval").body
        if isinstance(node, ast.List):
            return Parameter(name=name, kind=Kind.VALUES, values=_values(node.elts))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in (*Kind,)[1:]:
            kind = Kind(node.func.id)
            low, high = _ends(kind, node)
            return Parameter(name=name, kind=kind, low=low, high=high)
    except _Mistake as mistake:
        raise UserError(f"--vary={shown}: {mistake}") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        pass
    raise UserError(f"--vary={shown} must be NAME = {_FORMS}, with values as in Python: 1e-3, 'text', True, (1, 2)")


def parse_all(texts: Sequence[str]) -> Space:
    """The parameters of several texts; raises UserError as `parse`, for a name that comes twice, and for no text."""
    space = tuple(map(parse, texts))
    names = [parameter.name for parameter in space]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"--vary={twice[0]} = ... is there twice: remove one of them")
    if not space:
        raise UserError("--vary is not set: say what to vary, e.g. --vary='LEARNING_RATE = [1e-3, 3e-4]'")
    return space


def size_of(space: Space) -> int | None:
    """How many points a space has; None: a parameter is a range of floats."""
    sizes = [parameter.size for parameter in space]
    return None if None in sizes else math.prod(size for size in sizes if size is not None)


def number_of(text: str) -> float | None:
    """The number that a Gin text is; None: it is something else."""
    value = ast.literal_eval(text)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def plain(text: str) -> bool | float | str | None:
    """The value of a Gin text as JSON has it; a list, a tuple or a dict stays text."""
    value = ast.literal_eval(text)
    return value if value is None or isinstance(value, (bool, int, float, str)) else text


class _Mistake(Exception):
    """The message says what is wrong with a list or a range."""


def _values(nodes: Sequence[ast.expr]) -> tuple[str, ...]:
    texts = []
    for node in nodes:
        value = ast.literal_eval(node)
        _check(value)
        texts.append(repr(value))
    if not texts:
        raise _Mistake("the list is empty")
    if twice := [text for text in texts if texts.count(text) > 1]:
        raise _Mistake(f"{fields.short(ast.literal_eval(twice[0]))} is there twice: remove one of them")
    return tuple(texts)


def _check(value: object) -> None:
    """Raises _Mistake for a value that Gin text cannot hold."""
    if isinstance(value, float) and not math.isfinite(value):
        raise _Mistake(f"{value} must be a finite number")
    inner: list[object] = []
    if isinstance(value, dict):
        inner = [*value, *value.values()]
    elif isinstance(value, (list, tuple)):
        inner = [*value]
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        raise _Mistake(
            f"{fields.short(value)} must be a number, a text, True, False, None, or a list, tuple or dict of those"
        )
    for item in inner:
        _check(item)


def _ends(kind: Kind, node: ast.Call) -> tuple[float, float]:
    """The ends of a range."""
    if len(node.args) != 2 or node.keywords:
        raise _Mistake(f"{kind} must have two numbers: {kind}(low, high)")
    low, high = (ast.literal_eval(arg) for arg in node.args)
    for end in (low, high):
        if isinstance(end, bool) or not isinstance(end, (int, float)) or abs(end) > 1e300:
            raise _Mistake(f"{fields.short(end)} must be a finite number")
        if kind is Kind.INT and not (isinstance(end, int) and abs(end) < _LARGEST):
            raise _Mistake(f"{end} must be a whole number, in int")
    if kind is Kind.LOG and low <= 0:
        raise _Mistake(f"the low end of log is {low}, must be above 0")
    if not low < high:
        raise _Mistake(f"the low end ({low}) must be below the high end ({high})")
    return (low, high) if kind is Kind.INT else (float(low), float(high))
