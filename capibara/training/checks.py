"""Everything that a run is given, checked before anything is compiled: for `capibara train`, and for its --check alone.

Nothing is written here, and of checkpoints and models only descriptions are read: their arrays come while the step compiles.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import os
from collections.abc import Mapping
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from capibara import sharding
from capibara.checkpoints.manager import CheckpointReader, Restored
from capibara.core import extras
from capibara.core.types import UserError
from capibara.data.pipeline.loader import Loader, check_task_shards
from capibara.data.text.counts import Counts
from capibara.data.tokenizers import user_vocabularies
from capibara.models.api import Model
from capibara.training import run_folder
from capibara.training.base.state import TrainState
from capibara.training.feed import open_loader, validation_loader
from capibara.training.initialization import Read, check_params
from capibara.training.methods.hooks import Hooks
from capibara.training.metrics import EarlyStopping
from capibara.training.run_folder import own_tokenizer
from capibara.training.trainer import Trainer

_DATA_S = 2.0  # for the first batch of a split: where documents take longer, they are read on while the step compiles
_LAUNCHER = "CAPIBARA_BEAT"  # set for what a launcher has started: see jobs/workers.py


class RunInputs(NamedTuple):
    """What a run begins with, as far as it is known before its step is compiled.

    Attributes:
      resumes: the newest step whose description is intact; None: the run is new.
      batches: the training split, being read; from the position of `resumes`.
      counts: what was read for each split and what was left out, where the data says it.
      lines: what was checked, for a user.
      notes: what a user should know.
    """

    resumes: Restored | None
    batches: Loader
    counts: Mapping[str, Counts]
    lines: list[str]
    notes: list[str]


def options(trainer: Trainer, mesh: Mesh) -> None:
    """Raises UserError if a run's options do not fit its mesh, or its tokenizer is not there or too large for the model."""
    _check_evaluation(trainer, mesh)
    check_rows(trainer, mesh)
    trainer.training_method.check_start()
    trainer.training_loss.check_model(trainer.model)
    if trainer.dataset.is_seqio:
        _check_task_shards(trainer, mesh)
    if trainer.dataset.vocabulary is not None:  # a SeqIO task's own is only known once SeqIO is imported
        user_vocabularies.check(trainer.dataset.vocabulary)
        check_vocabulary(trainer)


def run_inputs(
    trainer: Trainer,
    model: Model,
    mesh: Mesh,
    target: TrainState,
    read: Read | None,
    hooks: Hooks,
    *,
    waits_for_data: bool = False,
) -> RunInputs:
    """Checks the run folder, the initial weights and the data.

    Args:
      trainer, model, mesh: of the run.
      target: shapes and shardings of its state.
      read: reads the initial weights, if they are a foreign model's.
      hooks: of its method.
      waits_for_data: wait for the first batch however long it takes, a SeqIO task's included, whose import takes seconds.

    Returns:
      What was found; close its `batches`.

    Raises:
      UserError: the run cannot begin or resume, or has ended.
    """
    resumes = _resumes(trainer, target, hooks)
    if resumes is None:
        check_params(trainer, model, mesh, read, target)
    own_tokenizer.check(trainer.dataset, trainer.model_dir)
    with contextlib.ExitStack() as undo:
        batches = undo.enter_context(contextlib.closing(open_loader(trainer, mesh, "train", trainer.plan.batch_size)))
        if resumes is not None:
            batches.set_state(resumes.data)
        batches.start()
        counts = {"train": batches.counts}
        if trainer.evaluation.every:
            with contextlib.closing(validation_loader(trainer, mesh)) as validation:
                _read_first(trainer, validation, waits_for_data)
                counts["validation"] = validation.counts
        is_read = _read_first(trainer, batches, waits_for_data)
        undo.pop_all()
    notes = [] if resumes is None else _stretched(trainer, resumes.step)
    known = {split: of_split for split, of_split in counts.items() if of_split is not None}
    return RunInputs(resumes, batches, known, _lines(trainer, mesh, resumes, is_read, known), notes)


def data_lines(counts: Mapping[str, Counts]) -> list[str]:
    """A line on each split: what was read, and what was held out, skipped and left out."""
    return [f"data: {split}: {of_split}" for split, of_split in counts.items()]


def _read_first(trainer: Trainer, batches: Loader, waits_for_data: bool) -> bool:
    if waits_for_data:
        return batches.check_first()
    return not trainer.dataset.is_seqio and batches.check_first(_DATA_S)


def _lines(
    trainer: Trainer, mesh: Mesh, resumes: Restored | None, is_read: bool, counts: Mapping[str, Counts]
) -> list[str]:
    axes = " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1) or "one device"
    vocabulary = trainer.dataset.vocabulary
    tokens = "" if vocabulary is None else f", {vocabulary.size} tokens in {trainer.model.vocab_size} rows"
    where = "a new run" if resumes is None else f"resumes from step {resumes.step}"
    first = "first batch made" if is_read else "opened"
    evaluates = ", validation split too" if trainer.evaluation.every else ""
    return [
        f"mesh: {axes}, {trainer.plan.batch_size} rows of {trainer.dataset.length}",
        f"model: {type(trainer.model).__name__}{tokens}",
        f"initial weights: {'random' if trainer.init_from is None else trainer.init_from}",
        f"data: {first}{evaluates}",
        *data_lines(counts),
        f"run folder: {trainer.model_dir}, {where}",
    ]


def _resumes(trainer: Trainer, target: TrainState, hooks: Hooks) -> Restored | None:
    """The step from which the run resumes; raises UserError if it cannot, or has ended."""
    with CheckpointReader(trainer.model_dir, trainer.saves) as checkpoints:
        restored = checkpoints.newest_progress()
        if restored is None:
            return None
        checkpoints.check_state(restored, target)
    hooks.check_resumed(restored.step)
    # A launcher starts a run again that was stopped just after its last step: its callbacks must still hear of the end.
    is_launched = _LAUNCHER in os.environ
    if not is_launched and not hooks.resumes_at_end and not restored.progress.get("owes_evaluation", False):
        _check_ended(trainer, restored, hooks)
    return restored


def _check_ended(trainer: Trainer, restored: Restored, hooks: Hooks) -> None:
    if EarlyStopping(trainer.evaluation.patience, restored.progress.get("early_stopping")).stop:
        raise UserError(f"the run stopped early at step {restored.step}: raise Evaluation.patience to continue")
    if restored.step >= hooks.last_step:
        raise UserError(hooks.ended(restored.step))


def _stretched(trainer: Trainer, step: int) -> list[str]:
    """A line if the run has another number of steps than at its last start, and so other learning rates from `step` on."""
    before, now = run_folder.recorded_steps(trainer.model_dir), trainer.steps
    if before is None or before == now:
        return []
    schedule = trainer.optimizer.schedule
    try:
        rates_before, rates_now = schedule.learning_rates(before), schedule.learning_rates(now)
    except UserError:  # it does not fit into the steps of before
        return []
    for at in sorted({step, max(step, min(before, now) - 1)}):  # the next update, and the last one of the shorter run
        rate_before, rate_now = float(rates_before(at)), float(rates_now(at))
        if not math.isclose(rate_before, rate_now, rel_tol=1e-6):
            verb = "stretches" if now > before else "shortens"
            return [
                f"Trainer.steps was {before}, is {now}, which {verb} the schedule: the learning rate of step {at + 1} was "
                f"{rate_before:.3g}, is {rate_now:.3g}"
            ]
    return []


def folder(model_dir: str) -> None:
    """Raises UserError if a run folder cannot be written; leaves nothing there."""
    from capibara.storage import stores
    from capibara.storage.full_disk import not_writable_explained

    path = stores.folder_of(model_dir)
    if not stores.of(path).has_local_paths:
        return
    with not_writable_explained(path):
        created = [parent for parent in (path, *path.parents) if not parent.exists()]
        try:
            path.mkdir(parents=True, exist_ok=True)
            probe = path / f".writable.{os.getpid()}"
            probe.write_bytes(b"")
            probe.unlink()
        finally:
            for parent in created:
                with contextlib.suppress(OSError):
                    os.rmdir(parent)


def check_vocabulary(trainer: Trainer) -> None:
    """Raises UserError if the model's vocabulary is smaller than the tokenizer's."""
    size = trainer.dataset.get_vocabulary().size
    if size > trainer.model.vocab_size:
        raise UserError(
            f"{type(trainer.model).__name__}.vocab_size ({trainer.model.vocab_size}) must be at least the vocabulary's "
            f"size ({size}): try {-(-size // 128) * 128}"
        )


def installed(trainer: Trainer) -> None:
    """Raises UserError if what a SeqIO task needs is not installed, without its import, which takes seconds."""
    for package in ("tensorflow", "seqio") if trainer.dataset.is_seqio else ():
        if importlib.util.find_spec(package) is None:
            extras.require(package, extra="seqio", why="SeqIO tasks")


def _check_task_shards(trainer: Trainer, mesh: Mesh) -> None:
    host_count, shards = max(sharding.host_shards(mesh, trainer.plan.rules)) + 1, trainer.dataset.task_shards
    check_task_shards(trainer.dataset, trainer.plan.batch_size, host_count)
    if host_count > shards and not jax.process_index():
        logging.getLogger(__name__).warning(
            "%d hosts share %d stream(s) of SeqIO task %r, and each preprocesses all examples of its own: set "
            "Dataset.task_shards = %d or a multiple of it in a new run",
            host_count,
            shards,
            trainer.dataset.mixture_or_task_name,
            host_count,
        )


def _check_evaluation(trainer: Trainer, mesh: Mesh) -> None:
    rows = trainer.evaluation.batch_size
    axes = sharding.batch_axes(mesh.shape, trainer.plan.rules)
    shards = math.prod(mesh.shape[axis] for axis in axes)
    if rows is not None and rows % shards:
        raise UserError(
            f"Evaluation.batch_size ({rows}) must be a multiple of {shards} "
            f"({' x '.join(f'{axis}={mesh.shape[axis]}' for axis in axes)}): "
            f"try {max(1, round(rows / shards)) * shards}"
        )


def check_rows(trainer: Trainer, mesh: Mesh) -> None:
    """Raises UserError if rows do not divide over the context axis.

    A context shard has two parts of a decoder's row (see sharding.balanced), and one of an encoder's.
    """
    context = mesh.shape["context"]
    for name, parts, shown in (
        ("length", 2 * context, "2 x Plan.context"),
        ("encoder_length", context, "Plan.context"),
    ):
        length = getattr(trainer.dataset, name)
        if context > 1 and length is not None and length % parts:
            raise UserError(
                f"Dataset.{name} ({length}) must be a multiple of {parts} ({shown}): try {-(-length // parts) * parts}"
            )
