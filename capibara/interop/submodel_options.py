"""Flags of `capibara convert --skip_layers --mlp_dims`; imports nothing slow."""

from __future__ import annotations

import argparse

from capibara.core.types import UserError

FLAGS = ("skip_layers", "mlp_dims")
SubmodelSizes = tuple[tuple[int, ...], tuple[int, ...]]  # layers to remove, hidden widths of the remaining ones


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds FLAGS."""
    parser.add_argument("--skip_layers", metavar="N,N-N", help="for gemma3n: layers to remove; 20-24 make E2B of E4B")
    parser.add_argument("--mlp_dims", metavar="N,N", help="for gemma3n: hidden widths of remaining layers; E2B: 8192")


def from_args(args: argparse.Namespace) -> SubmodelSizes | None:
    """The values of the flags; None: they are not set.

    Raises:
      UserError: they are not numbers.
    """
    if args.skip_layers is None and args.mlp_dims is None:
        return None
    layers: list[int] = []
    for part in (args.skip_layers or "").split(",") if args.skip_layers else ():
        first, _, last = part.partition("-")
        layers.extend(range(_number("skip_layers", first), _number("skip_layers", last or first) + 1))
    widths = args.mlp_dims.split(",") if args.mlp_dims else ()
    return tuple(layers), tuple(_number("mlp_dims", width) for width in widths)


def _number(flag: str, text: str) -> int:
    if not text.strip().isdecimal():
        form = "numbers and ranges: try 20-24" if flag == "skip_layers" else "numbers: try 8192"
        raise UserError(f"--{flag} has {text!r}, must be {form}")
    return int(text)
