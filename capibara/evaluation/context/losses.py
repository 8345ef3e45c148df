"""The loss of a model on the beginnings of long documents, with any scaling of its rotary positions, by one program."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from capibara import sharding
from capibara.core.types import Batch, Params, UserError
from capibara.data.sources.sources import JsonlSource
from capibara.data.text import disk
from capibara.data.text.splits import Use
from capibara.data.tokenizers.vocabulary import Vocabulary
from capibara.evaluation import scoring
from capibara.evaluation.subject import Subject
from capibara.models.api import Model, rope
from capibara.sharding import Plan

_TOKENS = 8192  # of a batch, approximately


def make_row_losses(model: Model, plan: Plan, mesh: Mesh) -> Callable[[Params, Batch, rope.Trial], jax.Array]:
    """A jitted function (params, batch, trial) -> the sum of -ln p of each row's targets, float32 [B]."""

    def losses(params: Params, batch: Batch, trial: rope.Trial) -> jax.Array:
        with sharding.activate(mesh, plan.rules, plan.pipeline(mesh)), rope.tried(trial):
            return -scoring.score(model, params, sharding.balanced(batch))[0]

    return jax.jit(losses)


def read_rows(files: Sequence[str], vocabulary: Vocabulary, length: int, count: int) -> np.ndarray:
    """The first `length` + 1 tokens of the first documents that have that many, int32 [at most count, length + 1].

    Args:
      files: JSON lines with a `text`.
      vocabulary: of the model.
      length: tokens that are predicted.
      count: the largest number of rows.

    Raises:
      UserError: the files cannot be read, or no document is long enough.
    """
    disk.listed("--data", tuple(files), disk.RECORDS, Use.VALIDATION)
    documents = JsonlSource(files=(), validation_files=tuple(files)).open("validation")
    rows: list[Sequence[int]] = []
    longest = 0
    for i in range(len(documents)):
        ids = vocabulary.prompt_ids(documents[i])
        longest = max(longest, len(ids))
        rows += [ids[: length + 1]] if len(ids) > length else []
        if len(rows) == count:
            break
    if not rows:
        raise UserError(
            f"the data ({', '.join(files)}) has no document of {length + 1} tokens, its longest has {longest}: name longer ones, or "
            "set a smaller --length"
        )
    return np.array(rows, np.int32)


class Losses:
    """The mean loss of rows in nats a token.

    Args:
      subject: the model.
    """

    def __init__(self, subject: Subject):
        plan, mesh = subject.trainer.plan, subject.mesh
        self._params, self._placed = subject.params, sharding.batch_sharding(mesh, plan.rules)
        pipeline = plan.pipeline(mesh)
        shards = math.prod(mesh.shape[axis] for axis in sharding.batch_axes(mesh.shape, plan.rules))
        self._unit = shards * (pipeline.microbatches if pipeline else 1)
        self._program = make_row_losses(subject.model, plan, mesh)

    def __call__(self, rows: np.ndarray, factors: Sequence[float], magnitude: float, unscaled_tokens: int) -> float:
        """The loss of rows [N, T + 1] with a scaling; infinity if it is not finite."""
        trial = rope.Trial(
            jnp.asarray(factors, jnp.float32), jnp.float32(magnitude), jnp.asarray(unscaled_tokens, jnp.int32)
        )
        length = rows.shape[1] - 1
        size = self._unit * -(-min(max(_TOKENS // length, 1), len(rows)) // self._unit)
        sums = [
            self._program(self._params, self._batch(rows[start : start + size], size), trial)
            for start in range(0, len(rows), size)
        ]
        total = sum(float(np.sum(jax.device_get(part))) for part in sums)
        return total / (len(rows) * length) if math.isfinite(total) else math.inf

    def _batch(self, rows: np.ndarray, size: int) -> Batch:
        whole = np.zeros((size, rows.shape[1]), np.int32)
        whole[: len(rows)] = rows
        is_row = np.broadcast_to(np.arange(size)[:, None] < len(rows), whole[:, 1:].shape)
        positions = np.broadcast_to(np.arange(rows.shape[1] - 1, dtype=np.int32), is_row.shape)
        batch = {
            "tokens": whole[:, :-1],
            "targets": whole[:, 1:],
            "positions": positions,
            "segment_ids": is_row.astype(np.int32),
            "weights": is_row.astype(np.float32),
        }
        return sharding.global_batch(self._placed, batch)
