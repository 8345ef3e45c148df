"""Command-line options for the sum of several adapters: which, their weights, and the method."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import math

from capibara.core.types import UserError

FLAGS = ("plus", "weights", "combination")


class Combination(enum.StrEnum):
    """How to sum adapters."""

    CAT = "cat"
    LINEAR = "linear"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sum:
    """Adapters with their weights.

    Attributes:
      folders: of PEFT.
      weights: one per folder; any finite numbers.
      combination: how to sum them.
    """

    folders: tuple[str, ...]
    weights: tuple[float, ...]
    combination: Combination = Combination.CAT

    def __post_init__(self) -> None:
        if len(self.weights) != len(self.folders):
            raise UserError(
                f"--weights has {len(self.weights)} numbers, there are {len(self.folders)} adapters: set one for each"
            )
        for weight in self.weights:
            if not math.isfinite(weight):
                raise UserError(f"--weights has {weight}, must be finite: try 0.5")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds FLAGS."""
    parser.add_argument("--plus", action="append", metavar="PATH", help="an adapter to add to --from; repeatable")
    parser.add_argument("--weights", metavar="N,N", help="weights of --from and each --plus; default: 1 each")
    parser.add_argument("--combination", choices=[*Combination], help="how to sum them, as in PEFT; default: cat")


def from_args(args: argparse.Namespace) -> str | Sum:
    """What to convert: --from, or the sum of it and each --plus.

    Raises:
      UserError: weights are not numbers, or there is nothing to sum.
    """
    for name in ("weights", "combination"):
        if getattr(args, name) and not args.plus:
            raise UserError(f"--{name}={getattr(args, name)} is for several adapters: add --plus=PATH, or leave it out")
    if not args.plus:
        return args.source
    folders = (args.source, *args.plus)
    try:
        weights = tuple(map(float, args.weights.split(","))) if args.weights else (1.0,) * len(folders)
    except ValueError:
        raise UserError(f"--weights={args.weights} must be numbers separated by commas: try 0.7,0.3") from None
    return Sum(folders=folders, weights=weights, combination=Combination(args.combination or "cat"))
