"""Makes the HTML of a report: one file, without scripts and without anything from elsewhere."""

from __future__ import annotations

import dataclasses
import importlib.resources
import math
from collections.abc import Callable, Sequence
from typing import Any

from capibara import config
from capibara.core.types import UserError
from capibara.monitoring.metrics_file.goodput import CATEGORIES
from capibara.monitoring.metrics_file.redaction import encodable, redact, redact_json
from capibara.monitoring.report import figures
from capibara.monitoring.report.facts import RunFacts

_UNKNOWN = "unavailable"
_MOST_CHARACTERS = 200  # of a figure that is a text
_PARTS = dict(zip(CATEGORIES, ("#009e73", "#56b4e9", "#e69f00", "#cc79a7", "#0072b2", "#b0b7c3", "#8f98a8", "#6f7a8d",
                               "#a9b4c4", "#d55e00", "#c3c9d3", "#dfe3e9")))  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Price:
    """What an hour of a device costs.

    Attributes:
      usd_per_device_hour: US dollars.
      source: where the price is from, in words.
    """

    usd_per_device_hour: float
    source: str


PriceOf = Callable[[RunFacts], Price | None]


def as_json(runs: Sequence[RunFacts], price_of: PriceOf) -> dict[str, Any]:
    """The figures of a report, for machines; None: unknown."""
    return {"runs": [_figures(run, price_of) for run in runs]}


def page(runs: Sequence[RunFacts], price_of: PriceOf, title: str | None = None) -> str:
    """The HTML of a report.

    Args:
      runs: their facts.
      price_of: the price of a run's devices; None: unknown.
      title: its heading; None: the names of the runs.

    Raises:
      UserError: there is no run.
    """
    import jinja2

    if not runs:
        raise UserError("a report needs at least one run folder: name one, e.g. capibara report runs/mine")
    template = importlib.resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    prices = [price for price in map(price_of, runs) if price is not None]
    bindings = [_bindings(run.config) for run in runs]
    names = sorted({name for of_run in bindings for name in of_run})
    texts = {name: [of_run.get(name) for of_run in bindings] for name in names}
    different = {name: values for name, values in texts.items() if len({*values}) > 1}
    text: str = environment.from_string(template).render(
        title=title or f"Report: {', '.join(run.name for run in runs)}",
        cost_note=", ".join(sorted({price.source for price in prices})) or "unavailable: no price is known",
        runs=[_shown(number, run) for number, run in enumerate(runs)],
        figures=_rows(
            {name: [_text(name, item[name]) for item in map(lambda r: _figures(r, price_of), runs)] for name in _WORDS}
        ),
        pictures=[{"title": name, "svg": svg} for name, svg in figures.pictures(runs)],
        evaluations=_rows(_evaluations(runs)),
        differences=_rows(
            {name: ["(not set)" if v is None else v for v in values] for name, values in different.items()}
        ),
        same=len(texts) - len(different),
    )
    return encodable(text)


def _bindings(text: str) -> dict[str, str | None]:
    """Parameter -> value as text, without secrets; nothing is imported or executed. Empty for what is no Gin."""
    try:
        bound = {name: value for name, (_, value) in config.changes("", text).items()}
    except Exception:  # the text is untrusted, and Gin's parser raises what it meets
        return {}
    result: dict[str, str | None] = redact_json(bound)
    return result


_WORDS = {
    "status": "status",
    "step": "step",
    "total_steps": "steps planned",
    "param_count": "parameters",
    "tokens": "tokens, with padding",
    "devices": "devices",
    "train_loss": "last training loss",
    "eval_loss": "last evaluation loss",
    "best_eval_loss": "lowest evaluation loss",
    "tokens_per_s": "tokens a second",
    "mfu": "MFU",
    "goodput": "goodput",
    "hours": "hours",
    "starts": "starts",
    "device_hours": "device hours",
    "usd": "cost in US dollars",
}


def _figures(run: RunFacts, price_of: PriceOf) -> dict[str, Any]:
    price, hours, about, best = price_of(run), run.device_hours, run.about, run.best
    count = _plain(about.get("device_count"))
    return {
        "name": run.name,
        "path": run.path,
        "status": _plain(run.ended) or "running, or killed",
        "step": run.step,
        "total_steps": _plain(about.get("total_steps")),
        "param_count": _plain(about.get("param_count")),
        "tokens": run.tokens,
        "devices": f"{count} x {_plain(about.get('device_kind'))}" if count else None,
        "train_loss": run.last("train", "loss"),
        "eval_loss": run.last("eval", "loss"),
        "best_eval_loss": None if best is None else best["loss"],
        "tokens_per_s": run.last("train", "tokens_per_s"),
        "mfu": run.last("train", "mfu"),
        "goodput": run.goodput,
        "hours": run.seconds["total"] / 3600 if run.seconds.get("total") else None,
        "starts": run.starts,
        "device_hours": hours,
        "usd": None if price is None or hours is None else _plain(hours * price.usd_per_device_hour),
        "price": None if price is None else dataclasses.asdict(price),
        "evaluation": {name: run.last("eval", name) for name in run.metrics("eval")},
        "seconds": dict(run.seconds),
    }


def _plain(value: object) -> str | int | float | None:
    """A value of a line, if it is a text or a number that JSON can hold; None: it is something else."""
    if isinstance(value, str):
        return value[:_MOST_CHARACTERS]
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def _text(name: str, value: object) -> str:
    if value is None:
        return _UNKNOWN
    if name in ("goodput", "mfu") and isinstance(value, float):
        return f"{value:.1%}"
    if name == "usd" and isinstance(value, float):
        return f"{value:,.2f}"
    return _number(value) if isinstance(value, (int, float)) else str(value)


def _number(value: float) -> str:
    if isinstance(value, int) or (value.is_integer() and abs(value) >= 1000):
        return f"{value:,.0f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _evaluations(runs: Sequence[RunFacts]) -> dict[str, list[str]]:
    names = dict.fromkeys(name for run in runs for name in run.metrics("eval"))
    rows: dict[str, list[str]] = {}
    for name in names:
        rows[name] = []
        for run in runs:
            last, best = run.last("eval", name), (run.best or {}).get(name)
            text = _UNKNOWN if last is None else _number(last)
            rows[name].append(text if best is None or last is None or best == last else f"{text} ({_number(best)})")
    return rows


def _rows(rows: dict[str, list[str]]) -> list[dict[str, Any]]:
    return [{"name": name, "values_of_runs": values} for name, values in rows.items()]


def _shown(number: int, run: RunFacts) -> dict[str, Any]:
    total = run.seconds.get("total") or 0.0
    shares = {name: run.seconds[name] / total for name in CATEGORIES if total and run.seconds.get(name)}
    parts = [
        {"percent": f"{100 * share:.2f}", "colour": _PARTS[name], "words": f"{_time_name(name)} {share:.1%}"}
        for name, share in shares.items()
    ]
    return {
        "name": run.name,
        "colour": figures.colour_of(number),
        "config": redact(run.config),
        "samples": run.samples,
        "lineage": "\n".join(run.lineage),
        "notes": run.notes,
        "parts": parts,
        "time_words": ", ".join(part["words"] for part in parts),
    }


def _time_name(name: str) -> str:
    return name.replace("_", " ")
