"""Reads run folders: configuration, parameters, optimizer state, adapters."""

from __future__ import annotations

import ast
import dataclasses
import logging
import os
from collections.abc import Callable

import jax
import optax

from capibara import config
from capibara.checkpoints import run_manifest, step_folders
from capibara.checkpoints.manager import CheckpointReader, Restored
from capibara.checkpoints.manifest import Corrupted
from capibara.checkpoints.policy import Checkpointing
from capibara.core.types import Params, PyTree, UserError
from capibara.models import api
from capibara.sharding import Plan
from capibara.storage import outputs, stores
from capibara.training.base.options import RunOptions
from capibara.training.base.state import TrainState, with_shardings

CONFIG = run_manifest.CONFIG
_OF_OTHERS = "config.json"  # a folder with this file is a Hugging Face folder, whatever else it contains


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """A run and its model at a checkpoint step.

    Attributes:
      trainer: the run.
      model: the model; without adapters, unless `load` was called with merge=False.
      params: the model's parameters.
      step: the checkpoint step.
      is_average: whether the parameters are moving averages.
    """

    trainer: RunOptions
    model: api.Model
    params: Params
    step: int
    is_average: bool


def is_run(folder: str) -> bool:
    """Whether a folder is a run folder: it has a recorded configuration, and is not of Hugging Face or T5X."""
    path = stores.folder_of(folder)
    ours = (path / run_manifest.NAME).exists() or step_folders.folder_of(folder).exists()
    return ours and (path / CONFIG).exists() and not (path / _OF_OTHERS).exists()


def recorded(folder: str, *, trust: bool = False) -> config.Recorded:
    """The recorded configuration of a run, after a check of its hash.

    Args:
      folder: the run folder.
      trust: the user trusts the folder: modules that its configuration names may be imported.

    Raises:
      UserError: it is not a run folder, or was changed after the run wrote it.
    """
    where = os.path.join(folder, CONFIG)
    text = outputs.read(where)
    if text is None:
        raise UserError(f"{folder} is not a run folder: it has no {CONFIG}")
    run_manifest.check(stores.folder_of(folder))
    return config.Recorded(text, where, trust)


# (the run's plan, its model or that without adapters) -> the sharding of each of the model's parameters.
Placed = Callable[[Plan, api.Model], PyTree]


def on_one_device(plan: Plan, model: api.Model) -> PyTree:
    """Shardings that put all parameters on the first local device."""
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(lambda _: here, model.abstract_params)


def load(
    folder: str,
    trainer: RunOptions,
    *,
    step: int | None = None,
    average: bool | None = None,
    placed: Placed = on_one_device,
    merge: bool = True,
) -> TrainedRun:
    """Loads a run's parameters at a checkpoint step.

    Args:
      folder: the run folder.
      trainer: the run that its record configures, with what the user set and with the folder's own tokenizer.
      step: the checkpoint step; None: the newest.
      average: True: the moving averages of the parameters; False: the parameters; None: averages if there are any.
      placed: shardings of the parameters.
      merge: whether to merge adapters into the parameters.

    Raises:
      UserError: it has no checkpoint, no such step, or no averages.
    """
    model = api.build(trainer.model)
    target = with_shardings(model.abstract_params, placed(trainer.plan, model))
    with CheckpointReader(folder, trainer.checkpointing) as checkpoints:
        result = _located(checkpoints, folder, target, step, average is not False)
        if result is None:
            raise UserError(f"{folder} holds no checkpoint yet: train it first")
        step, params = result
        if checkpoints.corrupted:
            newest = max(checkpoints.corrupted)
            logging.getLogger(__name__).warning(
                "%s: step %d is used, not step %d: %s", folder, step, newest, checkpoints.corrupted[newest]
            )
        retained = any(path.startswith("ema/") for path in checkpoints.restore_progress(step).shapes)
    if average and not retained:
        raise UserError(f"{folder} keeps no average of its parameters (Trainer.ema_decay is not set): take them raw")
    if merge and model.config.lora:
        params = merger(model, with_shardings(model.plain.abstract_params, placed(trainer.plan, model.plain)))(params)
    return TrainedRun(trainer, model.plain if merge else model, params, step, retained and average is not False)


def described(folder: str, trainer: RunOptions) -> TrainedRun:
    """A run and its model without adapters, with shapes (jax.ShapeDtypeStruct) for parameters; arguments as in `load`.

    Raises:
      UserError: it has no checkpoint.
    """
    model = api.build(trainer.model).plain
    with CheckpointReader(folder, trainer.checkpointing) as checkpoints:
        if not checkpoints.steps():
            raise UserError(f"{folder} holds no checkpoint yet: train it first")
    return TrainedRun(trainer, model, model.abstract_params, 0, False)


def newest_optimizer(
    folder: str, model: api.Model, tx: optax.GradientTransformation, how: Checkpointing
) -> tuple[int, PyTree] | None:
    """The newest valid step of a run and its optimizer's state, on one device.

    None: the step only has parameters, or moving averages are used, to which the state does not belong.

    Args:
      folder: the run folder.
      model: its model.
      tx: its optimizer.
      how: options of checkpoints.
    """
    trained = model.trained(model.abstract_params)
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shapes = jax.eval_shape(tx.init, trained)
    target = with_shardings(shapes, jax.tree.map(lambda _: here, shapes))
    with CheckpointReader(folder, how) as checkpoints:
        return checkpoints.newest_optimizer(target)


def newest_params(folder: str, target: Params, how: Checkpointing) -> Params:
    """The parameters of a run's newest valid step (the averages if there are any), as initial weights of another run.

    Args:
      folder: the run folder.
      target: shapes and shardings of the parameters.
      how: options of checkpoints.

    Raises:
      UserError: it has no checkpoint, or one of another model.
    """
    with CheckpointReader(folder, how) as checkpoints:
        result = checkpoints.newest_params(target)
    if result is None:
        raise UserError(no_checkpoint(folder))
    return result[1]


def no_checkpoint(folder: str) -> str:
    """The error for a folder that is to give initial weights and has none."""
    return (
        f"Trainer.init_from ({folder!r}) holds no checkpoint: name a run folder that has one, or None to "
        "begin with new parameters"
    )


def newest_state(folder: str, target: TrainState, how: Checkpointing) -> tuple[Restored, TrainState]:
    """The complete state of a run's newest valid step, for another run to continue; arguments as in `newest_params`."""
    with CheckpointReader(folder, how) as checkpoints:
        result = checkpoints.restore(target)
    if result is None:
        raise UserError(no_checkpoint(folder))
    return result


def head(folder: str) -> api.Head:
    """The head of a run's model, from its config.gin."""
    bound = config.changes("", outputs.read(os.path.join(folder, CONFIG)) or "")
    heads = [ast.literal_eval(value) for name, (_, value) in bound.items() if value and name.endswith("Config.head")]
    return api.Head(heads[0]) if heads else api.Head.TIED


def value_head(folder: str) -> bool:
    """Whether a run's model has a value head, from its config.gin."""
    bound = config.changes("", outputs.read(os.path.join(folder, CONFIG)) or "")
    return any(value == "True" for name, (_, value) in bound.items() if name.endswith("Config.value_head"))


def has_gates(folder: str) -> bool:
    """Whether a run's model has gates of streaming heads, from its config.gin."""
    bound = config.changes("", outputs.read(os.path.join(folder, CONFIG)) or "")
    bound_to = {name.rpartition("/")[2]: value for name, (_, value) in bound.items()}
    return "DecoderConfig.streaming" in bound_to and bound_to.get("StreamingHeads.heads", "None") == "None"


def lora(folder: str) -> api.Lora | None:
    """The configuration of a run's adapters, from its config.gin; None: it has none."""
    run_manifest.check(stores.folder_of(folder))
    bound = config.changes("", outputs.read(os.path.join(folder, CONFIG)) or "")
    values = {name: value for name, (_, value) in bound.items() if value is not None}
    if not any(name.endswith("Config.lora") and value == "@Lora()" for name, value in values.items()):
        return None
    return api.Lora(
        **{
            name.partition(".")[2]: ast.literal_eval(value)
            for name, value in values.items()
            if name.startswith("Lora.")
        }
    )


def adapters(folder: str, how: Checkpointing) -> tuple[api.Lora, Params] | None:
    """The adapters and other trained parameters of a run's newest valid step, on one device; None: it has no adapters.

    Args:
      folder: the run folder.
      how: options of checkpoints.

    Raises:
      UserError: the folder was changed after its run wrote it, or has no checkpoint.
    """
    result = lora(folder)
    if result is None:
        return None
    with CheckpointReader(folder, dataclasses.replace(how, cast=True)) as checkpoints:
        values = checkpoints.newest_part(result.trains)
    if values is None:
        raise UserError(f"{folder} holds no checkpoint yet: train it first")
    return result, values


def merger(model: api.Model, target: Params, *, base: bool = False) -> Callable[[Params], Params]:
    """Makes a jitted function that merges a model's adapters into its parameters.

    Args:
      model: the model with adapters.
      target: jax.ShapeDtypeStructs with shardings of the parameters of the model without adapters.
      base: drop the adapters instead of merging them.
    """
    created = model.base if base else model.merge

    def merge(params: Params) -> Params:
        return jax.tree.map(lambda x, like: x.astype(like.dtype), created(params), target)

    return jax.jit(merge, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, target))


def _located(
    checkpoints: CheckpointReader, folder: str, target: PyTree, step: int | None, average: bool
) -> tuple[int, Params] | None:
    if step is None:
        return checkpoints.newest_params(target, average=average)
    if step not in (steps := checkpoints.steps()):
        raise UserError(f"{folder} has no checkpoint of step {step}: there are {', '.join(map(str, steps)) or 'none'}")
    try:
        return step, checkpoints.restore_params(step, target, average=average)
    except Corrupted as fault:
        raise UserError(f"{folder}: step {step} is corrupted ({fault}): take another") from None
