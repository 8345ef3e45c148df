"""Reads run folders (configuration, parameters, optimizer state, adapters), and writes one of parameters alone."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import itertools
import logging
import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from capibara import config
from capibara.checkpoints import run_manifest, step_folders
from capibara.checkpoints.lease import Lease
from capibara.checkpoints.manager import CheckpointReader, Checkpoints, Restored
from capibara.checkpoints.manifest import Corrupted
from capibara.checkpoints.policy import Checkpointing
from capibara.core.multihost import peers
from capibara.core.types import Params, PyTree, UserError
from capibara.models import api
from capibara.sharding import Plan
from capibara.storage import outputs, stores
from capibara.storage.full_disk import not_writable_explained
from capibara.training.state import TrainState, with_shardings
from capibara.training.trainer import Trainer

CONFIG = run_manifest.CONFIG
_PERMIT = "CAPIBARA_START_OVER"  # names a launcher's file, which permits --start_over to rename the folder once
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

    trainer: Trainer
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
    trainer: Trainer,
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
        found = _found(checkpoints, folder, target, step, average is not False)
        if found is None:
            raise UserError(f"{folder} holds no checkpoint yet: train it first")
        step, params = found
        if checkpoints.corrupted:
            newest = max(checkpoints.corrupted)
            logging.getLogger(__name__).warning(
                "%s: step %d is used, not step %d: %s", folder, step, newest, checkpoints.corrupted[newest]
            )
        kept = any(path.startswith("ema/") for path in checkpoints.restore_progress(step).shapes)
    if average and not kept:
        raise UserError(f"{folder} keeps no average of its parameters (Trainer.ema_decay is not set): take them raw")
    if merge and model.config.lora:
        params = merger(model, with_shardings(model.plain.abstract_params, placed(trainer.plan, model.plain)))(params)
    return TrainedRun(trainer, model.plain if merge else model, params, step, kept and average is not False)


def described(folder: str, trainer: Trainer) -> TrainedRun:
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
        found = checkpoints.newest_params(target)
    if found is None:
        raise UserError(no_checkpoint(folder))
    return found[1]


def no_checkpoint(folder: str) -> str:
    """The error for a folder that is to give initial weights and has none."""
    return (
        f"Trainer.init_from ({folder!r}) holds no checkpoint: name a run folder that has one, or None to "
        "begin with new parameters"
    )


def newest_state(folder: str, target: TrainState, how: Checkpointing) -> tuple[Restored, TrainState]:
    """The complete state of a run's newest valid step, for another run to continue; arguments as in `newest_params`."""
    with CheckpointReader(folder, how) as checkpoints:
        found = checkpoints.restore(target)
    if found is None:
        raise UserError(no_checkpoint(folder))
    return found


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
    found = lora(folder)
    if found is None:
        return None
    with CheckpointReader(folder, dataclasses.replace(how, cast=True)) as checkpoints:
        values = checkpoints.newest_part(found.trains)
    if values is None:
        raise UserError(f"{folder} holds no checkpoint yet: train it first")
    return found, values


def merger(model: api.Model, target: Params, *, base: bool = False) -> Callable[[Params], Params]:
    """Makes a jitted function that merges a model's adapters into its parameters.

    Args:
      model: the model with adapters.
      target: jax.ShapeDtypeStructs with shardings of the parameters of the model without adapters.
      base: drop the adapters instead of merging them.
    """
    made = model.base if base else model.merge

    def merge(params: Params) -> Params:
        return jax.tree.map(lambda x, like: x.astype(like.dtype), made(params), target)

    return jax.jit(merge, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, target))


def _found(
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


def check_resumable(model_dir: str) -> None:
    """Raises UserError if a run folder has lost its checkpoints, or was changed after its run wrote it."""
    folder = stores.folder_of(model_dir)
    if folder.exists():
        run_manifest.check(folder)
        step_folders.lost(step_folders.folder_of(model_dir))


def changes(model_dir: str, configuration: str) -> list[str]:
    """Lines on how the configuration of a start differs from the recorded one; only on process 0."""
    path = os.path.join(model_dir, CONFIG)
    before = outputs.read(path) if jax.process_index() == 0 else None
    try:
        found = [] if before is None else config.diff(before, configuration)
        return [f"changed since the last start: {line}" for line in found]
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({type(error).__name__}): move it, or set another MODEL_DIR") from error


def recorded_steps(model_dir: str) -> int | None:
    """Trainer.steps of the last start of a run; None: it is not recorded."""
    text = outputs.read(os.path.join(model_dir, CONFIG))
    with contextlib.suppress(SyntaxError, ValueError):
        _, value = config.changes("", text or "").get("Trainer.steps", (None, None))
        return None if value is None else int(value)
    return None


def start_over(model_dir: str) -> None:
    """Renames a run folder, so that a new run takes its place; every process calls it, process 0 does it.

    After a restart by a launcher the command still has --start_over, but resumes: the launcher's permit is used up.

    Raises:
      UserError: another process writes to the folder, or it is in a bucket.
    """
    folder, permit = stores.folder_of(model_dir), os.environ.get(_PERMIT)
    is_permitted = permit is None or os.path.exists(permit)
    if jax.process_index() == 0 and is_permitted and folder.exists() and any(folder.iterdir()):
        if not stores.of(model_dir).renames:
            raise UserError(
                f"--start_over renames a local folder, and {model_dir} is in a bucket: set another MODEL_DIR"
            )
        steps = step_folders.folder_of(model_dir)
        with not_writable_explained(folder):
            steps.mkdir(exist_ok=True)
            Lease(steps).release()  # refused where a run is writing
            old = next(p for n in itertools.count(1) if not (p := folder.with_name(f"{folder.name}.old{n}")).exists())
            folder.rename(old)
        print(f"{folder} was renamed to {old.name}: a new run begins")
    if jax.process_index() == 0 and permit is not None:
        with contextlib.suppress(FileNotFoundError):
            os.remove(permit)
    peers.together("started over")


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
