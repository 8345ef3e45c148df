"""Options that only work together: a value that has no effect without another option is refused before anything compiles.

The table is that of docs/training.md. A value counts where it is not the default and the user gave it, in a Gin file, by a
flag or in Python: capibara's own Gin files have values for some runs only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from capibara import config
from capibara.core.fields import short
from capibara.core.types import Dataclass, UserError
from capibara.data.dataset import Kind
from capibara.data.packing.packing import Packing
from capibara.optim import OptimizerName, ScheduleKind
from capibara.sharding import Remat
from capibara.strategies.rewarded import RewardedLoss
from capibara.training.stability.anomalies import OnSpike
from capibara.training.trainer import Trainer

# Without effect on the answers of the current policy, whose ratio is 1.
_SURROGATE_OPTIONS = (
    *("Clipped.low", "Clipped.high", "Clipped.ceiling", "Cispo.cap", "Gmpo.low", "Gmpo.high"),
    *("Sapo.temperature_positive", "Sapo.temperature_negative"),
)


class Dependent(NamedTuple):
    """Options that have no effect without another.

    Attributes:
      options: of one class each, such as "Evaluation.patience".
      needs: what they need, as the user would set it.
      counts: (the run, the object that has the option) -> whether it has an effect.
    """

    options: tuple[str, ...]
    needs: str
    counts: Callable[[Trainer, Any], bool]


def _named(*names: str) -> Callable[[Trainer, Any], bool]:
    """Whether Optimizer.name is one of these."""
    return lambda run, component: component.name in map(OptimizerName, names)


def _factors(*names: str) -> Callable[[Trainer, Any], bool]:
    """Whether FactorSchedule.factors has one of these."""
    return lambda run, component: any(name.strip() in names for name in component.factors.split("*"))


def _is_off_policy(run: Trainer, component: Any) -> bool:
    """Whether steps train answers that an earlier policy wrote."""
    return isinstance(run.loss, RewardedLoss) and run.loss.steps_of_rollout > 1


def _bounds_importance(run: Trainer, component: Any) -> bool:
    return component.importance_cap is not None or component.importance_floor is not None


def _saves_milestones(run: Trainer, component: Any) -> bool:
    return all(_is_saved(run, step) for step in component.milestones)


def _is_saved(run: Trainer, step: int) -> bool:
    every = run.checkpointing.every
    return step == run.steps or (every > 0 and step % every == 0)


def _saves_what_it_evaluates(run: Trainer, component: Any) -> bool:
    saves, evaluates = component.every, run.evaluation.every
    return bool(saves and evaluates) and math.lcm(saves, evaluates) <= max(run.steps, saves, evaluates)


def _holds_out(run: Trainer, component: Any) -> bool:
    return not component.validation_files


def _scaled(*names: str) -> Callable[[Trainer, Any], bool]:
    """Whether Rope.scaling is one of these."""
    return lambda run, component: component.scaling in names


_OF_FILES = (
    "JsonlSource",
    "TextSource",
    "ShardedSource",
    "ChatJsonlSource",
    "PreferenceJsonlSource",
    "UnpairedJsonlSource",
    "PromptJsonlSource",
    "StepsJsonlSource",
)
DEPENDENT = (
    Dependent(
        ("Evaluation.max_batches", "Evaluation.batch_size", "Evaluation.patience", "Evaluation.unigram_batches")
        + ("Evaluation.task_metrics", "Checkpointing.keep_best", "SampleText.prompts"),
        "Evaluation.every above 0",
        lambda run, component: run.evaluation.every > 0,
    ),
    Dependent(("SampleText.sampling",), "SampleText.prompts", lambda run, component: bool(component.prompts)),
    Dependent(("Checkpointing.keep_every",), "Checkpointing.every above 0", lambda run, component: component.every > 0),
    Dependent(
        ("Checkpointing.keep_best",),
        "Checkpointing.every and Evaluation.every with a common multiple within Trainer.steps",
        _saves_what_it_evaluates,
    ),
    Dependent(
        ("Checkpointing.milestones",),
        "Checkpointing.every above 0, of which each is a multiple, or is Trainer.steps",
        _saves_milestones,
    ),
    Dependent(("Trainer.init_with",), "Trainer.init_from", lambda run, component: component.init_from is not None),
    Dependent(
        ("Trainer.loss_scaling",), "dtype = 'float16' of the model", lambda run, component: run.model.dtype == "float16"
    ),
    Dependent(
        ("Profile.start",), "Trainer.steps of at least as many", lambda run, component: component.start <= run.steps
    ),
    Dependent(("Watch.at_least_s",), "Watch.factor", lambda run, component: component.factor is not None),
    Dependent(
        ("Anomalies.window", "Anomalies.sigmas"),
        "Anomalies.on_spike = 'skip' or 'roll_back'",
        lambda run, component: component.on_spike is not OnSpike.OFF,
    ),
    Dependent(
        ("Anomalies.roll_back_steps", "Anomalies.skip_batches", "Anomalies.most_roll_backs"),
        "Anomalies.on_spike = 'roll_back'",
        lambda run, component: component.on_spike is OnSpike.ROLL_BACK,
    ),
    Dependent(
        ("Anomalies.most_in_a_row",),
        "Anomalies.skip_nonfinite, or Anomalies.on_spike = 'skip'",
        lambda run, component: (
            component.skip_nonfinite or component.on_spike is OnSpike.SKIP or run.float16_scaling is not None
        ),
    ),
    Dependent(
        ("Optimizer.b1", "Optimizer.b2"), "Optimizer.name = 'adamw', 'lion' or 'muon'", _named("adamw", "lion", "muon")
    ),
    Dependent(("Optimizer.eps",), "Optimizer.name = 'adamw' or 'muon'", _named("adamw", "muon")),
    Dependent(
        ("Optimizer.momentum",), "Optimizer.name = 'muon', 'sgd' or 'adafactor'", _named("muon", "sgd", "adafactor")
    ),
    Dependent(("Optimizer.nesterov",), "Optimizer.name = 'muon' or 'sgd'", _named("muon", "sgd")),
    Dependent(("Optimizer.muon_rms",), "Optimizer.name = 'muon'", _named("muon")),
    Dependent(
        ("Optimizer.factored_min_size", "Optimizer.parameter_scale", "Optimizer.adafactor"),
        "Optimizer.name = 'adafactor'",
        _named("adafactor"),
    ),
    Dependent(
        ("Schedule.decay_steps", "Schedule.final_fraction"),
        "Schedule.kind = 'cosine', 'linear' or 'wsd'",
        lambda run, component: component.kind not in (ScheduleKind.CONSTANT, ScheduleKind.RSQRT),
    ),
    Dependent(
        ("Schedule.decay_fraction",),
        "Schedule.kind = 'wsd', and Schedule.decay_steps = None",
        lambda run, component: component.kind is ScheduleKind.WSD and component.decay_steps is None,
    ),
    Dependent(
        ("Schedule.warmup_fraction",), "Schedule.warmup_steps = 0", lambda run, component: not component.warmup_steps
    ),
    Dependent(
        ("FactorSchedule.base_learning_rate",),
        "the factor constant or linear_decay",
        _factors("constant", "linear_decay"),
    ),
    Dependent(
        ("FactorSchedule.warmup_steps",),
        "the factor linear_warmup, linear_decay, rsqrt_decay, rsqrt_normalized_decay or cosine_decay",
        _factors("linear_warmup", "linear_decay", "rsqrt_decay", "rsqrt_normalized_decay", "cosine_decay"),
    ),
    Dependent(
        ("FactorSchedule.decay_factor",),
        "the factor linear_decay or decay_every",
        _factors("linear_decay", "decay_every"),
    ),
    Dependent(("FactorSchedule.steps_per_decay",), "the factor decay_every", _factors("decay_every")),
    Dependent(("FactorSchedule.steps_per_cycle",), "the factor cosine_decay", _factors("cosine_decay")),
    Dependent(
        ("Dataset.task_module", "Dataset.use_cached"),
        "Dataset.mixture_or_task_name",
        lambda run, component: component.is_seqio,
    ),
    Dependent(
        ("Dataset.cache_dirs", "Dataset.cached_order"),
        "Dataset.use_cached",
        lambda run, component: component.use_cached,
    ),
    Dependent(("Dataset.workers",), "Dataset.source", lambda run, component: not component.is_seqio),
    Dependent(
        ("Dataset.append_eos",),
        "Dataset.source, or Dataset.kind = 'encoder_decoder'",
        lambda run, component: not component.is_seqio or component.kind is Kind.ENCODER_DECODER,
    ),
    Dependent(
        ("Dataset.append_eos",),
        "a Dataset.source of texts: a chat template has the end in its text",
        lambda run, component: component.source is None or not component.source.has_conversations,
    ),
    Dependent(
        ("Dataset.seed",),
        "Dataset.shuffle, or Dataset.kind = 'encoder_decoder' or 'masked'",
        lambda run, component: component.shuffle or component.kind in (Kind.ENCODER_DECODER, Kind.MASKED),
    ),
    Dependent(
        ("Dataset.span_corruption",),
        "Dataset.kind = 'encoder_decoder'",
        lambda run, component: component.kind is Kind.ENCODER_DECODER,
    ),
    Dependent(("Dataset.masking",), "Dataset.kind = 'masked'", lambda run, component: component.kind is Kind.MASKED),
    Dependent(
        ("Dataset.too_long",),
        "a Dataset.source of conversations, such as @ChatJsonlSource()",
        lambda run, component: component.source is not None and component.source.has_conversations,
    ),
    Dependent(
        ("Dataset.pairs_per_row",),
        "a Dataset.source of preferences, paired or not, and Dataset.packing = 'best_fit'",
        lambda run, component: component.has_answers and component.packing is not Packing.NONE,
    ),
    Dependent(tuple(f"{name}.validation_fraction" for name in _OF_FILES), "validation_files = ()", _holds_out),
    Dependent(
        ("HuggingFaceSource.validation_fraction",),
        "HuggingFaceSource.validation_split = None",
        lambda run, component: component.validation_split is None,
    ),
    Dependent(
        ("Plan.pipeline_microbatches", "Plan.pipeline_repeats"),
        "Plan.stage above 1",
        lambda run, component: component.axes["stage"] != 1,
    ),
    Dependent(
        ("Plan.remat_names",),
        "Plan.remat = 'save' or 'offload'",
        lambda run, component: component.remat in (Remat.SAVE, Remat.OFFLOAD),
    ),
    Dependent(
        ("Sampling.top_k", "Sampling.top_p", "Sampling.min_p", "Sampling.seed"),
        "Sampling.temperature above 0, and Sampling.beams = None",
        lambda run, component: component.temperature > 0 and component.beams is None,
    ),
    Dependent(("Rope.factor",), "Rope.scaling, such as 'yarn'", lambda run, component: component.scaling != "none"),
    Dependent(
        ("Rope.original_length",),
        "Rope.scaling = 'llama3', 'yarn', 'dynamic' or 'longrope'",
        _scaled("llama3", "yarn", "dynamic", "longrope"),
    ),
    Dependent(
        ("Rope.low_frequency_factor", "Rope.high_frequency_factor"), "Rope.scaling = 'llama3'", _scaled("llama3")
    ),
    Dependent(("Rope.beta_fast", "Rope.beta_slow"), "Rope.scaling = 'yarn'", _scaled("yarn")),
    Dependent(("Rope.attention_factor",), "Rope.scaling = 'yarn' or 'longrope'", _scaled("yarn", "longrope")),
    Dependent(
        ("Rope.local_theta",),
        "'local' in DecoderConfig.layer_pattern",
        lambda run, component: "local" in run.model.kinds,
    ),
    Dependent(
        ("Dpo.alpha",),
        "Dpo.divergence = 'alpha_divergence'",
        lambda run, component: component.divergence == "alpha_divergence",
    ),
    Dependent(("Dpo.discopop_tau",), "Dpo.kind = 'discopop'", lambda run, component: component.kind == "discopop"),
    Dependent(("Cpo.gamma",), "Cpo.kind = 'simpo'", lambda run, component: component.kind == "simpo"),
    Dependent(
        _SURROGATE_OPTIONS,
        "updates or mini_batches of @Grpo() or @Ppo() above 1",
        _is_off_policy,
    ),
    Dependent(("Grpo.importance_mode",), "Grpo.importance_cap or Grpo.importance_floor", _bounds_importance),
    Dependent(("Grpo.kl_in", "Grpo.unbiased_kl"), "Grpo.kl above 0", lambda run, component: component.kl > 0),
    Dependent(("Ppo.kl_horizon",), "Ppo.kl_target", lambda run, component: component.kl_target is not None),
    Dependent(("Grpo.mesh",), "Grpo.where = 'auto' or 'own'", lambda run, component: component.where != "all"),
    Dependent(
        ("Grpo.max_staleness", "Ppo.max_staleness", "OnlineDpo.max_staleness"),
        "rollout_devices of @Grpo(), @Ppo() or @OnlineDpo() other than 0",
        lambda run, component: component.rollout_devices != 0,
    ),
    Dependent(("Ppo.mesh",), "Ppo.where = 'auto' or 'own'", lambda run, component: component.where != "all"),
    Dependent(
        ("OnlineDpo.mesh",), "OnlineDpo.where = 'auto' or 'own'", lambda run, component: component.where != "all"
    ),
    Dependent(
        ("Distillation.where", "Distillation.mesh"),
        "Distillation.on_policy above 0 or Distillation.teacher_draws",
        lambda run, component: component.draws,
    ),
)


def check(trainer: Trainer, *others: Dataclass) -> None:
    """Raises UserError if the user has given an option that has no effect.

    Args:
      trainer: the run.
      others: what else is configured, such as SampleText.
    """
    objects = [*_objects(trainer), *(part for other in others for part in _objects(other))]
    for row in DEPENDENT:
        for option in row.options:
            name, _, field = option.partition(".")
            for component in (part for part in objects if type(part).__name__ == name):
                value = getattr(component, field)
                if value == _default(component, field) or row.counts(trainer, component):
                    continue
                if (place := _given_at(option, value)) is None:
                    continue
                where = "" if not place or place.startswith("command line") else f" ({place})"
                raise UserError(
                    f"{option} is {short(value)}{where}, and has no effect without {row.needs}: set that, or leave it out"
                )


def _given_at(option: str, value: object) -> str | None:
    """As config.given_at, of an option whose value may be an object that is bound by its fields."""
    places = [config.given_at(option)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        places += [config.given_at(f"{type(value).__name__}.{field.name}") for field in dataclasses.fields(value)]
    if theirs := [place for place in places if place]:
        return theirs[0]
    return None if None in places else ""


def _objects(value: object) -> Iterator[Any]:
    """A configuration and its parts."""
    if isinstance(value, tuple):
        for part in value:
            yield from _objects(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield value
        for field in dataclasses.fields(value):
            yield from _objects(getattr(value, field.name, None))


def _default(component: Dataclass, name: str) -> object:
    (field,) = (field for field in dataclasses.fields(component) if field.name == name)
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def table() -> str:
    """The table of docs/training.md, in Markdown."""
    rows = [f"| {', '.join(f'`{option}`' for option in row.options)} | {row.needs} |" for row in DEPENDENT]
    return "\n".join(["| has no effect | without |", "|---|---|", *rows])
