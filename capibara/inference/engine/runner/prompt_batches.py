"""The batches of prompts that prefill programs read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from capibara.inference.engine.cache.batching import SMALLEST_BUCKET, bucket
from capibara.inference.engine.requests.adapters import Adapters
from capibara.inference.engine.requests.request import Request


class PromptBatches:
    """Makes batches of few sizes, so that few programs are compiled.

    Args:
      adapters: of the engine.
      length: positions of a slot.
      most: tokens of a part of a long prompt.
      whole: whether prompts are those of a prefix LM.
      encodes: whether an encoder reads the prompts: texts then begin with one token.
    """

    def __init__(self, adapters: Adapters, length: int, most: int, whole: bool, encodes: bool):
        self._adapters, self._length, self._most, self._whole = adapters, length, most, whole
        self._fewest = 1 if encodes else 2  # one token has a program of its own

    def size(self, tokens: int) -> int:
        """The size of the batch for so many tokens."""
        return bucket(max(tokens, self._fewest), self._length)

    def part_size(self, tokens: int) -> int:
        """The same for a part that is read into its slot; of fewer sizes, since most parts are full."""
        return min(max(SMALLEST_BUCKET, 1 << (tokens - 1).bit_length()), max(self._most, SMALLEST_BUCKET))

    def part(self, request: Request, tokens: Sequence[int]) -> dict[str, Any]:
        """A row of tokens that is read into its slot."""
        return self.batch([request], [tokens], self.part_size(len(tokens)))

    def batch(self, requests: Sequence[Request], tokens: Sequence[Sequence[int]], size: int) -> dict[str, Any]:
        """A row of `size` tokens for each request."""
        adapters = self._adapters.of([request.adapter for request in requests])
        return batch_of(requests, tokens, size, self._whole) | {"adapters": adapters}


def batch_of(requests: Sequence[Request], prompts: Sequence[Sequence[int]], size: int, marked: bool) -> dict[str, Any]:
    """Rows of requests' tokens, padded to a size, with the encoder's entries of each.

    `marked`: whether these are complete prompts of a prefix LM, whose input lengths are set too.
    """
    tokens = np.zeros((len(prompts), size), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    batch = {"tokens": tokens, "counts": np.array([len(prompt) for prompt in prompts], np.int32)}
    if requests[0].encoder is not None:
        entries = [request.encoder for request in requests if request.encoder is not None]  # all have one, or none
        batch |= {name: np.concatenate([of[name] for of in entries]) for name in entries[0]}
    if marked:
        generated = [len(request.tokens) - len(prompt) for request, prompt in zip(requests, prompts)]
        left = [max(request.prompt_tokens - before, 0) for request, before in zip(requests, generated)]
        batch["inputs"] = np.array(left, np.int32)
    return batch
