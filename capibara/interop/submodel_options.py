"""What `capibara convert --skip_layers --mlp_dims` asks for. Light: the verb reads its flags from here."""

from __future__ import annotations

import argparse

from capibara.core.types import UserError

FLAGS = ("skip_layers", "mlp_dims")
Asked = tuple[tuple[int, ...], tuple[int, ...]]  # layers that go, hidden widths of those that stay


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds FLAGS."""
    parser.add_argument("--skip_layers", metavar="N,N-N", help="of gemma3n: layers that go; 20-24 make E2B of E4B")
    parser.add_argument("--mlp_dims", metavar="N,N", help="of gemma3n: hidden widths of layers that stay; E2B: 8192")


def asked(args: argparse.Namespace) -> Asked | None:
    """What the flags ask for; None: nothing.

    Raises:
      UserError: they are no numbers.
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
