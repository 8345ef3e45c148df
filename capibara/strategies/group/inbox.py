"""The updates of one round as they arrive: read once, checked, accepted for the aggregation or rejected with a reason."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable

import numpy as np

from capibara.consensus.compression import Compression
from capibara.core.types import TryAgain, UserError
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
      every: steps of a round, as in the note.
    """

    arrays: dict[str, np.ndarray]
    norm: float
    loss: float
    tokens: float
    size: int
    every: int


class Inbox:
    """The updates of a round.

    Args:
      exchange: where they arrive.
      round_: the round.
      may_join: a node's name -> why it may not send anything; None: it may.
      model: the agreed model that the round began with; None: nodes send the weights that they begin with.
      most: the largest size of an update in bytes.
      every: steps of a round; 0: any.

    Attributes:
      round_: the round.
      updates: by node.
      rejected: node -> the reason.
      doubts: node -> what was wrong at some look; it may be right at the next.
    """

    def __init__(
        self,
        exchange: Exchange,
        round_: int,
        may_join: Callable[[str], str | None],
        model: Arrays | None,
        most: int,
        every: int = 0,
    ) -> None:
        self._exchange, self.round_, self._may_join = exchange, round_, may_join
        self._model, self._most, self._every = model, most, every
        self._notes: dict[str, Note | None] = {}  # of updates that were wrong at the last look
        self.doubts: dict[str, str] = {}
        self.updates: dict[str, Update] = {}
        self.rejected: dict[str, str] = {}

    def look(self) -> None:
        """Reads what has arrived since the last look. What is wrong twice is rejected: a node may be replacing its files."""
        with contextlib.suppress(OSError, TryAgain):  # the store does not answer: there is another look
            for name in self._exchange.senders(self.round_):
                if name not in self.updates and name not in self.rejected:
                    self._take(name)

    def _take(self, name: str) -> None:
        if (why := self._may_join(name)) is not None:
            self.rejected[name] = why
            return
        note = None
        try:
            note = self._exchange.note(self.round_, name)
            self.updates[name] = self._read(name, note)
        except UserError as error:
            if name in self._notes and repr(self._notes[name]) == repr(note):  # NaN is not equal to itself
                self.rejected[name] = str(error)
            self._notes[name], self.doubts[name] = note, str(error)

    def _read(self, name: str, note: Note) -> Update:
        if note.every != self._every and self._every:
            raise UserError(f"its rounds have {note.every} steps, the group's {self._every}: set GroupNode.every")
        result = arrays.from_bytes(self._exchange.update(self.round_, name, note, self._most))
        model = self._decoded(result, note)
        return Update(model, self._norm(model), note.loss, note.tokens, note.size, note.every)

    def _decoded(self, encoded: Arrays, note: Note) -> dict[str, np.ndarray]:
        if self._model is None:
            return arrays.model_of(encoded, {name: array.shape for name, array in encoded.items()})
        shapes = arrays.shapes_of(self._model)
        if note.bits == 32:
            return arrays.model_of(encoded, shapes)
        gradient = arrays.gradient_of(encoded, Compression(bits=note.bits, block=note.block), shapes)
        return {name: start - gradient[name] for name, start in self._model.items()}

    def _norm(self, model: Arrays) -> float:
        with np.errstate(all="ignore"):
            changes = (array if self._model is None else array - self._model[name] for name, array in model.items())
            return math.sqrt(sum(float(np.sum(np.square(change, dtype=np.float64))) for change in changes))
