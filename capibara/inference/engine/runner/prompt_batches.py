"""The batches of prompts that prefill programs read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from capibara.inference.engine.cache.batching import PACKED_PROMPTS, SMALLEST_BUCKET, bucket
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
      packs: whether prompts are read together in one row, whatever their lengths; else in rows of one size.
    """

    def __init__(self, adapters: Adapters, length: int, most: int, whole: bool, encodes: bool, packs: bool = False):
        self._adapters, self._length, self._most, self._whole, self.packs = adapters, length, most, whole, packs
        self._fewest = 1 if encodes else 2  # one token has a program of its own

    def size(self, tokens: int) -> int:
        """The size of the batch for so many tokens."""
        return bucket(max(tokens, self._fewest), self._length)

    def size_of(self, prompts: Sequence[Request]) -> int:
        """The size of the rows of prompts that are read together."""
        return self.size(sum(map(_length, prompts)) if self.packs else len(prompts[0].tokens))

    def tokens_of(self, prompts: Sequence[Request]) -> int:
        """Tokens of the batch for prompts that are read together, padding included."""
        return self.size_of(prompts) * (1 if self.packs else len(prompts))

    def joins(self, request: Request, prompts: Sequence[Request], room: int) -> bool:
        """Whether a prompt can be read together with these in a batch of about `room` tokens."""
        if not self.packs:
            return self.size_of([request]) == self.size_of(prompts)
        fits = sum(map(_length, prompts)) + _length(request) <= min(room, self._most, self._length)
        return fits and len(prompts) < PACKED_PROMPTS and request.adapter == prompts[0].adapter

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

    def together(self, prompts: Sequence[Request]) -> dict[str, Any]:
        """The batch for prompts that are read together."""
        size = self.size_of(prompts)
        if self.packs and len(prompts) > 1:
            return self.packed(prompts, size)
        return self.batch(prompts, [request.tokens for request in prompts], size)

    def packed(self, prompts: Sequence[Request], size: int) -> dict[str, Any]:
        """The tokens of several prompts with one adapter, one after the other in a row."""
        tokens, documents = np.zeros((2, 1, size), np.int32)
        ends, start = np.zeros(PACKED_PROMPTS, np.int32), 0
        for index, request in enumerate(prompts):
            end = start + len(request.tokens)
            tokens[0, start:end], documents[0, start:end], ends[index] = request.tokens, index + 1, end - 1
            start = end
        adapters = self._adapters.of([prompts[0].adapter])
        counts = np.array([start], np.int32)
        return {"tokens": tokens, "counts": counts, "documents": documents, "ends": ends, "adapters": adapters}


def _length(request: Request) -> int:
    return len(request.tokens)


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
