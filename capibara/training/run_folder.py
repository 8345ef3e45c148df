"""The parameters of a run folder, read out of one and put into one."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from capibara import config, outputs
from capibara.models import api
from capibara.training import own_tokenizer
from capibara.training.checkpointing import Checkpointing
from capibara.training.checkpoints import Checkpoints
from capibara.training.manifest import Damaged
from capibara.training.state import TrainState, with_shardings
from capibara.training.trainer import Trainer
from capibara.types import Params, PyTree, UserError

CONFIG = "config.gin"


class Loaded(NamedTuple):
    """A run, its model, and the parameters of its newest whole checkpoint, the average where one is kept.

    The model has no adapters: they are merged into the parameters, unless it was asked for them.
    """

    trainer: Trainer
    model: api.Model
    params: Params


def is_run(folder: str) -> bool:
    """Whether a folder is that of a run: it records its configuration."""
    return outputs.read(os.path.join(folder, CONFIG)) is not None


def load(
    folder: str,
    gin_files: Sequence[str] = (),
    bindings: Sequence[str] = (),
    search_paths: Sequence[str] = (),
    *,
    merge: bool = True,
) -> Loaded:
    """What a run has come to, on a device.

    Args:
      folder: of the run; its config.gin is parsed, then `gin_files` and `bindings`.
      merge: adapters into the parameters, where there are some.

    Raises:
      UserError: it is no run folder, or holds no checkpoint.
    """
    return load_step(folder, gin_files, bindings, search_paths, merge=merge)[1]


# (the run, its model or that without adapters) -> the sharding of each of the model's parameters.
Placed = Callable[[Trainer, api.Model], PyTree]


def on_one_device(trainer: Trainer, model: api.Model) -> PyTree:
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(lambda _: here, model.abstract_params)


def load_step(
    folder: str,
    gin_files: Sequence[str] = (),
    bindings: Sequence[str] = (),
    search_paths: Sequence[str] = (),
    *,
    step: int | None = None,
    average: bool | None = None,
    placed: Placed = on_one_device,
    merge: bool = True,
) -> tuple[int, Loaded, bool]:
    """What a run had come to at a step.

    Args:
      folder, gin_files, bindings, search_paths: as of `load`.
      step: of the checkpoint; None: the newest.
      average: True: the moving averages of the parameters; False: they themselves; None: averages where some were kept.
      placed: where the parameters shall lie.
      merge: adapters into the parameters, where there are some.

    Returns:
      the step, the run, and whether its parameters are averages.

    Raises:
      UserError: as `load`, or there is no such step, or no average in it.
    """
    recorded = outputs.read(os.path.join(folder, CONFIG))
    if recorded is None:
        raise UserError(f"{folder} is not a run folder: it has no {CONFIG}")
    with tempfile.NamedTemporaryFile("w", suffix=".gin") as copy:  # Gin reads no buckets
        copy.write(recorded)
        copy.flush()
        config.parse([copy.name, *gin_files], bindings, search_paths)
    trainer = own_tokenizer.of_run(config.build(Trainer), folder)
    model = api.build(trainer.model)
    target = with_shardings(model.abstract_params, placed(trainer, model))
    with Checkpoints(folder, trainer.checkpointing, read_only=True) as checkpoints:
        found = _found(checkpoints, folder, target, step, average is not False)
        if found is None:
            raise UserError(f"{folder} holds no checkpoint yet: train it first")
        step, params = found
        kept = any(path.startswith("ema/") for path in checkpoints.restore_progress(step).shapes)
    if average and not kept:
        raise UserError(f"{folder} keeps no average of its parameters (Trainer.ema_decay is not set): take them raw")
    if merge and model.config.lora:
        params = jax.jit(model.merge, out_shardings=placed(trainer, model.plain))(params)
    found_run = Loaded(trainer, model.plain if merge else model, params)
    return step, found_run, kept and average is not False


def _found(
    checkpoints: Checkpoints, folder: str, target: PyTree, step: int | None, average: bool
) -> tuple[int, Params] | None:
    if step is None:
        return checkpoints.newest_params(target, average=average)
    if step not in (steps := checkpoints.steps()):
        raise UserError(f"{folder} has no checkpoint of step {step}: there are {', '.join(map(str, steps)) or 'none'}")
    try:
        return step, checkpoints.restore_params(step, target, average=average)
    except Damaged as fault:
        raise UserError(f"{folder}: step {step} is damaged ({fault}): take another") from None


def save(folder: str, params: Params, gin: str) -> None:
    """Writes a run folder whose only checkpoint, of step 0, has parameters alone: others can begin from it.

    It is a run folder when this returns, or has no config.gin.

    Args:
      params: on devices.
      gin: its configuration.
    """
    step = jax.device_put(jnp.zeros((), jnp.int32), jax.tree.leaves(params)[0].sharding)
    with contextlib.closing(Checkpoints(folder, Checkpointing())) as checkpoints:
        checkpoints.save(0, TrainState(step=step, params=params, opt_state=(), ema=None), {}, {})
    outputs.replace(os.path.join(folder, CONFIG), gin)
