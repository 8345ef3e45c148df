"""Where classes were that have moved since: Gin files and records may name them with their modules."""

from __future__ import annotations

from collections.abc import Mapping

from capibara.config.search import defining_modules

_WAS: Mapping[str, tuple[str, ...]] = {
    "Aggregation": ("capibara.consensus.aggregation",),
    "ConsensusConfig": ("capibara.strategies.consensus",),
    "EngineConfig": ("capibara.inference.engine.batching",),
    "Evaluation": ("capibara.training.trainer", "capibara.training.base.trainer"),
    "Hints": ("capibara.models.moe.router",),
    "LossCurve": ("capibara.monitoring.curve",),
    "MetricsFile": ("capibara.monitoring.trackers.loggers",),
    "Moe": ("capibara.models.moe.router",),
    "Optimizer": ("capibara.optim",),
    "Plan": ("capibara.sharding",),
    "PreferenceJsonlSource": ("capibara.data.sources.answers",),
    "ProgressLine": ("capibara.monitoring.progress",),
    "PromptJsonlSource": ("capibara.data.sources.answers",),
    "Rules": ("capibara.sharding",),
    "TensorBoard": ("capibara.monitoring.trackers.loggers",),
    "Trainer": ("capibara.training.base.trainer",),
}


def selector_now(selector: str) -> str:
    """The complete selector of a class that is named with its old module or the end of it; others as they are."""
    module, _, name = selector.rpartition(".")
    is_old = module and any(f".{was}".endswith(f".{module}") for was in _WAS.get(name, ()))
    return f"{defining_modules()[name]}.{name}" if is_old else selector
