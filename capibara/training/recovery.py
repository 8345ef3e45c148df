"""Initial state, checkpoints and roll-back of a run."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from capibara.checkpoints.manager import Checkpoints, Restored
from capibara.core.types import Params, PyTree, UserError
from capibara.data.pipeline.loader import Loader, Position
from capibara.multihost import hosts
from capibara.training.base import state as states
from capibara.training.base.state import TrainState
from capibara.training.feed import BatchFeed
from capibara.training.metrics import EarlyStopping
from capibara.training.stability.bad_batches import BadBatches
from capibara.training.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class Initial:
    """The initial weights and state of a run: its own checkpoint, pretrained weights, or neither.

    The arrays may be used only once (they are donated).

    Attributes:
      checkpoint: the newest valid step and its state; None: the run does not resume.
      params: pretrained parameters of the model without adapters, and of adapters that are trained further.
      optimizer: the step and the optimizer's state (Trainer.init_with = "state").
      starts: functions that load the initial weights of the method's own; empty: it has none.
    """

    checkpoint: tuple[Restored, TrainState] | None = None
    params: Params | None = None
    optimizer: tuple[int, PyTree] | None = None
    starts: tuple[Callable[[], Params], ...] = ()

    @property
    def step(self) -> int:
        """Steps done."""
        return 0 if self.checkpoint is None else self.checkpoint[0].step


@dataclasses.dataclass(frozen=True)
class Start:
    """A state to train from.

    Attributes:
      state: on the mesh.
      step: completed steps.
      progress: further values of the checkpoint, as JSON; empty: the run is new.
    """

    state: TrainState
    step: int
    progress: Mapping[str, Any]


class Recovery:
    """Saves a run's checkpoints, monitors its steps for anomalies, and rolls back.

    Args:
      trainer: the run.
      checkpoints: the checkpoints of its folder.
      batches: its training split.
      target: shapes and shardings of its state.

    Attributes:
      early: the early stopping.
      owes_evaluation: the previous start stopped before the evaluation of the step from which the run resumed.
    """

    def __init__(self, trainer: Trainer, checkpoints: Checkpoints, batches: Loader, target: TrainState):
        self._trainer, self._checkpoints, self._batches, self._target = trainer, checkpoints, batches, target
        self._bad_batches = BadBatches(trainer.model_dir, trainer.anomalies, trainer.float16_scaling, batches)
        self._roll_backs: Counter[int] = Counter()  # number of roll-backs to each step
        self._resumed_at: int | None = None  # the step of the checkpoint from which the run resumed
        self.early = EarlyStopping(trainer.evaluation.patience)
        self.owes_evaluation = False

    def close(self) -> None:
        """Waits until the documents of bad batches are written."""
        self._bad_batches.close()

    def begin(self, initial: Initial, init: Callable[..., TrainState]) -> Start:
        """Makes the initial state of a run, on the mesh.

        Args:
          initial: the checkpoint or pretrained weights.
          init: (key, pretrained=parameters or None) -> a new state.
        """
        if initial.checkpoint is not None:
            return self._resumed(*initial.checkpoint)
        state, step = init(jax.random.key(self._trainer.seed), pretrained=initial.params), 0
        if initial.optimizer is not None:
            step, opt_state = initial.optimizer
            at = jax.device_put(np.int32(step), self._target.step.sharding)
            state = dataclasses.replace(state, step=at, opt_state=opt_state)
        return Start(state, step, {})

    def _resumed(self, restored: Restored, state: TrainState) -> Start:
        """Resumes from a checkpoint, including its progress."""
        progress, self._resumed_at = restored.progress, restored.step
        self.early = EarlyStopping(self._trainer.evaluation.patience, progress.get("early_stopping"))
        self.owes_evaluation = progress.get("owes_evaluation", False)
        if self.owes_evaluation and restored.score is not None:  # an earlier start has evaluated it
            self.early.update(restored.score)
            self.owes_evaluation = False
        state = states.with_new_window(state, self._target, self._trainer.anomalies)
        return Start(state, restored.step, progress)

    def evaluated(self, step: int, score: float) -> None:
        """Records the loss of an evaluation, also in the checkpoint of the step if it was saved without one."""
        self.early.update(score)
        if self.owes_evaluation and step == self._resumed_at:
            self._checkpoints.score(step, score)
            self.owes_evaluation = False

    def save(
        self,
        step: int,
        state: TrainState,
        feed: BatchFeed,
        metrics: Mapping[str, jax.Array],
        score: float | None = None,
        owes_evaluation: bool = False,
    ) -> None:
        """Passes a checkpoint to the asynchronous writer.

        Args:
          step, state, feed: what to save.
          metrics: metrics of the step.
          score: the loss of its evaluation; None: it was not evaluated.
          owes_evaluation: whether an evaluation was due but postponed.

        Raises:
          UserError: the step's loss or gradients (in `metrics`) are not finite, and its update was not skipped: such a
            state must not be saved. Or the loss scale cannot fall further.
        """
        self._bad_batches.read()
        self._check_worth(step, metrics)
        progress: dict[str, Any] = {"early_stopping": self.early.state()}
        data = feed.state()
        if owes_evaluation:
            progress["owes_evaluation"] = True
        if (supplied := feed.provider_state()) is not None:
            progress["supply"] = supplied
        self._checkpoints.save(step, state, data, progress, score)

    def _check_worth(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        trainer = self._trainer
        if not metrics:  # no step since the start: an adopted model, which is finite
            return
        if metrics.get("skipped", 0.0):
            if metrics.get("loss_scale", math.inf) <= trainer.loss_scaling.minimum:
                raise UserError(
                    f"gradients overflow at step {step} even at the smallest loss scale, not saved: earlier checkpoints "
                    f"are kept; float16 does not hold this model's values, set {type(trainer.model).__name__}.dtype = "
                    "'bfloat16'"
                )
            return
        for name in ("loss", "grad_norm"):
            if not math.isfinite(float(metrics[name])):
                raise UserError(
                    f"{name} is {float(metrics[name])} at step {step}, not saved: earlier checkpoints are kept; lower "
                    "Schedule.learning_rate or set Optimizer.clip_norm, and run the command again"
                )

    def watch(self, step: int, position: Position, metrics: Mapping[str, jax.Array]) -> None:
        """Records a step's metrics, still on the devices, and the data's position before its batch."""
        self._bad_batches.add(step, position, metrics)

    def spike(self) -> int | None:
        """The step of a loss spike that requires a roll-back, or None; call it when the host has waited for all steps.

        Raises:
          UserError: too many updates in a row were skipped.
        """
        self._bad_batches.read()
        return self._bad_batches.spike

    def roll_back(self, spike: int, state: TrainState) -> Start:
        """Restores a checkpoint from well before a spike, and skips the batches that led to it.

        Every process calls it for the same step, since all have read the same metrics.

        Args:
          spike: the step of the spike.
          state: the current state; its buffers are freed for the restored one.

        Raises:
          UserError: there is no such checkpoint, or the run has rolled back to it too often.
        """
        trainer, anomalies, checkpoints = self._trainer, self._trainer.anomalies, self._checkpoints
        checkpoints.wait()
        step = hosts.gathered(
            checkpoints.step_before(spike, spike - anomalies.roll_back_steps) if jax.process_index() == 0 else None
        )[0]
        if step is None:
            raise UserError(
                f"loss spike at step {spike}, and no checkpoint before it to roll back to: set Checkpointing.every "
                f"({trainer.checkpointing.every}) below that, or Anomalies.on_spike = 'skip'"
            )
        self._roll_backs[step] += 1
        if self._roll_backs[step] > anomalies.most_roll_backs:
            raise UserError(
                f"loss spike at step {spike}, after {anomalies.most_roll_backs} roll-backs to step {step}: earlier "
                "checkpoints are kept; lower Schedule.learning_rate, or raise Anomalies.sigmas or skip_batches"
            )
        jax.tree.map(lambda x: x.delete(), state)  # the devices do not have memory for two states
        restored = checkpoints.go_back(step)
        state = checkpoints.restore_state(restored, self._target)
        self._skip(spike, step, restored.data["batches"])
        return self._resumed(restored, state)

    def _skip(self, spike: int, step: int, first: int) -> None:
        """Skips the batches from `first` on that led to the spike."""
        batches = self._batches
        while batches.batches < first + self._trainer.anomalies.skip_batches:
            next(batches)
        self._bad_batches.rolled_back()
        if jax.process_index() == 0:
            logging.getLogger(__name__).warning(
                "loss spike at step %d: rolled back to step %d, skipping the %d batches after it (see bad_batches.jsonl)",
                *(spike, step, batches.batches - first),
            )

    def counters(self) -> dict[str, float]:
        """Counters of anomalies (skipped updates, loss spikes, roll-backs) as metrics, if there were any."""
        counts = {"checkpoints_corrupted": len(self._checkpoints.corrupted), "roll_backs": self._roll_backs.total()}
        return {name: float(count) for name, count in counts.items() if count}
