"""Set-up of a run: mesh, model, compiled step, data and checkpoints; the slow parts run in parallel."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypedDict

import jax
import optax
from jax.sharding import Mesh, NamedSharding

from capibara import optim, sharding
from capibara.checkpoints import manifest
from capibara.checkpoints.manager import CheckpointReader, Checkpoints
from capibara.core import processes, user_modules
from capibara.core.fields import did_you_mean
from capibara.core.types import Batch, Params, UserError
from capibara.data.pipeline.loader import Loader, Position, merge_states
from capibara.models import api
from capibara.multihost import hosts
from capibara.objectives.base import Metrics
from capibara.sharding.replicas import ReplicaCheck
from capibara.training import checks
from capibara.training.base import state as states
from capibara.training.base.state import OptStatePart, Step, TrainState
from capibara.training.evaluation import EvalStep, is_due, make_eval_step
from capibara.training.initialization import Load, Read, load_optimizer, load_params, reader, starts
from capibara.training.methods.hooks import Hooks
from capibara.training.methods.method import StepParts
from capibara.training.recovery import Initial, Recovery
from capibara.training.run_folder import origin, own_tokenizer
from capibara.training.stability.anomalies import Anomalies
from capibara.training.stability.device_memory import out_of_memory_explained
from capibara.training.stability.loss_scale import LossScaling
from capibara.training.step import make_train_step
from capibara.training.trainer import Trainer

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
      replicas: compares the replicas of the parameters.
      hooks: of its training method.
      load: checks a foreign model at `trainer.init_from`.
      spent: seconds by cause.
      data: the counts of each split, as JSON.
    """

    trainer: Trainer
    mesh: Mesh
    model: api.Model
    spec: StateSpec
    batch_sharding: NamedSharding
    train_step: Step
    step_temp_bytes: int
    eval_step: EvalStep
    batches: Loader
    checkpoints: Checkpoints
    recovery: Recovery
    replicas: ReplicaCheck
    hooks: Hooks
    load: Load | None
    spent: Mapping[str, float]
    data: Mapping[str, Mapping[str, Any]]

    def __enter__(self) -> Setup:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.recovery.close()
            self.batches.close()
        finally:
            self.checkpoints.__exit__(kind, error, trace)

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
        if is_due(step, self.trainer.replica_check_every) and self.replicas.copies > 1:
            self.replicas.check(state.params)
        return state, metrics


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
    mesh, model, spec, hooks, read, node_starts, batches, inputs = _check(trainer, devices, status, load)
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
            initial = dataclasses.replace(loading.result(), starts=node_starts)
        if (restored := initial.checkpoint) is not None:
            spent["restore"] = time.perf_counter() - compiled_s
            hooks.check_resumed(restored[0].step)
            if inputs.resumes is None or inputs.resumes.step != restored[0].step:  # the newest one was corrupt
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
        replicas=ReplicaCheck(spec.abstract.params, mesh),
        hooks=hooks,
        load=load,
        spent=spent,
        data={split: counts.as_json() for split, counts in inputs.counts.items()},
    )
    return setup, initial


class _Checked(NamedTuple):
    """A run whose options, folder and data are in order; close its `batches`."""

    mesh: Mesh
    model: api.Model
    spec: StateSpec
    hooks: Hooks
    read: Read | None
    starts: tuple[Callable[[], Params], ...]
    batches: Loader
    inputs: checks.RunInputs


def _check(
    trainer: Trainer,
    devices: list[jax.Device] | None,
    status: Callable[[str], None],
    load: Load | None,
    *,
    waits_for_data: bool = False,
) -> _Checked:
    """Finds the user's mistakes before anything is compiled or written; arguments as for `set_up` and `checks.run_inputs`."""
    mesh = _make_mesh(trainer, jax.devices() if devices is None else devices)
    checks.options(trainer, mesh)
    trainer.training_loss.check_mesh(mesh, trainer.plan.rules)
    model = api.build(trainer.model)
    spec = describe_state(trainer, model, mesh)
    hooks = trainer.training_method.hooks(trainer, model.trained(model.abstract_params), status)
    trainer.optimizer.schedule.learning_rates(trainer.steps)
    trainer.training_loss.checked_objective(model, trainer.dataset)
    read, node_starts = reader(trainer, model, load), starts(trainer, model, mesh, load)
    inputs = checks.run_inputs(trainer, model, mesh, spec.abstract, read, hooks, waits_for_data=waits_for_data)
    for note in inputs.notes if waits_for_data else (*inputs.notes, *checks.data_lines(inputs.counts)):
        status(note)
    if inputs.resumes is None and not trainer.dataset.is_seqio:  # SeqIO is still being imported
        merge_states(hosts.gathered(inputs.batches.get_state()))  # raises if hosts read different data
    return _Checked(mesh, model, spec, hooks, read, node_starts, inputs.batches, inputs)


def _make_mesh(trainer: Trainer, devices: list[jax.Device]) -> Mesh:
    """The mesh of the devices that train."""
    count, name = trainer.training_loss.training_devices(len(devices)), type(trainer.training_loss).__name__
    if count < len(devices):
        trainer.plan.mesh_shape(count, f"a run of {len(devices)} without {name}.rollout_devices")
    try:
        return sharding.make_mesh(trainer.plan, devices[:count])
    except AssertionError:  # JAX's, for chips that form no box in the slice
        if count == len(devices):
            raise
        raise UserError(
            f"{name}.rollout_devices is {len(devices) - count}, and the {count} chips that train form no box of the slice, which a "
            f"mesh needs: try {len(devices) // 2}, or ask `capibara plan`"
        ) from None


def check(trainer: Trainer, load: Load | None = None) -> list[str]:
    """Makes the checks of `set_up` alone, those that take long included; nothing is compiled or written.

    Returns:
      What was checked, in lines for a user.

    Raises:
      UserError: the run cannot begin or resume.
    """
    lines: list[str] = []
    checked = _check(trainer, None, lines.append, load, waits_for_data=True)
    checked.batches.close()
    checks.check_vocabulary(trainer)
    with CheckpointReader(trainer.model_dir, trainer.saves) as checkpoints:
        checkpoints.verified_step()
    return [*checked.inputs.lines, *lines]


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
    opt_part: OptStatePart | None


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


def describe_state(trainer: Trainer, model: api.Model, mesh: Mesh) -> StateSpec:
    """Specifies the train state from shapes only; nothing is allocated."""
    options: StateOptions = {
        "ema": trainer.ema_decay is not None or trainer.training_method.averages,
        "loss_scaling": trainer.float16_scaling,
        "anomalies": trainer.anomalies,
        "opt_part": trainer.training_method.opt_part(trainer.plan),
    }
    tx = trainer.optimizer.transformation(trainer.steps, model.trained(model.axes))
    if (user_class := user_modules.own_class(trainer.optimizer)) is not None:
        with user_modules.attributed("an update", trainer.optimizer):
            optim.check_updates(tx, model.trained(model.abstract_params), user_class)
    shardings = states.state_shardings(model, tx, mesh, trainer.plan.rules, **options)
    return StateSpec(tx, shardings, states.abstract_state(model, tx, shardings, **options), options)


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
    plan, method, spec = trainer.plan, trainer.training_method, spec or describe_state(trainer, model, mesh)
    objective = trainer.training_loss.checked_objective(model, trainer.dataset)
    parts = StepParts(model, plan, mesh, objective, spec.shardings)
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
        gradient=method.gradient(parts),
    )
    jitted = jax.jit(method.step(parts, step), donate_argnums=0, out_shardings=(spec.shardings, None))
    batch_sharding = sharding.batch_sharding(mesh, plan.rules)
    batch = {
        key: jax.ShapeDtypeStruct(shape, dtype, sharding=batch_sharding)
        for key, (shape, dtype) in trainer.batch_spec.items()
    }
    batch |= method.batch_spec(mesh)
    module = api.module_of(trainer.model)
    with user_modules.attributed(
        "the train step", trainer.model, module, trainer.loss, trainer.optimizer, method.configured
    ):
        lowered = jitted.lower(spec.abstract, batch)
    _check_means(trainer, lowered.out_info[1])
    return lowered


def _check_means(trainer: Trainer, metrics: Mapping[str, object]) -> None:
    """Raises UserError if a loss of the user's names metrics that its step does not have; ours name optional ones."""
    user_class = user_modules.own_class(trainer.loss)
    for name in trainer.loss.means if trainer.loss is not None and user_class is not None else ():
        if name not in metrics:
            raise UserError(
                f"{user_class}.means has {name!r}, which is no metric of its steps{did_you_mean(name, metrics)}"
            )


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
