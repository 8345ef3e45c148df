"""Command-line options of `capibara merge`: the method and its settings."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable

from capibara import config
from capibara.consensus.merging import METHODS
from capibara.consensus.merging.method import Method
from capibara.core.fields import did_you_mean
from capibara.core.types import UserError


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))


def _ranges(text: str) -> tuple[tuple[int, int], ...]:
    pairs = (item.split(":") for item in text.split(","))
    return tuple((int(start), int(end)) for start, end in pairs)


# What a flag's text must be, by how it is read.
_FORMS: dict[Callable[[str], object], str] = {
    _numbers: "numbers separated by commas: try 0.5,0.5",
    _ranges: "ranges of layers separated by commas, each first:end: try 0:8,4:12",
    float: "a number: try 0.5",
    int: "a whole number: try 2",
}
# Flag -> how its text is read. Each sets a field of the method.
_FLAGS: dict[str, Callable[[str], object]] = {
    "weights": _numbers, "density": _numbers, "t": float, "scale": float, "layers": _ranges, "top_k": int,
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --method and the flags of the methods' settings."""
    parser.add_argument("--method", metavar="NAME", help=f"how to merge: {', '.join(METHODS)}")
    parser.add_argument("--weights", metavar="N,N", help="weights of the models, in their order; default: 1 each")
    parser.add_argument("--density", metavar="N,N", help="share of values to keep, of all models or of each")
    parser.add_argument("--t", metavar="N", help="for slerp: 0 is the first model, 1 the second; default: 0.5")
    parser.add_argument("--scale", metavar="N", help="factor of the sum of offsets, or of the model; default: 1")
    parser.add_argument(
        "--layers", metavar="N:N,N:N", help="for passthrough: of each model a range of layers, first:end"
    )
    parser.add_argument("--top_k", metavar="N", help="for moe: experts of a token; default: 2")


def from_args(args: argparse.Namespace) -> Method:
    """The method, from the flags and the parsed Gin files; flags win.

    Raises:
      UserError: there is no such method, or it has no such settings.
    """
    if not args.method:
        raise UserError(f"merge needs --method=NAME: one of {', '.join(METHODS)}")
    if args.method not in METHODS:
        raise UserError(f"--method={args.method} is unknown{did_you_mean(args.method, METHODS, 'methods')}")
    result = METHODS[args.method]
    field_names = {field.name for field in dataclasses.fields(result)}
    settings: dict[str, object] = {}
    for flag, read in _FLAGS.items():
        if (text := getattr(args, flag)) is None:
            continue
        if flag not in field_names:
            having = ", ".join(name for name, cls in METHODS.items() if flag in _fields(cls))
            raise UserError(f"--{flag}={text} is not a setting of {args.method}, but of {having}: leave it out")
        try:
            value = read(text)
        except ValueError:
            raise UserError(f"--{flag}={text} must be {_FORMS[read]}") from None
        single = flag == "density" and result.name == "sce"
        settings[flag] = _only(flag, text, value) if single else value
    config.parse(args.gin_file, args.gin_bindings, args.gin_search_paths)
    method: Method = config.build(result, **settings)
    config.check_used()
    return method


def _fields(cls: type[Method]) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def _only(flag: str, text: str, value: object) -> float:
    assert isinstance(value, tuple)
    if len(value) != 1:
        raise UserError(f"--{flag}={text} has {len(value)} numbers, must have one for all models: try {value[0]}")
    return float(value[0])
