"""Loads the initial weights of a new run: from a run folder, or from a foreign model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh

from capibara import sharding
from capibara.checkpoints import step_folders
from capibara.checkpoints.manager import CheckpointReader, Restored
from capibara.checkpoints.policy import Checkpointing
from capibara.core import tree
from capibara.core.types import Params, PyTree, UserError
from capibara.models import api
from capibara.models.api import Head, Lora, Model, TransformerConfig
from capibara.storage import stores
from capibara.training import run_folder
from capibara.training.base import state as states
from capibara.training.base.options import InitWith
from capibara.training.base.state import TrainState
from capibara.training.trainer import Trainer


@runtime_checkable
class HasOptimizer(Protocol):
    """A reader of parameters that can also read the state of their optimizer."""

    def optimizer(self, opt_state: PyTree) -> tuple[int, PyTree]:
        """The step, and a state like `opt_state` (jax.ShapeDtypeStructs), of numpy arrays."""


# (jax.ShapeDtypeStructs with shardings, of the model without adapters) -> its parameters with these shardings.
Read = Callable[[Params], Params]
# (path, model, whether its adapters are merged) -> the reader of the foreign model there, which is checked to be this one
Load = Callable[[str, Model, bool], Read]


@runtime_checkable
class Adapted(Protocol):
    """A reader of a model that has adapters.

    Attributes:
      merged: the configuration of adapters that are merged into the base; None: they are trained further.
    """

    merged: Lora | None

    def adapters(self, target: Params) -> Params:
        """The adapters' parameters (Model.trained), with the shardings of these jax.ShapeDtypeStructs."""


def reader(trainer: Trainer, model: Model, load: Load | None) -> Read | None:
    """The reader of a foreign model at `trainer.init_from`; this only checks the model and reads no parameters.

    None: it is a run folder, or the run resumes or has random initial weights.

    Args:
      trainer, model: the run.
      load: makes the reader of a foreign model, which it checks.

    Raises:
      UserError: there is no model, or another one.
    """
    return None if _resumes(trainer) else reader_again(trainer, model, load)


def reader_again(trainer: Trainer, model: Model, load: Load | None) -> Read | None:
    """As `reader`, for a run that resumes and needs its initial weights again."""
    if load is None or trainer.init_from is None or step_folders.folder_of(trainer.init_from).exists():
        return None
    with _named("Trainer.init_from"):
        read = load(trainer.init_from, model, trainer.init_with is InitWith.MERGED)
    if trainer.init_with is InitWith.ADAPTERS and not isinstance(read, Adapted):
        raise _no_adapters(trainer)
    return read


def check_there(trainer: Trainer) -> None:
    """Raises UserError if there is nothing at `Trainer.init_from` of a new run; nothing there is read."""
    path = trainer.init_from
    if path is None or _resumes(trainer) or not stores.of(path).has_local_paths:
        return
    if not os.path.exists(path):
        raise UserError(
            f"Trainer.init_from ({path!r}) does not exist: name a run folder, a Hugging Face folder or a .gguf file, or None "
            "to begin with new parameters"
        )


def _resumes(trainer: Trainer) -> bool:
    folder = step_folders.folder_of(trainer.model_dir)
    return folder.is_dir() and bool(step_folders.steps(folder))


def starts(trainer: Trainer, model: Model, mesh: Mesh, load: Load | None) -> tuple[Callable[[], Params], ...]:
    """Functions that load the initial weights of the method's own, the trained part; a run that resumes has none.

    Foreign models are checked now; their parameters, and run folders, are read when a function is called.

    Args:
      trainer, model, mesh: of the run.
      load: as in `reader`.

    Raises:
      UserError: there is no model, or another one.
    """
    name, paths = trainer.training_method.own_weights
    if not paths or _resumes(trainer):
        return ()
    each = [dataclasses.replace(trainer, init_from=path) for path in paths]
    with _named(name):
        reads = [reader_again(of_one, model, load) for of_one in each]

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
        message = str(error).replace("Trainer.init_from", name)
        raise UserError(message if name in message else f"{name}: {message}") from error


def initial_params(
    trainer: Trainer, model: Model, mesh: Mesh, load: Load | None, init: Callable[..., TrainState]
) -> Params:
    """Makes the initial weights of a run again; its own adapters have no effect yet.

    Args:
      trainer, model, mesh: of the run.
      load: as in `reader`.
      init: (key, pretrained=parameters or None) -> a new state.
    """
    read = reader_again(trainer, model, load)
    loaded = None if trainer.init_from is None else load_params(trainer, model, mesh, read)
    return init(jax.random.key(trainer.seed), pretrained=loaded).params


def load_model(
    trainer: Trainer, mesh: Mesh, load: Load | None, path: str, config: TransformerConfig
) -> tuple[Model, Params]:
    """Loads another model beside the run's, adapters merged.

    Args:
      trainer, mesh: of the run.
      load: as in `reader`.
      path: of a run folder or a foreign model.
      config: its configuration.

    Raises:
      UserError: there is no model, or another one.
    """
    model = api.build(config)
    other = dataclasses.replace(trainer, model=config, init_from=path, init_with=InitWith.MERGED, loss=None)
    with _named(path):
        return model, load_params(other, model, mesh, reader_again(other, model, load))


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
    plain, target = model.plain, _plain_target(trainer, model, mesh)
    if isinstance(read, Adapted):
        adapted = model if read.merged is None else api.build(dataclasses.replace(plain.config, lora=read.merged))
        shardings = sharding.shardings(mesh, trainer.plan.rules, adapted.axes, adapted.abstract_params)
        values = read.adapters(
            states.with_shardings(adapted.trained(adapted.abstract_params), adapted.trained(shardings))
        )
        params = tree.joined(values, read(target))
        return params if read.merged is None else run_folder.merger(adapted, target)(params)
    if read is not None:
        return read(target)
    stored, created = _of_run(trainer, model, mesh, target)
    return created(_pretrained(trainer, stored))


def check_params(trainer: Trainer, model: Model, mesh: Mesh, read: Read | None, target: TrainState) -> None:
    """Checks what `load_params`, `load_optimizer` and `starts` would load for a new run from run folders; reads no array.

    Args:
      trainer, model, mesh, read: as for `load_params`; a foreign model was checked by its `reader`.
      target: shapes of the run's state.

    Raises:
      UserError: there is no checkpoint, or one of another model or optimizer.
    """
    if read is not None and trainer.init_with is InitWith.STATE and not isinstance(read, HasOptimizer):
        raise _no_optimizer()
    if trainer.init_from is not None and read is None:
        _check_run(trainer, model, mesh)
        if trainer.init_with is InitWith.STATE:
            _check_continues(trainer, _newest(trainer, dataclasses.replace(target, ema=None, losses=None)).step)
    name, paths = trainer.training_method.own_weights
    with _named(name):
        for path in paths:
            if step_folders.folder_of(path).exists():
                _check_run(dataclasses.replace(trainer, init_from=path), model, mesh)


def _check_run(trainer: Trainer, model: Model, mesh: Mesh) -> None:
    stored, _ = _of_run(trainer, model, mesh, _plain_target(trainer, model, mesh))
    with CheckpointReader(_folder(trainer), _any_dtype(trainer)) as checkpoints:
        if (newest := checkpoints.newest_progress()) is not None:
            with _named("Trainer.init_from"):
                checkpoints.check_params(newest, stored)
        elif not checkpoints.steps():
            raise UserError(run_folder.no_checkpoint(_folder(trainer)))


def _newest(trainer: Trainer, target: TrainState) -> Restored:
    """The description of the newest step at `trainer.init_from`, which has a state like `target`."""
    with CheckpointReader(_folder(trainer), trainer.checkpointing) as checkpoints:
        newest = checkpoints.newest_progress()
        if newest is None:
            raise UserError(run_folder.no_checkpoint(_folder(trainer)))
        with _named("Trainer.init_from"):
            checkpoints.check_state(newest, target)
    return newest


def _of_run(trainer: Trainer, model: Model, mesh: Mesh, target: Params) -> tuple[Params, Callable[[Params], Params]]:
    """Which parameters of the run folder at `trainer.init_from` are read, and what makes those like `target` of them."""
    head = run_folder.head(_folder(trainer))
    if model.config.head is Head.SCORE and head is not Head.SCORE:
        model = api.with_head(model, head)
        stored, created = _of_run(trainer, model, mesh, _plain_target(trainer, model, mesh))
        # Its projection is not needed, and the scores begin anew.
        return stored, lambda params: {name: value for name, value in created(params).items() if name != "output"}
    if model.config.value_head is not (has_values := run_folder.value_head(_folder(trainer))):
        model = api.with_value_head(model, has_values)
        stored, created = _of_run(trainer, model, mesh, _plain_target(trainer, model, mesh))
        # Values are for training alone, and begin anew where there are none.
        return stored, lambda params: {name: value for name, value in created(params).items() if name != "critic"}
    if model.config.has_gates and not run_folder.has_gates(_folder(trainer)):
        return _of_run(trainer, api.without_streaming(model), mesh, {n: x for n, x in target.items() if n != api.GATES})
    lora = run_folder.lora(_folder(trainer))
    if trainer.init_with is InitWith.ADAPTERS:
        if lora is None:
            raise _no_adapters(trainer)
        return _going_on(trainer, model, lora, mesh, target)
    if lora is None:
        return target, lambda params: params
    adapted = api.build(dataclasses.replace(model.plain.config, lora=lora))
    shardings = sharding.shardings(mesh, trainer.plan.rules, adapted.axes, adapted.abstract_params)
    return states.with_shardings(adapted.abstract_params, shardings), run_folder.merger(adapted, target)


def _no_optimizer() -> UserError:
    return UserError("Trainer.init_with is 'state', but Trainer.init_from only has parameters: set 'weights'")


def _no_adapters(trainer: Trainer) -> UserError:
    return UserError(
        f"Trainer.init_with is 'adapters', and Trainer.init_from ({trainer.init_from!r}) has none: set 'weights'"
    )


def _plain_target(trainer: Trainer, model: Model, mesh: Mesh) -> Params:
    """Shapes and shardings of the parameters of the model without adapters."""
    plain = model.plain
    shardings = sharding.shardings(mesh, trainer.plan.rules, plain.axes, plain.abstract_params)
    # In the dtype of the model's parameters; quantized ones are made from float32.
    dtypes = dict(
        zip(tree.path_names(model.abstract_params), (x.dtype for x in jax.tree.leaves(model.abstract_params)))
    )
    shapes = tree.map_with_names(
        lambda name, leaf: jax.ShapeDtypeStruct(leaf.shape, dtypes.get(name, leaf.dtype)), plain.abstract_params
    )
    return states.with_shardings(shapes, shardings)


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
        without_ema = dataclasses.replace(target, ema=None, losses=None)
        restored, state = run_folder.newest_state(_folder(trainer), without_ema, trainer.checkpointing)
        step, opt_state = restored.step, state.opt_state
    elif not isinstance(read, HasOptimizer):
        raise _no_optimizer()
    else:
        step, values = read.optimizer(target.opt_state)
        opt_state = jax.tree.map(_placed, values, target.opt_state)
    _check_continues(trainer, step)
    return step, opt_state


def _check_continues(trainer: Trainer, step: int) -> None:
    if step >= trainer.steps:
        raise UserError(
            f"Trainer.steps ({trainer.steps}) must be above the step of Trainer.init_from ({step}), from which the run "
            f"continues: try {step + 1000}, or Trainer.init_with = 'weights'"
        )


def _placed(value: np.ndarray, target: jax.ShapeDtypeStruct) -> jax.Array:
    value = np.asarray(value, target.dtype)
    return jax.make_array_from_callback(target.shape, target.sharding, lambda index: value[index])


def _going_on(
    trainer: Trainer, model: Model, lora: Lora, mesh: Mesh, target: Params
) -> tuple[Params, Callable[[Params], Params]]:
    """As `_of_run`, of a run folder with adapters, which are kept and trained further."""
    run_lora, folder = model.config.lora, trainer.init_from
    if run_lora is None:
        raise UserError(
            f"Trainer.init_with is 'adapters', and {type(model.config).__name__}.lora is None: set it to @Lora() as "
            f"{folder} has it, or Trainer.init_with = 'merged'"
        )
    for field in dataclasses.fields(Lora):
        ours, theirs = getattr(run_lora, field.name), getattr(lora, field.name)
        if field.name != "dropout" and ours != theirs:
            raise UserError(f"Lora.{field.name} is {ours!r}, {folder} was trained with {theirs!r}: set it to that")
    shardings = sharding.shardings(mesh, trainer.plan.rules, model.axes, model.abstract_params)
    merge = run_folder.merger(model, target, base=True)
    return (
        states.with_shardings(model.abstract_params, shardings),
        lambda params: tree.joined(model.trained(params), merge(params)),
    )


def _pretrained(trainer: Trainer, target: Params) -> Params:
    return run_folder.newest_params(_folder(trainer), target, _any_dtype(trainer))


def _any_dtype(trainer: Trainer) -> Checkpointing:
    """How to read a run folder that may have been trained in another dtype."""
    return dataclasses.replace(trainer.checkpointing, cast=True)


def _folder(trainer: Trainer) -> str:
    assert trainer.init_from is not None, "a run that reads parameters says where they are"
    return trainer.init_from
