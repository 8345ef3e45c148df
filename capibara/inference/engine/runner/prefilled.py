"""A request whose prompt has been read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from capibara.inference.engine.requests.request import Request


class Prefilled(NamedTuple):
    """A request whose prompt has been read, in a program with others or alone.

    Attributes:
      request: the request.
      row: the cache of its row; None: it was read into its slot.
      logits: [1, V] after it.
      group: the requests of that program.
    """

    request: Request
    row: Any
    logits: jax.Array
    group: Sequence[Request]
