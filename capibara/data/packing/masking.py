"""Denoising objectives on texts: span corruption (T5) and masked tokens (BERT)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.data.packing.shuffle import bits, permutation, uniform


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class SpanCorruption:
    """Replaces spans of a text by sentinels; the spans are the targets (Raffel et al. 2020, arXiv:1910.10683).

    Attributes:
      noise_density: fraction of the tokens that is removed.
      mean_span_length: mean length of the removed spans.
    """

    noise_density: float = 0.15
    mean_span_length: float = 3.0

    def __post_init__(self) -> None:
        if not 0 < self.noise_density < 1:
            raise UserError(f"SpanCorruption.noise_density ({self.noise_density}) must lie between 0 and 1: try 0.15")
        if self.mean_span_length < 1:
            raise UserError(f"SpanCorruption.mean_span_length ({self.mean_span_length}) must be at least 1: try 3")

    def counts(self, length: int) -> tuple[int, int]:
        """The numbers of removed tokens and of spans for a text of `length` (at least 2) tokens."""
        noise = min(max(round(length * self.noise_density), 1), length - 1)
        spans = max(round(noise / self.mean_span_length), 1)
        return noise, min(spans, length - noise)

    def longest_text(self, inputs_length: int, targets_length: int) -> int:
        """The longest text whose inputs and targets, without end tokens, have at most these lengths."""
        length = 1
        while True:
            noise, spans = self.counts(length + 1)
            if length + 1 - noise + spans > inputs_length or noise + spans > targets_length:
                return length
            length += 1

    def apply(
        self, ids: np.ndarray, sentinel_ids: Sequence[int], seeds: tuple[int, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Removes spans from a text.

        Args:
          ids: [n] int32, n at least 2.
          sentinel_ids: at least one per span.
          seeds: integers that choose the spans.

        Returns:
          The text with a sentinel in place of each span, and the spans, each after its sentinel.
        """
        noise, spans = self.counts(len(ids))
        kept_lengths = _partition(len(ids) - noise, spans, (*seeds, 0))
        noise_lengths = _partition(noise, spans, (*seeds, 1))
        ends = np.cumsum(kept_lengths + noise_lengths)
        starts = ends - noise_lengths
        is_noise = np.zeros(len(ids) + 1, np.int8)
        is_noise[starts] += 1
        is_noise[ends] -= 1
        is_noise = np.cumsum(is_noise[:-1]).astype(bool)
        sentinels = np.asarray(sentinel_ids[:spans], np.int32)
        inputs = ids.copy()
        inputs[starts] = sentinels
        first = np.zeros(len(ids), bool)
        first[starts] = True
        # Insert a sentinel before each span: at the span's start among the removed tokens.
        targets = np.insert(ids[is_noise], np.cumsum(noise_lengths) - noise_lengths, sentinels)
        return inputs[~is_noise | first], targets.astype(np.int32, copy=False)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Masking:
    """Masks tokens of a text, which are the targets (Devlin et al. 2019, arXiv:1810.04805, section 3.1).

    Attributes:
      chosen: fraction of the tokens that is predicted.
      masked: fraction of the chosen tokens that is replaced by the mask id.
      random: fraction of the chosen tokens that is replaced by a random id; the rest stay.
    """

    chosen: float = 0.15
    masked: float = 0.8
    random: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.chosen <= 1:
            raise UserError(f"Masking.chosen ({self.chosen}) must be above 0 and at most 1: try 0.15")
        if min(self.masked, self.random) < 0 or self.masked + self.random > 1:
            raise UserError(
                f"Masking.masked ({self.masked}) and random ({self.random}) must be at least 0 and together at most 1: "
                "try 0.8 and 0.1"
            )

    def apply(
        self, ids: np.ndarray, *, special: Sequence[int], mask_id: int, random_ids: np.ndarray, seeds: tuple[int, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Masks tokens of a text.

        Args:
          ids: [n] int32.
          special: ids that are never chosen.
          mask_id: id of the mask token.
          random_ids: ids from which random ones are drawn.
          seeds: integers that choose the tokens.

        Returns:
          The inputs, [n] int32, and the loss weights, [n] float32: 1 at chosen tokens.
        """
        candidates = np.flatnonzero(~np.isin(ids, special))
        count = min(max(round(len(candidates) * self.chosen), 1), len(candidates))
        chosen = candidates[permutation(len(candidates), *seeds, 0)[:count]]
        weights = np.zeros(len(ids), np.float32)
        weights[chosen] = 1
        draw = uniform(count, *seeds, 1)
        others = random_ids[(bits(count, *seeds, 2) % np.uint64(len(random_ids))).astype(np.int64)]
        read = ids.copy()
        read[chosen] = np.where(
            draw < self.masked, mask_id, np.where(draw < self.masked + self.random, others, ids[chosen])
        )
        return read, weights


def _partition(total: int, parts: int, seeds: tuple[int, ...]) -> np.ndarray:
    """[parts] lengths of at least 1 that add up to `total`, drawn uniformly among all such partitions."""
    cuts = np.sort(permutation(total - 1, *seeds)[: parts - 1]) + 1
    return np.diff(cuts, prepend=0, append=total)
