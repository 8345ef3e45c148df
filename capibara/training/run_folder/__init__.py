"""Reads run folders (configuration, parameters, optimizer state, adapters), and writes one of parameters alone."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import itertools
import logging
import os
from collections.abc import Callable, Sequence

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
from capibara.training.run_folder import own_tokenizer
from capibara.training.state import TrainState, with_shardings
from capibara.training.trainer import Trainer

CONFIG = run_manifest.CONFIG
_PERMIT = "CAPIBARA_START_OVER"  # a launcher's file, which lets --start_over rename the folder once
_OF_OTHERS = "config.json"  # of a Hugging Face folder, which is read by it whatever else lies beside it


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """A run and its model at a checkpoint step.

    Attributes:
      trainer: the run.
      model: without adapters, which are merged into the parameters; with them if `load` was called with merge=False.
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
    """Whether a folder is that of a run: it records its configuration, and is not one of Hugging Face or of T5X."""
    path = stores.folder_of(folder)
    ours = (path / run_manifest.NAME).exists() or step_folders.folder_of(folder).exists()
    return ours and (path / CONFIG).exists() and not (path / _OF_OTHERS).exists()


def recorded(folder: str, *, trust: bool = False) -> config.Recorded:
    """The configuration of a run, to be parsed as data, once its hash holds.

    Args:
      folder: of the run.
      trust: the user vouches for the folder: modules that its configuration names may be imported.

    Raises:
      UserError: it is no run folder, or not as the run wrote it.
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
    """A sharding for each parameter that puts it whole on the first local device."""
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(lambda _: here, model.abstract_params)


def load(
    folder: str,
    gin_files: Sequence[str] = (),
    bindings: Sequence[str] = (),
    search_paths: Sequence[str] = (),
    *,
    step: int | None = None,
    average: bool | None = None,
    placed: Placed = on_one_device,
    merge: bool = True,
    trust: bool = False,
) -> TrainedRun:
    """What a run had come to at a step.

    Args:
      folder: of the run; its config.gin is parsed as data, then `gin_files` and `bindings`.
      gin_files, bindings, search_paths: as of config.parse.
      step: of the checkpoint; None: the newest.
      average: True: the moving averages of the parameters; False: they themselves; None: averages where some were kept.
      placed: where the parameters shall lie.
      merge: adapters into the parameters, where there are some.
      trust: as of `recorded`.

    Raises:
      UserError: it is no run folder, or holds no checkpoint, no such step, or no average in it.
    """
    config.parse(gin_files, bindings, search_paths, recorded(folder, trust=trust))
    trainer = own_tokenizer.of_run(config.build(Trainer), folder)
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


def newest_optimizer(
    folder: str, model: api.Model, tx: optax.GradientTransformation, how: Checkpointing
) -> tuple[int, PyTree] | None:
    """The newest whole step of a run and its optimizer's state, on one device.

    None where the step holds parameters alone, or the run's parameters are moving averages: of these it is not the state.

    Args:
      folder: of the run.
      model: of the run.
      tx: its optimizer.
      how: checkpoints are read.
    """
    trained = model.trained(model.abstract_params)
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shapes = jax.eval_shape(tx.init, trained)
    target = with_shardings(shapes, jax.tree.map(lambda _: here, shapes))
    with CheckpointReader(folder, how) as checkpoints:
        return checkpoints.newest_optimizer(target)


def newest_params(folder: str, target: Params, how: Checkpointing) -> Params:
    """The parameters of a run's newest whole step, the averages where it has some, for another run to begin with.

    Args:
      folder: of the run.
      target: shapes and shardings of the parameters.
      how: checkpoints are read.

    Raises:
      UserError: it holds no checkpoint, or one of another model.
    """
    with CheckpointReader(folder, how) as checkpoints:
        found = checkpoints.newest_params(target)
    if found is None:
        raise UserError(
            f"Trainer.init_from ({folder!r}) holds no checkpoint: name a run folder that has one, or None to "
            "begin with new parameters"
        )
    return found[1]


def newest_state(folder: str, target: TrainState, how: Checkpointing) -> tuple[Restored, TrainState]:
    """The whole state of a run's newest whole step, for another run to go on from; arguments as of `newest_params`."""
    with CheckpointReader(folder, how) as checkpoints:
        found = checkpoints.restore(target)
    if found is None:
        raise UserError(f"Trainer.init_from ({folder!r}) holds no checkpoint: name a run folder that has one")
    return found


def lora(folder: str) -> api.Lora | None:
    """The adapters of a run, as its config.gin has them; None: it has none."""
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
    """The adapters of a run and what else it trains, of its newest whole step, on one device; None: it has none.

    Args:
      folder: of the run.
      how: checkpoints are read.

    Raises:
      UserError: the folder is not as its run wrote it, or holds no checkpoint.
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
    """Raises UserError where a run folder has lost what a run would resume from, or is not as its run wrote it."""
    folder = stores.folder_of(model_dir)
    if folder.exists():
        run_manifest.check(folder)
        step_folders.lost(step_folders.folder_of(model_dir))


def changes(model_dir: str) -> list[str]:
    """How the parsed configuration differs from the one that the run folder records, in lines; on process 0 alone."""
    path = os.path.join(model_dir, CONFIG)
    before = outputs.read(path) if jax.process_index() == 0 else None
    try:
        found = [] if before is None else config.diff(before, config.operative())
        return [f"changed since the last start: {line}" for line in found]
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({type(error).__name__}): move it, or set another MODEL_DIR") from error


def start_over(model_dir: str) -> None:
    """Renames a run folder, so that a new run begins in its place; every process calls it, process 0 does it.

    What a launcher starts again keeps the command's --start_over, and resumes: the launcher's permit is used up.

    Raises:
      UserError: another process writes there, or it is in a bucket.
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
    """Writes a run folder whose only checkpoint, of step 0, has parameters alone: others can begin from it.

    Its other files are there already: what they hold now goes into its manifest.

    Args:
      params: on devices.
      gin: its configuration.
    """
    run_manifest.replace(stores.folder_of(folder), {CONFIG: gin.encode()})
    run_manifest.seal(stores.folder_of(folder))
    step = jax.device_put(jnp.zeros((), jnp.int32), jax.tree.leaves(params)[0].sharding)
    with contextlib.closing(Checkpoints(folder, Checkpointing())) as checkpoints:
        checkpoints.save(0, TrainState(step=step, params=params, opt_state=(), ema=None), {}, {})
