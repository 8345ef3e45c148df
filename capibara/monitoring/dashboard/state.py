"""Everything that the dashboard's server knows: readers, alerts, answers of other rooms, and viewers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from capibara.core import limits
from capibara.monitoring.dashboard.alerts.board import Alert, Board
from capibara.monitoring.dashboard.alerts.rules import Rules
from capibara.monitoring.dashboard.alerts.webhooks import Webhooks
from capibara.monitoring.dashboard.facts import Facts, Question
from capibara.monitoring.dashboard.http.hub import Hub
from capibara.monitoring.dashboard.settings import DashboardConfig
from capibara.monitoring.dashboard.views.names import Json, finite
from capibara.monitoring.dashboard.views.summary import summary, unreadable
from capibara.monitoring.reading.reader import Change, Reader
from capibara.monitoring.reading.run import Limits, Run
from capibara.monitoring.summaries.progress import printable
from capibara.storage import stores

_BUCKET_POLL_S, _BUCKET_SCAN_S = 15.0, 60.0
_STALLS_EVERY_S = 20.0  # runs that log nothing are checked, too
_MOST_NEW = 30  # rows of an event; viewers ask for more
_NEW = {
    "train": (
        "loss",
        "grad_norm",
        "learning_rate",
        "tokens_per_s",
        "mfu",
        "step_s",
        "consensus_score",
        "router_entropy",
    ),
    "eval": ("loss", "perplexity", "token_accuracy", "bits_per_byte"),
}
_UPDATE = ("id", "status", "step", "updated", "loading", "loss", "eval_loss", "tokens_per_s")


class Dashboard:
    """The runs below some folders, followed, with their alerts.

    Args:
      roots: run folders, or folders of them; local or in a bucket.
      config: the options.
      questions: what other rooms know of a run folder; see facts.Facts.
      webhooks: whom alerts are sent to.
    """

    def __init__(
        self, roots: Sequence[str], config: DashboardConfig, questions: Mapping[str, Question], webhooks: Webhooks
    ):
        self.roots, self.config, self.webhooks = tuple(roots), config, webhooks
        self.facts, self.hub = Facts(questions), Hub(self.update)
        self.board = Board(_rules(config), self._news)
        self._readers = []
        most_bytes = config.memory_mib << 20
        local = [root for root in roots if stores.of(root).has_local_paths]
        remote = [root for root in roots if root not in local]
        if local:
            self._readers.append(Reader(local, self._changed, most_bytes=most_bytes))
        if remote:
            pace = {"poll_s": _BUCKET_POLL_S, "scan_s": _BUCKET_SCAN_S}
            self._readers.append(Reader(remote, self._changed, most_bytes=most_bytes, **pace))
        self._quiet_checked_s = 0.0
        self._announced: dict[tuple[str, str], tuple[int, int]] = {}  # epoch and step of the last row that viewers know

    def start(self) -> None:
        """Begins to read; called in the event loop of the server."""
        self.hub.begin()
        self.webhooks.start()
        for reader in self._readers:
            reader.start()

    def stop(self) -> None:
        """Ends all threads and processes."""
        self.hub.end()
        self.webhooks.stop()
        for reader in self._readers:
            reader.stop()

    @property
    def runs(self) -> list[Run]:
        """All runs that were found."""
        return [run for reader in self._readers for run in list(reader.runs.values())]

    @property
    def faults(self) -> list[str]:
        """Why folders cannot be listed."""
        return [reader.fault for reader in self._readers if reader.fault is not None]

    def run(self, run_id: str) -> Run | None:
        """A run that a viewer looks at."""
        return next((run for reader in self._readers if (run := reader.run(run_id)) is not None), None)

    def summary(self, run: Run) -> dict[str, Json]:
        """A run's row in the table of runs; of one that cannot be summed up, its name and what is wrong."""
        try:
            return summary(run, self.board.rules.quiet, self.board.active(run.id))
        except Exception as error:  # whatever the lines of an untrusted run lead to: the others are shown all the same
            return unreadable(run, limits.cause(error, 200))

    def update(self, run_id: str) -> dict[str, Json] | None:
        """What an event says of a run that has changed; None: it is gone."""
        run = next((item for item in self.runs if item.id == run_id), None)
        if run is None:
            return None
        whole = self.summary(run)
        kinds: list[Json] = [*sorted(run.kinds | set(run.tables))]
        new = {kind: self._new_rows(run, kind, names) for kind, names in _NEW.items()}
        return {**{name: whole[name] for name in _UPDATE}, "kinds": kinds, "new": {**new}}

    def _new_rows(self, run: Run, kind: str, names: Sequence[str]) -> Json:
        """The rows since the last call; None: there are none, or viewers are to ask for them."""
        view = run.views().get(kind)
        if view is None or not len(view):
            return None
        reported = self._announced.get((run.id, kind))
        self._announced[run.id, kind] = run.epoch, int(view.steps[-1])
        if reported is None or reported[0] != run.epoch:
            return None
        begin = int(np.searchsorted(view.steps, reported[1], side="right"))
        if not 0 < len(view) - begin <= _MOST_NEW:
            return None
        values = {name: view.columns[name][begin:].tolist() for name in names if name in view.columns}
        return {
            "after": reported[1],
            "steps": view.steps[begin:].tolist(),
            "times": [finite(item) for item in view.times[begin:].tolist()],
            "values": {name: [finite(item) for item in column] for name, column in values.items()},
        }

    def check_quiet(self) -> None:
        """Checks runs that have logged nothing for a while: silence is what a stall is."""
        now_s = time.monotonic()
        if now_s - self._quiet_checked_s > _STALLS_EVERY_S:
            self._quiet_checked_s = now_s
            for run in self.runs:
                self.board.check(run)

    def _changed(self, change: Change) -> None:
        """In a reader's thread: checks the rules, and tells viewers."""
        for run_id in change.removed:
            self.board.forget(run_id)
            self._announced = {key: step for key, step in self._announced.items() if key[0] != run_id}
        for run in self.runs:
            if run.id in change.updated:
                self.board.check(run)
        self.hub.changed(change)

    def _news(self, alert: Alert) -> None:
        self.hub.alert(alert.as_json())
        if self.webhooks.urls:
            state = "resolved" if alert.ended_s is not None else str(alert.finding.severity)
            text = printable(f"{alert.run_name}: {alert.finding.text} ({state})")
            for sign, name in {"&": "&amp;", "<": "&lt;", ">": "&gt;"}.items():  # Slack's: <!channel> calls everybody
                text = text.replace(sign, name)
            self.webhooks.send({"source": "capibara", "text": text, "alert": alert.as_json()})


def _rules(config: DashboardConfig) -> Rules:
    """When alerts are raised."""
    return Rules(
        spike_sigmas=config.spike_sigmas,
        spike_window=config.spike_window,
        low_goodput=config.low_goodput,
        disk_free_gib=config.disk_free_gib,
        quiet=Limits(config.stall_s, config.stall_train_s),
    )
