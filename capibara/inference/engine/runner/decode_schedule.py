"""Chooses how many tokens a program generates before the host processes them."""

from __future__ import annotations

import time
from collections.abc import Iterable

from capibara.inference.engine.cache.batching import EngineConfig
from capibara.inference.engine.requests.request import Request

_MOST_BETWEEN_S = 0.1  # readers of a stream get tokens at least this often, if the model is fast enough


class DecodeSchedule:
    """Chooses how many tokens the next program gives each row, considering what may happen meanwhile.

    Streaming also limits the program's time. Otherwise the clock has no influence: the same requests lead to the same
    programs, in every process that takes part, and again in a resumed run.

    Args:
      config: of the engine.
      length: positions of a slot.

    Attributes:
      streaming: whether texts are read while they are generated.
    """

    def __init__(self, config: EngineConfig, length: int):
        self._most, self._fixed, self._length = config.most_steps, config.decode_steps is not None, length
        self._token_s = self._came_s = 0.0
        self.streaming = False

    def allowed(self) -> int:
        """Most tokens for any requests, at least one; limited by time when streaming."""
        if not self.streaming or self._fixed:
            return self._most
        return max(1, min(self._most, int(_MOST_BETWEEN_S / self._token_s) if self._token_s else 1))

    def tokens(self, requests: Iterable[Request], allowed: int) -> int:
        """Tokens for these requests, at least one: within each one's limit and positions.

        `allowed`: from `allowed`, here or in the leading process.

        A forced token of a thought is a program's first one, so no program continues past its position.
        """
        most = allowed
        for request in requests:
            most = min(most, request.limit - request.requested, self._length - request.row_length + 1)
            if request.requested < request.sampling.min_new_tokens:  # until then no end token may be chosen
                most = min(most, request.sampling.min_new_tokens - request.requested)
            if request.sampling.thinking_tokens is not None:  # a thought that begins in the program must not end in it
                ahead = (index - request.requested for index in request.forced if index >= request.requested)
                most = min(most, request.sampling.thinking_tokens, *ahead)
        return max(1, most)

    def record(self, began_s: float | None, count: int) -> None:
        """Records `count` received tokens of a program started at `began_s` (time.monotonic); None: of a prompt."""
        now_s = time.monotonic()
        if began_s is not None:  # measured from the previous program's end: prefill in between does not count
            self._token_s = (now_s - max(began_s, self._came_s)) / count
        self._came_s = now_s
