"""The picture of how a model uses its experts."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np

from capibara.interop.experts.statistics import ALL, Statistics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

_MOST_DOMAINS = 10


def draw(statistics: Statistics) -> bytes:
    """A PNG: of each layer and expert the share of tokens and the activation, of all data; and the share in each domain."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    whole = statistics.domains[ALL]
    panels = {"share of tokens": _relative(whole.share), "mean activation": _relative(whole.activation)}
    domains = [name for name in statistics.domains if name != ALL][:_MOST_DOMAINS]
    panels |= {f"share of tokens of {name}": _relative(statistics.domains[name].share) for name in domains}
    rows = -(-len(panels) // 2)
    height = max(1.6, 0.18 * len(statistics.layers) + 0.9)
    figure = Figure(figsize=(11, rows * height + 0.4), layout="constrained")
    places = np.ravel(figure.subplots(rows, 2, squeeze=False))
    for axes, (title, values) in zip(places, panels.items()):
        image = _panel(axes, title, values, statistics.layers)
    for axes in places[len(panels) :]:
        axes.axis("off")
    figure.colorbar(image, ax=places.tolist(), label="times the layer's mean", extend="max")
    content = io.BytesIO()
    FigureCanvasAgg(figure).print_png(content)
    return content.getvalue()


def _relative(values_LE: np.ndarray) -> np.ndarray:
    mean_L1 = values_LE.mean(-1, keepdims=True)
    return values_LE / np.where(mean_L1 > 0, mean_L1, 1)


def _panel(axes: Axes, title: str, values_LE: np.ndarray, layers: tuple[int, ...]) -> AxesImage:
    image = axes.imshow(values_LE, cmap="viridis", vmin=0, vmax=3, aspect="auto", interpolation="nearest")
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("expert", fontsize=8)
    axes.set_ylabel("layer", fontsize=8)
    shown = range(0, len(layers), max(1, len(layers) // 8))
    axes.set_yticks(list(shown), [str(layers[index]) for index in shown])
    axes.tick_params(labelsize=7)
    return image
