"""Plans of a run for a TPU slice, and their proof: `capibara.plan` and `capibara.prove`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from capibara.api.opening import model_config
from capibara.api.stored import path_of
from capibara.core.types import UserError
from capibara.models.api import TransformerConfig
from capibara.objectives.loss import Loss
from capibara.sharding import Plan
from capibara.training.trainer import Trainer

if TYPE_CHECKING:
    from capibara.api.language_model import LanguageModel
    from capibara.planner.compiler.compile_cache import Verdict

_LENGTH = 2048


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """A plan with what is predicted of it.

    Attributes:
      plan: for `capibara.Trainer`.
      hbm_bytes: memory of a chip, predicted.
      hbm_limit_bytes: memory of a chip that a plan may use.
      step_s: seconds of a step, predicted.
      tokens_per_s: of the whole slice, predicted.
      description: one line.
      loss: for `capibara.Trainer`: the run's, with the split between training and drawing if it has `rollout_devices`.
    """

    plan: Plan = dataclasses.field(repr=False)
    hbm_bytes: float
    hbm_limit_bytes: float
    step_s: float
    tokens_per_s: float
    description: str
    loss: Loss | None = dataclasses.field(default=None, repr=False)

    @property
    def fits(self) -> bool:
        """Whether it is predicted to fit."""
        return self.hbm_bytes <= self.hbm_limit_bytes


def plan(
    run: Trainer | TransformerConfig | LanguageModel | str,
    slice: str,
    *,
    length: int | None = None,
    batch_size: int | None = None,
    headroom: float = 0.06,
    most: int = 8,
) -> list[PlannedRun]:
    """The best plans of a run for a slice, as `capibara plan` finds them; those that do not fit come last.

    Args:
      run: a run, or a model or its path, which is trained with the default optimizer.
      slice: such as "v5e-64".
      length: tokens of a row; None: the run's own, of a model 2048 or what it reads.
      batch_size: rows of a step; None: the best number.
      headroom: share of a chip's memory that predictions leave free.
      most: the largest number of plans.

    Raises:
      UserError: there is no such slice, or no mesh of it divides the model; of a run with `rollout_devices` also if nothing fits.
    """
    from capibara.planner.hardware import slices
    from capibara.planner.model import workload
    from capibara.planner.search import ranking, splits

    for name, value in (("length", length), ("batch_size", batch_size), ("most", most)):
        if value is not None and (type(value) is not int or value < 1):
            raise UserError(f"{name} is {value!r}, must be a number of at least 1")
    if not isinstance(slice, str):
        raise UserError(f"slice is {slice!r}, must be a name: try 'v5e-64'")
    trainer = run if isinstance(run, Trainer) else _training(run, length)
    if length is not None:
        trainer = dataclasses.replace(trainer, dataset=dataclasses.replace(trainer.dataset, length=length))
    workload.check_one_model(trainer.plan)
    workload.check_ordinary(trainer)
    slice_, work = slices.parse(slice), workload.of_run(trainer)
    question = ranking.Question(batch_size=batch_size, headroom=headroom, state_dtypes=tuple(work.state))
    if trainer.loss is None or not trainer.loss.rollout_devices:
        layout = splits.Layout(slice_, ranking.search(work, slice_, question))
    else:
        layout = splits.search(trainer, slice_, work, question)
    divided = [split.describe() for split in layout.splits[:1]]
    return [
        PlannedRun(
            dataclasses.replace(trainer.plan, **item.choice.fields(work, slice_.name)),
            item.memory.peak,
            item.limit_bytes,
            item.cost.step_s,
            item.cost.tokens_per_s,
            "; ".join([item.choice.describe(), *divided]),
            layout.divided(trainer).loss,
        )
        for item in layout.ranked[:most]
    ]


def prove(trainer: Trainer, slice: str | None = None, *, deadline_s: float = 1800) -> Verdict:
    """Compiles the train step of a run with the TPU compiler, as `capibara prove` does; no TPU is needed.

    Args:
      trainer: the run, with a plan for this slice.
      slice: such as "v5e-64"; None: that of the plan.
      deadline_s: most seconds to compile.

    Returns:
      What the compiler says: `compiled.fits`, `compiled.peak_bytes`; why it failed in `message`.

    Raises:
      UserError: libtpu is not installed, or the plan is not for this slice.
    """
    from capibara.config import written
    from capibara.planner.compiler import proof
    from capibara.planner.hardware import slices, topology
    from capibara.planner.search import splits

    if not isinstance(trainer, Trainer):
        raise UserError(
            f"prove takes a run, and is given a {type(trainer).__name__}: make a cb.Trainer of the model, with a plan"
        )
    name = slice or trainer.plan.slice
    if name is None:
        raise UserError("slice is not set, and Plan.slice is None: name one, such as slice='v5e-64'")
    slice_ = slices.parse(name)
    topology.check(slice_.name)
    part = splits.training_part(trainer, slice_)
    trainer.plan.mesh_shape(part.devices, slice_.name if part == slice_ else f"{slice_.name} without rollout_devices")
    lines = [line for line in written.text_of(trainer).split("\n") if line]
    return proof.prove(trainer, proof.Configuration((), lines), slice_, deadline_s=deadline_s)


def _training(model: TransformerConfig | LanguageModel | str, length: int | None) -> Trainer:
    """A run that trains a model, whose folder and data are not used."""
    from capibara.data.dataset import Dataset, Kind
    from capibara.optim import Optimizer

    config = (
        model
        if isinstance(model, TransformerConfig)
        else getattr(model, "config", None) or model_config(path_of(model))
    )
    length = length or min(_LENGTH, config.max_length or _LENGTH)
    domains = config.moe.hints.domains if config.moe is not None and config.moe.hints is not None else ()
    return Trainer(
        model_dir="unused",
        steps=1_000_000,
        model=config,
        plan=Plan(batch_size=1),
        dataset=Dataset(mixture_or_task_name="unused", length=length, kind=Kind(config.data_kind), domains=domains),
        optimizer=Optimizer(),
    )
