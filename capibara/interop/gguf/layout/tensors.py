"""How llama.cpp stores the tensors of a Hugging Face checkpoint."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import numpy as np

from capibara.core import extras

Shape = tuple[int, ...]
Factor = float | np.ndarray
# llama.cpp supports these in float32 only.
EXACT = (
    "ffn_gate_inp.weight",
    "ffn_gate_inp_shexp.weight",
    "position_embd.weight",
    "_norm.weight",
    ".bias",
    "altup_correct_coef.weight",
    "altup_predict_coef.weight",
    "ssm_conv1d.weight",
    "shortconv.conv.weight",
    "ssm_a",
    "ssm_d",
)


def package() -> Any:
    """The gguf package."""
    return extras.require("gguf", extra="gguf", why="GGUF files")


class Change(enum.StrEnum):
    """How a tensor of a GGUF file differs from the checkpoint's.

    queries, keys: the two halves of every head are interleaved, so that rotated pairs are adjacent (arch llama).
    plus_one: 1 is added to a norm's scale, which float32 rounds. transposed: Conv1D of GPT-2. interleaved: in the
    checkpoint every group of heads has its queries, key and value together; in GGUF all queries come first, then all
    keys. decay: the logarithm A of a recurrent layer becomes -exp(A). The others change the shape alone. channels: the
    middle dimension of a convolution, which is 1, is left out. row: a first dimension of 1 is left out. column,
    decay_column: there is a last dimension of 1. groups: rows of a group each. groups_swapped: those, whose two
    dimensions are then swapped. swapped: of each matrix in a stack the two dimensions.
    """

    NONE = ""
    QUERIES = "queries"
    KEYS = "keys"
    PLUS_ONE = "plus_one"
    TRANSPOSED = "transposed"
    INTERLEAVED = "interleaved"
    CHANNELS = "channels"
    DECAY = "decay"
    COLUMN = "column"
    DECAY_COLUMN = "decay_column"
    ROW = "row"
    SWAPPED = "swapped"
    GROUPS = "groups"
    GROUPS_SWAPPED = "groups_swapped"


@dataclasses.dataclass(frozen=True)
class Take:
    """What a tensor of the file has of one of the checkpoint.

    Attributes:
      place: its name within a layer; "": the one that the gguf package knows.
      indices: of the checkpoint's rows, in the file's order; None: all of them, as they are.
      axis: the dimension that has these rows.
      change: how the file's tensor differs from them; "": as the family says.
    """

    place: str = ""
    indices: np.ndarray | None = None
    axis: int = 0
    change: Change = Change.NONE

    def shape(self, shape: Shape) -> Shape:
        """The shape of what is taken of a tensor of this one."""
        if self.indices is None:
            return shape
        return (*shape[: self.axis], len(self.indices), *shape[self.axis + 1 :])

    def of(self, value: np.ndarray) -> np.ndarray:
        """What is taken of the checkpoint's tensor."""
        return value if self.indices is None else np.take(value, self.indices, self.axis)

    def put(self, value: np.ndarray, whole: np.ndarray) -> None:
        """Writes a part into the place that it was read from."""
        whole[(slice(None),) * self.axis + (self.indices if self.indices is not None else slice(None),)] = value


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a model, as far as one tensor of the file has it.

    Attributes:
      name, shape: in the checkpoint.
      stored: its name in the GGUF file, or of a list in the metadata that has it.
      listed: whether it is a number in such a list, at `index`.
      change: how the file's tensor differs.
      index: its place in the stack (of experts, heads or AltUp's streams) that GGUF stores; None: it is not stacked.
      stack: size of that stack.
      rows: number of rows in the file, if the checkpoint has fewer; the rest repeat its first row. None: as many.
      take: which of its rows the file's tensor has.
      factor: of the checkpoint's rows, which a file has in them.
      groups: number of groups of rows of a tensor that is stored by them.
    """

    name: str
    shape: Shape
    stored: str
    change: Change = Change.NONE
    index: int | None = None
    stack: int = 0
    rows: int | None = None
    take: Take = Take()
    factor: Factor = 1.0
    groups: int = 1
    listed: bool = False

    @property
    def part_shape(self) -> Shape:
        """The shape of what the file's tensor has of the checkpoint's."""
        return self.take.shape(self.shape)

    @property
    def is_exact(self) -> bool:
        """Whether the file's tensor has the checkpoint's values, all of them."""
        return self.take.indices is None and isinstance(self.factor, float) and self.factor == 1

    def scaled(self, value: np.ndarray) -> np.ndarray:
        """The checkpoint's tensor, multiplied."""
        if isinstance(self.factor, float):
            return value if self.factor == 1 else value.astype(np.float32) * np.float32(self.factor)
        return value.astype(np.float32) * self.factor.astype(np.float32).reshape(-1, *[1] * (value.ndim - 1))

    @property
    def stored_shape(self) -> Shape:
        """The shape in the file, slowest dimension first."""
        shape = self.part_shape
        match self.change:
            case Change.TRANSPOSED:
                shape = shape[::-1]
            case Change.CHANNELS:
                shape = (shape[0], *shape[2:])
            case Change.COLUMN | Change.DECAY_COLUMN:
                shape = (*shape, 1)
            case Change.ROW:
                shape = shape[1:]
            case Change.SWAPPED:
                shape = (shape[0], shape[2], shape[1])
            case Change.GROUPS:
                shape = (self.groups, shape[0] // self.groups, *shape[1:])
            case Change.GROUPS_SWAPPED:
                shape = (self.groups, shape[1], shape[0] // self.groups)
        shape = shape if self.rows is None else (self.rows, *shape[1:])
        return shape if self.index is None else (self.stack, *shape)


def to_gguf(value: np.ndarray, change: Change, heads: tuple[int, int]) -> np.ndarray:
    """Converts a checkpoint's values to a GGUF file's, but for their shape; `heads` are query and key heads."""
    match change:
        case Change.QUERIES | Change.KEYS:
            return _regroup(value, (heads[change is Change.KEYS], 2, -1))
        case Change.PLUS_ONE:
            return value.astype(np.float32) + np.float32(1)
        case Change.TRANSPOSED:
            return value.T
        case Change.SWAPPED:
            return value.swapaxes(1, 2)
        case Change.GROUPS_SWAPPED:
            return value.reshape(heads[0], -1, value.shape[1]).swapaxes(1, 2)
        case Change.INTERLEAVED:
            split = value.reshape(heads[1], heads[0] // heads[1] + 2, -1, *value.shape[1:])
            parts = split[:, :-2], split[:, -2], split[:, -1]
            return np.concatenate([part.reshape(-1, *value.shape[1:]) for part in parts])
        case Change.DECAY | Change.DECAY_COLUMN:
            return -np.exp(value.astype(np.float64)).astype(np.float32)
    return value


def to_checkpoint(value: np.ndarray, change: Change, heads: tuple[int, int]) -> np.ndarray:
    """The inverse of to_gguf; for decays up to rounding: several logarithms have one exponential in float32."""
    match change:
        case Change.QUERIES | Change.KEYS:
            return _regroup(value, (heads[change is Change.KEYS], -1, 2))
        case Change.PLUS_ONE:
            return value - value.dtype.type(1)
        case Change.TRANSPOSED:
            return value.T
        case Change.SWAPPED | Change.GROUPS_SWAPPED:
            return value.swapaxes(1, 2)
        case Change.INTERLEAVED:
            size = len(value) // (heads[0] + 2 * heads[1])
            rows = value.reshape(-1, size, *value.shape[1:])
            queries, keys, values = np.split(rows, (heads[0], heads[0] + heads[1]))
            queries = queries.reshape(heads[1], -1, *rows.shape[1:])
            return np.concatenate([queries, keys[:, None], values[:, None]], axis=1).reshape(value.shape)
        case Change.DECAY | Change.DECAY_COLUMN:
            return np.log(-value.astype(np.float64)).astype(np.float32)
    return value


def _regroup(value: np.ndarray, first: tuple[int, int, int]) -> np.ndarray:
    """Splits the first dimension into these three, and swaps the last two of them."""
    return value.reshape(*first, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
