"""A tracker: a table of what a run reports, beside its own metrics file.

cd examples/extend && python -m capibara.train --gin_file=my_tracker.gin --emulate=2
"""

import csv
import dataclasses
import os

from capibara.config import configurable
from capibara.monitoring.trackers.tracker import Tracker


@configurable
@dataclasses.dataclass(kw_only=True)
class CsvTracker(Tracker):
    """Appends one line a logged step to a file in the run folder.

    Attributes:
      name: of the file.
      metrics: which metrics are its columns.
    """

    name: str = "table.csv"
    metrics: tuple[str, ...] = ("train/loss", "train/learning_rate")

    # Called in a process beside the training; Tracker has the other events: texts, facts, pictures, the end.
    def start(self, run):
        self.path = os.path.join(run.folder, self.name)

    def log(self, moment, metrics):
        if all(name in metrics for name in self.metrics):
            with open(self.path, "a", newline="") as file:
                csv.writer(file).writerow([moment.step, *(metrics[name] for name in self.metrics)])
