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
    """How weights are rounded and stored.

    rtn rounds to nearest, without a text: the baseline of gptq and awq. The last four do, too, and are written tensor by tensor
    for vLLM: 4-bit and 8-bit floats, the latter with a scale for each output or each block, and packed 4-bit integers.
    """

    GPTQ = "gptq"
    AWQ = "awq"
    RTN = "rtn"
    NVFP4 = "nvfp4"
    FP8 = "fp8"
    FP8_BLOCK = "fp8_block"
    INT4 = "int4"


CALIBRATED = (Method.GPTQ, Method.AWQ)
BY_TENSOR = (Method.NVFP4, Method.FP8, Method.FP8_BLOCK, Method.INT4)
_GROUPED = (*CALIBRATED, Method.RTN, Method.INT4)


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
        if self.method in CALIBRATED and not self.calibration:
            raise UserError(
                f"--quantize={self.method} needs --calibration=FILE: use text similar to that of the model's task"
            )
        if self.method not in CALIBRATED and self.calibration:
            raise UserError(
                f"--calibration={self.calibration} is for gptq and awq, not for {self.method}: leave it out"
            )
        if self.method not in _GROUPED and self.group_size is not None:
            raise UserError(
                f"--group_size={self.group_size} is not for {self.method}, whose groups are fixed: leave it out"
            )
        if self.group_size not in (None, *GROUP_SIZES):
            raise UserError(f"--group_size={self.group_size} must be 32, 64 or 128: try 128")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags, and --dtype."""
    help_text = (
        "of weights; default: as stored, else bf16; q*: GGUF only, q8_0 and q*_k* as in llama-quantize; mxfp4: gpt-oss"
    )
    parser.add_argument("--dtype", type=str.lower, choices=DTYPES, help=help_text)
    parser.add_argument(
        "--quantize",
        choices=[str(m) for m in Method],
        help="of layers' weights: 4 bits for hf and gguf; nvfp4, fp8, fp8_block, int4 for hf, as vLLM reads",
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
