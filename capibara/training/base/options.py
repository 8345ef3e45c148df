"""The options of a training run that do not depend on its method."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import numpy as np

from capibara.checkpoints.policy import Checkpointing
from capibara.config import configurable
from capibara.core.fields import FilePath
from capibara.core.types import UserError
from capibara.data.pipeline.loader import Dataset
from capibara.models.api import TransformerConfig, longest_encoded
from capibara.objectives.base import Normalization
from capibara.objectives.cross_entropy import CrossEntropy
from capibara.objectives.loss import CrossEntropyOptions, Loss
from capibara.optim import OptimizerConfig
from capibara.sharding import Plan
from capibara.training.profiling.profile import Profile
from capibara.training.stability.anomalies import Anomalies, OnSpike
from capibara.training.stability.loss_scale import LossScaling
from capibara.training.stability.watchdog import Watch


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Options of the evaluation on the validation split.

    Attributes:
      every: steps between evaluations; 0: never.
      max_batches: the largest number of batches of an evaluation, or of each task of a SeqIO mixture; None: all.
      batch_size: rows of an evaluation batch; None: as in training.
      patience: the run stops after so many evaluations without a lower loss; None: never.
      unigram_batches: number of training batches to which a unigram model is fitted, whose bits per byte are reported as
        a baseline; 0: none.
      task_metrics: compute the metric_fns of the SeqIO task, or of each task of a mixture (see SeqioEvaluation).
    """

    every: int = 500
    max_batches: int | None = None
    batch_size: int | None = None
    patience: int | None = None
    unigram_batches: int = 0
    task_metrics: bool = False

    def __post_init__(self) -> None:
        for name in ("every", "unigram_batches"):
            if getattr(self, name) < 0:
                raise UserError(f"Evaluation.{name} is {getattr(self, name)}, must be at least 0 (0: none)")
        for name in ("max_batches", "batch_size", "patience"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UserError(f"Evaluation.{name} is {getattr(self, name)}, must be at least 1, or None")


class InitWith(enum.StrEnum):
    """What a new run loads from `Trainer.init_from`.

    WEIGHTS: the parameters; the run starts at step 0. Adapters of a run folder are merged into them; adapters of PEFT are
      trained further.
    ADAPTERS: the parameters; adapters are trained further, also those of a run folder. Lora must have their options.
    MERGED: the parameters; adapters are merged into the base, on which the run trains its own adapters.
    STATE: the parameters, the optimizer's state and the step, as in T5X: the run continues to `Trainer.steps`. Its data
      starts from the beginning.
    """

    WEIGHTS = "weights"
    ADAPTERS = "adapters"
    MERGED = "merged"
    STATE = "state"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The fields of a Trainer that are the same with every training method.

    Attributes:
      model_dir: the run folder, with checkpoints, metrics.jsonl, config.gin, curves. A run with an existing one resumes.
      steps: the step at which the run ends, counted from its very beginning.
      seed: seed of the initial weights, from 0 to 2**32 - 1; the data has its own.
      init_from: source of the initial weights of a new run; None: random. For a run folder, its newest step, with adapters
        merged (see init_with). With TransformerConfig.lora these are the weights of the base. Ignored by a run that
        resumes.
      init_with: what is loaded from there.
      model, plan, dataset, optimizer, evaluation, checkpointing: the parts.
      loss: the loss, such as @Dpo() on preference pairs; None: the cross entropy of texts.
      log_every: steps between logs; only then the host waits for the devices.
      z_loss: coefficient of the squared log normaliser (1e-4 in PaLM); 0: off.
      label_smoothing: fraction of a target's probability that is spread over all other ids; 0: off. The logged `loss` is
        without it.
      loss_normalization: the divisor of the summed loss of a batch, before differentiation, or a number (for the first T5
        models, the rows of a batch times the length of the targets). It does not affect Adafactor without clipping.
      ema_decay: decay of a moving average of the parameters for evaluation and export; None: no average.
      loss_scaling: loss scaling of a float16 run; not used with other dtypes.
      anomalies: what to do about numbers that are not finite, and about loss spikes.
      watch: when a step counts as hung.
      profile: which steps the profiler traces, such as @Profile(), or `--profile=START:STOP`; None: none.
      replica_check_every: steps between bitwise comparisons of the parameters' replicas; 0: never. With nodes that train apart
        they are the agreed model's, on all nodes.
      dashboard: whether the run starts a dashboard on this machine, whose address it prints: a process of its own that ends
        with the run (options: capibara.DashboardConfig).
      heartbeat_s: seconds without a heartbeat after which a process counts as dead, and the others end.
    """

    model_dir: FilePath
    steps: int
    model: TransformerConfig
    plan: Plan
    dataset: Dataset
    optimizer: OptimizerConfig
    evaluation: Evaluation = Evaluation()
    checkpointing: Checkpointing = Checkpointing()
    init_from: FilePath | None = None
    init_with: InitWith = InitWith.WEIGHTS
    loss: Loss | None = None
    seed: int = 0
    log_every: int = 10
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    loss_normalization: Normalization | float = Normalization.TOKENS
    ema_decay: float | None = None
    loss_scaling: LossScaling = LossScaling()
    anomalies: Anomalies = Anomalies()
    watch: Watch = Watch()
    profile: Profile | None = None
    replica_check_every: int = 1000
    heartbeat_s: int = 100
    dashboard: bool = False

    def __post_init__(self) -> None:
        if not self.model_dir.strip():
            raise UserError("Trainer.model_dir is empty: name a folder, e.g. --gin.MODEL_DIR=runs/mine")
        if self.init_from is not None and not self.init_from.strip():
            raise UserError("Trainer.init_from is empty: name a run folder, or None to begin with new parameters")
        if self.init_with is InitWith.STATE and (self.init_from is None or self.model.lora is not None):
            why = "Trainer.init_from is None" if self.init_from is None else "the model has adapters, which are new"
            raise UserError(f"Trainer.init_with is 'state', and {why}: set 'weights'")
        for name, value in (("steps", self.steps), ("log_every", self.log_every)):
            if not 1 <= value < 2**31:
                raise UserError(f"Trainer.{name} is {value}, must be from 1 to {2**31 - 1}: try 100")
        if self.ema_decay is not None and not 0.0 < self.ema_decay < 1.0:
            raise UserError(f"Trainer.ema_decay is {self.ema_decay}, must be between 0 and 1, or None")
        if self.replica_check_every < 0:
            raise UserError(f"Trainer.replica_check_every is {self.replica_check_every}, must be at least 0 (0: never)")
        if self.heartbeat_s < 5:
            raise UserError(f"Trainer.heartbeat_s is {self.heartbeat_s}, must be at least 5")
        if self.anomalies.on_spike is OnSpike.ROLL_BACK and not self.checkpointing.every:
            raise UserError(
                "Anomalies.on_spike ('roll_back') needs checkpoints to roll back to, and Checkpointing.every is 0: set it, "
                f"e.g. to {self.anomalies.roll_back_steps}"
            )
        loss = self.training_loss  # one of the cross entropy checks its options
        if not 0 <= self.seed < 2**32:
            raise UserError(f"Trainer.seed is {self.seed}, must be from 0 to 4294967295 (32 bits): try 0")
        if self.model.data_kind != self.dataset.kind:
            raise UserError(
                f"Dataset.kind ({str(self.dataset.kind)!r}) does not fit the model: {type(self.model).__name__} is trained "
                f"on {self.model.data_kind!r}: set Dataset.kind, or another Trainer.model"
            )
        loss.check_options(self.cross_entropy_options, self.evaluation.unigram_batches)
        loss.check(self.dataset, self.plan.batch_size)
        if self.loss is not None:  # a reward model's folder is opened without one; a run checks it at its start
            loss.check_model(self.model)
        if self.evaluation.task_metrics and (not self.dataset.is_seqio or self.loss is not None):
            why = "Dataset.source is no SeqIO task" if self.loss is None else "Trainer.loss has its own evaluation"
            raise UserError(f"Evaluation.task_metrics is True, and {why}: leave it out")
        hints = None if self.model.moe is None else self.model.moe.hints
        if hints is not None and hints.domains != self.dataset.domains:
            raise UserError(
                f"Hints.domains {hints.domains} must be Dataset.domains {self.dataset.domains}, in the same order: set "
                f"Dataset.domains = {hints.domains}"
            )
        for name, longest in (("length", self.model.max_length), ("encoder_length", longest_encoded(self.model))):
            length = getattr(self.dataset, name)
            if longest is not None and length is not None and length > longest:
                raise UserError(
                    f"Dataset.{name} ({length}) must be at most {type(self.model).__name__}.max_length ({longest}): try {longest}"
                )

    @property
    def training_loss(self) -> Loss:
        """The loss: of `Trainer.loss`, or the cross entropy with its options."""
        return CrossEntropy(**self.cross_entropy_options) if self.loss is None else self.loss

    @property
    def cross_entropy_options(self) -> CrossEntropyOptions:
        """The options of the cross entropy, by their names as Trainer's fields."""
        return {
            "z_loss": self.z_loss,
            "label_smoothing": self.label_smoothing,
            "loss_normalization": self.loss_normalization,
        }

    @property
    def batch_spec(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Shape and dtype of every array that a step reads."""
        return self.training_loss.batch_spec(self.dataset, self.plan.batch_size)

    @property
    def later(self) -> tuple[Callable[..., Any], ...]:
        """Functions that Gin names and that only training calls."""
        return self.training_loss.later

    @property
    def saves(self) -> Checkpointing:
        """The options of checkpoints: a frozen base is written once and then referred to."""
        if self.model.lora is None:
            return self.checkpointing
        return dataclasses.replace(self.checkpointing, incremental=True)

    @property
    def float16_scaling(self) -> LossScaling | None:
        """The loss scaling of a float16 run; None: another dtype."""
        return self.loss_scaling if self.model.dtype == "float16" else None
