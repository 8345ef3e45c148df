"""A tracker: a table of what a run reports, beside its own metrics file.

cd examples/extend && python -m capibara.train --gin_file=my_tracker.gin --emulate=2
"""

import csv
import os

from capibara.config import configurable
from capibara.training.callbacks import Callback


@configurable
class CsvTracker(Callback):
    """Appends one line a logged step to a file in the run folder.

    Args:
      name: of the file.
      metrics: which metrics are its columns.
    """

    def __init__(self, name: str = "table.csv", metrics: tuple[str, ...] = ("loss", "learning_rate")):
        self.name, self.metrics = name, metrics

    # Called on process 0 only; Callback has the other events: evaluations, samples, checkpoints, the end.
    def on_train_begin(self, run):
        self.path = os.path.join(run.model_dir, self.name)

    def on_step(self, step, metrics):
        with open(self.path, "a", newline="") as file:
            csv.writer(file).writerow([step, *(metrics[name] for name in self.metrics)])
