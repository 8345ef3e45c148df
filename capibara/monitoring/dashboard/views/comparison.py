"""Several runs side by side: their metrics, and the parameters in which they differ."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from capibara.monitoring.dashboard.views.files import bindings, config_text
from capibara.monitoring.dashboard.views.names import Json, best_of, clean, unit_of
from capibara.monitoring.reading.run import Run

_MOST_METRICS = 500


def metrics(runs: Sequence[Run]) -> list[Json]:
    """The last and the best value of each metric, by run."""
    each = [run.views() for run in runs]
    names = dict.fromkeys(
        (kind, name) for views in each for kind in ("eval", "train") if kind in views for name in views[kind].columns
    )
    rows: list[Json] = []
    for kind, name in list(names)[:_MOST_METRICS]:
        best, values = best_of(name), list[Json]()
        for views in each:
            view = views.get(kind)
            values.append(
                None if view is None or name not in view.columns else _ends(view.steps, view.columns[name], best)
            )
        rows.append({"name": f"{kind}/{name}", "unit": unit_of(name), "best": best, "values": values})
    return rows


def _ends(steps: np.ndarray, column: np.ndarray, best: str | None) -> Json:
    at = np.flatnonzero(np.isfinite(column))
    if not len(at):
        return None
    result: dict[str, Json] = {"last": float(column[at[-1]]), "best": None, "best_step": None}
    if best is not None:
        row = at[int(column[at].argmin() if best == "low" else column[at].argmax())]
        result |= {"best": float(column[row]), "best_step": int(steps[row])}
    return result


def configurations(runs: Sequence[Run]) -> dict[str, Json]:
    """The parameters whose values differ between runs, and how many do not."""
    each = [bindings(config_text(run) or "") for run in runs]
    rows: list[Json] = []
    same = 0
    for name in sorted({name for item in each for name in item}):
        values = [item.get(name) for item in each]
        if len(set(values)) == 1:
            same += 1
        else:
            rows.append({"name": clean(name), "values": [None if value is None else clean(value) for value in values]})
    return {"rows": rows, "same": same}
