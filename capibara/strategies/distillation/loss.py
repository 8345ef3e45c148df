"""Knowledge distillation: trains a student on the next-token distributions of a teacher, on given answers or on its own."""

from __future__ import annotations

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from capibara import sharding
from capibara.config import configurable
from capibara.core import tree
from capibara.core.fields import FilePath
from capibara.core.types import Batch, Params, UserError
from capibara.data.dataset import Dataset, Kind
from capibara.data.packing.packing import Packing
from capibara.data.pipeline.loader import Loader
from capibara.models import api
from capibara.models.api import Model, Stats, TransformerConfig
from capibara.objectives.base import Objective, Totals
from capibara.objectives.batches import RunParts
from capibara.objectives.loss import ResidentArrays
from capibara.sharding import RematPolicy, Rules
from capibara.strategies.distillation.batches import TeacherBatches
from capibara.strategies.distillation.divergence import TeacherLogProbs, block_length, blocks, logits_of, token_terms
from capibara.strategies.distillation.drawing import DrawnAnswers
from capibara.strategies.distillation.stored import StoredLogProbs
from capibara.strategies.distillation.teacher import Teacher


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Distillation(DrawnAnswers):
    """Trains on the divergence from a teacher at each token with loss (Hinton et al. 2015, arXiv:1503.02531).

    Answers are those of the data, the student's own (on-policy: generalised knowledge distillation, Agarwal et al. 2024,
    arXiv:2306.13649) or the teacher's (sequence-level distillation, Kim and Rush 2016, arXiv:1606.07947). The loss of a token is
    (1 - hard_weight) * divergence + hard_weight * cross entropy, and a batch's the mean over its tokens.

    Attributes:
      teacher: the teacher, on the run's mesh; None: `stored` has what it says.
      stored: a folder of `capibara prepare teacher`, which is read in the place of a teacher.
      beta: 0: KL(teacher || student), 1: KL(student || teacher), between them the generalised Jensen-Shannon divergence.
      temperature: divisor of both models' logits. (TRL's GKD uses its temperature for generation alone.)
      top_k: the teacher's tokens that are compared one by one at each position; all others count together as one. None: all
        are compared, in batches of [rows, length, vocabulary] probabilities.
      hard_weight: share of the cross entropy of the targets.
      on_policy, teacher_draws, sampling, engine, where, mesh: as in `DrawnAnswers`.
    """

    teacher: Teacher | None = None
    stored: FilePath | None = None
    beta: float = 0.5
    temperature: float = 1.0
    top_k: int | None = None
    hard_weight: float = 0.0

    means = ("divergence", "nll", "agreement")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("beta", "hard_weight"):
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise UserError(f"Distillation.{name} is {value}, must be from 0 to 1: try 0.5")
        if not 0 < self.temperature < float("inf"):
            raise UserError(f"Distillation.temperature is {self.temperature}, must be finite and above 0: try 1.0")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"Distillation.top_k is {self.top_k}, must be at least 1, or None for all tokens: try 64")
        if (self.teacher is None) == (self.stored is None):
            state = "neither is set" if self.teacher is None else "both are set"
            raise UserError(
                f"Distillation needs exactly one of teacher and stored, and {state}: set TEACHER = 'runs/large', or "
                "Distillation.stored = 'runs/teacher_log_probs'"
            )
        if self.stored is not None and self.top_k is not None:
            raise UserError(
                f"Distillation.top_k is {self.top_k}, and Distillation.stored has the number of its own: leave top_k out"
            )
        if self.stored is not None and self.draws:
            name = "on_policy" if self.on_policy else "teacher_draws"
            raise UserError(
                f"Distillation.{name} is {getattr(self, name)}, and Distillation.stored is of given answers: set TEACHER in "
                f"its place, or leave {name} out"
            )

    @property
    def compared(self) -> int | None:
        """The number of tokens of the teacher that are compared one by one; None: all.

        Raises:
          UserError: there is no such folder of stored probabilities.
        """
        return self.top_k if self.stored is None else StoredLogProbs.read(self.stored).top_k

    def check(self, dataset: Dataset, batch_size: int) -> None:
        super().check(dataset, batch_size)
        if dataset.kind is not Kind.CAUSAL:
            raise UserError(
                f"Trainer.loss is @Distillation(), and Dataset.kind is {str(dataset.kind)!r}: set it to 'causal'"
            )
        if dataset.is_seqio:
            raise UserError(
                "Trainer.loss is @Distillation(), and Dataset.mixture_or_task_name is set, which it does not read: set "
                "Dataset.source"
            )
        if self.stored is not None and dataset.packing is Packing.CONCAT:
            raise UserError(
                "Dataset.packing ('concat') cuts documents, and Distillation.stored is of whole ones: set 'best_fit'"
            )

    def check_model(self, model: TransformerConfig) -> None:
        super().check_model(model)
        if not isinstance(model, api.DecoderConfig):
            raise UserError(
                f"Trainer.loss is @Distillation(), and the model is a {type(model).__name__}: take a decoder"
            )
        if self.teacher is None:
            return
        size, other = model.vocab_size, self.teacher.model.vocab_size
        if self.top_k is None and size != other:
            raise UserError(
                f"{type(model).__name__}.vocab_size is {size} and the teacher's is {other}, so that not all tokens can be "
                "compared: set Distillation.top_k = 64"
            )
        if self.top_k is not None and self.top_k >= min(size, other):
            raise UserError(
                f"Distillation.top_k ({self.top_k}) must be below the vocabulary ({min(size, other)}): set None for all"
            )

    def check_mesh(self, mesh: Mesh, rules: Rules) -> None:
        if self.teacher is None:
            return
        teacher = api.build(self.teacher.model).plain
        try:
            sharding.shardings(mesh, rules, teacher.axes, teacher.abstract_params)
        except UserError as error:
            raise UserError(f"Distillation.teacher: {error}") from None

    def open(
        self, dataset: Dataset, *, split: str, batch_size: int, shard_index: int, shard_count: int, epochs: int | None
    ) -> Loader:
        if self.stored is not None:
            StoredLogProbs.read(self.stored).check(self.stored, dataset, self.temperature)
        if self.teacher is not None and "://" not in self.teacher.path and not os.path.exists(self.teacher.path):
            raise UserError(f"Teacher.path ({self.teacher.path!r}) does not exist: name a folder or a file of a model")
        where = dict(shard_index=shard_index, shard_count=shard_count)
        return super().open(dataset, split=split, batch_size=batch_size, epochs=epochs, **where)

    def vocab_size(self, model: Model) -> int:
        """The number of ids that student and teacher have: either may have rows that stand for no token.

        Raises:
          UserError: what is stored has ids that the model has not.
        """
        size, other = model.config.vocab_size, self._teacher_vocab_size
        if self.stored is not None and size < other:
            raise UserError(
                f"{type(model.config).__name__}.vocab_size is {size}, and Distillation.stored ({self.stored!r}) has {other} ids: "
                "prepare it again with this model"
            )
        return min(size, other)

    @property
    def _teacher_vocab_size(self) -> int:
        if self.teacher is not None:
            return self.teacher.model.vocab_size
        assert self.stored is not None, "one of both is set"
        return StoredLogProbs.read(self.stored).vocab_size

    def batch_spec(self, dataset: Dataset, rows: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """With `teacher_log_p`, and `teacher_ids` where not all tokens are compared."""
        spec, compared = dataset.batch_spec(rows), self.compared
        count = self._teacher_vocab_size if compared is None else compared
        ids = {} if compared is None else {"teacher_ids": ((rows, dataset.length, compared), np.dtype(np.int32))}
        return spec | {"teacher_log_p": ((rows, dataset.length, count), np.dtype(np.float32))} | ids

    def resident_arrays(self, model: Model, dataset: Dataset) -> tuple[ResidentArrays, ...]:
        """The teacher, and engines with their copies of parameters."""
        arrays = [*self.engine_arrays(model, dataset)] if self.on_policy else []
        if self.teacher is not None:
            teacher = api.build(self.teacher.model)
            shapes = (teacher.abstract_params, teacher.axes)
            arrays.append(ResidentArrays("teacher", tree.byte_count(teacher.abstract_params), shapes))
            arrays += self.engine_arrays(teacher, dataset) if self.teacher_draws else ()
        return tuple(arrays)

    def objective(self, model: Model, dataset: Dataset) -> Objective:
        del dataset
        self.vocab_size(model)  # raises before anything is compiled

        def sums(
            params: Params, batch: Batch, remat: RematPolicy | None, step: jax.Array | None
        ) -> tuple[jax.Array, Totals, Stats]:
            batch = sharding.balanced(batch)
            options = () if remat is None else (remat, step)
            hidden_BTD, stats = model.hidden(params, batch, *options)
            with jax.named_scope("loss"):
                loss, totals = self.totals(model, hidden_BTD, model.head(params), batch)
            return loss + model.layer_loss(stats), jax.lax.stop_gradient(totals), stats

        return Objective(sums, Totals.means)

    def totals(self, model: Model, hidden_BTD: jax.Array, head_VD: jax.Array, batch: Batch) -> tuple[jax.Array, Totals]:
        """The loss as a sum over tokens, and the metrics' sums.

        Args:
          model: the student.
          hidden_BTD, head_VD: its final hidden states and output projection.
          batch: with `teacher_log_p`, and `teacher_ids` where some tokens are compared.
        """
        size, vocab_size = block_length(hidden_BTD.shape[1]), self.vocab_size(model)

        @jax.checkpoint
        def of_block(total: dict[str, jax.Array], block: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], None]:
            logits_BtV = logits_of(block["hidden"], head_VD, model, vocab_size)
            teacher = TeacherLogProbs(block["teacher_log_p"], block.get("teacher_ids"))
            terms = token_terms(logits_BtV, block["targets"], teacher, self.temperature, self.beta)
            values = terms._asdict()
            values["loss"] = (1 - self.hard_weight) * terms.divergence
            values["loss"] += self.hard_weight * terms.nll if self.hard_weight else 0.0
            sums = {name: jnp.sum(value * block["weights"]) for name, value in values.items()}
            return jax.tree.map(jnp.add, total, sums), None

        names = ("targets", "weights", "teacher_log_p", "teacher_ids")
        of_all = {name: blocks(batch[name], size) for name in names if name in batch}
        zeros = dict.fromkeys(("loss", *self.means), jnp.zeros((), jnp.float32))
        totals, _ = jax.lax.scan(of_block, zeros, of_all | {"hidden": blocks(hidden_BTD, size)})
        tokens = jnp.sum(batch["weights"])
        return totals["loss"], Totals(totals, tokens, tokens)

    def batch_provider(self, run: RunParts) -> TeacherBatches:
        return TeacherBatches(run, self, self.objective(run.model, run.dataset))
