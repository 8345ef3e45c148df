"""The parameters of a run folder, read out of one and put into one."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from capibara import config, outputs
from capibara.models import api
from capibara.training.checkpointing import Checkpointing
from capibara.training.checkpoints import Checkpoints
from capibara.training.state import TrainState, with_shardings
from capibara.training.trainer import Trainer
from capibara.types import Params, UserError

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
    recorded = outputs.read(os.path.join(folder, CONFIG))
    if recorded is None:
        raise UserError(f"{folder} is not a run folder: it has no {CONFIG}")
    with tempfile.NamedTemporaryFile("w", suffix=".gin") as copy:  # Gin reads no buckets
        copy.write(recorded)
        copy.flush()
        config.parse([copy.name, *gin_files], bindings, search_paths)
    trainer = config.build(Trainer)
    model = api.build(trainer.model)
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    target = with_shardings(model.abstract_params, jax.tree.map(lambda _: here, model.abstract_params))
    with Checkpoints(folder, trainer.checkpointing, read_only=True) as checkpoints:
        params = checkpoints.restore_newest_params(target)
    if params is None:
        raise UserError(f"{folder} holds no checkpoint yet: train it first")
    if not merge or model.config.lora is None:
        return Loaded(trainer, model, params)
    return Loaded(trainer, model.plain, jax.jit(model.merge)(params))


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
