"""The interface of objectives, and the default one: the cross entropy of texts."""

from __future__ import annotations

import enum
import functools
import math
import sys
from collections.abc import Callable
from typing import NamedTuple, TypedDict

import jax
import jax.numpy as jnp

from capibara import sharding
from capibara.core.fields import short
from capibara.core.types import Batch, Params, PyTree, UserError
from capibara.kernels.cross_entropy.dispatch import cross_entropy, token_log_probabilities
from capibara.kernels.cross_entropy.terms import LossSums
from capibara.models.api import Model, Stats
from capibara.objectives import mtp
from capibara.sharding import RematPolicy

Metrics = dict[str, jax.Array]


class Normalization(enum.StrEnum):
    """The divisor of the summed loss, and so of the gradient.

    tokens: the sum of the targets' weights, so that every token counts the same (T5X: NUM_REAL_TARGET_TOKENS).
    positions: the number of target positions of the batch, padding included (T5X: NUM_TOTAL_TARGET_TOKENS).
    documents: each document's loss is divided by its tokens, and their sum by the number of documents (T5X:
      AVERAGE_PER_SEQUENCE).
    sum: none (T5X: None).
    """

    TOKENS = "tokens"
    POSITIONS = "positions"
    DOCUMENTS = "documents"
    SUM = "sum"

    @classmethod
    def _missing_(cls, value: object) -> Normalization | None:
        if value != "places":
            return None
        line = 'note: the loss normalization "places" is now "positions": the next version does not know the old name'
        print(line, file=sys.stderr)
        return cls.POSITIONS


class Objective(NamedTuple):
    """The function that the train step differentiates, and its metrics.

    Attributes:
      sums: (params, batch, remat, step) -> (the loss summed over the batch; sums for metrics, without gradient, with a
        field `weight`, the divisor of the gradient; the layers' statistics).
      metrics: (these sums, added over micro-batches; their weight, at least 1) -> metrics, including `loss` and `tokens`.
      divisor: (their weight, at least 1; the batch) -> the divisor of the gradient; None: the weight.
    """

    sums: Callable[..., tuple[jax.Array, PyTree, Stats]]
    metrics: Callable[[PyTree, jax.Array], Metrics]
    divisor: Callable[[jax.Array, Batch], jax.Array | float] | None = None

    def checked_sums(
        self, params: Params, batch: Batch, remat: RematPolicy, step: jax.Array | None
    ) -> tuple[jax.Array, PyTree, Stats]:
        """What `sums` returns; raises UserError if that is something else."""
        result = self.sums(params, batch, remat, step)
        if (
            isinstance(result, tuple)
            and len(result) == 3
            and jnp.shape(result[0]) == ()
            and hasattr(result[1], "weight")
        ):
            return result
        shapes = jax.tree.map(jnp.shape, result)
        raise UserError(
            f"the objective's sums are {short(shapes)} (shapes), must be three: the loss, a scalar; Totals; the layers' "
            "statistics: see examples/extend/my_loss.py"
        )

    def checked_metrics(self, sums: PyTree, weight: jax.Array) -> Metrics:
        """What `metrics` returns; raises UserError if `loss` or `tokens` is missing."""
        result = self.metrics(sums, weight)
        if missing := [name for name in ("loss", "tokens") if name not in result]:
            raise UserError(
                f"the objective's metrics are {', '.join(result)}, and {' and '.join(missing)} must be among them: see "
                "examples/extend/my_loss.py"
            )
        return result


class Totals(NamedTuple):
    """Sums over a batch, float32 scalars.

    Attributes:
      values: of each metric, with the weights of the loss.
      weight: number of pairs or answers.
      tokens: number of tokens of the answers.
    """

    values: dict[str, jax.Array]
    weight: jax.Array
    tokens: jax.Array

    def means(self, weight: jax.Array) -> Metrics:
        """The means of the metrics, and the number of tokens."""
        return {name: value / weight for name, value in self.values.items()} | {"tokens": self.tokens}


def of_cross_entropy(
    model: Model,
    z_loss: float,
    label_smoothing: float = 0.0,
    normalization: Normalization | float = Normalization.TOKENS,
) -> Objective:
    """The cross entropy of the targets, plus the balancing loss of experts.

    Args:
      model: the model.
      z_loss: coefficient of the squared log normaliser.
      label_smoothing: fraction of a target's probability that is spread over the other ids.
      normalization: the divisor of the sum over the batch, or a number.
    """
    by_documents = normalization is Normalization.DOCUMENTS

    def sums(params: Params, batch: Batch, remat: RematPolicy, step: jax.Array) -> tuple[jax.Array, LossSums, Stats]:
        tokens = jnp.sum(batch["weights"]) if by_documents else None
        if by_documents:
            batch = dict(batch) | {"weights": of_documents(batch["weights"], batch["segment_ids"])}
        batch = sharding.balanced(mtp.with_next_tokens(batch, model))
        hidden, stats = model.hidden(params, batch, remat, step)
        with jax.named_scope("loss"):
            loss, sums = cross_entropy(
                hidden,
                model.head(params),
                batch["targets"],
                batch["weights"],
                z_loss=z_loss,
                label_smoothing=label_smoothing,
                soft_cap=model.config.logit_soft_cap,
                trains_head=model.trains_head,
            )
        ahead, sums_ahead = mtp.loss(model, params, hidden, batch, remat, step)
        sums = sums._replace(tokens=tokens, ahead=sums_ahead)
        return loss + ahead + model.layer_loss(stats), sums, stats

    def metrics(sums: LossSums, weight: jax.Array) -> Metrics:
        smoothed = {} if sums.smoothing is None else {"smoothed_loss": (sums.nll + sums.smoothing) / weight}
        return (
            smoothed
            | mtp.metrics(sums)
            | {
                "loss": sums.nll / weight,
                "z_loss": z_loss * sums.z / weight,
                "token_accuracy": sums.correct / weight,
                "tokens": sums.weight if sums.tokens is None else sums.tokens,
            }
        )

    return Objective(sums, metrics, functools.partial(_divisor, normalization))


def _divisor(normalization: Normalization | float, weight: jax.Array, batch: Batch) -> jax.Array | float:
    match normalization:
        case Normalization.TOKENS | Normalization.DOCUMENTS:
            return weight
        case Normalization.POSITIONS:
            return float(math.prod(batch["targets"].shape))
        case Normalization.SUM:
            return 1.0
        case _:
            return normalization


def of_documents(weights_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """Normalises the weights of each document to a sum of 1; those of a document without weights stay 0."""
    T = weights_BT.shape[1]
    total = lambda weights, segments: jax.ops.segment_sum(weights, segments, num_segments=T + 1)[segments]  # noqa: E731
    total_BT = jax.vmap(total)(weights_BT, segment_ids_BT)
    return jnp.where(weights_BT > 0, weights_BT / jnp.maximum(total_BT, 1e-30), 0.0)


class DrawnFrom(TypedDict):
    """The distribution from which tokens are sampled.

    Attributes:
      temperature: divisor of the logits.
      usable: ids that can be sampled; None: all.
    """

    temperature: float
    usable: int | None


def log_probabilities(
    model: Model,
    params: Params,
    batch: Batch,
    remat: RematPolicy | None = None,
    step: jax.Array | None = None,
    *,
    temperature: float = 1.0,
    usable: int | None = None,
) -> tuple[jax.Array, Stats]:
    """Log-probability of every target of a `sharding.balanced` batch, float32 [B, T], and the layers' statistics.

    Args:
      model: the model.
      params: its parameters.
      batch: inputs and targets.
      remat, step: during training, otherwise None.
      temperature, usable: the distribution of the targets, as in `token_log_probabilities`.
    """
    options = () if remat is None else (remat, step)
    hidden, stats = model.hidden(params, batch, *options)
    return log_probabilities_of(model, params, hidden, batch, temperature=temperature, usable=usable), stats


def log_probabilities_of(
    model: Model,
    params: Params,
    hidden: jax.Array,
    batch: Batch,
    *,
    temperature: float = 1.0,
    usable: int | None = None,
) -> jax.Array:
    """Log-probability of every target, as `log_probabilities`, of final hidden states [B, T, D]."""
    with jax.named_scope("loss"):
        cap = model.config.logit_soft_cap
        return token_log_probabilities(
            hidden, model.head(params), batch["targets"], soft_cap=cap, temperature=temperature, usable=usable,
            trains_head=model.trains_head,
        )  # fmt: skip


def values_of(model: Model, params: Params, hidden: jax.Array) -> jax.Array:
    """Values [B, T] in float32 of final hidden states [B, T, D], by a model's value head."""
    D = model.config.embed_dim  # a head with a bias has a column of ones behind them
    return jnp.einsum("btd,d->bt", hidden[..., :D], params["critic"], preferred_element_type=jnp.float32)
