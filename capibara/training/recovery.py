"""Where a run begins, what it saves, and how it goes back from a loss spike."""

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
from capibara.core.multihost import hosts
from capibara.core.types import Params, PyTree, UserError
from capibara.data.pipeline.loader import Loader, Position
from capibara.training import state as states
from capibara.training.feed import BatchFeed
from capibara.training.metrics import EarlyStopping
from capibara.training.stability.bad_batches import BadBatches
from capibara.training.state import TrainState
from capibara.training.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class Initial:
    """What a run begins from: a checkpoint of its own, pretrained weights, or nothing. The arrays are to be used once.

    Attributes:
      checkpoint: the newest whole step and its state, of a run that resumes.
      params: pretrained ones of the model without adapters, with those of an adapter that goes on.
      optimizer: the step and the optimizer's state that come with them (Trainer.init_with = "state").
    """

    checkpoint: tuple[Restored, TrainState] | None = None
    params: Params | None = None
    optimizer: tuple[int, PyTree] | None = None

    @property
    def step(self) -> int:
        """Steps done."""
        return 0 if self.checkpoint is None else self.checkpoint[0].step


@dataclasses.dataclass(frozen=True)
class Start:
    """A state to train from.

    Attributes:
      state: on the mesh.
      step: steps done.
      progress: what its checkpoint kept besides, as JSON values; empty: it is new.
    """

    state: TrainState
    step: int
    progress: Mapping[str, Any]


class Recovery:
    """Saves a run's checkpoints, looks at what went wrong, and goes back where it must.

    Args:
      trainer: the run.
      checkpoints: of its folder.
      batches: of its training split.
      target: shapes and shardings of its state.

    Attributes:
      early: whether evaluations still get better.
      owes_evaluation: the run was to stop before the evaluation of the step that it resumed from.
    """

    def __init__(self, trainer: Trainer, checkpoints: Checkpoints, batches: Loader, target: TrainState):
        self._trainer, self._checkpoints, self._batches, self._target = trainer, checkpoints, batches, target
        self._bad_batches = BadBatches(trainer.model_dir, trainer.anomalies, trainer.float16_scaling, batches)
        self._roll_backs: Counter[int] = Counter()  # by the step that it went back to
        self._resumed_at: int | None = None  # the step of the checkpoint
        self.early = EarlyStopping(trainer.evaluation.patience)
        self.owes_evaluation = False

    def close(self) -> None:
        """Waits until the documents of bad batches are written down."""
        self._bad_batches.close()

    def begin(self, initial: Initial, init: Callable[..., TrainState]) -> Start:
        """The state that a run begins with, on the mesh.

        Args:
          initial: what it begins from.
          init: (key, given=parameters or None) -> a new state.
        """
        if initial.checkpoint is not None:
            return self._resumed(*initial.checkpoint)
        state, step = init(jax.random.key(self._trainer.seed), given=initial.params), 0
        if initial.optimizer is not None:
            step, opt_state = initial.optimizer
            at = jax.device_put(np.int32(step), self._target.step.sharding)
            state = dataclasses.replace(state, step=at, opt_state=opt_state)
        return Start(state, step, {})

    def _resumed(self, restored: Restored, state: TrainState) -> Start:
        """From a checkpoint, whose progress this takes up."""
        progress, self._resumed_at = restored.progress, restored.step
        self.early = EarlyStopping(self._trainer.evaluation.patience, progress.get("early_stopping"))
        self.owes_evaluation = progress.get("owes_evaluation", False)
        if self.owes_evaluation and restored.score is not None:  # an earlier start has made it
            self.early.update(restored.score)
            self.owes_evaluation = False
        state = states.with_new_window(state, self._target, self._trainer.anomalies)
        return Start(state, restored.step, progress)

    def evaluated(self, step: int, score: float) -> None:
        """Takes the loss of an evaluation; the checkpoint that owed it has it from now on."""
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
        """Hands a checkpoint to the asynchronous writer.

        Args:
          step, state, feed: what there is to save.
          metrics: of the step.
          score: the loss of its evaluation, if there was one.
          owes_evaluation: there should have been one.

        Raises:
          UserError: the step's loss or gradients (in its `metrics`) are not finite, and its update was not left out for
            that: such a state is not worth keeping. Or no update can be made any more.
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
        """Takes a step's metrics, still on the devices, and where the data stood before its batch."""
        self._bad_batches.add(step, position, metrics)

    def spike(self) -> int | None:
        """The step of a loss spike that the run is to go back for; all steps must have reached the host, as in a log.

        Raises:
          UserError: too many updates were left out one after the other.
        """
        self._bad_batches.read()
        return self._bad_batches.spike

    def roll_back(self, spike: int, state: TrainState) -> Start:
        """Goes back to a checkpoint from well before a spike, and leaves out the batches that led to it.

        Every process comes here, and to the same step, as all have read the same metrics.

        Args:
          spike: its step.
          state: the one at hand, which makes room for the other.

        Raises:
          UserError: there is no such checkpoint, or it went back there often enough.
        """
        trainer, anomalies, checkpoints = self._trainer, self._trainer.anomalies, self._checkpoints
        checkpoints.wait()
        step = hosts.gathered(
            checkpoints.step_before(spike, spike - anomalies.roll_back_steps) if jax.process_index() == 0 else None
        )[0]
        if step is None:
            raise UserError(
                f"loss spike at step {spike}, and no checkpoint from before it to go back to: set Checkpointing.every "
                f"({trainer.checkpointing.every}) below that, or Anomalies.on_spike = 'skip'"
            )
        self._roll_backs[step] += 1
        if self._roll_backs[step] > anomalies.most_roll_backs:
            raise UserError(
                f"loss spike at step {spike}, after going back to step {step} {anomalies.most_roll_backs} times: earlier "
                "checkpoints are kept; lower Schedule.learning_rate, or raise Anomalies.sigmas or skip_batches"
            )
        jax.tree.map(lambda x: x.delete(), state)  # the devices have no room for two
        restored = checkpoints.go_back(step)
        state = checkpoints.restore_state(restored, self._target)
        self._skip(spike, step, restored.data["batches"])
        return self._resumed(restored, state)

    def _skip(self, spike: int, step: int, first: int) -> None:
        """Leaves out the batches from `first` on that led to the spike."""
        batches = self._batches
        while batches.batches < first + self._trainer.anomalies.skip_batches:
            next(batches)
        self._bad_batches.rolled_back()
        if jax.process_index() == 0:
            logging.getLogger(__name__).warning(
                "loss spike at step %d: back to step %d, without the %d batches after it (see bad_batches.jsonl)",
                *(spike, step, batches.batches - first),
            )

    def counters(self) -> dict[str, float]:
        """What went wrong and was survived, where something did."""
        counts = {"checkpoints_corrupted": len(self._checkpoints.corrupted), "roll_backs": self._roll_backs.total()}
        return {name: float(count) for name, count in counts.items() if count}
