"""Names of metrics as viewers see them: group/metric, with a unit and which direction is better."""

from __future__ import annotations

import math
from collections.abc import Mapping

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

_UNITS = {
    "loss": "nats per token",
    "bits_per_byte": "bits per byte",
    "unigram_bits_per_byte": "bits per byte",
    "tokens_per_s": "tokens/s",
    "epsilon": "epsilon",
    "cpus": "CPUs",
    "compiles": "programs",
}
_ENDINGS = {
    "_percent": "%",
    "_bytes": "bytes",
    "_s": "s",
    "_p50": "s",
    "_p90": "s",
    "_p99": "s",
    "_score": "",
    "accuracy": "share",
}
_SHARES = {"mfu", "hfu", "consensus_score", "router_entropy", "token_accuracy", "reward_accuracy"}
_LOW = ("loss", "perplexity", "bits_per_byte", "step_s", "data_wait_s", "failed_rounds", "skipped")
_HIGH = ("accuracy", "reward", "reward_margin", "mfu", "tokens_per_s", "consensus_score")


def split(metric: str) -> tuple[str, str]:
    """Kind of line and name of "train/loss"; a name may have slashes of its own."""
    kind, _, name = metric.partition("/")
    return kind, name


def unit_of(name: str) -> str:
    """The unit of a metric; empty: it has none."""
    last = name.rpartition("/")[2]
    if last in _UNITS:
        return _UNITS[last]
    if last in _SHARES:
        return "share"
    return next((unit for ending, unit in _ENDINGS.items() if last.endswith(ending)), "")


def best_of(name: str) -> str | None:
    """Which values of a metric are better: "low" or "high"; None: neither."""
    last = name.rpartition("/")[2]
    if last in _LOW or last.endswith(("_loss", "perplexity")):
        return "low"
    return "high" if last.endswith(_HIGH) else None


def finite(value: float | None) -> float | None:
    """A number that JSON can hold."""
    return value if value is not None and math.isfinite(value) else None


def all_finite(value: Json) -> Json:
    """A JSON value with null in place of numbers that are not finite."""
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, dict):
        return {key: all_finite(item) for key, item in value.items()}
    return [all_finite(item) for item in value] if isinstance(value, list) else value


def clean(value: object, depth: int = 6) -> Json:
    """A value of a run folder as JSON, without what is not finite, too deep or too long."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, str):
        return value[:10_000].encode("utf-8", "replace").decode()
    if depth and isinstance(value, Mapping):
        return {str(key)[:500]: clean(item, depth - 1) for key, item in list(value.items())[:1000]}
    if depth and isinstance(value, (list, tuple)):
        return [clean(item, depth - 1) for item in value[:1000]]
    return str(value)[:500]
