"""The callbacks of a run: the usual ones, or those of its Gin file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from capibara.checkpoints import run_manifest
from capibara.config import configurable, written
from capibara.core.types import UserError
from capibara.monitoring.dashboard.beside import DashboardProcess
from capibara.monitoring.dashboard.settings import DashboardConfig
from capibara.monitoring.metrics_file.loggers import MetricsFile, TensorBoard
from capibara.monitoring.profiling.callback import ProfileSummary
from capibara.monitoring.summaries.curve import LossCurve
from capibara.monitoring.summaries.progress import ProgressLine
from capibara.monitoring.system.sampler import SystemMetrics, SystemSampler
from capibara.monitoring.trackers.tracker import Tracker
from capibara.monitoring.trackers.tracking import Tracking, TrackingProcess
from capibara.training.base.callbacks import Callback, Callbacks, RunInfo, SystemValue


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Monitoring:
    """The callbacks of a run.

    Attributes:
      callbacks: the callbacks; None: the usual ones (metrics file, TensorBoard, progress line, loss curve, summary of a
        profile).
      more: additional callbacks, called after them.
      trackers: services and files that show the run; a process of their own feeds them from the metrics file.
    """

    callbacks: tuple[Callback, ...] | None = None
    more: tuple[Callback, ...] = ()
    trackers: tuple[Tracker, ...] = ()

    def build(
        self,
        system: SystemMetrics = SystemMetrics(),
        tracking: Tracking = Tracking(),
        dashboard: DashboardConfig | None = None,
    ) -> Callbacks:
        """One callback that calls them all.

        Args:
          system: how the machine is watched.
          tracking: how the trackers are fed.
          dashboard: of the process that is started with the run; None: none is.

        Raises:
          UserError: the trackers cannot be fed.
        """
        callbacks = [*(usual() if self.callbacks is None else self.callbacks), *self.more]
        report = Report()
        if system.every_s and any(isinstance(item, MetricsFile) for item in callbacks):
            callbacks = [SystemSampler(system, report), *callbacks]  # first: its last sample is to reach the others
        if self.trackers:
            callbacks.append(self._process(tracking, callbacks, report))
        if dashboard is not None:
            callbacks.append(DashboardProcess(dashboard, report))
        report.callbacks = Callbacks([ConfigFile(), *callbacks, Seal()])
        return report.callbacks

    def _process(self, how: Tracking, callbacks: Sequence[Callback], report: Callback) -> TrackingProcess:
        """The process that feeds the trackers."""
        if not any(isinstance(item, MetricsFile) for item in callbacks):
            raise UserError(
                "Monitoring.trackers are fed from the metrics file: add @MetricsFile() to Monitoring.callbacks"
            )
        alone = Monitoring(trackers=self.trackers)
        if unnamed := written.unnamed(alone):
            raise UserError(
                f"Monitoring.trackers has {unnamed[0]} of this script, which the process of the trackers cannot import: put it "
                "into a module of its own"
            )
        return TrackingProcess(self.trackers, written.text_of(alone).split("\n"), how, report)


class Report(Callback):
    """Passes samples and status lines of callbacks that have threads on to all callbacks.

    Attributes:
      callbacks: all of them.
    """

    callbacks: Callback = Callback()

    def on_status(self, text: str) -> None:
        self.callbacks.on_status(text)

    def on_system(self, step: int, metrics: Mapping[str, SystemValue]) -> None:
        self.callbacks.on_system(step, metrics)

    def on_facts(self, step: int, facts: Mapping[str, object]) -> None:
        self.callbacks.on_facts(step, facts)


class ConfigFile(Callback):
    """Writes config.gin into the run folder when training starts, so that a refused change does not overwrite it."""

    def on_train_begin(self, run: RunInfo) -> None:
        folder = run_manifest.folder_of(run.model_dir)
        run_manifest.begin(folder, run.data)
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
    return [
        MetricsFile(),
        TensorBoard(),
        ProgressLine(),
        LossCurve(),
        ProfileSummary(),
    ]  # MetricsFile first: the others read its file
