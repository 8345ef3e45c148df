"""Set-up of a run: mesh, model, compiled step, data and checkpoints, with the slow parts side by side."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from capibara import sharding
from capibara.checkpoints import provenance
from capibara.checkpoints.manager import Checkpoints, Restored
from capibara.core import processes
from capibara.core.multihost import hosts
from capibara.core.types import Batch, Params, PyTree, UserError
from capibara.data.pipeline.loader import Loader, Position, merge_states, unigram_bits_per_byte
from capibara.models import api
from capibara.objectives.base import Objective, Supply, of_cross_entropy
from capibara.sharding.replicas import ReplicaCheck
from capibara.training import checks, origin, own_tokenizer
from capibara.training import state as states
from capibara.training.callbacks import RunInfo
from capibara.training.evaluation import EvalStep, make_eval_step, metrics_of, sums_of, with_tasks
from capibara.training.initialization import Load, Read, load_optimizer, load_params, reader
from capibara.training.loaders import each_task, open_loader, validation_batches, validation_loader
from capibara.training.metrics import EarlyStopping
from capibara.training.stability.bad_batches import BadBatches
from capibara.training.state import TrainState
from capibara.training.step import make_train_step
from capibara.training.trainer import Trainer

ASK_EVERY = 8  # batches of an evaluation, after which several hosts ask each other whether to stop


@dataclasses.dataclass
class Run:
    """What the loop works with. Made by `set_up`."""

    trainer: Trainer
    mesh: Mesh
    model: api.Model
    batch_sharding: NamedSharding
    abstract_state: TrainState
    init: Callable[..., TrainState]
    train_step: Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]
    eval_step: EvalStep
    batches: Loader
    checkpoints: Checkpoints
    restored: Restored | None
    restored_state: TrainState | None
    given: Params | None  # those that a new run begins from, of the model without adapters
    goes_on: tuple[int, PyTree] | None  # the step and the optimizer's state that a new run goes on from
    bad_batches: BadBatches
    spent: dict[str, float]  # seconds by what took them, before the first step
    owes_evaluation: bool = False  # the run was to stop before the evaluation of the step that it resumes from
    unused_data: dict[str, Any] | None = None  # the data's state before a batch that was given up
    roll_backs: Counter[int] = dataclasses.field(default_factory=Counter)  # by the step that it went back to
    before_batch: Position = None  # where the data stood before the batch at hand
    load: Load | None = None
    status: Callable[[str], None] = lambda text: None
    progress: Callable[[str], None] = lambda text: None
    check: Callable[..., None] = lambda done, every=1: None  # StopRequest.check
    supply: Supply | None = dataclasses.field(default=None, init=False)  # where a loss takes more than the loader's

    def __post_init__(self):
        if self.trainer.loss is not None:
            self.supply = self.trainer.loss.supply(self)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self.bad_batches.close()
            self.batches.close()
        finally:
            self.checkpoints.__exit__(*error)

    def start(self) -> tuple[TrainState, int, EarlyStopping]:
        """The newest checkpoint's state on the mesh, or a new one.

        Returns:
          state, its step, and the early-stopping state.
        """
        patience = self.trainer.evaluation.patience
        if self.restored is None:
            given, self.given = self.given, None
            state, step, progress = self.init(jax.random.key(self.trainer.seed), given=given), 0, {}
            if self.goes_on is not None:
                (step, opt_state), self.goes_on = self.goes_on, None
                at = jax.device_put(np.int32(step), self.abstract_state.step.sharding)
                state = dataclasses.replace(state, step=at, opt_state=opt_state)
        else:
            state, self.restored_state = self.restored_state, None
            state = states.with_new_window(state, self.abstract_state, self.trainer.anomalies)
            step, progress = self.restored.step, self.restored.progress
        early = EarlyStopping(patience, progress.get("early_stopping"))
        self.owes_evaluation = progress.get("owes_evaluation", False)
        if self.owes_evaluation and self.restored.score is not None:  # an earlier start has made it
            early.update(self.restored.score)
            self.owes_evaluation = False
        if self.supply is not None:
            self.supply.begin(state.params, step, progress.get("supply"))
        return state, step, early

    def evaluated(self, step: int, score: float, early: EarlyStopping) -> None:
        """Takes the loss of an evaluation; the checkpoint that owed it has it from now on."""
        early.update(score)
        if self.owes_evaluation and step == self.restored.step:
            self.checkpoints.score(step, score)
            self.owes_evaluation = False

    def save(
        self,
        step: int,
        state: TrainState,
        early: EarlyStopping,
        metrics: Mapping[str, jax.Array],
        score: float | None = None,
        owes_evaluation: bool = False,
    ) -> None:
        """Hands a checkpoint to the asynchronous writer.

        Args:
          step, state, early: what there is to save.
          metrics: of the step.
          score: the loss of its evaluation, if there was one.
          owes_evaluation: there should have been one.

        Raises:
          UserError: the step's loss or gradients (in its `metrics`) are not finite, and its update was not left out for
            that: such a state is not worth keeping. Or no update can be made any more.
        """
        self.bad_batches.read()
        if metrics.get("skipped", 0.0) and metrics.get("loss_scale", math.inf) <= self.trainer.loss_scaling.minimum:
            raise UserError(
                f"gradients overflow at step {step} even at the smallest loss scale, not saved: earlier checkpoints are "
                f"kept; float16 does not hold this model's values, set {type(self.trainer.model).__name__}.dtype = "
                "'bfloat16'"
            )
        for name in () if metrics.get("skipped", 0.0) else ("loss", "grad_norm"):
            if not math.isfinite(float(metrics[name])):
                raise UserError(
                    f"{name} is {float(metrics[name])} at step {step}, not saved: earlier checkpoints are kept; lower "
                    "Schedule.learning_rate or set Optimizer.clip_norm, and run the command again"
                )
        data = merge_states(hosts.gathered(self.unused_data or self.batches.get_state()))
        progress = {"early_stopping": early.state()} | ({"owes_evaluation": True} if owes_evaluation else {})
        if self.supply is not None:
            progress["supply"] = self.supply.state()
        self.checkpoints.save(step, state, data, progress, score)

    def step(self, step: int, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """Makes a step; no array crosses to or from the devices unseen.

        Raises:
          SilentCorruption: every `replica_check_every` steps: devices hold different bits of what they must hold alike.
        """
        self.checkpoints.check()
        with jax.transfer_guard("disallow"):
            state, metrics = self.train_step(state, batch)
        self.bad_batches.add(step, self.before_batch, metrics)
        every = self.trainer.replica_check_every
        if every and step % every == 0 and self._replicas.copies > 1:
            self._replicas.check(state.params)
        return state, metrics

    @functools.cached_property
    def _replicas(self) -> ReplicaCheck:
        return ReplicaCheck(self.abstract_state.params, self.mesh)

    def spike(self) -> int | None:
        """The step of a loss spike that the run is to go back for; all steps must have reached the host, as in a log.

        Raises:
          UserError: too many updates were left out one after the other.
        """
        self.bad_batches.read()
        return self.bad_batches.spike

    def roll_back(self, spike: int, state: TrainState) -> tuple[TrainState, int, EarlyStopping]:
        """Goes back to a checkpoint from well before a spike, and leaves out the batches that led to it.

        Every process comes here, and to the same step, as all have read the same metrics.

        Args:
          spike: its step.
          state: the one at hand, which makes room for the other.

        Returns:
          as of `start`.

        Raises:
          UserError: there is no such checkpoint, or it went back there often enough.
        """
        anomalies, batches = self.trainer.anomalies, self.batches
        self.checkpoints.wait()
        step = hosts.gathered(
            self.checkpoints.step_before(spike, spike - anomalies.roll_back_steps) if jax.process_index() == 0 else None
        )[0]
        if step is None:
            raise UserError(
                f"loss spike at step {spike}, and no checkpoint from before it to go back to: set Checkpointing.every "
                f"({self.trainer.checkpointing.every}) below that, or Anomalies.on_spike = 'skip'"
            )
        self.roll_backs[step] += 1
        if self.roll_backs[step] > anomalies.most_roll_backs:
            raise UserError(
                f"loss spike at step {spike}, after going back to step {step} {anomalies.most_roll_backs} times: earlier "
                "checkpoints are kept; lower Schedule.learning_rate, or raise Anomalies.sigmas or skip_batches"
            )
        jax.tree.map(lambda x: x.delete(), state)  # the devices have no room for two
        self.restored = self.checkpoints.go_back(step)
        self.restored_state = self.checkpoints.restore_state(self.restored, self.abstract_state)
        first = self.restored.data["batches"]
        while batches.batches < first + anomalies.skip_batches:
            next(batches)
        self.bad_batches.rolled_back()
        if jax.process_index() == 0:
            logging.getLogger(__name__).warning(
                "loss spike at step %d: back to step %d, without the %d batches after it (see bad_batches.jsonl)",
                *(spike, step, batches.batches - first),
            )
        return self.start()

    def counters(self) -> dict[str, float]:
        """What went wrong and was survived, where something did, and what there is to tell of batches; for the metrics."""
        counts = {"checkpoints_corrupted": len(self.checkpoints.corrupted), "roll_backs": self.roll_backs.total()}
        told = {} if self.supply is None else self.supply.metrics()
        return {name: float(count) for name, count in counts.items() if count} | told

    def batch_takes_long(self, step: int) -> bool:
        """Whether the devices make the batch of a step."""
        return self.supply is not None and self.supply.takes_long(step)

    def next_batch(self, step: int, params: Params) -> dict[str, jax.Array]:
        """The batch of a step, on its devices; `params`: of the state before it.

        Raises:
          Interrupted: the run is to stop, and its next start makes this batch.
        """
        if self.supply is not None:
            before, count = self.batches.position, self.batches.batches
            self.unused_data = self.batches.get_state() if self.batch_takes_long(step) else None
            batch = self.supply.next_batch(step, params)
            self.unused_data = None
            self.before_batch = before if self.batches.batches > count else self.before_batch
            return batch
        self.before_batch = self.batches.position
        return sharding.global_batch(self.batch_sharding, next(self.batches))

    def evaluate(self, params: Params) -> dict[str, float]:
        """Metrics over the validation split, with the unigram baseline where one is asked for; raises Interrupted.

        Of a SeqIO mixture those of each task, too, as "TASK/METRIC".
        """
        if self.supply is not None:
            return self.supply.evaluate(params)
        sums = {}
        for task, trainer in each_task(self.trainer).items():
            with contextlib.closing(validation_loader(trainer, self.mesh)) as loader:
                sums[task] = sums_of(self.eval_step, params, self.each_validation_batch(loader), self.batch_sharding)
        metrics = metrics_of([one for of_task in sums.values() for one in of_task])
        if len(sums) > 1:
            metrics = with_tasks(metrics, ((task, metrics_of(of_task)) for task, of_task in sums.items()))
        if self.trainer.evaluation.unigram_batches:
            metrics["unigram_bits_per_byte"] = self._unigram_bits_per_byte
        return metrics

    def each_validation_batch(self, loader: Loader) -> Iterator[Batch]:
        """Those of one evaluation, each of them told of; raises Interrupted if the run is to stop."""
        return self._each(loader, validation_batches(self.trainer), "evaluating")

    def _each(self, batches: Iterable[Batch], most: int | None, what: str) -> Iterator[Batch]:
        for done, batch in enumerate(itertools.islice(batches, most)):
            self.check(done, every=ASK_EVERY)
            self.progress(f"{what}: {done} batches" if most is None else f"{what}: {done} of {most} batches")
            yield batch

    @functools.cached_property
    def _unigram_bits_per_byte(self) -> float:
        evaluation, vocabulary = self.trainer.evaluation, self.trainer.dataset.get_vocabulary()
        seen = open_loader(self.trainer, self.mesh, "train", self.trainer.plan.batch_size)
        with contextlib.closing(seen), contextlib.closing(validation_loader(self.trainer, self.mesh)) as unseen:
            return unigram_bits_per_byte(
                self._each(seen, evaluation.unigram_batches, "counting tokens for the unigram model"),
                self._each(unseen, validation_batches(self.trainer), "evaluating the unigram model"),
                vocabulary.token_bytes(),
                self._of_all_hosts,
            )

    def _of_all_hosts(self, counts: np.ndarray) -> np.ndarray:
        """The sum over all shards of the batches; all processes call it."""
        shards = sharding.host_shards(self.mesh, self.trainer.plan.rules)
        found = hosts.gathered(counts.tolist())
        return np.sum([found[shards.index(shard)] for shard in set(shards)], axis=0)

    def info(self, start_step: int, peak_flops: float | None, config: str) -> RunInfo:
        """What callbacks are told."""
        dataset = self.trainer.dataset
        tokens = self.trainer.plan.batch_size * dataset.length
        return RunInfo(
            model_dir=self.trainer.model_dir,
            start_step=start_step,
            total_steps=self.trainer.steps,
            param_count=self.model.param_count,
            tokens_per_step=tokens,
            flops_per_step=self.model.flops_per_token(dataset.length, dataset.encoder_length) * tokens,
            device_count=self.mesh.size,
            device_kind=self.mesh.devices.flat[0].device_kind,
            peak_flops=peak_flops,
            config=config,
        )


def set_up(
    trainer: Trainer,
    devices: list[jax.Device] | None = None,
    status: Callable[[str], None] = lambda text: None,
    compiler_options: Mapping[str, str] | None = None,
    config: str = "",
    load: Load | None = None,
) -> Run:
    """Builds everything. While the step compiles, a thread reads the newest checkpoint and starts the data feed.

    Args:
      trainer: the run.
      devices: of the mesh; None: all.
      status: told of what takes time.
      compiler_options: XLA's, for the train step; None: its own choices.
      config: the operative configuration, for the manifests of checkpoints.
      load: looks at what is at `trainer.init_from`, where that is no run folder, and gives what reads it.
    """
    spent, set_up_s = {"start": processes.age_s()}, time.perf_counter()
    mesh = sharding.make_mesh(trainer.plan, devices)
    checks.check(trainer, mesh)
    model = api.build(trainer.model)
    state = describe_state(trainer, model, mesh)
    read = reader(trainer, load)  # now: compiling takes long
    with concurrent.futures.ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as undo:
        opened = pool.submit(_open_checkpoints_and_data, trainer, mesh, config, state.abstract, read)
        loaded = pool.submit(_given, opened, trainer, model, mesh, read, state.abstract)
        undo.callback(_close, opened)
        status(f"compiling the train step for {mesh.size} devices")
        begin_s = time.perf_counter()
        parts = compile_step(trainer, model, mesh, compiler_options, state)
        status(f"compiled in {(compiled_s := time.perf_counter()) - begin_s:.1f} s")
        checkpoints, restored, batches = opened.result()
        given, goes_on = loaded.result()
        if restored is not None:
            spent["restore"] = time.perf_counter() - compiled_s
        checks.check_vocabulary(trainer)
        eval_step = make_eval_step(model, trainer.plan, mesh, trainer.dataset.get_vocabulary().token_bytes())
        undo.pop_all()
    spent["set_up"] = time.perf_counter() - set_up_s - spent.get("restore", 0.0)
    return Run(
        trainer=trainer,
        mesh=mesh,
        model=model,
        eval_step=eval_step,
        batches=batches,
        bad_batches=BadBatches(trainer.model_dir, trainer.anomalies, trainer.float16_scaling, batches),
        checkpoints=checkpoints,
        restored=None if restored is None else restored[0],
        restored_state=None if restored is None else restored[1],
        given=given,
        goes_on=goes_on,
        spent=spent,
        load=load,
        status=status,
        **parts,
    )


def _given(
    opened: concurrent.futures.Future,
    trainer: Trainer,
    model: api.Model,
    mesh: Mesh,
    read: Read | None,
    target: TrainState,
) -> tuple[Params | None, tuple[int, PyTree] | None]:
    """The parameters that the run begins from, and what else it goes on from; None: new ones, or its checkpoint's."""
    _, restored, _ = opened.result()
    if trainer.init_from is None or restored is not None:
        return None, None
    goes_on = load_optimizer(trainer, target, read)
    return load_params(trainer, model, mesh, read), goes_on


def _close(opened: concurrent.futures.Future) -> None:
    """After a fault elsewhere: neither the data's threads nor the checkpoints' may outlive it."""
    if opened.exception() is None:
        checkpoints, _, batches = opened.result()
        batches.close()
        checkpoints.close()


@dataclasses.dataclass(frozen=True)
class StateSpec:
    """The train state before there is one: how it is made, where it lies."""

    tx: optax.GradientTransformation
    shardings: TrainState
    abstract: TrainState
    options: dict[str, Any]  # of states.init_state

    def init(self, model: api.Model) -> Callable[..., TrainState]:
        """key, given=None -> a new state."""
        make = functools.partial(states.init_state, model, self.tx, **self.options)
        in_blocks = model.config.lora is not None and model.config.lora.base_dtype.in_blocks
        donated = () if in_blocks else "given"  # what is rounded to blocks has no buffer to give
        return jax.jit(make, out_shardings=self.shardings, donate_argnames=donated)


def describe_state(trainer: Trainer, model: api.Model, mesh: Mesh) -> StateSpec:
    """From shapes alone; nothing is allocated."""
    options = {
        "ema": trainer.ema_decay is not None,
        "loss_scaling": trainer.float16_scaling,
        "anomalies": trainer.anomalies,
    }
    tx = trainer.optimizer.build(trainer.steps, model.trained(model.axes))
    shardings = states.state_shardings(model, tx, mesh, trainer.plan.rules, **options)
    return StateSpec(tx, shardings, states.abstract_state(model, tx, shardings, **options), options)


def _objective(trainer: Trainer, model: api.Model) -> Objective:
    if trainer.loss is not None:
        return trainer.loss.objective(model, trainer.dataset)
    return of_cross_entropy(model, trainer.z_loss, trainer.label_smoothing, trainer.loss_normalization)


def compile_step(
    trainer: Trainer,
    model: api.Model,
    mesh: Mesh,
    compiler_options: Mapping[str, str] | None = None,
    state: StateSpec | None = None,
) -> dict[str, Any]:
    """Compiles the train step ahead of time from shapes alone; nothing is allocated.

    Returns:
      Run's fields batch_sharding, abstract_state, init and train_step.
    """
    parts = lower_step(trainer, model, mesh, state)
    return parts | {"train_step": parts["train_step"].compile(compiler_options=dict(compiler_options or {}) or None)}


def lower_step(trainer: Trainer, model: api.Model, mesh: Mesh, state: StateSpec | None = None) -> dict[str, Any]:
    """`compile_step` without its last part: train_step is a jax.stages.Lowered, for the devices of any mesh."""
    checks.check_rows(trainer, mesh)
    plan, state = trainer.plan, state or describe_state(trainer, model, mesh)
    batch_sharding = sharding.batch_sharding(mesh, plan.rules)
    step = make_train_step(
        model,
        state.tx,
        trainer.optimizer.schedule.build(trainer.steps),
        plan,
        mesh,
        ema_decay=trainer.ema_decay,
        loss_scaling=state.options["loss_scaling"],
        anomalies=trainer.anomalies,
        objective=_objective(trainer, model),
    )
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(state.shardings, None))
    abstract = {
        key: jax.ShapeDtypeStruct(shape, dtype, sharding=batch_sharding)
        for key, (shape, dtype) in trainer.batch_spec.items()
    }
    return {
        "batch_sharding": batch_sharding,
        "abstract_state": state.abstract,
        "init": state.init(model),
        "train_step": jitted.lower(state.abstract, abstract),
    }


def _open_checkpoints_and_data(
    trainer: Trainer, mesh: Mesh, config: str, target: TrainState, read: Read | None
) -> tuple[Checkpoints, tuple[Restored, TrainState] | None, Loader]:
    """The data feed starts from the newest checkpoint's state, so the checkpoints are opened first."""
    about = provenance.about(config) if jax.process_index() == 0 else None
    with contextlib.ExitStack() as undo:
        checkpoints = undo.enter_context(Checkpoints(trainer.model_dir, trainer.saves, about=about))
        restored = checkpoints.restore(target)
        batches = open_loader(trainer, mesh, "train", trainer.plan.batch_size)
        if restored is not None:
            batches.set_state(restored[0].data)
        elif not trainer.dataset.is_seqio:  # of a task it shows at the first save: it is still being imported
            merge_states(hosts.gathered(batches.get_state()))  # hosts that read different data are told now
        if trainer.evaluation.every:
            validation_loader(trainer, mesh).close()  # a mistake in these files shows now, not at the first evaluation
        if jax.process_index() == 0:
            own_tokenizer.keep(trainer.dataset, trainer.model_dir)
            origin.keep(trainer, read)
        batches.start()
        undo.pop_all()
    return checkpoints, restored, batches
