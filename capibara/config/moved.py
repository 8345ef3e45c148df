"""Where classes were that have moved since: Gin files and records may name them with their modules."""

from __future__ import annotations

from collections.abc import Mapping

from capibara.config.search import defining_modules

_WAS: Mapping[str, str] = {
    "Aggregation": "capibara.consensus.aggregation",
    "ConsensusConfig": "capibara.strategies.consensus",
    "EngineConfig": "capibara.inference.engine.batching",
    "Evaluation": "capibara.training.trainer",
    "Hints": "capibara.models.moe.router",
    "LossCurve": "capibara.monitoring.curve",
    "MetricsFile": "capibara.monitoring.trackers.loggers",
    "Moe": "capibara.models.moe.router",
    "Optimizer": "capibara.optim",
    "Plan": "capibara.sharding",
    "PreferenceJsonlSource": "capibara.data.sources.answers",
    "ProgressLine": "capibara.monitoring.progress",
    "PromptJsonlSource": "capibara.data.sources.answers",
    "Rules": "capibara.sharding",
    "TensorBoard": "capibara.monitoring.trackers.loggers",
    "Trainer": "capibara.training.trainer",
}


def selector_now(selector: str) -> str:
    """The complete selector of a class that is named with its old module or the end of it; others as they are."""
    module, _, name = selector.rpartition(".")
    was = _WAS.get(name, "")
    return f"{defining_modules()[name]}.{name}" if module and f".{was}".endswith(f".{module}") else selector
