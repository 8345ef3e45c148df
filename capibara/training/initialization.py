"""Loads the initial weights of a new run: from a run folder, or from a foreign model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh

from capibara import sharding
from capibara.checkpoints import step_folders
from capibara.core import tree
from capibara.core.types import Params, PyTree, UserError
from capibara.models import api
from capibara.models.api import Lora, Model
from capibara.training import run_folder
from capibara.training import state as states
from capibara.training.state import TrainState
from capibara.training.trainer import InitWith, Trainer


@runtime_checkable
class HasOptimizer(Protocol):
    """A reader of parameters that can also read the state of their optimizer."""

    def optimizer(self, opt_state: PyTree) -> tuple[int, PyTree]:
        """The step, and a state like `opt_state` (jax.ShapeDtypeStructs), of numpy arrays."""


# (jax.ShapeDtypeStructs with shardings, of the model without adapters) -> its parameters with these shardings.
Read = Callable[[Params], Params]
Load = Callable[[str], Read]  # (path) -> the reader of the foreign model there, which is checked to be the run's


@runtime_checkable
class Adapted(Protocol):
    """A reader of a model that has adapters.

    Attributes:
      merged: the configuration of adapters that are merged into the base; None: they are trained further.
    """

    merged: Lora | None

    def adapters(self, target: Params) -> Params:
        """The adapters' parameters (Model.trained), with the shardings of these jax.ShapeDtypeStructs."""


def reader(trainer: Trainer, load: Load | None) -> Read | None:
    """The reader of a foreign model at `trainer.init_from`; this only checks the model and reads no parameters.

    None: it is a run folder, or the run resumes or has random initial weights.

    Args:
      trainer: the run.
      load: makes the reader of a foreign model, which it checks.

    Raises:
      UserError: there is no model, or another one.
    """
    own = step_folders.folder_of(trainer.model_dir)
    resumes = own.exists() and bool(step_folders.steps(own))
    return None if resumes else reader_again(trainer, load)


def reader_again(trainer: Trainer, load: Load | None) -> Read | None:
    """As `reader`, for a run that resumes and needs its initial weights again."""
    if load is None or trainer.init_from is None or step_folders.folder_of(trainer.init_from).exists():
        return None
    return load(trainer.init_from)


def starts(trainer: Trainer, model: Model, mesh: Mesh, load: Load | None) -> tuple[Callable[[], Params], ...]:
    """Functions that load the nodes' own initial weights (Trainer.strategy.starts), the trained part; a run that resumes has none.

    Foreign models are checked now; their parameters, and run folders, are read when a function is called.

    Args:
      trainer, model, mesh: of the run.
      load: as in `reader`.

    Raises:
      UserError: there is no model, or another one.
    """
    own = step_folders.folder_of(trainer.model_dir)
    if trainer.strategy is None or (own.exists() and step_folders.steps(own)):
        return ()
    name = f"{type(trainer.strategy).__name__}.init_from"
    each = [dataclasses.replace(trainer, init_from=path) for path in trainer.strategy.starts]
    with _named(name):
        reads = [reader_again(of_one, load) for of_one in each]

    def loaded(of_one: Trainer, read: Read | None) -> Params:
        with _named(name):
            return model.trained(load_params(of_one, model, mesh, read))

    return tuple(functools.partial(loaded, of_one, read) for of_one, read in zip(each, reads, strict=True))


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Errors say which field named the model."""
    try:
        yield
    except UserError as error:
        said = str(error).replace("Trainer.init_from", name)
        raise UserError(said if name in said else f"{name}: {said}") from error


def initial_params(
    trainer: Trainer, model: Model, mesh: Mesh, load: Load | None, init: Callable[..., TrainState]
) -> Params:
    """Makes the initial weights of a run again; its own adapters have no effect yet.

    Args:
      trainer, model, mesh: of the run.
      load: as in `reader`.
      init: (key, pretrained=parameters or None) -> a new state.
    """
    read = reader_again(trainer, load)
    loaded = None if trainer.init_from is None else load_params(trainer, model, mesh, read)
    return init(jax.random.key(trainer.seed), pretrained=loaded).params


def load_params(trainer: Trainer, model: Model, mesh: Mesh, read: Read | None) -> Params:
    """Loads the parameters at `trainer.init_from` onto the mesh: of the model, and of adapters that are there.

    Args:
      trainer: the run.
      model: its model.
      mesh: its mesh.
      read: from `reader` or `reader_again`.

    Raises:
      UserError: there is no model, or another one.
    """
    plain = model.plain
    shardings = sharding.shardings(mesh, trainer.plan.rules, plain.axes, plain.abstract_params)
    # In the dtype of the model's parameters; quantized ones are made from float32.
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
        return params if read.merged is None else run_folder.merger(own, target)(params)
    lora = run_folder.lora(_folder(trainer)) if read is None else None
    if goes_on and lora is None:
        raise UserError(
            f"Trainer.init_with is 'adapters', and Trainer.init_from ({trainer.init_from!r}) has none: set 'weights'"
        )
    if read is not None:
        return read(target)
    if lora is None:
        return _pretrained(trainer, target)
    if goes_on:
        return _going_on(trainer, model, lora, mesh, target)
    return _merged(trainer, plain, lora, mesh, target)


def load_optimizer(trainer: Trainer, target: TrainState, read: Read | None) -> tuple[int, PyTree] | None:
    """Loads the step and the optimizer's state at `trainer.init_from` onto the mesh; None: init_with is not "state".

    Args:
      trainer: the run.
      target: shapes and shardings of the run's state.
      read: from `reader`.

    Raises:
      UserError: there is no such state, it is another optimizer's, or the run would end before its step.
    """
    if trainer.init_with is not InitWith.STATE:
        return None
    if read is None:
        own = dataclasses.replace(target, ema=None, losses=None)
        restored, state = run_folder.newest_state(_folder(trainer), own, trainer.checkpointing)
        step, opt_state = restored.step, state.opt_state
    elif not isinstance(read, HasOptimizer):
        raise UserError("Trainer.init_with is 'state', but Trainer.init_from only has parameters: set 'weights'")
    else:
        step, values = read.optimizer(target.opt_state)
        opt_state = jax.tree.map(_placed, values, target.opt_state)
    if step >= trainer.steps:
        raise UserError(
            f"Trainer.steps ({trainer.steps}) must be above the step of Trainer.init_from ({step}), from which the run "
            f"continues: try {step + 1000}, or Trainer.init_with = 'weights'"
        )
    return step, opt_state


def _placed(value: np.ndarray, target: jax.ShapeDtypeStruct) -> jax.Array:
    value = np.asarray(value, target.dtype)
    return jax.make_array_from_callback(target.shape, target.sharding, lambda index: value[index])


def _merged(trainer: Trainer, plain: Model, lora: Lora, mesh: Mesh, target: Params) -> Params:
    """The parameters of a run folder with adapters, merged into its base."""
    adapted = api.build(dataclasses.replace(plain.config, lora=lora))
    shardings = sharding.shardings(mesh, trainer.plan.rules, adapted.axes, adapted.abstract_params)
    params = _pretrained(trainer, states.with_shardings(adapted.abstract_params, shardings))
    return run_folder.merger(adapted, target)(params)


def _going_on(trainer: Trainer, model: Model, lora: Lora, mesh: Mesh, target: Params) -> Params:
    """The parameters of a run folder with adapters, which are kept and trained further."""
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
    params = _pretrained(trainer, states.with_shardings(model.abstract_params, shardings))
    return tree.joined(model.trained(params), run_folder.merger(model, target, base=True)(params))


def _pretrained(trainer: Trainer, target: Params) -> Params:
    # In any dtype: the run folder may have been trained in another one.
    how = dataclasses.replace(trainer.checkpointing, cast=True)
    return run_folder.newest_params(_folder(trainer), target, how)


def _folder(trainer: Trainer) -> str:
    assert trainer.init_from is not None, "a run that reads parameters says where they are"
    return trainer.init_from
