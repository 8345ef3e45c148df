"""The parameters that a new run begins from, where they are not drawn anew."""

from __future__ import annotations

import ast
import dataclasses
import os
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh

from capibara import config, sharding
from capibara.checkpoints import run_manifest, step_folders
from capibara.checkpoints.manager import CheckpointReader, Restored
from capibara.checkpoints.policy import Checkpointing
from capibara.core import tree
from capibara.core.types import Params, PyTree, UserError
from capibara.models import api
from capibara.models.api import Lora, Model
from capibara.storage import outputs
from capibara.training import state as states
from capibara.training.state import TrainState
from capibara.training.trainer import InitWith, Trainer


@runtime_checkable
class HasOptimizer(Protocol):
    """What reads parameters, where the state of their optimizer is beside them."""

    def optimizer(self, opt_state: PyTree) -> tuple[int, PyTree]:
        """The step, and a state like `opt_state` (jax.ShapeDtypeStructs), of numpy arrays."""


# (jax.ShapeDtypeStructs with shardings, of the model without adapters) -> its parameters, lying so.
Read = Callable[[Params], Params]
Load = Callable[[], Read]  # looks whether it is that model


@runtime_checkable
class Adapted(Protocol):
    """A reader of a model that has adapters already.

    Attributes:
      merged: they become a part of the base, and this is their configuration; None: they go on.
    """

    merged: Lora | None

    def adapters(self, target: Params) -> Params:
        """What Model.trained gives of its parameters, lying as these jax.ShapeDtypeStructs say."""


def reader(trainer: Trainer, load: Load | None) -> Read | None:
    """What reads the parameters at `trainer.init_from` where that is no run folder; it is looked at here, not read.

    None where it is one, and for a run that begins with other parameters or resumes.

    Args:
      trainer: the run.
      load: looks at what is there.

    Raises:
      UserError: nothing is there, or another model.
    """
    own = step_folders.folder_of(trainer.model_dir)
    resumes = own.exists() and bool(step_folders.steps(own))
    return None if resumes else reader_again(trainer, load)


def reader_again(trainer: Trainer, load: Load | None) -> Read | None:
    """As `reader`, for a run that resumes and needs what it began from once more."""
    if load is None or trainer.init_from is None or step_folders.folder_of(trainer.init_from).exists():
        return None
    return load()


def initial_params(
    trainer: Trainer, model: Model, mesh: Mesh, load: Load | None, init: Callable[..., TrainState]
) -> Params:
    """The parameters that a run began from, made again: of adapters those without effect.

    Args:
      trainer, model, mesh: of the run.
      load: as of `reader`.
      init: (key, given=parameters or None) -> a new state.
    """
    read = reader_again(trainer, load)
    loaded = None if trainer.init_from is None else load_params(trainer, model, mesh, read)
    return init(jax.random.key(trainer.seed), given=loaded).params


def load_params(trainer: Trainer, model: Model, mesh: Mesh, read: Read | None) -> Params:
    """The parameters at `trainer.init_from`, on the mesh: of the model without adapters, and those of an adapter there.

    Args:
      trainer: the run.
      model: of the run.
      mesh: where they are to lie.
      read: of `reader` or `reader_again`.

    Raises:
      UserError: nothing is there, or another model.
    """
    plain = model.plain
    shardings = sharding.shardings(mesh, trainer.plan.rules, plain.axes, plain.abstract_params)
    # In the precision that the model keeps them in; what it stores in blocks it makes of float32.
    dtypes = dict(
        zip(tree.path_names(model.abstract_params), (x.dtype for x in jax.tree.leaves(model.abstract_params)))
    )
    shapes = tree.map_with_names(
        lambda name, leaf: jax.ShapeDtypeStruct(leaf.shape, dtypes.get(name, leaf.dtype)), plain.abstract_params
    )
    target = states.with_shardings(shapes, shardings)
    goes_on = trainer.init_with is InitWith.ADAPTERS
    if isinstance(read, Adapted):
        own = model if read.merged is None else api.build(dataclasses.replace(plain.config, lora=read.merged))
        beside = sharding.shardings(mesh, trainer.plan.rules, own.axes, own.abstract_params)
        values = read.adapters(states.with_shardings(own.trained(own.abstract_params), own.trained(beside)))
        params = tree.joined(values, read(target))
        return params if read.merged is None else merger(own, target)(params)
    lora = adapters_at(trainer.init_from) if read is None else None
    if goes_on and lora is None:
        raise UserError(
            f"Trainer.init_with is 'adapters', and Trainer.init_from ({trainer.init_from!r}) has none: set 'weights'"
        )
    if read is not None:
        return read(target)
    if goes_on:
        return _going_on(trainer, model, lora, mesh, target)
    return _of_run_folder(trainer, target) if lora is None else _merged(trainer, plain, lora, mesh, target)


def load_optimizer(trainer: Trainer, target: TrainState, read: Read | None) -> tuple[int, PyTree] | None:
    """The step and the optimizer's state at `trainer.init_from`, on the mesh; None: the run begins with new ones.

    Args:
      trainer: the run.
      target: of the run's state: shapes and shardings.
      read: of `reader`.

    Raises:
      UserError: there is none, it is another optimizer's, or the run would end before its step.
    """
    if trainer.init_with is not InitWith.STATE:
        return None
    if read is None:
        restored, state = _restored(trainer, target)
        step, opt_state = restored.step, state.opt_state
    elif not isinstance(read, HasOptimizer):
        raise UserError("Trainer.init_with is 'state', and Trainer.init_from has parameters alone: set 'weights'")
    else:
        step, values = read.optimizer(target.opt_state)
        opt_state = jax.tree.map(_placed, values, target.opt_state)
    if step >= trainer.steps:
        raise UserError(
            f"Trainer.steps ({trainer.steps}) must be above the step of Trainer.init_from ({step}), from which the run "
            f"goes on: try {step + 1000}, or Trainer.init_with = 'weights'"
        )
    return step, opt_state


def _restored(trainer: Trainer, target: TrainState) -> tuple[Restored, TrainState]:
    own = dataclasses.replace(target, ema=None, losses=None)
    with CheckpointReader(trainer.init_from, trainer.checkpointing) as checkpoints:
        found = checkpoints.restore(own)
    if found is None:
        raise UserError(
            f"Trainer.init_from ({trainer.init_from!r}) holds no checkpoint: name a run folder that has one"
        )
    return found


def _placed(value: np.ndarray, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    value = np.asarray(value, wanted.dtype)
    return jax.make_array_from_callback(wanted.shape, wanted.sharding, lambda index: value[index])


def adapters_at(folder: str) -> Lora | None:
    """The adapters of a run, as its config.gin has them; None: it has none."""
    run_manifest.check(run_manifest.folder_of(folder))
    bound = config.changes("", outputs.read(os.path.join(folder, run_manifest.CONFIG)) or "")
    values = {name: value for name, (_, value) in bound.items()}
    if not any(name.endswith("Config.lora") and value == "@Lora()" for name, value in values.items()):
        return None
    return Lora(
        **{
            name.partition(".")[2]: ast.literal_eval(value)
            for name, value in values.items()
            if name.startswith("Lora.")
        }
    )


def adapters_of(folder: str, how: Checkpointing) -> tuple[Lora, Params] | None:
    """The adapters of a run and what else it trains, of its newest whole step, on one device; None: it has none.

    Args:
      folder: of the run.
      how: checkpoints are read.

    Raises:
      UserError: the folder is not as its run wrote it, or holds no checkpoint.
    """
    lora = adapters_at(folder)
    if lora is None:
        return None
    with CheckpointReader(folder, dataclasses.replace(how, cast=True)) as checkpoints:
        values = checkpoints.newest_part(lora.trains)
    if values is None:
        raise UserError(f"{folder} holds no checkpoint yet: train it first")
    return lora, values


def _merged(trainer: Trainer, plain: Model, lora: Lora, mesh: Mesh, target: Params) -> Params:
    """The parameters of a run with adapters, which are added to its base."""
    adapted = api.build(dataclasses.replace(plain.config, lora=lora))
    shardings = sharding.shardings(mesh, trainer.plan.rules, adapted.axes, adapted.abstract_params)
    params = _of_run_folder(trainer, states.with_shardings(adapted.abstract_params, shardings))
    return merger(adapted, target)(params)


def _going_on(trainer: Trainer, model: Model, lora: Lora, mesh: Mesh, target: Params) -> Params:
    """The parameters of a run with adapters, and its adapters beside them."""
    own, folder = model.config.lora, trainer.init_from
    if own is None:
        raise UserError(
            f"Trainer.init_with is 'adapters', and {type(model.config).__name__}.lora is None: set it to @Lora() as "
            f"{folder} has it, or Trainer.init_with = 'merged'"
        )
    for field in dataclasses.fields(Lora):
        ours, theirs = getattr(own, field.name), getattr(lora, field.name)
        if field.name != "dropout" and ours != theirs:
            raise UserError(f"Lora.{field.name} is {ours!r}, {folder} was trained with {theirs!r}: set it to that")
    shardings = sharding.shardings(mesh, trainer.plan.rules, model.axes, model.abstract_params)
    params = _of_run_folder(trainer, states.with_shardings(model.abstract_params, shardings))
    return tree.joined(model.trained(params), merger(model, target, base=True)(params))


def merger(model: Model, target: Params, *, base: bool = False) -> Callable[[Params], Params]:
    """A model's parameters -> those without adapters that compute the same, jitted.

    Args:
      model: with adapters.
      target: of the model without them, jax.ShapeDtypeStructs with the shardings that the parameters shall have.
      base: the adapters are left out instead.
    """
    made = model.base if base else model.merge

    def merge(params: Params) -> Params:
        return jax.tree.map(lambda x, wanted: x.astype(wanted.dtype), made(params), target)

    return jax.jit(merge, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, target))


def _of_run_folder(trainer: Trainer, target: Params) -> Params:
    # Whatever precision it was trained in.
    with CheckpointReader(trainer.init_from, dataclasses.replace(trainer.checkpointing, cast=True)) as checkpoints:
        found = checkpoints.newest_params(target)
    if found is None:
        raise UserError(
            f"Trainer.init_from ({trainer.init_from!r}) holds no checkpoint: name a run folder that has one, or None to "
            "begin with new parameters"
        )
    return found[1]
