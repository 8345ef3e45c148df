"""Shape letters, the format of a batch, and the two errors that verbs turn into one line.

Shape letters, used as suffixes in numeric code (`q_BTNH`):
  B batch rows, T time (query positions), S source (key positions), D embed, F mlp, V vocabulary,
  N query heads, K key/value heads, G query heads per key/value head (N = K * G), H head_dim, L layers.

A HostBatch is a dict of numpy arrays, a Batch one of jax.Array:
  tokens      [B, T] int32    inputs of the decoder: the targets shifted right, the beginning token first
  targets     [B, T] int32    the tokens to predict
  weights     [B, T] float32  1 where a target counts towards the loss, 0 on padding and masked targets
  segment_ids [B, T] int32    1, 2, ... for the documents packed into a row; 0 is padding
  positions   [B, T] int32    0, 1, ... within each document

Where sharding.balanced has reordered the columns for a context axis, the batch also has
  row_positions [T] int32     index of each column in the row before the move

In a masked batch (for an encoder) `tokens` are the unshifted targets, some of them masked, and `weights` are 1 at the
positions to predict. An encoder-decoder's batch also has the encoder's inputs, rows of S tokens. The arrays above belong
to the decoder; its segment i attends to segment i of the encoder:
  encoder_tokens      [B, S] int32
  encoder_segment_ids [B, S] int32    0 is padding
  encoder_positions   [B, S] int32    0, 1, ... within each input

If Dataset.domains is set, every batch also has
  domains     [B, T] int32    the document's domain, counted from 1 in the order of Dataset.domains; 0: unknown

If Dataset.kind is "prefix", every batch also has
  prefix      [B, T] int32    1 on a document's inputs (its beginning token, then all input tokens), else 0

A batch of preference pairs has both answers of each pair in one row: for pair i of the row, segment 2i + 1 is the chosen
answer and segment 2i + 2 the rejected one; `weights` are 1 on the answers. A batch of prompts has one prompt a row. Both
also have
  numbers     [B, T] int32    n + 1 at the first token of document n of the split; 0 at all other tokens
An answer counts as a document: pair p is numbered 2p + 1 (chosen) and 2p + 2 (rejected). A batch of unpaired preferences
has each answer in the place of a chosen one, and the mismatched answer to its prompt, if there is one, in that of the rejected
one. It also has, as pairs with margins have,
  labels      [B, T] float32  at the first token of the answer 1: desirable, 0: undesirable; of a pair its margin; else 0
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, Union

if TYPE_CHECKING:
    import jax
    import numpy as np

# A leaf stands for what has its shape and dtype, too: a numpy array, a ShapeDtypeStruct, an array that is being traced.
Params: TypeAlias = Mapping[str, Union["Params", "jax.Array"]]
AxisNames: TypeAlias = tuple[str | None, ...]  # the logical axes of one array
ParamAxes: TypeAlias = Mapping[
    str, Union["ParamAxes", AxisNames]
]  # those of each parameter, in the tree of the parameters
Batch: TypeAlias = Mapping[str, "jax.Array"]
HostBatch: TypeAlias = Mapping[str, "np.ndarray"]
PyTree = Any

BATCH_KEYS = ("tokens", "targets", "weights", "segment_ids", "positions")  # of every batch
ENCODER_KEYS = ("encoder_tokens", "encoder_segment_ids", "encoder_positions")


class Dataclass(Protocol):
    """An instance of any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


class TryAgain(Exception):
    """A fault that may pass, in one line: the same command may succeed when it is run again."""


class UserError(ValueError):
    """A mistake in the user's input.

    The message is one line: the name, the value, the constraint and the fix. The verbs print it without a traceback
    and exit with code 2; every other exception is a fault of capibara and keeps its traceback.
    """


class Auto(enum.StrEnum):
    """The type of AUTO, which Gin files write as 'auto'."""

    AUTO = "auto"

    def __repr__(self) -> str:
        return "AUTO"


AUTO = Auto.AUTO
"""Not set: what uses the field chooses. A field that is set to what would be chosen differs from one that is not set."""
