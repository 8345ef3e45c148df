"""Flags of `capibara convert --skip_layers --mlp_dims`; imports nothing slow."""

from __future__ import annotations

import argparse

from capibara.core.types import UserError

FLAGS = ("skip_layers", "mlp_dims")
_MOST_LAYERS = 10_000  # more than any model has
SubmodelSizes = tuple[tuple[int, ...], tuple[int, ...]]  # layers to remove, hidden widths of the remaining ones


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds FLAGS."""
    parser.add_argument("--skip_layers", metavar="N,N-N", help="for gemma3n: layers to remove; 20-24 make E2B of E4B")
    parser.add_argument("--mlp_dims", metavar="N,N", help="for gemma3n: hidden widths of remaining layers; E2B: 8192")


def from_args(args: argparse.Namespace) -> SubmodelSizes | None:
    """The values of the flags; None: they are not set.

    Raises:
      UserError: they are not numbers, or a range ends before it begins.
    """
    if args.skip_layers is None and args.mlp_dims is None:
        return None
    parts = [] if args.skip_layers is None else args.skip_layers.split(",")
    widths = [] if args.mlp_dims is None else args.mlp_dims.split(",")
    layers = tuple(layer for part in parts for layer in _range(part))
    return layers, tuple(_number("mlp_dims", width) for width in widths)


def _range(part: str) -> range:
    first, dash, last = part.partition("-")
    begin = _number("skip_layers", first)
    end = _number("skip_layers", last) if dash else begin
    if not begin <= end < _MOST_LAYERS:
        raise UserError(
            f"--skip_layers has {part!r}, must be layers of the model, the first before the last: try 20-24"
        )
    return range(begin, end + 1)


def _number(flag: str, text: str) -> int:
    if not text.strip().isdecimal():
        form = "numbers and ranges: try 20-24" if flag == "skip_layers" else "numbers: try 8192"
        raise UserError(f"--{flag} has {text!r}, must be {form}")
    return int(text)
