"""What is wrong with a run, told before it takes long."""

from __future__ import annotations

import logging
import math

import jax
from jax.sharding import Mesh

from capibara import sharding
from capibara.core.types import UserError
from capibara.data.pipeline.loader import check_task_shards
from capibara.training.trainer import Trainer


def check_vocabulary(trainer: Trainer) -> None:
    """Raises UserError where the model has not all tokens of the vocabulary."""
    size = trainer.dataset.get_vocabulary().size
    if size > trainer.model.vocab_size:
        raise UserError(
            f"{type(trainer.model).__name__}.vocab_size ({trainer.model.vocab_size}) must be at least the vocabulary's "
            f"size ({size}): try {-(-size // 128) * 128}"
        )


def check(trainer: Trainer, mesh: Mesh) -> None:
    """Raises UserError for what can be known before anything is compiled."""
    _check_evaluation(trainer, mesh)
    if trainer.dataset.is_seqio:
        _check_task_shards(trainer, mesh)
    if trainer.dataset.vocabulary is not None:  # that of a SeqIO task is known only once SeqIO is imported
        check_vocabulary(trainer)


def _check_task_shards(trainer: Trainer, mesh: Mesh) -> None:
    hosts, shards = max(sharding.host_shards(mesh, trainer.plan.rules)) + 1, trainer.dataset.task_shards
    check_task_shards(trainer.dataset, trainer.plan.batch_size, hosts)
    if hosts > shards and not jax.process_index():
        logging.getLogger(__name__).warning(
            "%d hosts share %d stream(s) of SeqIO task %r, and each preprocesses all examples of its own: set "
            "Dataset.task_shards = %d or a multiple of it in a new run",
            hosts,
            shards,
            trainer.dataset.mixture_or_task_name,
            hosts,
        )


def _check_evaluation(trainer: Trainer, mesh: Mesh) -> None:
    rows = trainer.evaluation.batch_size
    shards = math.prod(mesh.shape[axis] for axis in trainer.plan.rules.batch)
    if rows is not None and rows % shards:
        raise UserError(
            f"Evaluation.batch_size ({rows}) must be a multiple of {shards} "
            f"({' x '.join(f'{axis}={mesh.shape[axis]}' for axis in trainer.plan.rules.batch)}): "
            f"try {max(1, round(rows / shards)) * shards}"
        )


def check_rows(trainer: Trainer, mesh: Mesh) -> None:
    """Raises UserError where rows cannot be cut.

    Each context shard has two parts of a row (see sharding.balanced), and one of an encoder's.
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
