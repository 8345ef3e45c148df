"""Command-line options of `capibara experts`: the operation and its settings."""

from __future__ import annotations

import argparse
import dataclasses

from capibara import config
from capibara.core.types import UserError
from capibara.interop.experts import OPERATIONS
from capibara.interop.experts.operation import ExpertOperation

# Flag -> how its text is read, and what it is. Each sets a field of the operation.
_FLAGS: dict[str, tuple[type, str]] = {
    "experts": (int, "experts of a layer in the result"),
    "parts": (int, "parts of an expert; default: 2"),
    "top_k": (int, "experts of a token; default: 2"),
    "granularity": (int, "parts of an MLP, of which an expert has one; default: 1"),
    "drop_ratio": (float, "share of hidden units that are drawn anew; default: 0"),
    "router_scale": (float, "size of the new router's weights; default: 1"),
    "similarity": (str, "what experts are compared by: outputs or router"),
    "alignment": (str, "whether hidden units are matched: hidden or none"),
    "noise": (float, "noise on the copies' rows of the router; default: 0"),
    "by": (str, "by what experts count: activation, use, gate or random"),
    "domain": (str, "the domain of the statistics whose tokens count; default: all"),
    "seed": (int, "of random numbers; default: 0"),
}
_REWIRE = ("target", "statistics", "format", "dtype")
_STATS = ("data", "domains", "limit", "out", "step", "weights", "emulate")
_FORMS: dict[type, str] = {int: "a whole number: try 2", float: "a number: try 0.5"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the operations' settings."""
    for flag, (_, text) in _FLAGS.items():
        used_by = ", ".join(name for name, cls in OPERATIONS.items() if flag in _fields(cls))
        parser.add_argument(
            f"--{flag}", metavar="N" if _FLAGS[flag][0] is not str else "NAME", help=f"{used_by}: {text}"
        )


def add_stats(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of stats."""
    parser.add_argument(
        "--data", action="append", metavar="FILE", help="stats: JSON lines with text and domain; repeatable"
    )
    parser.add_argument("--domains", metavar="NAME,NAME", help="stats: domains that count apart; default: the run's")
    parser.add_argument("--limit", type=int, metavar="N", help="stats: most batches")
    parser.add_argument("--out", metavar="FILE", help="stats: the file of the statistics; a picture goes beside it")
    parser.add_argument("--step", type=int, metavar="N", help="stats: checkpoint step of a run; default: the newest")
    parser.add_argument(
        "--weights", choices=("ema", "raw"), help="stats: of a run; default: its moving averages, if any"
    )
    parser.add_argument("--emulate", type=int, metavar="N", help="stats: run on N emulated CPU devices (1 to 64)")


def check(args: argparse.Namespace) -> None:
    """Raises UserError if flags are given that are not for args.action, or one that it needs is not."""
    others, action = (_REWIRE, "stats") if args.action == "stats" else (_STATS, args.action)
    options = {"to" if name == "target" else name: getattr(args, name) for name in others}
    options |= _settings_of(args) if args.action == "stats" else {}
    for name, value in options.items():
        if value is not None:
            raise UserError(f"--{name}={value} is not for {action}: leave it out")
    if args.limit is not None and args.limit < 1:
        raise UserError(f"--limit={args.limit} must be at least 1")
    if args.action != "stats" and not args.target:
        raise UserError(f"{args.action} needs --to=PATH: name a new folder")


def _settings_of(args: argparse.Namespace) -> dict[str, str]:
    """The flags of settings that are given, and their texts."""
    return {flag: text for flag in _FLAGS if (text := getattr(args, flag)) is not None}


def from_args(args: argparse.Namespace) -> ExpertOperation:
    """The operation, from the flags and the parsed Gin files; flags win.

    Raises:
      UserError: it has no such settings, or they are no numbers.
    """
    cls = OPERATIONS[args.action]
    settings: dict[str, object] = {}
    for flag, text in _settings_of(args).items():
        if flag not in _fields(cls):
            having = ", ".join(name for name, other in OPERATIONS.items() if flag in _fields(other))
            raise UserError(f"--{flag}={text} is not a setting of {args.action}, but of {having}: leave it out")
        read = _FLAGS[flag][0]
        try:
            settings[flag] = read(text)
        except ValueError:
            raise UserError(f"--{flag}={text} must be {_FORMS[read]}") from None
    config.parse(args.gin_file, args.gin_bindings, args.gin_search_paths)
    operation: ExpertOperation = config.build(cls, **settings)
    config.check_used()
    return operation


def _fields(cls: type[ExpertOperation]) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}
