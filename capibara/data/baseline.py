"""What a model must beat: the frequencies of the tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from capibara.core.types import Batch, UserError


def unigram_bits_per_byte(
    train: Iterable[Batch],
    validation: Iterable[Batch],
    token_bytes: np.ndarray,
    of_all: Callable[[np.ndarray], np.ndarray] = lambda counts: counts,
) -> float:
    """Bits per byte of a unigram model: what a model must beat that has learnt more than frequencies.

    Args:
      train: batches whose targets are counted (take a number of them: a training loader may never end).
      validation: batches on which the model is measured.
      token_bytes: [V] from `Vocabulary.token_bytes`.
      of_all: [V], the counts of this host's rows -> those of all hosts.
    """
    counts = of_all(_count(train, len(token_bytes))) + 1.0
    bits = -np.log2(counts / counts.sum())
    seen = of_all(_count(validation, len(token_bytes)))
    byte_count = float(seen @ token_bytes)
    if not byte_count:
        raise UserError("the validation batches hold no text: a unigram baseline needs some")
    return float(seen @ bits) / byte_count


def _count(batches: Iterable[Batch], size: int) -> np.ndarray:
    counts = np.zeros(size, np.float64)
    for batch in batches:
        counts += np.bincount(batch["targets"][batch["weights"] > 0], minlength=size)
    return counts
