"""The teacher of a distillation: its configuration, and the program that makes its distributions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from capibara import sharding
from capibara.config import configurable
from capibara.core.fields import FilePath
from capibara.core.types import Batch, Params, UserError
from capibara.data.tokenizers.vocabulary import Vocabulary
from capibara.models.api import Head, Model, TransformerConfig
from capibara.sharding import Plan
from capibara.strategies.distillation.divergence import block_length, blocks, log_probs_of, logits_of


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Teacher:
    """A model that teaches another one; `TEACHER = "folder, file or name"` in a Gin file binds all of it.

    Attributes:
      path: a run folder, a Hugging Face folder or a .gguf file.
      model: its configuration.
      vocabulary: its tokenizer, which must have the tokens of the run's; None: it is not compared.
    """

    path: FilePath
    model: TransformerConfig
    vocabulary: Vocabulary | None = None

    def __post_init__(self) -> None:
        if not self.path.strip():
            raise UserError("Teacher.path is empty, must be a folder or a file: try TEACHER = 'runs/large'")
        if self.model.head is Head.SCORE:
            raise UserError(
                f"Teacher.model has the head 'score', of a reward model: name a language model ({self.path})"
            )
        if self.model.lora is not None:
            raise UserError("Teacher.model.lora is set, and a teacher's adapters are merged: set it to None")


def make_teacher(
    model: Model,
    plan: Plan,
    mesh: Mesh,
    batch_sharding: NamedSharding,
    *,
    vocab_size: int,
    temperature: float,
    top_k: int | None,
) -> Callable[[Params, Batch], dict[str, jax.Array]]:
    """Makes a jitted function (params, batch) -> the arrays of batches that a teacher makes.

    `teacher_log_p` [B, T, V or K] float32 and, with `top_k`, `teacher_ids` [B, T, K] int32; sharded by rows.

    Args:
      model, plan, mesh: the teacher, and the mesh of the run.
      batch_sharding: of the run.
      vocab_size: ids that the student has, too.
      temperature, top_k: as in `Distillation`.
    """

    def teacher(params: Params, batch: Batch) -> dict[str, jax.Array]:
        with sharding.activate(mesh, plan.rules, plan.pipeline(mesh)):
            batch = sharding.balanced(batch)
            hidden_BTD, _ = model.hidden(params, batch)
            head, size = model.head(params), block_length(hidden_BTD.shape[1])
            of_block = lambda hidden: log_probs_of(logits_of(hidden, head, model, vocab_size), temperature, top_k)  # noqa: E731
            outputs = jax.lax.map(of_block, blocks(hidden_BTD, size))
        joined = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(len(hidden_BTD), -1, x.shape[-1]), outputs)
        if "row_positions" in batch:
            joined = jax.tree.map(lambda x: x[:, np.argsort(batch["row_positions"])], joined)
        ids = {} if joined.ids_BTK is None else {"teacher_ids": joined.ids_BTK}
        return {"teacher_log_p": joined.log_p_BTC} | ids

    return jax.jit(teacher, out_shardings=batch_sharding)
