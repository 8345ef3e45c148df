"""The interface of `Trainer.loss`: configurations of objectives other than the cross entropy of texts."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, NamedTuple, Self, TypedDict

import numpy as np
from jax.sharding import Mesh

from capibara.core.fields import returned
from capibara.core.types import ParamAxes, Params, UserError
from capibara.data.pipeline.loader import Dataset, Loader, make_loader
from capibara.data.sources.sources import DataFormat
from capibara.models.api import Head, Model, TransformerConfig
from capibara.objectives.base import Normalization, Objective
from capibara.objectives.batches import BatchProvider, LoaderBatches, RunParts
from capibara.sharding import Rules

_SOURCES = {
    DataFormat.PREFERENCES: "@PreferenceJsonlSource()",
    DataFormat.UNPAIRED: "@UnpairedJsonlSource()",
    DataFormat.PROMPTS: "@PromptJsonlSource()",
    DataFormat.STEPS: "@StepsJsonlSource()",
}


class ResidentArrays(NamedTuple):
    """Arrays that training keeps on the devices beside the train state and the memory of the step.

    Attributes:
      name: their name in reports.
      bytes: their total size.
      spread_as: (shapes, logical axes) of parameters whose shardings they have; None: replicated on each device.
    """

    name: str
    bytes: int
    spread_as: tuple[Params, ParamAxes] | None = None


class Rollout(NamedTuple):
    """How an engine on `rollout_devices` draws the answers of a rollout; an axis of its mesh that is None is not set.

    Attributes:
      answers: of a rollout.
      prompt_tokens, answer_tokens: most tokens of a prompt and of an answer.
      steps: train steps on the answers.
      in_turn: whether drawing and training wait for each other, since no answer may be stale.
      slots, cache_dtype, prefill_tokens: of the engine; "compute" is the dtype of the model's products.
      memory_share: share of a device's free memory that the engine may use.
      tensor, data: mesh axes.
    """

    answers: int
    prompt_tokens: int
    answer_tokens: int
    steps: int
    in_turn: bool
    slots: int
    cache_dtype: str
    prefill_tokens: int
    memory_share: float
    tensor: int | None
    data: int | None


class CrossEntropyOptions(TypedDict):
    """The fields of Trainer that only the cross entropy reads."""

    z_loss: float
    label_smoothing: float
    loss_normalization: Normalization | float


class Loss(abc.ABC):
    """Configuration of an objective; a new one on texts only implements `objective`.

    Attributes:
      data_format: the format of the sources that it supports.
      means: metrics of a step that a log averages over its steps.
      reads_values: whether it reads the values of a model's value head.
      predicts_ahead: whether it has a term for modules that predict further tokens.
      rollout_devices: how many devices of a run draw answers and do not train; -1: the planner's choice.
    """

    data_format: DataFormat = DataFormat.TEXTS
    means: tuple[str, ...] = ()
    reads_values: bool = False
    predicts_ahead: bool = False
    rollout_devices: int = 0

    @property
    def rows_of_a_prompt(self) -> int:
        """The number of rows of a batch for one prompt."""
        return 1

    @property
    def later(self) -> tuple[Callable[..., Any], ...]:
        """Functions in Gin bindings that are only called in training: bindings of their parameters count as used."""
        return ()

    def resident_arrays(self, model: Model, dataset: Dataset) -> tuple[ResidentArrays, ...]:
        """The arrays that training keeps on the devices beside the state, also between steps."""
        del model, dataset
        return ()

    def rollout_arrays(self, model: Model, dataset: Dataset) -> tuple[ResidentArrays, ...]:
        """The arrays on each of `rollout_devices`."""
        del model, dataset
        return ()

    def rollout(self, dataset: Dataset, batch_size: int) -> Rollout | None:
        """How `rollout_devices` draw the answers of a rollout; None: there are none."""
        del dataset, batch_size
        return None

    def with_rollouts(self, devices: int, tensor: int | None, data: int | None) -> Self:
        """The loss with so many `rollout_devices`, and this mesh of their engine."""
        del devices, tensor, data
        return self

    @property
    def unplanned(self) -> str | None:
        """Why a search for a mesh does not know what the loss needs; None: it does."""
        return None

    def check_options(self, options: CrossEntropyOptions, unigram_batches: int) -> None:
        """Raises UserError for options of the cross entropy, and Evaluation.unigram_batches: another loss has none."""
        name = f"Trainer.loss (@{type(self).__name__}())"
        if options["z_loss"]:
            raise UserError(f"Trainer.z_loss is {options['z_loss']}, and {name} has none: leave it out")
        if options["label_smoothing"]:
            raise UserError(f"Trainer.label_smoothing is of the cross entropy, not of {name}: leave it out")
        if options["loss_normalization"] is not Normalization.TOKENS:
            raise UserError(f"Trainer.loss_normalization is of the cross entropy, not of {name}: leave it out")
        if unigram_batches:
            raise UserError(
                f"Evaluation.unigram_batches is {unigram_batches}, and there are no bits per byte with {name}: leave it out"
            )

    def check(self, dataset: Dataset, batch_size: int) -> None:
        """Raises UserError if the loss does not support this data or batch size."""
        del batch_size
        if dataset.data_format is not self.data_format:
            source = _SOURCES.get(self.data_format, "another source")
            raise UserError(
                f"Trainer.loss (@{type(self).__name__}()) is for {self.data_format}, and Dataset.source holds "
                f"{dataset.data_format}: set Dataset.source = {source}, or leave Trainer.loss out"
            )

    def check_model(self, model: TransformerConfig) -> None:
        """Raises UserError if the loss does not support this model."""
        if model.value_head and not self.reads_values:
            name, loss = type(model).__name__, type(self).__name__
            raise UserError(
                f"{name}.value_head is True, which only @Ppo() reads, and Trainer.loss is {loss}: set {name}.value_head = False"
            )
        if model.trains_mtp and not self.predicts_ahead:
            raise UserError(
                f"{type(model).__name__}.mtp has Mtp.loss_weight above 0, and Trainer.loss (@{type(self).__name__}()) has no "
                "multi-token prediction: set Mtp.loss_weight = 0, which freezes its modules"
            )
        if model.head is Head.SCORE:
            name, loss = type(model).__name__, type(self).__name__
            raise UserError(
                f"{name}.head is 'score', of a reward model, and Trainer.loss is {loss}: set Trainer.loss = @Reward(), or "
                f"{name}.head = 'tied' or 'separate'"
            )

    def training_devices(self, count: int) -> int:
        """How many of `count` devices of a run train: the first ones; raises UserError if none is left."""
        return count

    def check_mesh(self, mesh: Mesh, rules: Rules) -> None:
        """Raises UserError if the loss does not run on this mesh."""
        del mesh, rules

    def batch_spec(self, dataset: Dataset, rows: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Shape and dtype of every array of the step's batch."""
        return dataset.batch_spec(rows)

    def open(
        self, dataset: Dataset, *, split: str, batch_size: int, shard_index: int, shard_count: int, epochs: int | None
    ) -> Loader:
        """Opens a loader of the data; arguments as in `make_loader`."""
        return make_loader(
            dataset,
            split=split,
            batch_size=batch_size,
            shard_index=shard_index,
            shard_count=shard_count,
            epochs=epochs,
        )

    @abc.abstractmethod
    def objective(self, model: Model, dataset: Dataset) -> Objective:
        """The objective for the train step of a model."""

    def checked_objective(self, model: Model, dataset: Dataset) -> Objective:
        """What `objective` returns; raises UserError if that is something else."""
        return returned(self.objective(model, dataset), Objective, f"{type(self).__name__}.objective")

    def batch_provider(self, run: RunParts) -> BatchProvider:
        """The batch provider of a run."""
        return LoaderBatches(run, self.checked_objective(run.model, run.dataset))
