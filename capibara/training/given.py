"""The parameters that a new run begins from, where they are not drawn anew."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from capibara import sharding, tree
from capibara.models.api import Model
from capibara.training import state as states
from capibara.training import step_folders
from capibara.training.checkpoints import Checkpoints
from capibara.training.trainer import Trainer
from capibara.types import Params, UserError

# (jax.ShapeDtypeStructs with shardings, of the model without adapters) -> its parameters, lying so.
Load = Callable[[Params], Params]


def load_params(trainer: Trainer, model: Model, mesh: Mesh, load: Load | None) -> Params:
    """The parameters at `trainer.init_from`, of the model without adapters, on the mesh.

    Args:
      trainer: the run.
      model: of the run.
      mesh: where they are to lie.
      load: reads what is there where that is not the folder of another run, whose newest step is read otherwise.

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
    of_run = load is None or step_folders.folder_of(trainer.init_from).exists()
    return _of_run_folder(trainer, target) if of_run else load(target)


def _of_run_folder(trainer: Trainer, target: Params) -> Params:
    # Whatever precision it was trained in.
    with Checkpoints(
        trainer.init_from, dataclasses.replace(trainer.checkpointing, cast=True), read_only=True
    ) as checkpoints:
        params = checkpoints.restore_newest_params(target)
    if params is None:
        raise UserError(
            f"Trainer.init_from ({trainer.init_from!r}) holds no checkpoint: name a run folder that has one, or None to "
            "begin with new parameters"
        )
    return params
