"""The callbacks of a run: the usual ones, or those of its Gin file."""

from __future__ import annotations

import dataclasses

from capibara.checkpoints import run_manifest
from capibara.config import configurable
from capibara.monitoring.curve import LossCurve
from capibara.monitoring.progress import ProgressLine
from capibara.monitoring.trackers.loggers import MetricsFile, TensorBoard
from capibara.training.callbacks import Callback, Callbacks, RunInfo


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Monitoring:
    """The callbacks of a run.

    Attributes:
      callbacks: the callbacks; None: the usual ones (metrics file, TensorBoard, progress line, loss curve).
      more: additional callbacks, called after them.
    """

    callbacks: tuple[Callback, ...] | None = None
    more: tuple[Callback, ...] = ()

    def build(self) -> Callbacks:
        """One callback that calls them all."""
        own = usual() if self.callbacks is None else self.callbacks
        return Callbacks([ConfigFile(), *own, *self.more, Seal()])


class ConfigFile(Callback):
    """Writes config.gin into the run folder when training starts, so that a refused change does not overwrite it."""

    def on_train_begin(self, run: RunInfo) -> None:
        folder = run_manifest.folder_of(run.model_dir)
        run_manifest.begin(folder)
        run_manifest.replace(folder, {run_manifest.CONFIG: run.config.encode()})


class Seal(Callback):
    """Updates the hashes in the run folder's manifest.json after the other callbacks have written their files."""

    def __init__(self) -> None:
        self._model_dir = ""

    def on_train_begin(self, run: RunInfo) -> None:
        self._model_dir = run.model_dir

    def on_checkpoint(self, step: int) -> None:
        run_manifest.seal_logs(run_manifest.folder_of(self._model_dir))

    def on_train_end(self, step: int, reason: str) -> None:
        run_manifest.seal_outputs(run_manifest.folder_of(self._model_dir))


def usual() -> list[Callback]:
    """The default callbacks of a run."""
    return [MetricsFile(), TensorBoard(), ProgressLine(), LossCurve()]  # MetricsFile first: the others read its file
