"""The words that every room shares.

Shape letters, used as suffixes in numeric code (`q_BTNH`):
  B batch rows, T time (query positions), S source (key positions), D embed, F mlp, V vocabulary,
  N query heads, K key/value heads, G query heads per key/value head (N = K * G), H head_dim, L layers.

A Batch is a dict of arrays, numpy on the host and jax.Array on the devices:
  tokens      [B, T] int32    what the decoder reads: the targets shifted right, the beginning token first
  targets     [B, T] int32    what it must predict
  weights     [B, T] float32  1 where a target counts towards the loss, 0 on padding and masked targets
  segment_ids [B, T] int32    1, 2, ... for the documents packed into a row; 0 is padding
  positions   [B, T] int32    0, 1, ... within each document

Where sharding.balanced has reordered the columns for a context axis, the batch also has
  row_positions [T] int32     index of each column in the row before the move

In a masked batch (an encoder's) `tokens` are the targets themselves, some of them replaced, and `weights` are 1 at the
places that were chosen to be predicted. An encoder-decoder's batch has more: S places that its encoder reads. Segment i
of the arrays above, which are the decoder's, is predicted from segment i of these:
  encoder_tokens      [B, S] int32
  encoder_segment_ids [B, S] int32    0 is padding
  encoder_positions   [B, S] int32    0, 1, ... within each input

Where Dataset.domains names some, every batch also has
  domains     [B, T] int32    i: the document is of the i-th of them, counted from 1; 0: nothing is known

Where Dataset.kind is "prefix", every batch also has
  prefix      [B, T] int32    1 where a document's inputs are read (its beginning token, then all inputs), else 0

A batch of preference pairs has both answers of each pair in one row, segment 2i + 1 the chosen one and 2i + 2 the
rejected one of the row's pair i; `weights` are 1 on the answers. A batch of prompts has one a row. Both also have
  numbers     [B, T] int32    n: the first place of what the split's document n - 1 tells; 0: another place
A pair's answers have two documents' worth of numbers: pair p has 2p + 1 for the chosen one and 2p + 2 for the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

Params = Any  # nested dicts whose leaves are arrays
Batch = Mapping[str, Any]
PyTree = Any

BATCH_KEYS = ("tokens", "targets", "weights", "segment_ids", "positions")  # of every batch
ENCODER_KEYS = ("encoder_tokens", "encoder_segment_ids", "encoder_positions")


class Dataclass(Protocol):
    """An instance of any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


class TryAgain(Exception):
    """What has happened is over: the same command, run again, goes on; one line."""


class UserError(ValueError):
    """A mistake in what the user gave us.

    The message is one line: the name, the value, the constraint and the fix. The verbs print it without a traceback
    and exit with code 2; every other exception is a fault of ours and keeps its traceback.
    """
