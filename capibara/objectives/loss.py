"""What `Trainer.loss` takes: what a run minimises in place of the cross entropy of its texts."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from capibara.core.types import Params, UserError
from capibara.data.pipeline.loader import Dataset, Loader, make_loader
from capibara.data.sources.sources import DataFormat
from capibara.models.api import Model
from capibara.objectives.base import Objective
from capibara.objectives.batches import BatchProvider, LoaderBatches, RunParts


class ResidentArrays(NamedTuple):
    """Arrays that training holds on the devices beside the state and what its step makes.

    Attributes:
      name: what they are.
      bytes: of all of them.
      spread_as: parameters by which they are spread over the mesh, as (shapes, logical axes); None: each device has all.
    """

    name: str
    bytes: int
    spread_as: tuple[Params, Params] | None = None


class Loss(abc.ABC):
    """Configuration of what a run minimises; a new one on texts gives its `objective` and no more.

    Attributes:
      data_format: of the sources that it can be trained on.
      means: metrics of a step of which a log has the mean over its steps.
    """

    data_format: DataFormat = DataFormat.TEXTS
    means: tuple[str, ...] = ()

    @property
    def rows_of_a_prompt(self) -> int:
        """Rows of a batch that belong together."""
        return 1

    @property
    def later(self) -> tuple[Callable[..., Any], ...]:
        """Functions that Gin names and that are called only in training: what is bound for them is used then."""
        return ()

    def resident_arrays(self, model: Model, dataset: Dataset) -> tuple[ResidentArrays, ...]:
        """What training holds beside the state, between the steps too."""
        del model, dataset
        return ()

    def check(self, dataset: Dataset, batch_size: int) -> None:
        """Raises UserError where a run on this data, in batches of so many rows, cannot be trained so."""
        del batch_size
        if dataset.data_format is not self.data_format:
            name = type(self).__name__
            raise UserError(
                f"Trainer.loss (@{name}()) is for {self.data_format}, and Dataset.source holds {dataset.data_format}: set "
                "another Dataset.source, or leave Trainer.loss out"
            )

    def batch_spec(self, dataset: Dataset, rows: int) -> dict[str, tuple[tuple[int, int], np.dtype]]:
        """Shape and dtype of every array of the step's batch."""
        return dataset.batch_spec(rows)

    def open(
        self, dataset: Dataset, *, split: str, batch_size: int, shard_index: int, shard_count: int, epochs: int | None
    ) -> Loader:
        """A loader of the data; arguments as of `make_loader`."""
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
        """For the train step of a model."""

    def batch_provider(self, run: RunParts) -> BatchProvider:
        """What makes the batches of a run."""
        return LoaderBatches(run, self.objective(run.model, run.dataset))
