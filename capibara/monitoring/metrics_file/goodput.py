"""Goodput: the share of a run's time, over all its starts, that was spent on steps that count, and the causes of the rest.

The categories are those that Google Cloud's ML productivity goodput counts as badput: start, set-up, restore, data, saves,
and steps that an interruption lost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from capibara.monitoring.metrics_file.loggers import AGAIN

# In the order in which they are printed.
CATEGORIES = (
    *("productive", "data_wait", "rollout", "evaluate", "save", "start", "set_up", "restore", "reference"),
    *("lost", "down", "other"),
)


_MOST_S = 1e12  # of a duration; sums of them stay finite


@dataclasses.dataclass
class _Life:
    """The records between one start of a run, or roll-back, and the next."""

    records: list[Mapping[str, Any]]

    @property
    def first_step(self) -> int:
        return self.records[0]["step"]

    @property
    def begin_s(self) -> float:
        """When the process was started: seconds since 1970."""
        before = next((r for r in self.records if r.get("event") == "spent" and r["step"] == self.first_step), {})
        return self.records[0]["time"] - sum(
            _seconds(before, name) for name in ("start", "set_up", "restore", "reference")
        )

    @property
    def end_s(self) -> float:
        return max(record["time"] for record in self.records)


def account(records: Iterable[Mapping[str, object]]) -> dict[str, float]:
    """Seconds by category, and their sum as "total".

    Args:
      records: all lines of metrics.jsonl in the order in which they were written (loggers.all_records).

    Returns:
      An empty dict if no run was started.
    """
    attempts: list[_Life] = []
    for record in records:
        if record["kind"] == "event" and record.get("event") in AGAIN:
            attempts.append(_Life([]))
        if attempts:
            attempts[-1].records.append(record)
    if not attempts:
        return {}
    spent = dict.fromkeys(CATEGORIES, 0.0)
    for index, life in enumerate(attempts):
        following = attempts[index + 1] if index + 1 < len(attempts) else None
        _add(spent, life, following.first_step if following else None)
        if following:
            between_s = max(0.0, following.begin_s - life.end_s)
            spent["down" if following.records[0]["event"] == "start" else "restore"] += between_s
    total = attempts[-1].end_s - attempts[0].begin_s
    spent["other"] = max(0.0, total - sum(spent.values()))
    return spent | {"total": total}


def _add(spent: dict[str, float], life: _Life, kept_steps: int | None) -> None:
    """Adds the seconds of one life; its steps after `kept_steps` count as lost, since the next life repeats them."""
    step = life.first_step
    for record in life.records:
        if record["kind"] == "train":
            count, before = max(0, record["step"] - step), step
            step = record["step"]
            retained = count if kept_steps is None else min(count, max(0, kept_steps - before))
            waited_s, step_s = _seconds(record, "data_wait_s"), _seconds(record, "step_s")
            spent["productive"] += retained * (step_s - waited_s)
            spent["data_wait"] += retained * waited_s
            spent["lost"] += (count - retained) * step_s
        if record["kind"] == "train" or record.get("event") == "spent":
            for name in ("rollout", "evaluate", "save", "start", "set_up", "restore", "reference"):
                spent[name] += _seconds(record, name if record["kind"] == "event" else f"{name}_s")


def _seconds(record: Mapping[str, object], name: str) -> float:
    """A duration of a line, which may be anyone's; 0: it has none, or no plausible one."""
    value = record.get(name)
    return value if isinstance(value, (int, float)) and abs(value) < _MOST_S else 0.0


def line(spent: Mapping[str, float]) -> str | None:
    """The account in one line; None: it is empty."""
    if not spent or spent["total"] <= 0:
        return None
    shares: Sequence[str] = [
        f"{name.replace('_', ' ')} {spent[name] / spent['total']:.1%}"
        for name in CATEGORIES[1:]
        if spent[name] >= 0.0005 * spent["total"]
    ]
    rest = f" ({', '.join(shares)})" if shares else ""
    return f"goodput {spent['productive'] / spent['total']:.1%} of {spent['total']:.0f} s{rest}"
