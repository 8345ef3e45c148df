"""How many tokens the rows get before anybody looks at them."""

from __future__ import annotations

import time
from collections.abc import Iterable

from capibara.inference.engine.batching import EngineConfig
from capibara.inference.engine.request import Request

_MOST_BETWEEN_S = 0.1  # a reader sees a text go on at least so often, if its model is that fast


class DecodeSchedule:
    """Chooses how many tokens the next program gives each row, by what may happen meanwhile.

    Where somebody reads along, by the time it takes too. Elsewhere the clock decides nothing: the same requests make the
    same programs, in every process that has a part in them, and again in a run that is resumed.

    Args:
      config: of the engine.
      length: positions of a slot.

    Attributes:
      streaming: whether texts are read while they are made.
    """

    def __init__(self, config: EngineConfig, length: int):
        self._most, self._fixed, self._length = config.most_steps, config.decode_steps is not None, length
        self._token_s = self._came_s = 0.0
        self.streaming = False

    def allowed(self) -> int:
        """For any requests, at least one: by the time that it takes, where somebody reads along."""
        if not self.streaming or self._fixed:
            return self._most
        return max(1, min(self._most, int(_MOST_BETWEEN_S / self._token_s) if self._token_s else 1))

    def tokens(self, requests: Iterable[Request], allowed: int) -> int:
        """For these requests together, at least one: for none more than it may still have or has positions for.

        `allowed`: as `allowed` gives it, here or in the process that decides.

        What is forced into a thought is the first of a program's tokens, so none goes beyond its position.
        """
        most = allowed
        for one in requests:
            most = min(most, one.limit - one.requested, self._length - one.row_length + 1)
            if one.sampling.thinking_tokens is not None:  # a thought that begins among them must not end there
                ahead = (index - one.requested for index in one.forced if index >= one.requested)
                most = min(most, one.sampling.thinking_tokens, *ahead)
        return max(1, most)

    def record(self, began_s: float | None, count: int) -> None:
        """So many tokens of each row have come, of a program asked for at `began_s` (time.monotonic); None: of a prompt."""
        now_s = time.monotonic()
        if began_s is not None:  # after what was asked for before: a prompt that was read meanwhile does not count
            self._token_s = (now_s - max(began_s, self._came_s)) / count
        self._came_s = now_s
