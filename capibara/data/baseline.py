"""The unigram baseline, which a language model must beat."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from capibara.core.types import HostBatch, UserError


def unigram_bits_per_byte(
    train: Iterable[HostBatch],
    validation: Iterable[HostBatch],
    token_bytes: np.ndarray,
    of_all: Callable[[np.ndarray], np.ndarray] = lambda counts: counts,
) -> float:
    """Bits per byte of a unigram model of the training data on the validation data.

    Args:
      train: batches whose targets are counted; a finite number of them, since a training loader may be endless.
      validation: batches on which the model is evaluated.
      token_bytes: [V] from `Vocabulary.token_bytes`.
      of_all: sums counts [V] of this host's rows over all hosts.
    """
    counts = of_all(_count(train, len(token_bytes))) + 1.0
    bits = -np.log2(counts / counts.sum())
    seen = of_all(_count(validation, len(token_bytes)))
    byte_count = float(seen @ token_bytes)
    if not byte_count:
        raise UserError(
            "the validation batches have no text, which a unigram baseline needs: check the validation data"
        )
    return float(seen @ bits) / byte_count


def _count(batches: Iterable[HostBatch], size: int) -> np.ndarray:
    counts = np.zeros(size, np.float64)
    for batch in batches:
        counts += np.bincount(batch["targets"][batch["weights"] > 0], minlength=size)
    return counts
