"""Decides which examples a routing set has: which are repeated texts, in which split each is, and how often."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from capibara.builders.preparation.near import Groups
from capibara.builders.routing.balance import Balance
from capibara.builders.routing.rows import Scratch, State
from capibara.builders.routing.splits import NAMES, Splits, seeded

LEAK = np.dtype([("row", "<u4"), ("first", "<u4"), ("split", "u1"), ("first_split", "u1"), ("shared", "u1")])
SHARED = ("text", "piece", "near")  # what the two records of a leak share: all, a piece, or they are similar
_Pairs = Sequence[tuple[np.ndarray, np.ndarray]]  # records, and for each an earlier one that shares something


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """The examples of a routing set.

    Attributes:
      rows: [n] of `rows.DTYPE`, with repeated texts marked.
      split: [n] uint8, a position in `splits.NAMES`.
      before: by split and domain, the examples before balancing, [3, d].
      orders: by split, the examples in the order in which they are written: rows and repetitions.
      sources: by split, [3], the number of its sources with an example.
      linked: sources that share a split with another one since they have equal pieces or similar texts.
      largest: examples of the largest group of linked sources.
      repeated: texts that an earlier record of the same source has.
      repeated_elsewhere: texts that an earlier record of another source has.
      contradicted: of both, those that have another domain than the earlier record.
      leaks: [k] of `LEAK`, in the order of the records: pairs of records that would have been in different splits if
        only their sources counted. shared: a position in `SHARED`.
    """

    rows: np.ndarray
    split: np.ndarray
    before: np.ndarray
    orders: tuple[tuple[np.ndarray, np.ndarray], ...]
    sources: np.ndarray
    linked: int
    largest: int
    repeated: int
    repeated_elsewhere: int
    contradicted: int
    leaks: np.ndarray

    def after(self) -> np.ndarray:
        """By split and domain, the examples that are written, repetitions included, [3, d]."""
        domains = self.before.shape[1]
        return np.stack([np.bincount(self.rows["domain"][rows], minlength=domains) for rows, _ in self.orders])


def select(scratch: Scratch, splits: Splits, balance: Balance, domains: tuple[str, ...]) -> Selection:
    """Decides about all records, by them, their order and the settings alone; takes some 70 bytes for each record.

    Args:
      scratch: the records.
      splits: the shares of the splits.
      balance: how many examples of each domain are kept.
      domains: their names.
    """
    rows = scratch.rows()
    groups = _groups(len(rows), scratch.repeated("origins"))
    own_split = splits.of(_smallest(rows["source"], groups))
    pieces = _of_two_sources(scratch.repeated("pieces"), groups)
    similar = [] if splits.near is None else _of_two_sources(scratch.similar(splits.near), groups)
    group = _groups(len(rows), [(np.arange(len(rows), dtype=np.uint32), groups), *pieces, *similar])
    split = splits.of(_smallest(rows["source"], group))
    texts = [*scratch.repeated("texts", columns=2)]
    again, first = _joined(texts)
    rows["state"][again] = State.DUPLICATE
    retained = rows["state"] == State.KEPT
    before = np.zeros((len(NAMES), len(domains)), np.int64)
    np.add.at(before, (split[retained], rows["domain"][retained]), 1)
    used = np.unique(groups[retained], return_index=True)[1]
    elsewhere = int((groups[again] != groups[first]).sum())
    return Selection(
        rows=rows,
        split=split,
        before=before,
        orders=tuple(
            _order(rows, retained & (split == at), at, before[at], balance, domains) for at in range(len(NAMES))
        ),
        sources=np.bincount(split[retained][used], minlength=len(NAMES)),
        linked=len(used) - len(np.unique(group[retained])),
        largest=int(np.bincount(group[retained], minlength=1).max()),
        repeated=len(again) - elsewhere,
        repeated_elsewhere=elsewhere,
        contradicted=int((rows["domain"][again] != rows["domain"][first]).sum()),
        leaks=_leaks(own_split, (texts, pieces, similar)),
    )


def _of_two_sources(pairs: Iterable[tuple[np.ndarray, np.ndarray]], sources: np.ndarray) -> _Pairs:
    """The pairs whose records are of different sources, each once: a session repeats itself often."""
    result = []
    for rows, others in pairs:
        differ = sources[rows] != sources[others]
        item, other = np.unique(np.stack([rows[differ], others[differ]]), axis=1)
        result.append((item, other))
    return result


def _joined(pairs: _Pairs) -> tuple[np.ndarray, np.ndarray]:
    empty = np.zeros(0, np.uint32)
    return np.concatenate([empty, *(item for item, _ in pairs)]), np.concatenate([empty, *(item for _, item in pairs)])


def _groups(count: int, pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """[n], the first record of each record's group; records of a pair are in one group."""
    groups = Groups(np.zeros(count, np.uint32))
    for rows, others in pairs:
        groups.join(rows, others)
    return groups.first(np.arange(count, dtype=np.uint32))


def _smallest(keys: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """[n], the smallest key of each record's group."""
    result = keys.copy()
    np.minimum.at(result, groups, keys)
    return result[groups]


def _leaks(split: np.ndarray, shared: Sequence[_Pairs]) -> np.ndarray:
    """The pairs whose records are in different splits, by what they share (`SHARED`), each pair once."""
    result = np.zeros(0, LEAK)
    for index, pairs in enumerate(shared):
        rows, others = _joined(pairs)
        is_leak = split[rows] != split[others]
        rows, others = np.unique(np.stack([rows[is_leak], others[is_leak]]), axis=1)
        leaks = np.zeros(len(rows), LEAK)
        leaks["row"], leaks["first"], leaks["shared"] = rows, others, index
        leaks["split"], leaks["first_split"] = split[rows], split[others]
        result = np.concatenate([result, leaks])
    result = result[np.lexsort((result["shared"], result["first"], result["row"]))]
    is_new = np.append(True, (result[["row", "first"]][1:] != result[["row", "first"]][:-1]))
    return result[is_new[: len(result)]]


def _order(
    rows: np.ndarray, candidates: np.ndarray, split: int, counts: np.ndarray, balance: Balance, domains: tuple[str, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """The examples of a split and their repetitions, shuffled."""
    targets = balance.targets(dict(zip(domains, counts.tolist())), NAMES[split])
    chosen, repeats = [np.zeros(0, np.int64)], [np.zeros(0, np.uint8)]
    for number, domain in enumerate(domains):
        result = np.flatnonzero(candidates & (rows["domain"] == number))
        ranked = result[np.lexsort((result, seeded(rows["id"][result], balance.seed, 2)))]
        remaining, repeat = targets[domain], 0
        while remaining > 0 and len(ranked):
            part = ranked[:remaining]
            chosen.append(part)
            repeats.append(np.full(len(part), repeat, np.uint8))
            remaining, repeat = remaining - len(part), repeat + 1
    row, repeat_of = np.concatenate(chosen), np.concatenate(repeats)
    keys = seeded(rows["id"][row] + repeat_of.astype(np.uint64), balance.seed, 3)
    order = np.lexsort((repeat_of, row, keys))
    return row[order], repeat_of[order]
