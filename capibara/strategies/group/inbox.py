"""The updates of one round as they arrive: read once, checked, accepted for the aggregation or rejected with a reason."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from capibara.consensus.compression import Compression
from capibara.core.types import UserError
from capibara.strategies.group import arrays
from capibara.strategies.group.arrays import Arrays
from capibara.strategies.group.exchange import Exchange, Note


@dataclasses.dataclass(frozen=True)
class Update:
    """What a node has sent, checked to be of the group's parameters.

    Attributes:
      arrays: the node's model.
      norm: of its difference from the agreed model; not finite if a value is not.
      loss, tokens: as in the node's note, unchecked.
      size: bytes that were sent.
    """

    arrays: Arrays
    norm: float
    loss: float
    tokens: float
    size: int


class Inbox:
    """The updates of a round.

    Args:
      exchange: where they arrive.
      round_: the round.
      may_join: a node's name -> why it may not send anything; None: it may.
      model: the agreed model that the round began with; None: nodes send the weights that they begin with.
      most: the largest size of an update in bytes.

    Attributes:
      round_: the round.
      updates: by node.
      rejected: node -> the reason.
    """

    def __init__(
        self,
        exchange: Exchange,
        round_: int,
        may_join: Callable[[str], str | None],
        model: Arrays | None,
        most: int,
    ) -> None:
        self._exchange, self.round_, self._may_join = exchange, round_, may_join
        self._model, self._most = model, most
        self.updates: dict[str, Update] = {}
        self.rejected: dict[str, str] = {}

    def look(self) -> None:
        """Reads what has arrived since the last look."""
        for name in self._exchange.senders(self.round_):
            if name in self.updates or name in self.rejected:
                continue
            if (why := self._may_join(name)) is not None:
                self.rejected[name] = why
                continue
            try:
                self.updates[name] = self._read(name)
            except UserError as error:
                self.rejected[name] = str(error)

    def _read(self, name: str) -> Update:
        note = self._exchange.note(self.round_, name)
        found = arrays.from_bytes(self._exchange.update(self.round_, name, note, self._most))
        model = self._decoded(found, note)
        return Update(model, self._norm(model), note.loss, note.tokens, note.size)

    def _decoded(self, found: Arrays, note: Note) -> Arrays:
        if self._model is None:
            return arrays.model_of(found, {name: array.shape for name, array in found.items()})
        shapes = arrays.shapes_of(self._model)
        if note.bits == 32:
            return arrays.model_of(found, shapes)
        gradient = arrays.gradient_of(found, Compression(bits=note.bits, block=note.block), shapes)
        return {name: start - gradient[name] for name, start in self._model.items()}

    def _norm(self, model: Arrays) -> float:
        with np.errstate(all="ignore"):
            changes = (array if self._model is None else array - self._model[name] for name, array in model.items())
            return math.sqrt(sum(float(np.sum(np.square(change, dtype=np.float64))) for change in changes))
