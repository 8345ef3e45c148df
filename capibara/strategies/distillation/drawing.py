"""Which answers a distillation draws, and the memory that drawing takes."""

from __future__ import annotations

import dataclasses

from capibara.core.types import UserError
from capibara.data.dataset import Dataset
from capibara.data.packing.packing import Packing
from capibara.inference.engine.engine import EngineConfig
from capibara.inference.engine.placement import footprint
from capibara.inference.engine.placement.own_chips import Where
from capibara.inference.engine.placement.serving_mesh import ServingMesh
from capibara.inference.sampling.sampling import Sampling
from capibara.models.api import Model
from capibara.objectives.loss import Loss, ResidentArrays


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawnAnswers(Loss):
    """A loss on the answers of the data, or on answers that are drawn in their place.

    Attributes:
      on_policy: share of batches whose answers the student draws, lambda in Agarwal et al. 2024.
      teacher_draws: whether the teacher draws the answers of the other batches.
      sampling: sampling options of drawn answers; its seed is ignored.
      engine, where, mesh: as in `Grpo`, of drawn answers.
    """

    on_policy: float = 0.0
    teacher_draws: bool = False
    sampling: Sampling = Sampling(max_new_tokens=256, temperature=1.0)
    engine: EngineConfig = EngineConfig(slots=16)
    where: Where = Where.AUTO
    mesh: ServingMesh = ServingMesh()

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not 0 <= self.on_policy <= 1:
            raise UserError(f"{name}.on_policy is {self.on_policy}, must be from 0 to 1: try 0.5")
        if not self.draws:
            return
        if not self.sampling.temperature > 0:
            raise UserError(f"{name}'s Sampling.temperature is {self.sampling.temperature}, must be above 0: try 1.0")
        if self.sampling.beams is not None or self.sampling.num_decodes > 1:
            field = "num_decodes" if self.sampling.beams is None else "beams"
            raise UserError(f"{name}'s Sampling.{field} is set, but it trains on one sampled answer: leave it out")

    @property
    def draws(self) -> bool:
        """Whether answers of some batches are drawn."""
        return self.on_policy > 0 or self.teacher_draws

    def check(self, dataset: Dataset, batch_size: int) -> None:
        super().check(dataset, batch_size)
        name = type(self).__name__
        if self.draws and dataset.packing is not Packing.NONE:
            raise UserError(
                f"Dataset.packing ({str(dataset.packing)!r}) must be 'none' where answers are drawn ({name}.on_policy, "
                "teacher_draws): set it to that"
            )
        if self.draws and self.sampling.max_new_tokens >= dataset.length:
            raise UserError(
                f"Dataset.length ({dataset.length}) leaves prompts no room beside Sampling.max_new_tokens "
                f"({self.sampling.max_new_tokens}): try {2 * self.sampling.max_new_tokens}"
            )

    def engine_arrays(self, model: Model, dataset: Dataset) -> tuple[ResidentArrays, ...]:
        """The engine of a model that draws, with its copy of the parameters."""
        spread_as = None if self.where is Where.OWN else (model.plain.abstract_params, model.plain.axes)
        size = footprint.parameters_bytes(model) // (self.mesh.tensor or 1)
        return (
            ResidentArrays("engine's parameters", size, spread_as),
            ResidentArrays("engine's keys and values", footprint.state_bytes(model, self.engine, dataset.length)),
        )
