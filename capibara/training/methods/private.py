"""Differential privacy of a run's documents (`Trainer.privacy`): DP-SGD, until the budget is spent."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from capibara.consensus.privacy import Privacy
from capibara.core.types import Batch, Params, UserError
from capibara.data.packing.packing import Packing
from capibara.objectives.base import Metrics, Normalization
from capibara.training.base.gradient import Gradient
from capibara.training.base.options import InitWith, RunOptions
from capibara.training.base.state import Step, TrainState
from capibara.training.methods.hooks import Hooks
from capibara.training.methods.method import Method, StepParts
from capibara.training.privacy.gradient import NOISE_KEY, key_sharding, make_private_gradient, noise_key
from capibara.training.privacy.ledger import Ledger
from capibara.training.stability.anomalies import OnSpike


@dataclasses.dataclass(frozen=True)
class Private(Method):
    """Clips the gradient of each document and adds noise to their mean.

    Attributes:
      privacy: what is promised.
    """

    field: ClassVar[str] = "privacy"

    privacy: Privacy

    @property
    def configured(self) -> object:
        return self.privacy

    def unsupported(self, options: RunOptions) -> Mapping[str, bool]:
        return {
            "Dataset.mixture_or_task_name": options.dataset.is_seqio,
            "Trainer.loss": options.loss is not None,
            "Trainer.loss_normalization": options.loss_normalization is not Normalization.TOKENS,
            "Trainer.init_with = 'state'": options.init_with is InitWith.STATE,
            "Anomalies.on_spike": options.anomalies.on_spike is not OnSpike.OFF,
            "Evaluation.unigram_batches": bool(options.evaluation.unigram_batches),
            f"{type(options.model).__name__}.dtype = 'float16'": options.model.dtype == "float16",
            "Plan.accumulation": options.plan.micro_batches != 1,
            "Plan.stage": options.plan.axes["stage"] != 1,
        }

    def check(self, options: RunOptions) -> None:
        if options.dataset.packing is not Packing.NONE:
            raise UserError(
                f"Dataset.packing is {str(options.dataset.packing)!r}, must be 'none' with Trainer.privacy, which clips the "
                "gradient of each document: set Dataset.packing = 'none'"
            )
        super().check(options)

    def gradient(self, parts: StepParts) -> Gradient:
        return make_private_gradient(parts.objective, parts.plan, parts.mesh, self.privacy)

    def step(self, parts: StepParts, update: Step) -> Step:
        del parts

        def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            new, metrics = update(state, batch)
            # After the decision to skip the update, which must not tell of one document.
            is_broken = (metrics["broken_rows"] > 0) & (metrics["tokens"] == 0)
            return new, metrics | {"loss": jnp.where(is_broken, jnp.nan, metrics["loss"])}

        return step

    def loader_options(self) -> dict[str, Any]:
        promised = {"clip_norm": self.privacy.clip_norm, "noise_multiplier": self.privacy.noise_multiplier}
        return {"privacy": promised}

    def batch_spec(self, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
        return {NOISE_KEY: jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=key_sharding(mesh))}

    @property
    def unplanned(self) -> str | None:
        return (
            "Trainer.privacy is set, and a search does not know what the gradients of single documents need: set the axes of the "
            "mesh (Plan.fsdp, ...) and ask `capibara prove`"
        )

    def hooks(self, options: RunOptions, trained: Params, status: Callable[[str], None]) -> Hooks:
        ledger = Ledger.of(self.privacy, options.dataset, options.plan.batch_size)
        for line in ledger.remarks(options.steps, sum(x.size for x in jax.tree.leaves(trained))):
            status(line)
        return _PrivateHooks(options, ledger)


class _PrivateHooks(Hooks):
    """Ends the run with its budget, and says what is spent."""

    def __init__(self, options: RunOptions, ledger: Ledger):
        super().__init__(options)
        self._ledger = ledger

    @property
    def last_step(self) -> int:
        return min(self.options.steps, self._ledger.last_step)

    @property
    def reason(self) -> str:
        return "privacy_budget" if self.last_step < self.options.steps else super().reason

    def check_resumed(self, step: int) -> None:
        self._ledger.check_resumed(step)

    def ended(self, step: int) -> str:
        if self.last_step < self.options.steps:
            return f"the privacy budget is spent at step {step}: raise Privacy.budget to continue"
        return super().ended(step)

    def closing(self, step: int) -> str | None:
        return self._ledger.line(step)

    def constants(self, mesh: Mesh) -> dict[str, jax.Array]:
        return {NOISE_KEY: noise_key(mesh)}

    def metrics(self, step: int) -> dict[str, float]:
        return self._ledger.metrics(step)
