"""Several adapters that are to become one: which, with what weights, and how; of the command line."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import math

from capibara.core.types import UserError

FLAGS = ("plus", "weights", "combination")


class Combination(enum.StrEnum):
    """How adapters are added up."""

    CAT = "cat"
    LINEAR = "linear"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sum:
    """Adapters with their weights.

    Attributes:
      folders: of PEFT.
      weights: of each; any finite numbers.
      combination: how they are added up.
    """

    folders: tuple[str, ...]
    weights: tuple[float, ...]
    combination: Combination = Combination.CAT

    def __post_init__(self) -> None:
        if len(self.weights) != len(self.folders):
            raise UserError(
                f"--weights has {len(self.weights)} numbers, there are {len(self.folders)} adapters: give one for each"
            )
        for weight in self.weights:
            if not math.isfinite(weight):
                raise UserError(f"--weights has {weight}, must be finite: try 0.5")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds FLAGS."""
    parser.add_argument("--plus", action="append", metavar="PATH", help="of adapters: one more to add; may be repeated")
    parser.add_argument("--weights", metavar="N,N", help="of --from and each --plus; default: 1 for each")
    parser.add_argument("--combination", choices=[*Combination], help="of them, as in PEFT; default: cat")


def asked(args: argparse.Namespace) -> str | Sum:
    """What is to be converted: --from, or the sum of it and each --plus.

    Raises:
      UserError: weights are no numbers, or there is nothing to be added.
    """
    for name in ("weights", "combination"):
        if getattr(args, name) and not args.plus:
            raise UserError(f"--{name}={getattr(args, name)} is of several adapters: add --plus=PATH, or leave it out")
    if not args.plus:
        return args.source
    folders = (args.source, *args.plus)
    try:
        weights = tuple(map(float, args.weights.split(","))) if args.weights else (1.0,) * len(folders)
    except ValueError:
        raise UserError(f"--weights={args.weights} must be numbers with commas between them: try 0.7,0.3") from None
    return Sum(folders=folders, weights=weights, combination=Combination(args.combination or "cat"))
