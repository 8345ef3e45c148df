"""Manages jobs from the command line, and shows them: as a table, as JSON, and as a line while they run."""

from __future__ import annotations

import argparse
import collections
import datetime
import pathlib
import shutil
import sys
import time
from collections.abc import Callable, Collection, Sequence

from capibara.core.types import UserError
from capibara.jobs.managing.manager import Manager, Times
from capibara.jobs.managing.records import Record, Records, State, default_path
from capibara.monitoring.status import StatusLine
from capibara.multihost import exits
from capibara.multihost.signals import Signals

_HEAD = ("JOB", "WHERE", "SLICE", "STATE", "ATTEMPT", "LAUNCHED", "USD", "WHY")
_MOST = 90  # characters of a reason in the table
_LONGEST_POLL_S = 3600


class Opened:
    """The database of a command line, in a `with` block."""

    def __init__(self, args: argparse.Namespace):
        if not 0 < args.poll <= _LONGEST_POLL_S:
            raise UserError(f"--poll is {args.poll:g}, must be above 0 and at most {_LONGEST_POLL_S}")
        self._path = pathlib.Path(args.state).expanduser() if args.state else default_path()

    def __enter__(self) -> Records:
        self._records = Records(self._path, say)
        return self._records

    def __exit__(self, *_: object) -> None:
        self._records.close()


def manage(
    records: Records,
    names: Collection[str] | None,
    args: argparse.Namespace,
    is_enough: Callable[[Sequence[Record]], bool],
) -> list[Record]:
    """Manages jobs until it is enough, with a line that shows how they are; returns their records.

    Args:
      records: the database.
      names: of the jobs; None: all.
      args: with --poll.
      is_enough: of the records after each pass.
    """
    with StatusLine() as line:

        def show(records: Sequence[Record]) -> None:
            if live := [item for item in records if not item.state.is_final]:
                topic, detail = progress(live, time.time())
                room = shutil.get_terminal_size().columns - len(topic) - 3  # a line that is wrapped cannot be cleared
                line.show(topic, detail if not sys.stderr.isatty() else detail[: max(0, room)])

        try:
            with Signals() as signals, Manager(records, names, times=Times(poll_s=args.poll), say=say) as manager:
                return manager.run(is_enough, show, signals.pause)
        except KeyboardInterrupt:
            say("the jobs still run: capibara launch manage manages them")
            raise


def exit_code(records: Sequence[Record]) -> int:
    """Prints an error for each job that has failed; returns 0 if there is none."""
    failed = [entry for entry in records if entry.state is State.FAILED]
    for item in failed:
        print(f"error: job {item.name} has failed: {printable(item.reason)}", file=sys.stderr)
    return exits.EXIT_FAULT if failed else 0


def say(text: str) -> None:
    """Prints a line with the time, in place of the one that shows the jobs."""
    clear = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{clear}{time.strftime('%H:%M:%S')} {printable(text)}", file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """A text of a system or a host in one line, without signs that would drive the terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def progress(live: Sequence[Record], now_s: float) -> tuple[str, str]:
    """The line that shows jobs while they run: how many are in each state, and what they have cost."""
    states = collections.Counter(item.state for item in live)
    topic = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    parts = [f"for {duration(now_s - min(item.launched_s for item in live))}"]
    costs = [cost for item in live if (cost := cost_of(item, now_s)) is not None]
    parts += [f"{sum(costs):,.2f} USD"] if any(costs) else []
    if len(live) == 1 and live[0].reason:
        parts.append(printable(live[0].reason))
    return topic, ", ".join(parts)


def cost_of(record: Record, now_s: float) -> float | None:
    """What the chips of a job have cost, in USD; None: the price is unknown."""
    try:
        price = record.spec()[1].usd_per_hour
    except UserError:
        return None
    return None if price is None else price * record.spent_s(now_s) / 3600


def as_json(record: Record, now_s: float) -> dict[str, object]:
    """What is known of a job, for machines."""
    try:
        backend, spec = record.spec()
    except UserError as error:  # of another version of capibara
        return {"name": record.name, "state": str(record.state), "reason": str(error)}
    return {
        "name": record.name,
        "where": backend.name,
        "place": {name: value for name, value in vars(backend).items() if value is not None},
        "slice": spec.slice_.name,
        "state": str(record.state),
        "reason": record.reason,
        "attempt": record.attempt.number + 1,
        "failures": record.attempt.failures,
        "launched": datetime.datetime.fromtimestamp(record.launched_s, datetime.UTC).isoformat(timespec="seconds"),
        "chip_seconds": round(record.spent_s(now_s) * spec.slice_.chips, 1),
        "usd": cost_of(record, now_s),
        "budget_usd": spec.budget_usd,
        "storage": spec.folder,
    }


def table(records: Sequence[Record], now_s: float) -> str:
    """Jobs as a table of text."""
    rows = [_HEAD]
    for item in records:
        try:
            backend, spec = item.spec()
            where, slice_, reason = backend.name, spec.slice_.name, printable(item.reason)
        except UserError as error:  # of another version of capibara
            where, slice_, reason = "?", "?", str(error)
        cost = cost_of(item, now_s)
        reason = reason if len(reason) <= _MOST else f"{reason[: _MOST - 3]}..."
        shown = "" if cost is None else f"{cost:,.2f}"
        row = (item.name, where, slice_, item.state, str(item.attempt.number + 1))
        rows.append((*row, f"{duration(now_s - item.launched_s)} ago", shown, reason))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def duration(seconds: float) -> str:
    """A time in words of a few letters: 12s, 5m, 3h07m, 2d04h."""
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if minutes < 1:
        return f"{max(0.0, seconds):.0f}s"
    if hours < 1:
        return f"{minutes}m"
    return f"{hours}h{minutes % 60:02}m" if hours < 24 else f"{hours // 24}d{hours % 24:02}h"
