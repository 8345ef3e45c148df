"""What a run minimises: the cross entropy of its texts, or what `Trainer.loss` names in its place."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import enum
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from capibara import sharding
from capibara.core.types import Batch, Params
from capibara.data.pipeline.loader import Dataset, Loader, make_loader
from capibara.kernels.cross_entropy import LossSums, cross_entropy, token_log_probabilities
from capibara.models.api import Model, Stats
from capibara.sharding import Plan, RematPolicy

Metrics = dict[str, jax.Array]


class Normalization(enum.StrEnum):
    """What a sum of losses, and so the gradient, is divided by.

    tokens: the real targets' weights, so that each token weighs the same wherever it lies (T5X: NUM_REAL_TARGET_TOKENS).
    places: all places of the batch, padding too (T5X: NUM_TOTAL_TARGET_TOKENS).
    documents: each document's loss by its own tokens, and the sum of these by how many they are (T5X:
      AVERAGE_PER_SEQUENCE).
    sum: nothing (T5X: None).
    """

    TOKENS = "tokens"
    PLACES = "places"
    DOCUMENTS = "documents"
    SUM = "sum"


class Objective(NamedTuple):
    """What the train step differentiates, and what it tells.

    Attributes:
      sums: (params, batch, remat, step) -> the loss as a sum over what a batch holds; sums without gradient that have a
        `weight`, by which the gradient is divided; the layers' statistics.
      metrics: (these sums, added up over micro-batches; their weight, at least 1) -> metrics, `loss` and `tokens` among
        them.
      divisor: (their weight, at least 1; the batch) -> what the gradient is divided by; None: the weight.
    """

    sums: Callable[..., tuple[jax.Array, Any, Stats]]
    metrics: Callable[[Any, jax.Array], Metrics]
    divisor: Callable[[jax.Array, Batch], jax.Array | float] | None = None


class Totals(NamedTuple):
    """Sums over a batch, float32 scalars.

    Attributes:
      values: of each metric, weighted as the loss is.
      weight: pairs or answers.
      tokens: of the answers.
    """

    values: dict[str, jax.Array]
    weight: jax.Array
    tokens: jax.Array

    def means(self, weight: jax.Array) -> Metrics:
        """The metrics of what the sums are over, and how many tokens that was."""
        return {name: value / weight for name, value in self.values.items()} | {"tokens": self.tokens}


class Held(NamedTuple):
    """Arrays that training holds on the devices beside the state and what its step makes.

    Attributes:
      name: what they are.
      bytes: of all of them.
      spread_as: parameters by which they are spread over the mesh, as (shapes, logical axes); None: each device has all.
    """

    name: str
    bytes: int
    spread_as: tuple[Params, Params] | None = None


class Check(Protocol):
    """Whether a run is to stop in the middle of what takes long."""

    def __call__(self, done: int, every: int = 1) -> None:
        """As StopRequest.check: after `done` parts, asked of all hosts every so many; raises Interrupted."""
        ...


@dataclasses.dataclass(frozen=True)
class Reporter:
    """Where work that takes longer than a step says how far it is, and asks whether the run is to stop.

    Attributes:
      check: called before each part of the work, alike on every process.
      progress: shows how far it is; "": it is over.
      status: says what is worth a line of its own.
      took: notes seconds that no step has, by what took them.
    """

    check: Check
    progress: Callable[[str], None]
    status: Callable[[str], None]
    took: Callable[[str, float], None]


@dataclasses.dataclass(frozen=True)
class RunParts:
    """What a loss may use of a run to make its batches.

    Attributes:
      model_dir, seed, init_from: of the run.
      model, dataset, plan, mesh: of the run.
      batch_sharding: of every array of a batch.
      batches: the training split, as the run reads it.
      step_temp_bytes: of a device, what the train step takes beside its arguments.
      evaluates: whether the run has evaluations.
      open_once: (data, split, rows) -> this process's share of a split, read once in global batches of so many rows.
      validation: opens the batches of one evaluation; each of them is reported.
      initial_params: makes the parameters that the run began from again, of adapters those without effect.
      reporter: of the loop.
    """

    model_dir: str
    seed: int
    init_from: str | None
    model: Model
    dataset: Dataset
    plan: Plan
    mesh: Mesh
    batch_sharding: NamedSharding
    batches: Loader
    step_temp_bytes: int
    evaluates: bool
    open_once: Callable[[Dataset, str, int], Loader]
    validation: Callable[[], contextlib.AbstractContextManager[Iterator[Batch]]]
    initial_params: Callable[[], Params]
    reporter: Reporter


class Supply(abc.ABC):
    """What stands between the loader of a run and its steps, where batches take more than the data."""

    @abc.abstractmethod
    def begin(self, params: Params, step: int, saved: Mapping[str, Any] | None) -> None:
        """Before the first step of this start, and after the run went back.

        Args:
          params: of the state at hand.
          step: steps done.
          saved: what `state` gave for the checkpoint that the run resumes from; None: a new run.
        """

    @abc.abstractmethod
    def next_batch(self, step: int, params: Params) -> dict[str, jax.Array]:
        """The batch of a step, on its devices.

        Args:
          step: its number; that of the first is 1.
          params: that it is made with.
        """

    @abc.abstractmethod
    def evaluate(self, params: Params) -> dict[str, float]:
        """Metrics of the validation split, `loss` among them."""

    @abc.abstractmethod
    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, JSON-able; alike on all processes."""

    def takes_long(self, step: int) -> bool:
        """Whether the batch of a step is made by the devices, which is time of its own."""
        del step
        return False

    def metrics(self) -> dict[str, float]:
        """What there is to tell of the batches since this was last asked."""
        return {}


class Loss(abc.ABC):
    """Configuration of what a run minimises.

    Attributes:
      means: metrics of a step of which a log has the mean over its steps.
    """

    means: tuple[str, ...] = ()

    @property
    def rows_of_a_prompt(self) -> int:
        """Rows of a batch that belong together."""
        return 1

    @property
    def later(self) -> tuple[Callable[..., Any], ...]:
        """Functions that Gin names and that are called only in training: what is bound for them is used then."""
        return ()

    def held(self, model: Model, dataset: Dataset) -> tuple[Held, ...]:
        """What training holds beside the state, between the steps too."""
        del model, dataset
        return ()

    @abc.abstractmethod
    def check(self, dataset: Dataset, batch_size: int) -> None:
        """Raises UserError where a run on this data, in batches of so many rows, cannot be trained so."""

    @abc.abstractmethod
    def batch_spec(self, dataset: Dataset, rows: int) -> dict[str, tuple[tuple[int, int], np.dtype]]:
        """Shape and dtype of every array of the step's batch."""

    def open(self, dataset: Dataset, **options: Any) -> Loader:
        """A loader of the data; `options` are those of `make_loader`."""
        return make_loader(dataset, **options)

    @abc.abstractmethod
    def objective(self, model: Model, dataset: Dataset) -> Objective:
        """For the train step of a model."""

    @abc.abstractmethod
    def supply(self, run: RunParts) -> Supply:
        """What makes the batches of a run."""


def of_cross_entropy(
    model: Model,
    z_loss: float,
    label_smoothing: float = 0.0,
    normalization: Normalization | float = Normalization.TOKENS,
) -> Objective:
    """The cross entropy of the targets, and how experts are balanced.

    Args:
      model: gives hidden states and head.
      z_loss: coefficient of the squared log normaliser.
      label_smoothing: share of a target's probability that goes to the other ids.
      normalization: what the sum over the batch is divided by, or a number.
    """
    by_documents = normalization is Normalization.DOCUMENTS

    def sums(params: Params, batch: Batch, remat: RematPolicy, step: jax.Array):
        tokens = jnp.sum(batch["weights"]) if by_documents else None
        if by_documents:
            batch = dict(batch) | {"weights": of_documents(batch["weights"], batch["segment_ids"])}
        batch = sharding.balanced(batch)
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
        return loss + model.layer_loss(stats), sums._replace(tokens=tokens), stats

    def metrics(sums: LossSums, weight: jax.Array) -> Metrics:
        smoothed = {} if sums.smoothing is None else {"smoothed_loss": (sums.nll + sums.smoothing) / weight}
        return smoothed | {
            "loss": sums.nll / weight,
            "z_loss": z_loss * sums.z / weight,
            "token_accuracy": sums.correct / weight,
            "tokens": sums.weight if sums.tokens is None else sums.tokens,
        }

    def divisor(weight: jax.Array, batch: Batch) -> jax.Array | float:
        match normalization:
            case Normalization.TOKENS | Normalization.DOCUMENTS:
                return weight
            case Normalization.PLACES:
                return float(math.prod(batch["targets"].shape))
            case Normalization.SUM:
                return 1.0
            case _:
                return normalization

    return Objective(sums, metrics, divisor)


def of_documents(weights_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """Weights whose sum over each document is 1, in the shares that they had; of one without any they are 0."""
    T = weights_BT.shape[1]
    total = lambda weights, segments: jax.ops.segment_sum(weights, segments, num_segments=T + 1)[segments]  # noqa: E731
    total_BT = jax.vmap(total)(weights_BT, segment_ids_BT)
    return jnp.where(weights_BT > 0, weights_BT / jnp.maximum(total_BT, 1e-30), 0.0)


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
      model: gives hidden states and head.
      params: its parameters.
      batch: what it reads and predicts.
      remat, step: of training, else None.
      temperature, usable: of the distribution that the targets are of, as for `token_log_probabilities`.
    """
    options = () if remat is None else (remat, step)
    hidden, stats = model.hidden(params, batch, *options)
    with jax.named_scope("loss"):
        cap = model.config.logit_soft_cap
        found = token_log_probabilities(
            hidden, model.head(params), batch["targets"], soft_cap=cap, temperature=temperature, usable=usable,
            trains_head=model.trains_head,
        )  # fmt: skip
    return found, stats
