"""The picture of a sweep: the metric against each of one or two parameters, or parallel coordinates of more.

Both have the best value so far over the trials beside it.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from capibara.jobs.sweeps import space as spaces
from capibara.jobs.sweeps.space import Kind, Parameter
from capibara.jobs.sweeps.sweep import Goal, Sweep
from capibara.jobs.sweeps.trial import State, Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DONE, _BEST, _INK, _FAINT = "#4a6fa5", "#c8553d", "#333333", "#8a8a8a"
_FEW = 2  # parameters that have a chart each
_LOG_RATIO = 30.0  # a list of numbers whose ends are further apart has a logarithmic scale
_LABEL = 16  # characters of a value
_MOST_LABELS = 12  # on an axis


def draw(sweep: Sweep, trials: Sequence[Trial], first: Trial | None) -> bytes | None:
    """A PNG image of the trials, of which `first` is the best; None: no trial has a value."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    valued = [trial for trial in trials if trial.value is not None]
    if not valued:
        return None
    count = len(sweep.space)
    is_few = count <= _FEW
    size = (4.4 * (count + 1), 4.2) if is_few else (max(9.0, 1.8 * (count + 1)), 8.0)
    figure = Figure(figsize=size, dpi=130, facecolor="white", layout="constrained")
    if is_few:
        *charts, last = figure.subplots(1, count + 1, squeeze=False)[0]
        for axes, parameter in zip(charts, sweep.space):
            _scatter(axes, sweep, parameter, valued, first)
    else:
        above, last = figure.subplots(2, 1, height_ratios=(3, 2))
        _parallel(above, sweep, valued, first)
    _best_so_far(last, sweep, valued)
    image = io.BytesIO()
    FigureCanvasAgg(figure).print_png(image)
    return image.getvalue()


@dataclasses.dataclass(frozen=True)
class _Scale:
    """Places the values of a parameter, or of the metric, on an axis.

    Attributes:
      labels: of a list that is not of numbers: each value's; its place is its index.
      is_log: whether places are to be shown logarithmically.
    """

    labels: tuple[str, ...] = ()
    is_log: bool = False

    @classmethod
    def of(cls, parameter: Parameter) -> _Scale:
        numbers = [spaces.number_of(text) for text in parameter.values]
        result = [number for number in numbers if number is not None]
        if len(result) < len(numbers):
            return cls(parameter.values)
        return cls(is_log=parameter.kind is Kind.LOG or bool(result) and 0 < min(result) * _LOG_RATIO < max(result))

    def place(self, text: str) -> float:
        if self.labels:
            return float(self.labels.index(text))
        number = spaces.number_of(text)
        assert number is not None
        return number

    def share(self, place: float, low: float, high: float) -> float:
        """Where a place is between two others, from 0 to 1."""
        if self.is_log:
            place, low, high = math.log(place), math.log(low), math.log(high)
        return (place - low) / (high - low) if high > low else 0.5


def _scatter(axes: Axes, sweep: Sweep, parameter: Parameter, trials: Sequence[Trial], first: Trial | None) -> None:
    scale = _Scale.of(parameter)
    places = {trial.number: scale.place(trial.bindings[parameter.name]) for trial in trials}
    _marks(axes, trials, places, _DONE)
    _marks(axes, [trial for trial in trials if trial is first], places, _BEST)
    if scale.is_log:
        axes.set_xscale("log")
    if scale.labels:
        shown = range(0, len(scale.labels), math.ceil(len(scale.labels) / _MOST_LABELS))
        axes.set_xticks([*shown], [_short(scale.labels[index]) for index in shown], rotation=30, ha="right")
        axes.set_xlim(-0.5, len(scale.labels) - 0.5)
    _dress(
        axes,
        _short(parameter.name, 40),
        sweep.metric,
        "" if first is None else f"best: {first.bindings[parameter.name]}",
    )


def _parallel(axes: Axes, sweep: Sweep, trials: Sequence[Trial], first: Trial | None) -> None:
    """A line for each trial through its values and its metric."""
    ends = len(sweep.space)
    values = [trial.value for trial in trials if trial.value is not None]
    low, high = min(values), max(values)
    scales = [(_Scale.of(parameter), parameter) for parameter in sweep.space]
    places = [[scale.place(trial.bindings[item.name]) for trial in trials] for scale, item in scales]
    for index, trial in enumerate(trials):
        assert trial.value is not None
        heights = [
            scale.share(trial_values[index], min(trial_values), max(trial_values))
            for (scale, _), trial_values in zip(scales, places)
        ]
        heights.append(_Scale().share(trial.value, low, high))
        badness = heights[-1] if sweep.goal is Goal.MINIMIZE else 1 - heights[-1]
        style = ":" if trial.state is State.STOPPED else "-"
        if trial is first:
            axes.plot(heights, style, color=_BEST, linewidth=2.6, zorder=4, clip_on=False)
        else:
            axes.plot(heights, style, color=_DONE, linewidth=1.2, alpha=0.15 + 0.65 * (1 - badness), clip_on=False)
    for index, ((scale, _), trial_values) in enumerate(zip(scales, places)):
        axes.axvline(index, color=_FAINT, linewidth=0.8)
        for place in sorted(
            {min(trial_values), max(trial_values), *(trial_values if len({*trial_values}) <= _MOST_LABELS else ())}
        ):
            text = _short(scale.labels[int(place)]) if scale.labels else f"{place:.4g}"
            _label(axes, index, scale.share(place, min(trial_values), max(trial_values)), text)
    axes.axvline(ends, color=_INK, linewidth=1.2)
    for value in sorted({low, high}):
        _label(axes, ends, _Scale().share(value, low, high), f"{value:.5g}")
    axes.set_xticks(range(ends + 1), [*(_short(item.name, 28) for item in sweep.space), sweep.metric])
    axes.set_xlim(-0.1, ends + 0.35)
    axes.set_yticks([])
    _dress(axes, "", "", "" if first is None else _short(f"best: {first.shown}", 110))
    axes.spines["left"].set_visible(False)


def _label(axes: Axes, index: int, height: float, text: str) -> None:
    axes.annotate(
        text, (index, height), xytext=(4, 0), textcoords="offset points", fontsize=8, color=_INK, va="center", zorder=5,
        bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.75},
    )  # fmt: skip


def _best_so_far(axes: Axes, sweep: Sweep, trials: Sequence[Trial]) -> None:
    from matplotlib.ticker import MaxNLocator

    pick = min if sweep.goal is Goal.MINIMIZE else max
    numbers: list[int] = []
    so_far: list[float] = []
    for trial in sorted(trials, key=lambda trial: trial.number):
        if trial.state is not State.STOPPED and trial.value is not None:
            numbers.append(trial.number)
            so_far.append(pick([*so_far[-1:], trial.value]))
    _marks(axes, trials, {trial.number: trial.number for trial in trials}, _DONE)
    axes.step(numbers, so_far, where="post", color=_BEST, linewidth=1.8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    stopped = sum(trial.state is State.STOPPED for trial in trials)
    _dress(axes, "trial", sweep.metric, f"best so far{f'; hollow: {stopped} stopped early' if stopped else ''}")


def _marks(axes: Axes, trials: Sequence[Trial], places: Mapping[int, float], colour: str) -> None:
    """A mark for each trial at its place and its value, hollow for one that was stopped early."""
    for is_stopped, face in ((False, colour), (True, "white")):
        result = [trial for trial in trials if (trial.state is State.STOPPED) == is_stopped]
        x, y = [places[trial.number] for trial in result], [trial.value or 0.0 for trial in result]
        axes.plot(x, y, "o", markersize=6, markeredgecolor=colour, markerfacecolor=face, alpha=0.8)


def _dress(axes: Axes, x: str, y: str, title: str) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_FAINT)
    axes.tick_params(colors=_INK, labelsize=9, color=_FAINT)
    axes.grid(axis="y", color="#000000", alpha=0.07, linewidth=0.8)
    axes.set_xlabel(x, color=_INK, fontsize=10)
    axes.set_ylabel(y, color=_INK, fontsize=10)
    axes.set_title(_short(title, 110), color=_INK, fontsize=10, loc="left")


def _short(text: str, most: int = _LABEL) -> str:
    # Matplotlib takes what is between two dollars for a formula.
    text = text.replace("$", r"\$")
    return text if len(text) <= most else f"{text[: most - 1]}…"
