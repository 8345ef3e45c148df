"""Everything that a training is made of, as one value."""

from __future__ import annotations

import dataclasses

from capibara.evaluation.judging import TaskJudge
from capibara.evaluation.seqio_tasks import SeqioEvaluation
from capibara.inference.engine.engine import EngineConfig
from capibara.inference.sample import SampleText
from capibara.models.api import Model
from capibara.monitoring.dashboard.settings import DashboardConfig
from capibara.monitoring.defaults import Monitoring
from capibara.monitoring.system.sampler import SystemMetrics
from capibara.monitoring.trackers.tracking import Tracking
from capibara.planner.search import automatic
from capibara.training import emulation
from capibara.training.base.callbacks import Callbacks
from capibara.training.run_folder import own_tokenizer
from capibara.training.trainer import Trainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A training run. Gin files and Python code describe it; it is not changed, but replaced.

    Attributes:
      trainer: the model, its data and how it is trained.
      samples: texts that are generated during training.
      monitoring: the callbacks and trackers.
      system: how the machine is watched.
      tracking: how trackers are fed.
      dashboard: the dashboard that Trainer.dashboard starts.
      tasks: evaluations on SeqIO tasks, if Evaluation.task_metrics is set.
      batching: how their answers are generated.
    """

    trainer: Trainer
    samples: SampleText = SampleText()
    monitoring: Monitoring = Monitoring()
    system: SystemMetrics = SystemMetrics()
    tracking: Tracking = Tracking()
    dashboard: DashboardConfig = DashboardConfig()
    tasks: SeqioEvaluation = SeqioEvaluation()
    batching: EngineConfig = EngineConfig()

    def callbacks(self, *, dashboard: bool) -> Callbacks:
        """The callbacks of the training; `dashboard`: a process that shows one is started with it.

        Raises:
          UserError: the trackers cannot be fed.
        """
        return self.monitoring.build(self.system, self.tracking, self.dashboard if dashboard else None)

    def judge(self, model: Model) -> TaskJudge | None:
        """The judge of the SeqIO tasks during training; None: Evaluation.task_metrics is not set."""
        if not self.trainer.evaluation.task_metrics:
            return None
        return TaskJudge(self.trainer, model, self.tasks_as_read, self.batching)

    @property
    def tasks_as_read(self) -> SeqioEvaluation:
        """`tasks`; they are read from the cache if the training data is."""
        return dataclasses.replace(self.tasks, use_cached=True) if self.trainer.dataset.use_cached else self.tasks


def with_own_tokenizer(run: Run) -> Run:
    """A run whose tokenizer is the copy in its folder, if the original is gone; errors as in `own_tokenizer.of_run`."""
    return dataclasses.replace(run, trainer=own_tokenizer.of_run(run.trainer))


def with_plan(run: Run) -> tuple[Run, str]:
    """A run that names a slice, with the mesh that the planner chooses; and a line that describes it.

    Returns:
      The run itself and an empty line, if its mesh is set or it names no slice.

    Raises:
      UserError: as in `automatic.planned`.
    """
    trainer, line = automatic.planned(run.trainer)
    return (dataclasses.replace(run, trainer=trainer) if line else run), line


def emulated(run: Run, device_count: int) -> tuple[Run, str]:
    """A run that is shrunk for emulated devices, and a line that explains how; an empty one if it is small already."""
    trainer = emulation.shrunk(run.trainer, device_count)
    if trainer is run.trainer:
        return run, ""
    return dataclasses.replace(run, trainer=trainer), f"--emulate={device_count}: {emulation.RULE}"
