"""Flags of `capibara convert --quantize`; imports nothing slow."""

from __future__ import annotations

import argparse
import dataclasses
import enum

from capibara.core.types import UserError

FLAGS = ("quantize", "calibration", "group_size")
GROUP_SIZES = (128, 64, 32)
# Choices of --dtype; all but the first three and the last are for GGUF.
DTYPES = (
    *("f32", "bf16", "f16", "q8_0", "q6_k", "q5_k_m", "q5_k_s", "q4_k_m", "q4_k_s"),
    *("q3_k_l", "q3_k_m", "q3_k_s", "q4_0", "mxfp4"),
)


class Method(enum.StrEnum):
    """How weights are rounded. rtn: to nearest, without a text; the baseline of the others."""

    GPTQ = "gptq"
    AWQ = "awq"
    RTN = "rtn"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantize:
    """The request.

    Attributes:
      method: how to round.
      calibration: a text file, or .jsonl.
      group_size: number of inputs that share a scale; None: 32 in GGUF files, else the largest of 128, 64 and 32 that
        divides all weights.
      symmetric: whether the middle of a group's range is 0, as always in GGUF files; None: yes for gptq and rtn.
      rows, length: most rows, and tokens per row, of the calibration text.
      act_order: for gptq: round inputs with large squares first.
    """

    method: Method
    calibration: str | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    rows: int = 64
    length: int = 512
    act_order: bool = True

    def __post_init__(self) -> None:
        if self.method is not Method.RTN and not self.calibration:
            raise UserError(
                f"--quantize={self.method} needs --calibration=FILE: use text similar to that of the model's task"
            )
        if self.method is Method.RTN and self.calibration:
            raise UserError(f"--calibration={self.calibration} is for gptq and awq, not for rtn: leave it out")
        if self.group_size not in (None, *GROUP_SIZES):
            raise UserError(f"--group_size={self.group_size} must be 32, 64 or 128: try 128")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags, and --dtype."""
    help_text = (
        "of weights; default: as stored, else bf16; q*: GGUF only, q8_0 and q*_k* as in llama-quantize; mxfp4: gpt-oss"
    )
    parser.add_argument("--dtype", type=str.lower, choices=DTYPES, help=help_text)
    parser.add_argument(
        "--quantize", choices=[str(m) for m in Method], help="write layers' weights in 4 bits: for hf and gguf"
    )
    parser.add_argument("--calibration", metavar="FILE", help="for gptq and awq: text, or .jsonl of texts or chats")
    parser.add_argument(
        "--group_size", type=int, metavar="N", help="for --quantize: inputs that share a scale, e.g. 64"
    )


def from_args(args: argparse.Namespace) -> Quantize | None:
    """The values of the flags; None: they are not set.

    Raises:
      UserError: the combination is invalid.
    """
    if args.quantize is not None:
        return Quantize(method=Method(args.quantize), calibration=args.calibration, group_size=args.group_size)
    for name in FLAGS[1:]:
        if getattr(args, name) is not None:
            raise UserError(f"--{name}={getattr(args, name)} needs --quantize: add that, or leave it out")
    return None
