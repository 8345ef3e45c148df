"""The training loop: set up, restore, evaluate, save, next batch, step, log."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping

import jax

from capibara.core import tree
from capibara.core.interrupt import Interrupted, StopRequest
from capibara.core.types import Batch, Params, TryAgain, UserError
from capibara.multihost.decisions import Decisions
from capibara.objectives.base import Metrics
from capibara.objectives.batches import Reporter
from capibara.storage.full_disk import disk_full_explained
from capibara.training import assembly
from capibara.training.base.adopted import Score
from capibara.training.base.callbacks import Callback
from capibara.training.base.state import TrainState
from capibara.training.evaluation import Judge, Sampler, is_due
from capibara.training.feed import BatchFeed
from capibara.training.initialization import Load
from capibara.training.metrics import Meter
from capibara.training.observers import Observers
from capibara.training.profiling.profiler import Profiler
from capibara.training.recovery import Start
from capibara.training.setup import Setup, set_up
from capibara.training.stability.device_memory import out_of_memory_explained
from capibara.training.stability.watchdog import Watchdog
from capibara.training.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
      step: steps done.
      reason: "finished", "early_stopping", "interrupted", or why the training method allows no more steps.
      signal_number: of the signal that interrupted it.
    """

    step: int
    reason: str
    signal_number: int | None = None


def train(
    trainer: Trainer,
    callbacks: Callback,
    *,
    sampler: Sampler | None = None,
    judge: Judge | None = None,
    peak_flops: float | None = None,
    compiler_options: Mapping[str, str] | None = None,
    config: str = "",
    load: Load | None = None,
) -> Outcome:
    """Trains until `trainer.steps`, early stopping or a signal; call it again with the same folder to resume.

    Args:
      trainer: the run.
      callbacks: called on process 0.
      sampler: parameters -> (prompt, text) pairs, called after each evaluation.
      judge: computes metrics of tasks, which are added to those of each evaluation.
      peak_flops: of one device, for the MFU.
      compiler_options, config, load: as for `set_up`.
    """
    callbacks = callbacks if jax.process_index() == 0 else Callback()
    with contextlib.ExitStack() as stack:
        stack.enter_context(disk_full_explained(trainer.model_dir))
        stack.callback(callbacks.close)
        stack.enter_context(out_of_memory_explained(trainer.plan, "the run"))
        watchdog = stack.enter_context(Watchdog(trainer.watch, trainer.log_every))
        run, initial = set_up(
            trainer, status=callbacks.on_status, compiler_options=compiler_options, config=config, load=load
        )
        stack.enter_context(out_of_memory_explained(trainer.plan, "the run", program=run.train_step))
        stop = stack.enter_context(StopRequest(agree_every=trainer.log_every))
        stack.enter_context(run)
        stack.callback(watchdog.ending)
        spent, begins, reason = dict(run.spent), initial.step, None
        reporter = _reporter(stop, watchdog, callbacks, spent)
        provider, constants = assembly.batch_provider(run, reporter), run.hooks.constants(run.mesh)
        data = stack.enter_context(BatchFeed(run.batches, run.batch_sharding, provider, trainer.batch_spec, constants))
        evaluator = assembly.evaluator(run, reporter, data.provider, callbacks, sampler, judge)
        try:
            start = assembly.begin(run, initial)
            del initial  # frees a frozen base that has been quantized
            data.begin(start.state.params, start.step, start.progress.get("supply"))
            evaluator.prepare()
            begins = start.step
        except Interrupted:
            reason = "interrupted"
        callbacks.on_train_begin(assembly.info(run, begins, peak_flops, config))
        callbacks.on_spent(begins, spent)
        if reason is not None:
            callbacks.on_train_end(begins, reason)
            return Outcome(begins, reason, stop.agreed(begins))
        decisions = stack.enter_context(Decisions())
        run.hooks.begin(run.model.trained(run.spec.abstract.params), reporter)
        profiler = stack.enter_context(Profiler(trainer.profile, trainer.model_dir, run.hooks.last_step))
        profiler.announce(begins + 1, callbacks.on_status)
        meter = Meter(trainer.plan.batch_size * trainer.dataset.length, trainer.training_loss.means)
        observers = Observers(callbacks, evaluator, stop, watchdog, decisions, meter, profiler)
        return _Loop(run, data, observers).train(start)


def _reporter(stop: StopRequest, watchdog: Watchdog, callbacks: Callback, spent: dict[str, float]) -> Reporter:
    def check(done: int, every: int = 1) -> None:
        watchdog.advance()
        stop.check(done, every)

    return Reporter(check, callbacks.on_progress, callbacks.on_status, spent.__setitem__)


@dataclasses.dataclass(frozen=True)
class _Loop:
    """The training loop: `train`, and a method for each of its lines.

    Attributes:
      run: the run, set up.
      data: its batches.
      observers: look on.
    """

    run: Setup
    data: BatchFeed
    observers: Observers

    def train(self, start: Start) -> Outcome:
        """Trains from a start to the end of the run."""
        trainer, recovery, hooks = self.run.trainer, self.run.recovery, self.run.hooks
        stop, evaluator, meter = self.observers.stop, self.observers.evaluator, self.observers.meter
        state, step, score = start.state, start.step, None
        metrics: Metrics = {}
        first_step = saved = step
        while True:
            try:
                state, step = self._adopt(step, state, is_first=step == first_step)
            except (UserError, TryAgain):
                if step > saved:
                    self._save(step, state, metrics, None, owes_evaluation=False)
                raise

            signal_number, is_last = stop.agreed(step), step >= hooks.last_step
            done = is_last or signal_number is not None

            due = score is None and evaluator.due(step, first_step, recovery.owes_evaluation, is_last)
            if due and signal_number is None:  # after a signal only seconds may be left: save first
                score = self._evaluate(step, state)
                signal_number = None if done and score is not None else stop.agreed(step)
            done = done or recovery.early.stop or signal_number is not None

            if step > saved and (done or is_due(step, trainer.checkpointing.every)):
                self._save(step, state, metrics, score, owes_evaluation=due and score is None)
                saved = step
            if done:
                return self._ended(step, signal_number)

            self.observers.decisions.passed(step)
            batch = self._next_batch(step + 1, state.params)
            if batch is None:
                continue

            step, score = step + 1, None
            with self.observers.profiler.step(step):
                state, metrics = self.run.step(step, state, batch, self.data.position)
            meter.add(metrics)  # first: the time that it still needs counts
            self.observers.profile(step, metrics)
            hooks.watch(metrics)
            if step % trainer.log_every == 0 or step == hooks.last_step:
                self._log(step)
                if (spike := recovery.spike()) is not None:
                    start = self._roll_back(step, spike, state)
                    state, step = start.state, start.step
                    first_step = saved = step
            self.observers.watchdog.beat(step)

    def _adopt(self, step: int, state: TrainState, is_first: bool) -> tuple[TrainState, int]:
        """The state from which the run goes on: with another model, if the training method has one."""
        if not self.run.hooks.is_due(step, is_first):
            return state, step
        with self.observers.between_steps("round", "the round", "evaluation_s"):
            adopted = self.run.hooks.adopt(step, self.run.model.trained(state.params), self._score(state))
            if adopted is not None:
                self.observers.callbacks.on_status(f"step {adopted.step}: {adopted.line}")
                return state.with_params(adopted.params, adopted.step), adopted.step
        return state, step

    def _score(self, state: TrainState) -> Score | None:
        """The loss of models on the validation split; None: the run has no evaluations."""
        if not self.run.trainer.evaluation.every:
            return None
        frozen = self.run.model.frozen(state.params)
        return lambda trained: self.observers.evaluator.metrics(tree.joined(trained, frozen))["loss"]

    def _evaluate(self, step: int, state: TrainState) -> float | None:
        """Evaluates and returns the loss; None if the run must stop before that."""
        self.observers.decisions.record(step, "evaluate")
        with self.observers.long_work("evaluate", "the evaluation", "evaluation_s"):
            score = self.observers.evaluator.evaluate(step, state.eval_params)
        if score is not None:
            self.run.recovery.evaluated(step, score)
        return score

    def _save(
        self,
        step: int,
        state: TrainState,
        metrics: Mapping[str, jax.Array],
        score: float | None,
        owes_evaluation: bool,
    ) -> None:
        self.observers.decisions.record(step, "save")
        with self.observers.long_work("save", "the save", "save_s"):
            self.run.recovery.save(step, state, self.data, metrics, score, owes_evaluation)
            self.observers.callbacks.on_checkpoint(step)

    def _next_batch(self, step: int, params: Params) -> Batch | None:
        """The batch of a step, or None if the run must stop before; a rollout does not count as time of the step."""
        if not self.data.takes_long(step):
            with self.observers.meter.waiting():
                return self.data.next_batch(step, params)
        with self.observers.between_steps("rollout", "the rollout", "evaluation_s"):
            batch = self.data.next_batch(step, params)
            self.observers.callbacks.on_progress("")
            return batch
        return None

    def _log(self, step: int) -> None:
        """Logs the steps since the last log; raises UserError if the training method says that the run must end."""
        meter, callbacks, hooks = self.observers.meter, self.observers.callbacks, self.run.hooks
        metrics = meter.read() | self.run.recovery.counters() | self.data.metrics()
        callbacks.on_step(step, metrics | hooks.metrics(step))
        for number, of_step in enumerate(meter.steps, step - len(meter.steps) + 1):
            for line in hooks.remarks(number, of_step):
                callbacks.on_status(line)

    def _roll_back(self, step: int, spike: int, state: TrainState) -> Start:
        """Rolls back after a loss spike and calls the callbacks."""
        self.observers.decisions.record(step, "roll back")
        with self.observers.long_work("roll_back", "rolling back", "save_s"):
            self.data.close()
            start = self.run.recovery.roll_back(spike, state)
            self.data.begin(start.state.params, start.step, start.progress.get("supply"))
            self.observers.callbacks.on_roll_back(start.step)
        return start

    def _ended(self, step: int, signal_number: int | None) -> Outcome:
        """Waits for the last save, calls the callbacks, and returns the outcome."""
        meter, callbacks, hooks = self.observers.meter, self.observers.callbacks, self.run.hooks
        self.observers.decisions.record(step, "end")
        self.observers.watchdog.ending()
        with meter.paused("save"):
            self.run.checkpoints.wait()
        stopped = self.run.recovery.early.stop
        reason = "interrupted" if signal_number else "early_stopping" if stopped else hooks.reason
        if (line := hooks.closing(step)) is not None:
            callbacks.on_status(line)
        if signal_number is None and (epochs := self.data.epochs()) is not None:
            callbacks.on_status(f"step {step}: {epochs:.3g} epochs of the data were read")
        callbacks.on_spent(step, meter.spent())
        callbacks.on_train_end(step, reason)
        return Outcome(step, reason, signal_number)
