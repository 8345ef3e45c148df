"""What `capibara convert --quantize` asks for. Light: the verb reads its flags from here."""

from __future__ import annotations

import argparse
import dataclasses
import enum

from capibara.core.types import UserError

FLAGS = ("quantize", "calibration", "group_size")
GROUP_SIZES = (128, 64, 32)
# What --dtype may say; all but the first three and the last are of GGUF.
DTYPES = (
    *("f32", "bf16", "f16", "q8_0", "q6_k", "q5_k_m", "q5_k_s", "q4_k_m", "q4_k_s"),
    *("q3_k_l", "q3_k_m", "q3_k_s", "q4_0", "mxfp4"),
)


class Method(enum.StrEnum):
    """How weights are rounded. rtn: each to its nearest, without a text: what the others are compared with."""

    GPTQ = "gptq"
    AWQ = "awq"
    RTN = "rtn"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantize:
    """What is asked for.

    Attributes:
      method: how.
      calibration: a text file, or .jsonl.
      group_size: inputs that share a scale; None: 32 in GGUF files, elsewhere the largest of 128, 64 and 32 that
        divides all weights.
      symmetric: whether the middle of a group's range is 0, as it is in GGUF files; None: of gptq and rtn it is.
      rows, length: of the calibration text: at most so many rows of so many tokens.
      act_order: of gptq: inputs with large squares are rounded first.
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
            raise UserError(f"--quantize={self.method} needs --calibration=FILE, text like that which the model is for")
        if self.method is Method.RTN and self.calibration:
            raise UserError(f"--calibration={self.calibration} is of gptq and awq, not of rtn: leave it out")
        if self.group_size not in (None, *GROUP_SIZES):
            raise UserError(f"--group_size={self.group_size} must be 32, 64 or 128, or left out")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags, and --dtype."""
    told = "of weights; default: as stored, else bf16; q*: of gguf, q8_0 and q*_k* as llama-quantize writes them; mxfp4: of gpt-oss"
    parser.add_argument("--dtype", type=str.lower, choices=DTYPES, help=told)
    parser.add_argument(
        "--quantize", choices=[str(m) for m in Method], help="layers' weights in 4 bits: of hf and gguf"
    )
    parser.add_argument("--calibration", metavar="FILE", help="of gptq and awq: text, or .jsonl of texts or chats")
    parser.add_argument("--group_size", type=int, metavar="N", help="of --quantize: inputs with one scale, e.g. 64")


def asked(args: argparse.Namespace) -> Quantize | None:
    """What the flags ask for; None: nothing.

    Raises:
      UserError: they make no sense together.
    """
    if args.quantize is not None:
        return Quantize(method=Method(args.quantize), calibration=args.calibration, group_size=args.group_size)
    for name in FLAGS[1:]:
        if getattr(args, name) is not None:
            raise UserError(f"--{name}={getattr(args, name)} is of --quantize: give that too, or leave it out")
    return None
