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
from capibara.training.base.callbacks import Callback
from capibara.training.base.group import Member, Score
from capibara.training.base.state import TrainState
from capibara.training.base.trainer import Trainer
from capibara.training.evaluation import Evaluator, Judge, Sampler, is_due
from capibara.training.feed import BatchFeed
from capibara.training.initialization import Load
from capibara.training.metrics import Meter
from capibara.training.profiling.profiler import Profiler
from capibara.training.recovery import Start
from capibara.training.setup import Setup, set_up
from capibara.training.stability.device_memory import out_of_memory_explained
from capibara.training.stability.watchdog import Watchdog


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
      step: steps done.
      reason: "finished", "early_stopping", "privacy_budget" (it allows no more steps) or "interrupted".
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
        dog = stack.enter_context(Watchdog(trainer.watch, trainer.log_every))
        setup, initial = set_up(
            trainer, status=callbacks.on_status, compiler_options=compiler_options, config=config, load=load
        )
        stack.enter_context(out_of_memory_explained(trainer.plan, "the run", program=setup.train_step))
        stop = stack.enter_context(StopRequest(agree_every=trainer.log_every))
        stack.enter_context(setup)
        stack.callback(dog.ending)
        spent = dict(setup.spent)
        reporter = _reporter(stop, dog, callbacks, spent)
        provider = setup.batch_provider(reporter)
        feed = BatchFeed(setup.batches, setup.batch_sharding, provider, trainer.batch_spec, setup.constants)
        evaluator = setup.evaluator(reporter, feed.provider, callbacks, sampler, judge)
        begins, reason = initial.step, None
        try:
            start = setup.begin(initial)
            del initial  # frees a frozen base that has been quantized
            feed.begin(start.state.params, start.step, start.progress.get("supply"))
            evaluator.prepare()
            begins = start.step
        except Interrupted:
            reason = "interrupted"
        callbacks.on_train_begin(setup.info(begins, peak_flops, config))
        callbacks.on_spent(begins, spent)
        if reason is not None:
            callbacks.on_train_end(begins, reason)
            return Outcome(begins, reason, stop.agreed(begins))
        decisions = stack.enter_context(Decisions())
        member = setup.member(reporter)
        profiler = stack.enter_context(Profiler(trainer.profile, trainer.model_dir, setup.last_step))
        profiler.announce(begins + 1, callbacks.on_status)
        loop = _Loop(setup, feed, evaluator, callbacks, stop, dog, decisions, setup.meter(), member, profiler)
        return loop.run(start)


def _reporter(stop: StopRequest, dog: Watchdog, callbacks: Callback, spent: dict[str, float]) -> Reporter:
    def check(done: int, every: int = 1) -> None:
        dog.advance()
        stop.check(done, every)

    return Reporter(check, callbacks.on_progress, callbacks.on_status, spent.__setitem__)


@dataclasses.dataclass(frozen=True)
class _Loop:
    """The training loop: `run`, and a method for each of its lines."""

    setup: Setup
    feed: BatchFeed
    evaluator: Evaluator
    callbacks: Callback
    stop: StopRequest
    dog: Watchdog
    decisions: Decisions
    meter: Meter
    member: Member
    profiler: Profiler

    def run(self, start: Start) -> Outcome:
        """Trains from a start to the end of the run."""
        trainer, recovery = self.setup.trainer, self.setup.recovery
        state, step, score = start.state, start.step, None
        metrics: Metrics = {}
        first_step = saved = step
        while True:
            try:
                state, step = self._meet(step, state, is_first=step == first_step)
            except (UserError, TryAgain):
                if step > saved:
                    self._save(step, state, metrics, None, owes_evaluation=False)
                raise

            signal_number = self.stop.agreed(step)
            done = step >= self.setup.last_step or signal_number is not None

            due = score is None and self.evaluator.due(
                step, first_step, recovery.owes_evaluation, step >= self.setup.last_step
            )
            if due and signal_number is None:  # after a signal only seconds may be left: save first
                score = self._evaluate(step, state)
                signal_number = None if done and score is not None else self.stop.agreed(step)
            done = done or recovery.early.stop or signal_number is not None

            if step > saved and (done or is_due(step, trainer.checkpointing.every)):
                self._save(step, state, metrics, score, owes_evaluation=due and score is None)
                saved = step
            if done:
                return self._ended(step, signal_number)

            self.decisions.passed(step)
            batch = self._next_batch(step + 1, state.params)
            if batch is None:
                continue

            step, score = step + 1, None
            with self.profiler.step(step):
                state, metrics = self.setup.step(step, state, batch, self.feed.position)
            self.meter.add(metrics)  # first: the time that it still needs counts
            self._profiled(step, metrics)
            self.member.watch(metrics)
            if step % trainer.log_every == 0 or step == self.setup.last_step:
                metrics_of_step = self.meter.read() | recovery.counters() | self.feed.metrics()
                self.callbacks.on_step(step, metrics_of_step | self.setup.spent_privacy(step))
                self._remark(step)
                if (spike := recovery.spike()) is not None:
                    start = self._roll_back(step, spike, state)
                    state, step = start.state, start.step
                    first_step = saved = step
            self.dog.beat(step)

    def _meet(self, step: int, state: TrainState, is_first: bool) -> tuple[TrainState, int]:
        """The state from which the run goes on after meeting its group, if it is in one and a round has ended."""
        group = self.setup.trainer.group
        if group is None or not (is_first or is_due(step, group.round_steps)):
            return state, step
        watched = self.dog.left_out("the round", "evaluation_s")
        with self.meter.paused("round"), watched, contextlib.suppress(Interrupted):
            adopted = self.member.meet(step, self.setup.model.trained(state.params), self._score(state))
            self.callbacks.on_progress("")
            if adopted is not None and adopted.step > self.setup.trainer.steps:
                raise UserError(
                    f"the group is at step {adopted.step}, beyond Trainer.steps ({self.setup.trainer.steps}): raise it"
                )
            if adopted is not None:
                self.callbacks.on_status(f"step {adopted.step}: {adopted.line}")
                return state.with_params(adopted.params, adopted.step), adopted.step
        return state, step

    def _score(self, state: TrainState) -> Score | None:
        """The loss of models on the validation split, by which a group votes."""
        if not self.setup.trainer.evaluation.every:
            return None
        frozen = self.setup.model.frozen(state.params)
        return lambda trained: self.evaluator.metrics(tree.joined(trained, frozen))["loss"]

    def _remark(self, step: int) -> None:
        """Passes on what the strategy says of the steps up to this one; raises UserError if the run must end."""
        if (strategy := self.setup.trainer.strategy) is None:
            return
        for number, metrics in enumerate(self.meter.steps, step - len(self.meter.steps) + 1):
            for line in strategy.remarks(number, metrics):
                self.callbacks.on_status(line)

    def _profiled(self, step: int, metrics: Metrics) -> None:
        """Ends the trace after its last step; writing it does not count as time of the steps."""
        if self.profiler.ends(step):
            with self.meter.paused("profile"), self.dog.allowing("writing the profile", "save_s"):
                if (found := self.profiler.end(step, metrics)) is not None:
                    self.callbacks.on_profile(step, *found)

    def _evaluate(self, step: int, state: TrainState) -> float | None:
        """Evaluates and returns the loss; None if the run must stop before that."""
        self.decisions.made(step, "evaluate")
        with self.meter.paused("evaluate"), self.dog.allowing("the evaluation", "evaluation_s"):
            score = self.evaluator.evaluate(step, state.eval_params)
        if score is not None:
            self.setup.recovery.evaluated(step, score)
        return score

    def _save(
        self,
        step: int,
        state: TrainState,
        metrics: Mapping[str, jax.Array],
        score: float | None,
        owes_evaluation: bool,
    ) -> None:
        self.decisions.made(step, "save")
        with self.meter.paused("save"), self.dog.allowing("the save", "save_s"):
            self.setup.recovery.save(step, state, self.feed, metrics, score, owes_evaluation)
            self.callbacks.on_checkpoint(step)

    def _next_batch(self, step: int, params: Params) -> Batch | None:
        """The batch of a step, or None if the run must stop before; a rollout does not count as time of the step."""
        if not self.feed.takes_long(step):
            with self.meter.waiting():
                return self.feed.next_batch(step, params)
        watched = self.dog.left_out("the rollout", "evaluation_s")
        with self.meter.paused("rollout"), watched, contextlib.suppress(Interrupted):
            batch = self.feed.next_batch(step, params)
            self.callbacks.on_progress("")
            return batch
        return None

    def _roll_back(self, step: int, spike: int, state: TrainState) -> Start:
        """Rolls back after a loss spike and calls the callbacks."""
        self.decisions.made(step, "roll back")
        with self.meter.paused("roll_back"), self.dog.allowing("rolling back", "save_s"):
            start = self.setup.recovery.roll_back(spike, state)
            self.feed.begin(start.state.params, start.step, start.progress.get("supply"))
            self.callbacks.on_roll_back(start.step)
        return start

    def _ended(self, step: int, signal_number: int | None) -> Outcome:
        """Waits for the last save, calls the callbacks, and returns the outcome."""
        self.decisions.made(step, "end")
        self.dog.ending()
        with self.meter.paused("save"):
            self.setup.checkpoints.wait()
        stopped = self.setup.recovery.early.stop
        spends = self.setup.last_step < self.setup.trainer.steps
        ends = "privacy_budget" if spends else "finished"
        reason = "interrupted" if signal_number else "early_stopping" if stopped else ends
        if self.setup.ledger is not None:
            self.callbacks.on_status(self.setup.ledger.line(step))
        self.callbacks.on_spent(step, self.meter.spent())
        self.callbacks.on_train_end(step, reason)
        return Outcome(step, reason, signal_number)
