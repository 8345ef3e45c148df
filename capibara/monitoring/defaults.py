"""Which callbacks a run has."""

from __future__ import annotations

import dataclasses
import os

from capibara import outputs
from capibara.config import configurable
from capibara.monitoring.curve import LossCurve
from capibara.monitoring.loggers import MetricsFile, TensorBoard
from capibara.monitoring.progress import ProgressLine
from capibara.training.callbacks import Callback, Callbacks, RunInfo


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Monitoring:
    """The callbacks of a run.

    Attributes:
      callbacks: None: the usual ones (metrics file, TensorBoard, progress line, loss curve).
      more: called after them.
    """

    callbacks: tuple[Callback, ...] | None = None
    more: tuple[Callback, ...] = ()

    def build(self) -> Callbacks:
        """One callback that calls them all."""
        return Callbacks([ConfigFile(), *(usual() if self.callbacks is None else self.callbacks), *self.more])


class ConfigFile(Callback):
    """Writes config.gin into the run folder: only once the run has started, so a refused change leaves it as it was."""

    def on_train_begin(self, run: RunInfo) -> None:
        outputs.replace(os.path.join(run.model_dir, "config.gin"), run.config)


def usual() -> list[Callback]:
    """What a run has when its Gin file says nothing."""
    return [MetricsFile(), TensorBoard(), ProgressLine(), LossCurve()]  # the metrics first: the others read them
