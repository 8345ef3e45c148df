"""Trains the gates of a model's key/value heads: which ones must retrieve, and which ones may stream."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from capibara import sharding
from capibara.config import configurable
from capibara.core import tree
from capibara.core.types import Batch, HostBatch, Params, UserError
from capibara.data.dataset import Dataset, Kind
from capibara.models import api
from capibara.models.api import GATES, Model, Stats, TransformerConfig
from capibara.objectives.base import Objective, Totals
from capibara.objectives.batches import LoaderBatches, RunParts
from capibara.objectives.loss import Loss
from capibara.sharding import RematPolicy
from capibara.strategies.duo_attention.passkeys import Passkeys


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class DuoAttention(Loss):
    """Trains the gates of StreamingHeads, and no weights (Xiao et al. 2024, arXiv:2410.10819).

    The data's texts get passkeys and questions about them. The loss of a token of an answer is the mean squared difference of the
    last hidden states to those of the model whose heads all retrieve, plus gate_weight x the mean of all gates.

    Attributes:
      passkeys: of a row.
      passkey_words: words of a passkey.
      shortest: tokens of the shortest row, from which lengths up to Dataset.length are drawn; None: rows are whole.
      gate_weight: of the gates' mean.
    """

    passkeys: int = 10
    passkey_words: int = 32
    shortest: int | None = None
    gate_weight: float = 0.05

    means = ("distance", "retrieval")

    def __post_init__(self) -> None:
        for name, usual in (("passkeys", 10), ("passkey_words", 32)):
            if getattr(self, name) < 1:
                raise UserError(f"DuoAttention.{name} is {getattr(self, name)}, must be at least 1: try {usual}")
        if self.shortest is not None and self.shortest < 1:
            raise UserError(f"DuoAttention.shortest is {self.shortest}, must be at least 1, or None: rows are whole")
        if not 0 <= self.gate_weight < float("inf"):
            raise UserError(f"DuoAttention.gate_weight is {self.gate_weight}, must be finite and at least 0: try 0.05")

    def check(self, dataset: Dataset, batch_size: int) -> None:
        super().check(dataset, batch_size)
        if dataset.kind is not Kind.CAUSAL:
            raise UserError(
                f"Trainer.loss is @DuoAttention(), and Dataset.kind is {str(dataset.kind)!r}: set it to 'causal'"
            )

    def check_model(self, model: TransformerConfig) -> None:
        super().check_model(model)
        if model.has_gates:
            return
        field = f"{type(model).__name__}.streaming"
        if model.streaming is not None:
            raise UserError(
                f"Trainer.loss is @DuoAttention(), whose runs have gates, and {field} is a pattern: open the model that the gates "
                f"were trained for with the pattern, or to train gates set {field} = @StreamingHeads(), and StreamingHeads.heads = None"
            )
        raise UserError(
            f"Trainer.loss is @DuoAttention(), and {field} is None, without gates: set {field} = @StreamingHeads(), and "
            "StreamingHeads.heads = None"
        )

    def objective(self, model: Model, dataset: Dataset) -> Objective:
        self.passkeys_of(dataset, 0).check(dataset.length)  # raises before anything is compiled
        whole = api.without_streaming(model)

        def sums(
            params: Params, batch: Batch, remat: RematPolicy | None, step: jax.Array | None
        ) -> tuple[jax.Array, Totals, Stats]:
            batch = sharding.balanced(batch)
            options = () if remat is None else (remat, step)
            weights = {name: value for name, value in params.items() if name != GATES}
            want_BTD, _ = whole.hidden(jax.lax.stop_gradient(weights), batch, *options)
            got_BTD, stats = model.hidden(params, batch, *options)
            with jax.named_scope("loss"):
                difference_BTD = got_BTD.astype(jnp.float32) - jax.lax.stop_gradient(want_BTD).astype(jnp.float32)
                distance = jnp.sum(jnp.mean(jnp.square(difference_BTD), axis=-1) * batch["weights"])
                tokens = jnp.sum(batch["weights"])
                retrieval = jnp.mean(api.bounded(tree.leaf(params, GATES).astype(jnp.float32))) * tokens
                loss = distance + self.gate_weight * retrieval
            values = {"loss": loss, "distance": distance, "retrieval": retrieval}
            return loss, jax.lax.stop_gradient(Totals(values, tokens, tokens)), stats

        return Objective(sums, Totals.means)

    def passkeys_of(self, dataset: Dataset, seed: int) -> Passkeys:
        """What puts passkeys into the data's texts."""
        return Passkeys(dataset.get_vocabulary(), self.passkeys, self.passkey_words, self.shortest, seed)

    def batch_provider(self, run: RunParts) -> LoaderBatches:
        return PasskeyBatches(run, self.objective(run.model, run.dataset), self.passkeys_of(run.dataset, run.seed))


class PasskeyBatches(LoaderBatches):
    """The loader's batches with passkeys; in evaluations, too.

    Args:
      run, objective: as in LoaderBatches.
      passkeys: what puts them into rows.
    """

    def __init__(self, run: RunParts, objective: Objective, passkeys: Passkeys):
        @contextlib.contextmanager
        def validation() -> Iterator[Iterator[HostBatch]]:
            with run.validation() as batches:
                yield map(passkeys.rows, batches)

        super().__init__(dataclasses.replace(run, validation=validation), objective)
        self._passkeys = passkeys

    def on_host(self, step: int, batch: HostBatch) -> HostBatch:
        del step
        return self._passkeys.rows(batch)
