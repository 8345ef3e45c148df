"""Asks a teacher about all documents of a run, and stores its answers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import jax
import numpy as np

from capibara import sharding
from capibara.core.types import HostBatch, UserError
from capibara.models import api
from capibara.strategies.distillation.loss import Distillation
from capibara.strategies.distillation.stored import StoredLogProbs, write
from capibara.strategies.distillation.teacher import Teacher, make_teacher
from capibara.training import initialization
from capibara.training.feed import open_loader
from capibara.training.initialization import Load
from capibara.training.trainer import Trainer


def store(
    trainer: Trainer, loss: Distillation, teacher: Teacher, folder: str, load: Load, show: Callable[[str, str], None]
) -> StoredLogProbs:
    """Writes the folder of a run's training and validation documents, one pass over each.

    Args:
      trainer, loss, teacher: of the distillation, with `top_k`.
      folder: must not exist.
      load: as in `initialization.reader`.
      show: reports the progress.

    Returns:
      What was written.

    Raises:
      UserError: there is no such teacher or data, answers are drawn, or there are several processes.
    """
    assert loss.top_k is not None, "what is stored has a number of tokens"
    if jax.process_count() > 1:
        raise UserError(f"{jax.process_count()} processes cannot store a teacher's log-probabilities: start one")
    if loss.draws:
        raise UserError("what is stored is of given answers: leave Distillation.on_policy and teacher_draws out")
    plan, dataset = trainer.plan, dataclasses.replace(trainer.dataset, shuffle=False, workers=0)
    mesh = sharding.make_mesh(plan, None)
    loss.check_mesh(mesh, plan.rules)
    rows = sharding.batch_sharding(mesh, plan.rules)
    show("reading", teacher.path)
    model, params = initialization.load_model(trainer, mesh, load, teacher.path, teacher.model)
    log_probs = make_teacher(
        model, plan, mesh, rows, vocab_size=loss.vocab_size(api.build(trainer.model)), temperature=loss.temperature,
        top_k=loss.top_k,
    )  # fmt: skip

    def batches() -> Iterator[tuple[HostBatch, np.ndarray, np.ndarray]]:
        for split in ("train", "validation") if trainer.evaluation.every else ("train",):
            run = dataclasses.replace(trainer, dataset=dataset)
            with contextlib.closing(open_loader(run, mesh, split, plan.batch_size, epochs=1)) as loader:
                for count, batch in enumerate(loader, 1):
                    show("teacher", f"batch {count} of the {split} split")
                    outputs = jax.device_get(log_probs(params, sharding.global_batch(rows, batch)))
                    yield batch, outputs["teacher_log_p"], outputs["teacher_ids"]

    manifest = StoredLogProbs(
        teacher=teacher.path,
        vocabulary=dataset.get_vocabulary().fingerprint(),
        vocab_size=loss.vocab_size(api.build(trainer.model)),
        top_k=loss.top_k,
        temperature=loss.temperature,
    )
    return write(folder, manifest, batches())
