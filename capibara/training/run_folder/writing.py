"""Writes a run folder of parameters alone."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp

from capibara.checkpoints import run_manifest
from capibara.checkpoints.manager import Checkpoints
from capibara.checkpoints.policy import Checkpointing
from capibara.core.types import Params
from capibara.storage import stores
from capibara.training.base.state import TrainState
from capibara.training.run_folder.reading import CONFIG


def save(folder: str, params: Params, gin: str) -> None:
    """Writes a run folder with one checkpoint, of step 0, that only has parameters, as initial weights for other runs.

    Its other files exist already; they are added to its manifest.

    Args:
      folder: the run folder.
      params: parameters on devices.
      gin: its configuration.
    """
    run_manifest.replace(stores.folder_of(folder), {CONFIG: gin.encode()})
    run_manifest.seal(stores.folder_of(folder))
    step = jax.device_put(jnp.zeros((), jnp.int32), jax.tree.leaves(params)[0].sharding)
    with contextlib.closing(Checkpoints(folder, Checkpointing())) as checkpoints:
        checkpoints.save(0, TrainState(step=step, params=params, opt_state=(), ema=None), {}, {})
