"""Seeded permutations and uniform draws that do not depend on the machine or the version of NumPy."""

from __future__ import annotations

import functools

import numpy as np


def mix(keys: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser on uint64 keys: neighbouring keys become unrelated (Steele et al., 2014)."""
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))


def bits(n: int, *seeds: int) -> np.ndarray:
    """[n] uint64, chosen by the integers `seeds`."""
    key = np.zeros(1, np.uint64)
    for seed in seeds:
        key = mix(key * np.uint64(0x9E3779B97F4A7C15) + np.array([seed % (1 << 64)], np.uint64) + np.uint64(1))
    return mix(np.arange(n, dtype=np.uint64) + key)


def permutation(n: int, *seeds: int) -> np.ndarray:
    """[n] int64: a permutation of 0..n-1 chosen by the integers `seeds`."""
    return np.argsort(bits(n, *seeds), kind="stable")


def uniform(n: int, *seeds: int) -> np.ndarray:
    """[n] float64 from 0 up to 1, chosen by the integers `seeds`."""
    return (bits(n, *seeds) >> np.uint64(11)) * 2.0**-53


@functools.lru_cache(maxsize=4)
def epoch_order(n: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of an epoch; cached because every row of a batch needs it."""
    order = permutation(n, seed, epoch)
    order.setflags(write=False)
    return order
