"""The training loop: set up, restore, evaluate, save, next batch, step, log."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping

import jax

from capibara.core.interrupt import Interrupted, StopRequest
from capibara.core.multihost.decisions import Decisions
from capibara.core.types import Batch, Params
from capibara.storage.full_disk import disk_full_explained
from capibara.training.callbacks import Callback
from capibara.training.evaluation import Judge, with_tasks
from capibara.training.initialization import Load
from capibara.training.metrics import EarlyStopping, Meter
from capibara.training.setup import ASK_EVERY, Run, set_up
from capibara.training.stability.watchdog import Watchdog
from capibara.training.state import TrainState
from capibara.training.trainer import Trainer

Sampler = Callable[[Params], Iterable[tuple[str, str]]]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
      step: steps done.
      reason: "finished", "early_stopping" or "interrupted".
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
    """Trains until `trainer.steps`, early stopping or a signal; run again with the same folder to resume.

    Args:
      trainer: the run.
      callbacks: told of everything that happens, on process 0.
      sampler: parameters -> (prompt, text) pairs, called after each evaluation.
      judge: gives metrics of tasks, which join those of each evaluation.
      peak_flops: of one device, for the MFU.
      compiler_options, config, load: as for `set_up`.
    """
    callbacks = callbacks if jax.process_index() == 0 else Callback()
    with disk_full_explained(trainer.model_dir), contextlib.ExitStack() as stack:
        dog = stack.enter_context(Watchdog(trainer.watch, trainer.log_every))
        run = set_up(trainer, status=callbacks.on_status, compiler_options=compiler_options, config=config, load=load)
        stop = stack.enter_context(StopRequest(agree_every=trainer.log_every))
        stack.enter_context(run)
        stack.callback(dog.ending)

        def check(done: int, every: int = 1) -> None:
            dog.advance()
            stop.check(done, every)

        run.check, run.progress = check, callbacks.on_progress
        try:
            started = run.start()
        except Interrupted:
            return _not_begun(run, callbacks, stop, peak_flops, config)
        if judge is not None:
            judge.prepare()
        callbacks.on_train_begin(run.info(started[1], peak_flops, config))
        callbacks.on_spent(started[1], run.spent)
        decisions = stack.enter_context(Decisions())
        return _stepped(run, started, stop, dog, decisions, callbacks, sampler, judge)


def _stepped(
    run: Run,
    started: tuple[TrainState, int, EarlyStopping],
    stop: StopRequest,
    dog: Watchdog,
    decisions: Decisions,
    callbacks: Callback,
    sampler: Sampler | None,
    judge: Judge | None,
) -> Outcome:
    """The loop, from what `Run.start` gave."""
    trainer, (state, first_step, early) = run.trainer, started
    step, saved, score, metrics = first_step, first_step, None, {}
    meter = Meter(trainer.plan.batch_size * trainer.dataset.length, trainer.loss.means if trainer.loss else ())
    while True:
        signal_number = stop.agreed(step)
        done = step >= trainer.steps or signal_number is not None
        due = score is None and _evaluation_due(run, step, first_step)
        if due and signal_number is None:  # else there may be seconds: then the checkpoint comes first
            decisions.made(step, "evaluate")
            with meter.paused("evaluate"), dog.allowing("the evaluation", "evaluation_s"):
                score = _evaluate(run, step, state.eval_params, callbacks, sampler, judge)
            if score is not None:
                run.evaluated(step, score, early)
            signal_number = None if done and score is not None else stop.agreed(step)
        done = done or early.stop or signal_number is not None
        if step > saved and (done or _due(step, trainer.checkpointing.every)):
            decisions.made(step, "save")
            with meter.paused("save"), dog.allowing("the save", "save_s"):
                run.save(step, state, early, metrics, score, owes_evaluation=due and score is None)
                callbacks.on_checkpoint(step)
            saved = step
        if done:
            decisions.made(step, "end")
            dog.ending()
            return _ended(run, callbacks, meter, step, early.stop, signal_number)
        decisions.passed(step)
        batch = _next_batch(run, step + 1, state.params, meter, dog)
        if batch is None:
            continue
        step, score = step + 1, None
        state, metrics = run.step(step, state, batch)
        meter.add(metrics)
        if step % trainer.log_every == 0 or step == trainer.steps:
            callbacks.on_step(step, meter.read() | run.counters())
            if (spike := run.spike()) is not None:
                decisions.made(step, "go back")
                with meter.paused("roll_back"), dog.allowing("going back", "save_s"):
                    state, first_step, early = _gone_back(run, spike, state, callbacks)
                step = saved = first_step
        dog.beat(step)


def _not_begun(run: Run, callbacks: Callback, stop: StopRequest, peak_flops: float | None, config: str) -> Outcome:
    """Tells the callbacks of a run that is to stop before its first step, and returns the outcome."""
    step = 0 if run.restored is None else run.restored.step
    callbacks.on_train_begin(run.info(step, peak_flops, config))
    callbacks.on_spent(step, run.spent)
    callbacks.on_train_end(step, "interrupted")
    return Outcome(step, "interrupted", stop.agreed(step))


def _next_batch(run: Run, step: int, params: Params, meter: Meter, dog: Watchdog) -> Batch | None:
    """The batch of a step, None if the run is to stop before it is made; a rollout is no part of the step's time."""
    if not run.batch_takes_long(step):
        with meter.waiting():
            return run.next_batch(step, params)
    watched = dog.left_out("the rollout", "evaluation_s")
    with meter.paused("rollout"), watched, contextlib.suppress(Interrupted):
        batch = run.next_batch(step, params)
        run.progress("")
        return batch


def _evaluation_due(run: Run, step: int, first_step: int) -> bool:
    """Whether parameters are to be evaluated: new ones, and those that were given, for what becomes of them."""
    trainer = run.trainer
    given = step == 0 and trainer.init_from is not None
    return (step > first_step or given or run.owes_evaluation) and _due(
        step, trainer.evaluation.every, step >= trainer.steps
    )


def _ended(run: Run, callbacks: Callback, meter: Meter, step: int, stopped: bool, signal_number: int | None) -> Outcome:
    """Waits for the last save, tells the callbacks, and returns the outcome."""
    with meter.paused("save"):
        run.checkpoints.wait()
    reason = "interrupted" if signal_number else "early_stopping" if stopped else "finished"
    outcome = Outcome(step, reason, signal_number)
    callbacks.on_spent(outcome.step, meter.spent())
    callbacks.on_train_end(outcome.step, outcome.reason)
    return outcome


def _gone_back(run: Run, spike: int, state: TrainState, callbacks: Callback) -> tuple[TrainState, int, EarlyStopping]:
    """Goes back from a loss spike, tells the callbacks, and returns what `Run.start` does."""
    state, step, early = run.roll_back(spike, state)
    callbacks.on_roll_back(step)
    return state, step, early


def _evaluate(
    run: Run, step: int, params: Params, callbacks: Callback, sampler: Sampler | None, judge: Judge | None
) -> float | None:
    """Evaluates, judges, samples, tells the callbacks, and returns the loss; None if the run is to stop before there is one."""
    loss = None
    with contextlib.suppress(Interrupted):
        metrics = run.evaluate(params)
        if judge is not None:
            metrics = with_tasks(metrics, judge(params, _telling(run)))
        loss = metrics["loss"]
        callbacks.on_evaluate(step, metrics)
        samples = iter(sampler(params)) if sampler else iter(())
        for done in itertools.count():
            run.check(done)
            run.progress(f"sampling: {done} texts")
            if (sample := next(samples, None)) is None:
                break
            callbacks.on_sample(step, *sample)
    run.progress("")
    if loss is None:
        callbacks.on_status(f"step {step}: the evaluation is left, and made when the run resumes")
    return loss


def _telling(run: Run) -> Callable[[str], None]:
    """For a judge: shows what it is at; raises Interrupted where the run is to stop."""
    done = itertools.count()

    def tell(text: str) -> None:
        run.check(next(done), every=ASK_EVERY)
        run.progress(text)

    return tell


def _due(step: int, every: int, last: bool = False) -> bool:
    return every > 0 and (step % every == 0 or last)
