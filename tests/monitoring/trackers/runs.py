"""Run folders for tests of trackers, and trackers that note what they get, or misbehave."""

from __future__ import annotations

import dataclasses
import os
import time

from capibara.config import configurable
from capibara.monitoring.defaults import ConfigFile
from capibara.monitoring.metrics_file.loggers import MetricsFile
from capibara.monitoring.trackers.feeds import Feeds
from capibara.monitoring.trackers.tracker import Tracker
from tests.monitoring.metrics_file.test_loggers import RUN as PLAIN_RUN

TOKEN = "hf_abcdefghijklmnopqrstuv"
PNG = b"\x89PNG\r\n\x1a\n%bIEND\xaeB`\x82"  # with content between, a file that looks like a picture
RUN = dataclasses.replace(
    PLAIN_RUN, config=f"Trainer.steps = 100\nTrainer.model_dir = 'x'\nDataset.token = {TOKEN!r}\n"
)


def lived(folder, steps, *, start=0, reason="finished", loss=1.0):
    """One start of a run that logs at `steps`; reason None: it is killed."""
    run = dataclasses.replace(RUN, model_dir=str(folder), start_step=start)
    metrics = MetricsFile()
    for callback in (ConfigFile(), metrics):
        callback.on_train_begin(run)
    for step in steps:
        metrics.on_step(step, {"loss": loss + step})
    if reason is not None:
        metrics.on_train_end(steps[-1] if steps else start, reason)
    return metrics


def sent(trackers, folder, within_s=120.0):
    """Feeds trackers with what a run has written; returns the lines for the user, and what they have not got."""
    said = []
    feeds = Feeds(trackers, str(folder), said.append)
    feeds.start()
    feeds.end()
    feeds.wait(within_s)
    return said, feeds.unsent()


@configurable
@dataclasses.dataclass(kw_only=True)
class Noting(Tracker):
    """Notes all calls in `calls`, which the copies of all sessions share; what is not flushed is lost at a failure."""

    how: str = ""

    def __post_init__(self):
        self.calls = []
        self.pending = []

    def start(self, run):
        self.run, self.pending = run, []
        self.calls.append(("start", run.run_id))
        return f"id-{run.uid[:8]}"

    def log(self, moment, metrics):
        self.pending.append(("log", moment.step, dict(metrics)))

    def text(self, moment, name, text):
        self.pending.append(("text", moment.step, name, text))

    def facts(self, moment, facts):
        self.pending.append(("facts", moment.step, dict(facts)))

    def picture(self, moment, name, path):
        self.pending.append(("picture", moment.step, name, os.path.getsize(path)))

    def roll_back(self, moment):
        self.pending.append(("roll_back", moment.step))

    def flush(self):
        self.calls += self.pending
        self.pending = []
        return True

    def finish(self, reason):
        self.flush()
        self.calls.append(("finish", reason))

    def losses(self):
        """Step and loss of all that was logged, in order."""
        return [(call[1], call[2]["train/loss"]) for call in self.calls if call[0] == "log" and "train/loss" in call[2]]


@configurable
@dataclasses.dataclass(kw_only=True)
class Odd(Tracker):
    """A tracker that sleeps, raises, ends the process, or connects to a server that never answers."""

    how: str = "raise"
    port: int = 0

    def start(self, run):
        if self.how == "sleep":
            time.sleep(1000)
        elif self.how == "raise":
            raise ConnectionError(f"no server at http://me:my-secret-key@host/ with token={TOKEN}\nand more")
        elif self.how == "kill":
            os.kill(os.getpid(), 9)
        elif self.how == "import":
            import a_client_that_is_not_there  # noqa: F401
        elif self.how == "connect":
            import urllib.request

            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/", timeout=1000)
