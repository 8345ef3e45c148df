"""The picture of a search of settings: recall against bytes and against time."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from capibara.retrieval.tuning import Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(trials: Sequence[Trial], chosen: Trial, count: int) -> bytes:
    """A PNG with the held-out recall of settings by their bytes a vector, and by their time.

    Args:
      trials: the settings that were tried.
      chosen: the one that is marked.
      count: of the vectors.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    size, time = figure.subplots(1, 2, sharey=True)
    _points(size, trials, [trial.bytes / count for trial in trials])
    _points(time, trials, [trial.ms for trial in trials])
    for axes, value, label in (
        (size, chosen.bytes / count, "bytes a vector"),
        (time, chosen.ms, "milliseconds of a query, one core"),
    ):
        axes.plot([value], [chosen.held_out_recall], "o", ms=14, mfc="none", mec="black", label="chosen")
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())  # its labels would overlap
        axes.set_xlabel(label)
        axes.grid(alpha=0.3, which="both")
    size.set_ylabel("recall on held-out queries")
    time.legend(fontsize=8)
    content = io.BytesIO()
    FigureCanvasAgg(figure).print_png(content)
    return content.getvalue()


def _points(axes: Axes, trials: Sequence[Trial], values: Sequence[float]) -> None:
    groups: dict[str, list[tuple[float, float]]] = {}
    for trial, value in zip(trials, values):
        groups.setdefault(_family(trial), []).append((value, trial.held_out_recall))
    for name, points in groups.items():
        axes.plot(*zip(*sorted(points)), "o-", ms=4, lw=1, label=name)


def _family(trial: Trial) -> str:
    quantizer = trial.quantizer
    words = ["OPQ + PQ" if quantizer.opq else "PQ" if quantizer.pq_bytes else str(quantizer.codes)]
    words += ["principal components"] if quantizer.reduced else []
    words += [f"{quantizer.lists} lists"] if quantizer.lists else []
    words += [f"refined by {quantizer.refined}"] if quantizer.refined else []
    return ", ".join(words)
