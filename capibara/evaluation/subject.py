"""What is evaluated: a model on its devices, with what reads, scores and answers for it, each made when it is wanted."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from capibara import config, loading, sharding
from capibara.inference import chat
from capibara.inference.engine import Engine, EngineConfig, check_generates
from capibara.inference.sample import on_one_device
from capibara.evaluation.scoring import Scorer
from capibara.loading import Opened
from capibara.models.api import Model
from capibara.sharding import MESH_AXES, Plan
from capibara.training.trainer import Trainer
from capibara.types import Params, PyTree, UserError


class Subject:
    """A model that is evaluated.

    Attributes:
      trainer: its run.
      model: without adapters.
      params: on the mesh.
      mesh: of all devices.
    """

    def __init__(self, opened: Opened, trainer: Trainer, mesh: Mesh, batching: EngineConfig):
        self.trainer, self.model, self.params, self.mesh = trainer, opened.run.model, opened.run.params, mesh
        self._opened, self._batching = opened, batching

    @property
    def about(self) -> dict[str, Any]:
        """Which model it is and what else its answers depend on, as JSON values."""
        return self._opened.about | {
            "cache_dtype": str(self._batching.cache_dtype),
            "length": self.trainer.dataset.length,
        }

    @property
    def vocabulary(self):
        return self.trainer.dataset.get_vocabulary()

    @property
    def slots(self) -> int:
        """Texts that are made at a time."""
        return self._batching.slots

    @functools.cached_property
    def engine(self) -> Engine:
        """Generates. Where no device could hold the parameters alone they stay spread over all."""
        self._check_answers()
        dataset = self.trainer.dataset
        return Engine(
            self.model, self._for_rows, self.vocabulary, dataset.length, self._batching, dataset.encoder_length
        )

    @functools.cached_property
    def scorer(self) -> Scorer:
        """Scores given texts, spread over the mesh."""
        self._check_answers()
        dataset, vocabulary = self.trainer.dataset, self.vocabulary
        return Scorer(
            self.model, self.params, dataset.length, encoder_length=dataset.encoder_length, pad_id=vocabulary.pad_id,
            plan=self.trainer.plan, mesh=self.mesh,
        )  # fmt: skip

    @functools.cached_property
    def chat(self) -> chat.Chat:
        return chat.of_run(self.trainer.dataset, "EvalTask.format = 'chat' (or Harness.chat)")

    def _check_answers(self) -> None:
        check_generates(self.model)
        if jax.process_count() > 1:
            raise UserError("only --task=validation runs in several processes: evaluate other tasks on one host")

    @property
    def _for_rows(self) -> Params:
        """Emulated devices are one processor: what they would share out is quicker done at once."""
        emulated = self.mesh.devices.flat[0].platform == "cpu"
        whole = all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(self.params))
        return on_one_device(self.params) if emulated or whole else self.params


def open_subject(
    path: str,
    gin_files: Sequence[str] = (),
    bindings: Sequence[str] = (),
    search_paths: Sequence[str] = (),
    *,
    step: int | None = None,
    weights: str | None = None,
    trust: bool = False,
) -> Subject:
    """Reads a model onto all devices; arguments as of `loading.load`."""
    chosen = any(binding.startswith("Plan.") for binding in bindings)

    def placed(trainer: Trainer, model: Model) -> PyTree:
        plan, mesh = _laid_out(trainer.plan, chosen)
        return sharding.shardings(mesh, plan.rules, model.axes, model.abstract_params)

    given = (path, gin_files, bindings, search_paths)
    opened = loading.load(*given, step=step, weights=weights, placed=placed, trust=trust)
    plan, mesh = _laid_out(opened.run.trainer.plan, chosen)
    trainer = dataclasses.replace(opened.run.trainer, plan=plan)
    return Subject(opened, trainer, mesh, config.build(EngineConfig))


def _laid_out(plan: Plan, chosen: bool) -> tuple[Plan, Mesh]:
    """The run's plan; where the devices are others than it was made for, and nobody chose one, rows over all of them."""
    try:
        return plan, sharding.make_mesh(plan)
    except UserError:
        if chosen:
            raise
    count = jax.device_count()
    axes = dict.fromkeys(MESH_AXES, 1) | {"fsdp": count}
    rows = max(1, round(plan.batch_size / plan.accumulation / count)) * count
    plan = dataclasses.replace(plan, **axes, batch_size=rows, accumulation=1, pipeline_microbatches=None)
    return plan, sharding.make_mesh(plan)
