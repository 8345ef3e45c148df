"""The model that is evaluated, with its vocabulary, scorer and engine, which are created on first use."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

from capibara import sharding
from capibara.core.types import Params, PyTree, UserError
from capibara.data.chat.template import ChatTemplate
from capibara.data.tokenizers import model_rows
from capibara.data.tokenizers.decoder_start import start_id
from capibara.data.tokenizers.vocabulary import Vocabulary
from capibara.evaluation.scoring import Scorer
from capibara.inference.engine.engine import Engine, EngineConfig, check_generates
from capibara.inference.engine.placement import own_chips
from capibara.inference.engine.placement.own_chips import OwnChips, Where
from capibara.inference.engine.placement.serving_mesh import ServingMesh
from capibara.inference.interactive import chat
from capibara.inference.thinking.reward_model import RewardModel, check_head
from capibara.interop.open_model import LoadedModel
from capibara.models.api import Model
from capibara.multihost import hosts
from capibara.sharding import MESH_AXES, NODE_AXIS, Plan
from capibara.training.trainer import Trainer

S = TypeVar("S")
T = TypeVar("T")


class Subject:
    """A model that is evaluated.

    Attributes:
      trainer: its run.
      model: the model, with adapters merged.
      params: its parameters, on the mesh.
      mesh: the mesh of all devices.
      template: the chat template, if the run has none; None: the one beside the tokenizer.
    """

    def __init__(
        self, model: Model, params: Params, about: Mapping[str, Any], trainer: Trainer, mesh: Mesh,
        batching: EngineConfig, serving: ServingMesh,
    ):  # fmt: skip
        self.trainer, self.model, self.params, self.mesh = trainer, model, params, mesh
        self._about, self._batching, self._serving = dict(about), batching, serving
        self.template: ChatTemplate | None = None

    @property
    def about(self) -> dict[str, Any]:
        """Identifies the model and everything else on which its answers depend, as JSON values."""
        return self._about | {
            "cache_dtype": str(self._batching.cache_dtype),
            "length": self.trainer.dataset.length,
        }

    @property
    def vocabulary(self) -> Vocabulary:
        return self.trainer.dataset.get_vocabulary()

    @property
    def slots(self) -> int:
        """The number of texts that are generated at a time."""
        return self._batching.slots

    @functools.cached_property
    def engine(self) -> Engine:
        """The engine, on the chips of this process (`is_distributed`) or on all."""
        dataset = self.trainer.dataset
        return Engine(
            self.model, self._brought(), self.vocabulary, dataset.length, self._batching, dataset.encoder_length
        )

    @functools.cached_property
    def scorer(self) -> Scorer:
        """The scorer of texts, on the chips of this process (`is_distributed`) or on all."""
        dataset, vocabulary = self.trainer.dataset, self.vocabulary
        plan: Plan | None = self.trainer.plan
        mesh: Mesh | None = self.mesh
        if self._layout is not None:
            mesh = getattr(jax.tree.leaves(self._layout)[0], "mesh", None)
            sizes = {} if mesh is None else mesh.shape
            plan = None if mesh is None else Plan(
                batch_size=sizes["data"], fsdp=1, data=sizes["data"], tensor=sizes["tensor"]
            )  # fmt: skip
        return Scorer(
            self.model, self._brought(), dataset.length, encoder_length=dataset.encoder_length,
            start_id=start_id(vocabulary), vocabulary=vocabulary, plan=plan, mesh=mesh, in_turns=self.in_turns,
        )  # fmt: skip

    @property
    def is_distributed(self) -> bool:
        """Whether each process works on its share of the items on its own chips; otherwise all work together."""
        return self._layout is not None

    def in_turns(self, things: Sequence[S], make: Callable[[Sequence[S]], Iterator[T]], every: int) -> Iterator[T]:
        """Yields the results of `make` for all things in order; splits the work by `hosts.in_turns` if `is_distributed`."""
        return hosts.in_turns(things, make, every) if self.is_distributed else make(things)

    @functools.cached_property
    def chat(self) -> chat.Chat:
        flag = "EvalTask.format = 'chat' (or EvalTask.pairs, or Harness.chat)"
        return chat.of_run(self.trainer.dataset, flag, template=self.template)

    @functools.cached_property
    def reward_model(self) -> RewardModel:
        """The model as one that scores answers, on all devices of one process.

        Raises:
          UserError: it is no reward model, scores steps, or is on several processes or a context axis.
        """
        path = str(self.about["model"])
        check_head(path, self.model)
        if (count := jax.process_count()) > 1:
            raise UserError(f"EvalTask.pairs is for one process, and there are {count}: start one alone")
        if (context := self.mesh.shape["context"]) > 1:
            raise UserError(f"EvalTask.pairs does not support Plan.context ({context}): set it to 1")
        is_sharded = self.mesh.size > 1
        result = RewardModel(
            path, self.model, self.params, self.trainer.dataset, self.chat.template,
            self.trainer.plan if is_sharded else None, self.mesh if is_sharded else None,
        )  # fmt: skip
        if result.scores_steps:
            raise UserError(
                f"{path} scores the steps of an answer, and EvalTask.pairs needs one score of each: name a model of "
                "--method=reward"
            )
        return result

    @functools.cached_property
    def _layout(self) -> PyTree | None:
        """The shardings of the parameters on this process's chips; None: they do not fit."""
        check_generates(self.model)
        dataset, each = self.trainer.dataset, hosts.gathered(own_chips.free_bytes())
        free = None if None in each else min(each)
        return own_chips.layout_of(
            self.model, self._serving, Where.AUTO, self._batching, dataset.length, dataset.encoder_length, free
        )

    def _brought(self) -> Params:
        """The parameters for answers: on this process's own chips if they fit."""
        return (
            self.params
            if self._layout is None
            else OwnChips(self.model, self._layout, self.trainer.plan.rules)(self.params)
        )


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a model that is evaluated lies on the devices: by its run's plan, or if that does not fit them, by rows.

    Attributes:
      is_set: the user sets the plan: it must fit.
    """

    is_set: bool = False

    def of(self, plan: Plan) -> tuple[Plan, Mesh]:
        """The plan of an evaluation of a run with this plan, and its mesh of all devices."""
        try:
            return plan, sharding.make_mesh(plan)
        except UserError:
            if self.is_set:
                raise
        count = jax.device_count()
        rows = max(1, round(plan.batch_size / plan.micro_batches / count)) * count
        axes: dict[str, Any] = dict.fromkeys((NODE_AXIS, *MESH_AXES), 1) | {"fsdp": count}
        plan = dataclasses.replace(plan, **axes, batch_size=rows, accumulation=1, pipeline_microbatches=None)
        return plan, sharding.make_mesh(plan)

    def placed(self, plan: Plan, model: Model) -> PyTree:
        """The shardings of the parameters of a model whose run has this plan."""
        plan, mesh = self.of(plan)
        return sharding.shardings(mesh, plan.rules, model.axes, model.abstract_params)


def of_model(
    loaded: LoadedModel,
    run: Trainer,
    layout: Layout,
    *,
    batching: EngineConfig,
    serving: ServingMesh,
) -> Subject:
    """A loaded model that is to be evaluated.

    Args:
      loaded: the model, its parameters as `layout` places them.
      run: its run.
      layout: how it lies on the devices.
      batching, serving: how its answers are generated.

    Raises:
      UserError: its tokenizer has ids beyond its rows.
    """
    if loaded.step is not None:  # a run folder, whose tokenizer may have been set anew; others were checked
        model_rows.check_vocabulary(run.dataset.get_vocabulary(), loaded.model.config.vocab_size, loaded.path)
    plan, mesh = layout.of(run.plan)
    # An evaluation has one model; a strategy is for training several.
    trainer = dataclasses.replace(run, plan=plan, strategy=run.strategy if plan.node > 1 else None)
    return Subject(loaded.model, loaded.params, loaded.about, trainer, mesh, batching, serving)
