"""Set-up of a run: mesh, model, compiled step, data and checkpoints; the slow parts run in parallel."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from capibara import optim, sharding
from capibara.checkpoints import manifest
from capibara.checkpoints.manager import CheckpointReader, Checkpoints
from capibara.core import processes, tree, user_modules
from capibara.core.fields import did_you_mean, returned
from capibara.core.types import Batch, Params, PyTree, UserError
from capibara.data.dataset import Dataset
from capibara.data.pipeline.loader import Loader, Position, merge_states
from capibara.models import api
from capibara.multihost import hosts
from capibara.objectives.base import Metrics, Objective, of_cross_entropy
from capibara.objectives.batches import BatchProvider, Reporter, RunParts
from capibara.sharding.replicas import ReplicaCheck
from capibara.training import checks, evaluation
from capibara.training.base import state as states
from capibara.training.base.callbacks import Callback, RunInfo
from capibara.training.base.group import Alone, Member
from capibara.training.base.state import Apart, TrainState
from capibara.training.base.trainer import Trainer
from capibara.training.evaluation import EvalStep, Evaluator, Judge, Sampler, is_due, make_eval_step
from capibara.training.feed import open_loader
from capibara.training.initialization import Load, Read, initial_params, load_optimizer, load_params, reader, starts
from capibara.training.metrics import Meter
from capibara.training.privacy.gradient import NOISE_KEY, key_sharding, make_private_gradient, noise_key
from capibara.training.privacy.ledger import Ledger
from capibara.training.recovery import Initial, Recovery, Start
from capibara.training.run_folder import origin, own_tokenizer
from capibara.training.stability.anomalies import Anomalies
from capibara.training.stability.device_memory import out_of_memory_explained
from capibara.training.stability.loss_scale import LossScaling
from capibara.training.step import make_node_loss, make_nodes_step, make_train_step

_RESTORE_S = 2.0  # to wait for a checkpoint before the compile begins beside it


@dataclasses.dataclass(frozen=True)
class Setup:
    """A run that is ready to train; leaving its `with` closes data and checkpoints. Made by `set_up`.

    Attributes:
      trainer: the run.
      mesh, model: of the run.
      spec: the specification of the train state.
      batch_sharding: of every array of a batch.
      train_step: (state, batch) -> (state, metrics), compiled; the state is donated.
      step_temp_bytes: temporary memory of the train step on a device, beside its arguments.
      eval_step: from `make_eval_step`.
      batches: the training split.
      checkpoints: of the run folder.
      recovery: saves checkpoints, and rolls back.
      load: checks a foreign model at `trainer.init_from`.
      spent: seconds by cause.
      ledger: of the run's privacy; None: it has none.
      data: the counts of each split, as JSON.
    """

    trainer: Trainer
    mesh: Mesh
    model: api.Model
    spec: StateSpec
    batch_sharding: NamedSharding
    train_step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    step_temp_bytes: int
    eval_step: EvalStep
    batches: Loader
    checkpoints: Checkpoints
    recovery: Recovery
    load: Load | None
    spent: Mapping[str, float]
    ledger: Ledger | None
    data: Mapping[str, Mapping[str, Any]]

    def __enter__(self) -> Setup:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.recovery.close()
            self.batches.close()
        finally:
            self.checkpoints.__exit__(kind, error, trace)

    def begin(self, initial: Initial) -> Start:
        """Makes the initial state of the run, on the mesh."""
        init = self.spec.init(self.model)

        def new(key: jax.Array, pretrained: Params | None) -> TrainState:
            return self.spec.with_starts(init(key, pretrained=pretrained), initial.starts)

        return self.recovery.begin(initial, new)

    @property
    def last_step(self) -> int:
        """The step at which the run ends, unless it is stopped earlier."""
        return self.trainer.steps if self.ledger is None else min(self.trainer.steps, self.ledger.last_step)

    def batch_provider(self, reporter: Reporter) -> BatchProvider | None:
        """The batch provider of the loss; None: batches come from the data alone."""
        loss = self.trainer.loss
        if loss is None:
            return None
        return returned(
            loss.batch_provider(self._parts(reporter)), BatchProvider, f"{type(loss).__name__}.batch_provider"
        )

    @functools.cached_property
    def constants(self) -> dict[str, jax.Array]:
        """Arrays that every batch of this start has besides those of the data."""
        return {} if self.ledger is None else {NOISE_KEY: noise_key(self.mesh)}

    def spent_privacy(self, step: int) -> dict[str, float]:
        """The epsilon so far, if the run has privacy, as a metric."""
        return {} if self.ledger is None else self.ledger.metrics(step)

    def step(self, step: int, state: TrainState, batch: Batch, position: Position) -> tuple[TrainState, Metrics]:
        """Runs a train step, with implicit transfers to and from the devices forbidden.

        Args:
          step: its number, from 1.
          state, batch: on the devices; the state is donated.
          position: the data's position before the batch.

        Raises:
          SilentCorruption: the check every `replica_check_every` steps found replicas that differ.
        """
        self.checkpoints.check()
        with jax.transfer_guard("disallow"):
            state, metrics = self.train_step(state, batch)
        self.recovery.watch(step, position, metrics)
        if is_due(step, self.trainer.replica_check_every) and self._replicas.copies > 1:
            self._replicas.check(state.params)
        return state, metrics

    @functools.cached_property
    def _replicas(self) -> ReplicaCheck:
        return ReplicaCheck(self.spec.abstract.params, self.mesh)

    def evaluator(
        self,
        reporter: Reporter,
        provider: BatchProvider | None = None,
        callbacks: Callback = Callback(),
        sampler: Sampler | None = None,
        judge: Judge | None = None,
    ) -> Evaluator:
        """The evaluator of this run, for the loop."""
        return Evaluator(
            self.trainer,
            self.mesh,
            self.eval_step,
            self.batch_sharding,
            reporter,
            callbacks,
            provider,
            sampler,
            judge,
            self.model.layer_metrics,
        )

    def meter(self) -> Meter:
        """A meter for the steps from now on."""
        trainer = self.trainer
        means = trainer.loss.means if trainer.loss else ()
        return Meter(trainer.plan.batch_size * trainer.dataset.length, means)

    def member(self, reporter: Reporter) -> Member:
        """This run's part in its group, for the loop."""
        group = self.trainer.group
        return Alone() if group is None else group.join(self.model.trained(self.spec.abstract.params), reporter)

    def _parts(self, reporter: Reporter) -> RunParts:
        trainer, mesh = self.trainer, self.mesh

        def open_once(dataset: Dataset, split: str, rows: int) -> Loader:
            return open_loader(dataclasses.replace(trainer, dataset=dataset), mesh, split, rows, epochs=1)

        return RunParts(
            model_dir=trainer.model_dir,
            seed=trainer.seed,
            init_from=trainer.init_from,
            model=self.model,
            dataset=trainer.dataset,
            plan=trainer.plan,
            mesh=mesh,
            batch_sharding=self.batch_sharding,
            batches=self.batches,
            step_temp_bytes=self.step_temp_bytes,
            evaluates=bool(trainer.evaluation.every),
            open_once=open_once,
            validation=functools.partial(evaluation.validation, trainer, mesh, reporter),
            initial_params=functools.partial(
                initial_params, trainer, self.model, mesh, self.load, self.spec.init(self.model)
            ),
            reporter=reporter,
        )

    def info(self, start_step: int, peak_flops: float | None, config: str) -> RunInfo:
        """The facts about the run for callbacks."""
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
            arrays={
                name: (leaf.shape, str(leaf.dtype))
                for name, leaf in zip(tree.path_names(self.spec.abstract), jax.tree.leaves(self.spec.abstract))
            },
            data=self.data,
        )


def set_up(
    trainer: Trainer,
    devices: list[jax.Device] | None = None,
    status: Callable[[str], None] = lambda text: None,
    compiler_options: Mapping[str, str] | None = None,
    config: str = "",
    load: Load | None = None,
) -> tuple[Setup, Initial]:
    """Sets up a run. While the step compiles, a thread reads the newest checkpoint and starts the data feed.

    Args:
      trainer, devices: the run, and the devices of its mesh; None: all.
      status: called with lines on what takes time.
      compiler_options: XLA's, for the train step; None: defaults.
      config: the operative configuration, for the manifests of checkpoints.
      load: checks a foreign model at `trainer.init_from` and returns its reader.

    Returns:
      The set-up for the loop, and the checkpoint or pretrained weights from which the run starts.
    """
    spent, set_up_s = {"start": processes.age_s()}, time.perf_counter()
    mesh, model, spec, ledger, read, own, batches, given = _check(trainer, devices, status, load)
    with contextlib.ExitStack() as undo:
        undo.callback(batches.close)
        checkpoints = undo.enter_context(contextlib.closing(_open_folder(trainer, config, read)))
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            loading = pool.submit(_initial, checkpoints, trainer, model, mesh, read, spec.abstract)
            # A small state that is corrupt is told before the compile.
            for loaded in concurrent.futures.wait([loading], _RESTORE_S if checkpoints.steps() else 0.0).done:
                loaded.result()
            train_step = _compiled(trainer, model, mesh, compiler_options, spec, status)
            compiled_s = time.perf_counter()
            initial = dataclasses.replace(loading.result(), starts=own)
        if (restored := initial.checkpoint) is not None:
            spent["restore"] = time.perf_counter() - compiled_s
            if ledger is not None:
                ledger.check_resumed(restored[0].step)
            if given.resumes is None or given.resumes.step != restored[0].step:  # the newest one was corrupt
                batches.set_state(restored[0].data)
                batches.start()
        checks.check_vocabulary(trainer)
        eval_step = make_eval_step(model, trainer.plan, mesh, trainer.dataset.get_vocabulary().token_bytes())
        undo.pop_all()
    spent["set_up"] = time.perf_counter() - set_up_s - spent.get("restore", 0.0)
    setup = Setup(
        *(trainer, mesh, model, spec),
        batch_sharding=sharding.batch_sharding(mesh, trainer.plan.rules),
        train_step=train_step,
        step_temp_bytes=_temp_bytes(train_step),
        eval_step=eval_step,
        batches=batches,
        checkpoints=checkpoints,
        recovery=Recovery(trainer, checkpoints, batches, spec.abstract),
        load=load,
        spent=spent,
        ledger=ledger,
        data={split: counts.as_json() for split, counts in given.counts.items()},
    )
    return setup, initial


class _Checked(NamedTuple):
    """A run whose options, folder and data are in order; close its `batches`."""

    mesh: Mesh
    model: api.Model
    spec: StateSpec
    ledger: Ledger | None
    read: Read | None
    starts: tuple[Callable[[], Params], ...]
    batches: Loader
    given: checks.Given


def _check(
    trainer: Trainer,
    devices: list[jax.Device] | None,
    status: Callable[[str], None],
    load: Load | None,
    *,
    whole: bool = False,
) -> _Checked:
    """Finds the user's mistakes before anything is compiled or written; arguments as for `set_up` and `checks.given`."""
    mesh = sharding.make_mesh(trainer.plan, devices)
    checks.options(trainer, mesh)
    model = api.build(trainer.model)
    spec, ledger = describe_state(trainer, model, mesh), _ledger(trainer, model, status)
    trainer.optimizer.schedule.learning_rates(trainer.steps)
    _objective(trainer, model)
    read, own = reader(trainer, load), starts(trainer, model, mesh, load)
    given = checks.given(trainer, model, mesh, spec.abstract, read, ledger, whole=whole)
    for note in given.notes if whole else (*given.notes, *checks.data_lines(given.counts)):
        status(note)
    if given.resumes is None and not trainer.dataset.is_seqio:  # SeqIO is still being imported
        merge_states(hosts.gathered(given.batches.get_state()))  # raises if hosts read different data
    return _Checked(mesh, model, spec, ledger, read, own, given.batches, given)


def check(trainer: Trainer, load: Load | None = None) -> list[str]:
    """Makes the checks of `set_up` alone, those that take long included; nothing is compiled or written.

    Returns:
      What was checked, in lines for a user.

    Raises:
      UserError: the run cannot begin or resume.
    """
    lines: list[str] = []
    checked = _check(trainer, None, lines.append, load, whole=True)
    checked.batches.close()
    checks.check_vocabulary(trainer)
    with CheckpointReader(trainer.model_dir, trainer.saves) as checkpoints:
        checkpoints.verified_step()
    return [*checked.given.lines, *lines]


def _compiled(
    trainer: Trainer,
    model: api.Model,
    mesh: Mesh,
    compiler_options: Mapping[str, str] | None,
    spec: StateSpec,
    status: Callable[[str], None],
) -> jax.stages.Compiled:
    """The train step; raises UserError if it does not fit the devices."""
    status(f"compiling the train step for {mesh.size} devices")
    begin_s = time.perf_counter()
    with out_of_memory_explained(trainer.plan, "the train step", spec.abstract):
        train_step = compile_step(trainer, model, mesh, compiler_options, spec)
    status(f"compiled in {time.perf_counter() - begin_s:.1f} s")
    return train_step


def _ledger(trainer: Trainer, model: api.Model, status: Callable[[str], None]) -> Ledger | None:
    """The ledger of the run's privacy, after it has told what a user should know; None: it has none."""
    if trainer.privacy is None:
        return None
    ledger = Ledger.of(trainer.privacy, trainer.dataset, trainer.plan.batch_size)
    params = sum(x.size for x in jax.tree.leaves(model.trained(model.abstract_params)))
    for line in ledger.remarks(trainer.steps, params):
        status(line)
    return ledger


def _temp_bytes(program: jax.stages.Compiled) -> int:
    """Temporary memory of a program on a device, beside its arguments; 0: the back end does not report it."""
    memory = program.memory_analysis()
    return 0 if memory is None else memory.temp_size_in_bytes


def _initial(
    checkpoints: Checkpoints, trainer: Trainer, model: api.Model, mesh: Mesh, read: Read | None, target: TrainState
) -> Initial:
    """The newest intact step, or the initial weights of a new run."""
    restored = checkpoints.restore(target)
    if trainer.init_from is None or restored is not None:
        return Initial(restored)
    optimizer = load_optimizer(trainer, target, read)
    return Initial(params=load_params(trainer, model, mesh, read), optimizer=optimizer)


class StateOptions(TypedDict):
    """Options of `state.init_state` that decide which parts a state has."""

    ema: bool
    loss_scaling: LossScaling | None
    anomalies: Anomalies
    apart: Apart | None


@dataclasses.dataclass(frozen=True)
class StateSpec:
    """The specification of a train state: shapes, shardings, and how it is initialised."""

    tx: optax.GradientTransformation
    shardings: TrainState
    abstract: TrainState
    options: StateOptions

    def init(self, model: api.Model) -> Callable[..., TrainState]:
        """A jitted function (key, pretrained=None) -> a new state."""
        make = functools.partial(states.init_state, model, self.tx, **self.options)
        in_blocks = model.config.lora is not None and model.config.lora.base_dtype.in_blocks
        donated = () if in_blocks else "pretrained"  # a quantized parameter cannot reuse the buffer
        return jax.jit(make, out_shardings=self.shardings, donate_argnames=donated)

    def begun(self) -> Callable[..., PyTree]:
        """A jitted function (nodes, index of a node, trained parameters) -> the nodes, of which one begins with these."""
        apart = self.options["apart"]
        assert apart is not None, "only a strategy has nodes"
        return jax.jit(apart.strategy.begun, donate_argnums=0, out_shardings=self.shardings.opt_state)

    def with_starts(self, state: TrainState, loads: Sequence[Callable[[], Params]]) -> TrainState:
        """A new state whose nodes have initial weights of their own.

        Args:
          state: its arrays may be used only once.
          loads: each loads the trained parameters of a model; the nodes take them in turn.
        """
        apart, nodes = self.options["apart"], state.opt_state
        if apart is None or not loads:
            return state
        begun = self.begun()
        for index, load in enumerate(loads):
            params = load()
            for node in range(index, apart.nodes, len(loads)):
                nodes = begun(nodes, jnp.int32(node), params)
            del params  # before the next one comes
        return dataclasses.replace(state, opt_state=nodes)


def describe_state(trainer: Trainer, model: api.Model, mesh: Mesh) -> StateSpec:
    """Specifies the train state from shapes only; nothing is allocated."""
    options: StateOptions = {
        "ema": trainer.ema_decay is not None or (trainer.strategy is not None and trainer.strategy.averages),
        "loss_scaling": trainer.float16_scaling,
        "anomalies": trainer.anomalies,
        "apart": None if trainer.strategy is None else Apart(trainer.strategy, trainer.plan.node),
    }
    tx = trainer.optimizer.transformation(trainer.steps, model.trained(model.axes))
    if (own := user_modules.own_class(trainer.optimizer)) is not None:
        with user_modules.attributed("an update", trainer.optimizer):
            optim.check_updates(tx, model.trained(model.abstract_params), own)
    shardings = states.state_shardings(model, tx, mesh, trainer.plan.rules, **options)
    return StateSpec(tx, shardings, states.abstract_state(model, tx, shardings, **options), options)


def _objective(trainer: Trainer, model: api.Model) -> Objective:
    if trainer.loss is not None:
        return trainer.loss.checked_objective(model, trainer.dataset)
    return of_cross_entropy(model, trainer.z_loss, trainer.label_smoothing, trainer.loss_normalization)


def compile_step(
    trainer: Trainer,
    model: api.Model,
    mesh: Mesh,
    compiler_options: Mapping[str, str] | None = None,
    spec: StateSpec | None = None,
) -> jax.stages.Compiled:
    """Compiles the train step ahead of time from shapes only; nothing is allocated."""
    lowered = lower_step(trainer, model, mesh, spec)
    return lowered.compile(compiler_options=dict(compiler_options or {}) or None)


def lower_step(trainer: Trainer, model: api.Model, mesh: Mesh, spec: StateSpec | None = None) -> jax.stages.Lowered:
    """Lowers the train step without compiling it, for the devices of any mesh."""
    checks.check_rows(trainer, mesh)
    plan, spec = trainer.plan, spec or describe_state(trainer, model, mesh)
    batch_sharding, objective = sharding.batch_sharding(mesh, plan.rules), _objective(trainer, model)
    private = None if trainer.privacy is None else make_private_gradient(objective, plan, mesh, trainer.privacy)
    step = make_train_step(
        model,
        spec.tx,
        trainer.optimizer.schedule.learning_rates(trainer.steps),
        plan,
        mesh,
        ema_decay=trainer.ema_decay,
        loss_scaling=spec.options["loss_scaling"],
        anomalies=trainer.anomalies,
        objective=objective,
        private=private,
    )
    if trainer.strategy is not None:
        step = make_nodes_step(
            step, make_node_loss(model, plan, mesh, objective), model, trainer.strategy, spec.shardings
        )
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(spec.shardings, None))
    batch = {
        key: jax.ShapeDtypeStruct(shape, dtype, sharding=batch_sharding)
        for key, (shape, dtype) in trainer.batch_spec.items()
    }
    if private is not None:
        batch[NOISE_KEY] = jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=key_sharding(mesh))
    module = api.module_of(trainer.model)
    with user_modules.attributed(
        "the train step", trainer.model, module, trainer.loss, trainer.optimizer, trainer.strategy
    ):
        lowered = jitted.lower(spec.abstract, batch)
    _check_means(trainer, lowered.out_info[1])
    return lowered


def _check_means(trainer: Trainer, metrics: Mapping[str, object]) -> None:
    """Raises UserError if a loss of the user's names metrics that its step does not have; ours name optional ones."""
    own = user_modules.own_class(trainer.loss)
    for name in trainer.loss.means if trainer.loss is not None and own is not None else ():
        if name not in metrics:
            raise UserError(f"{own}.means has {name!r}, which is no metric of its steps{did_you_mean(name, metrics)}")


def _open_folder(trainer: Trainer, config: str, read: Read | None) -> Checkpoints:
    """Opens the checkpoints, which nobody else may write now, and keeps the files that came with the tokenizer and weights."""
    about = manifest.provenance(config) if jax.process_index() == 0 else None
    with contextlib.ExitStack() as undo:
        checkpoints = undo.enter_context(Checkpoints(trainer.model_dir, trainer.saves, about=about))
        if jax.process_index() == 0:
            own_tokenizer.keep(trainer.dataset, trainer.model_dir)
            origin.keep(trainer, read)
        undo.pop_all()
    return checkpoints
