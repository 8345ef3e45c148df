"""What is merged by both programs: small tensors, our settings and mergekit's for each method. Needs only numpy."""

from __future__ import annotations

import numpy as np

SHAPES = {"matrix": (5, 4), "vector": (6,)}
SCALES = (1.0, 1e-9)  # of all tensors; at the smaller one mergekit's bounds count
THREE = {"weights": (1.0, 0.5, 2.0)}
ITS_THREE = {"weight": [1.0, 0.5, 2.0]}
SPARSE, ITS_SPARSE = {**THREE, "density": (0.5, 0.7, 0.3)}, {**ITS_THREE, "density": [0.5, 0.7, 0.3]}
SCALED = {"scale": 1.5, "normalize": False}
ITS_SCALED = {"lambda": 1.5, "normalize": False}

# name: (method, our settings, mergekit's, number of models, whether there is a base)
CASES = {
    "linear": ("linear", THREE, ITS_THREE, 3, False),
    "linear sum": ("linear", {**THREE, "normalize": False}, {**ITS_THREE, "normalize": False}, 3, False),
    "slerp": ("slerp", {"t": 0.3}, {"t": 0.3}, 2, False),
    "nuslerp": ("nuslerp", {"weights": (1.0, 3.0)}, {"weight": [1.0, 3.0]}, 2, False),
    "nuslerp of offsets": ("nuslerp", {"weights": (1.0, 3.0)}, {"weight": [1.0, 3.0]}, 2, True),
    "nuslerp of rows": (
        "nuslerp", {"weights": (2.0, 1.0), "along": "rows"}, {"weight": [2.0, 1.0], "nuslerp_flatten": False}, 2, False,
    ),
    "nuslerp of columns": (
        "nuslerp", {"weights": (2.0, 1.0), "along": "columns"},
        {"weight": [2.0, 1.0], "nuslerp_flatten": False, "nuslerp_row_wise": True}, 2, False,
    ),
    "multislerp": ("multislerp", THREE, ITS_THREE, 3, False),
    "multislerp of offsets": ("multislerp", THREE, ITS_THREE, 3, True),
    "multislerp sum": ("multislerp", {**THREE, "normalize": False}, {**ITS_THREE, "normalize_weights": False}, 3, False),
    "karcher": ("karcher", {}, {}, 3, False),
    "task_arithmetic": ("task_arithmetic", {**THREE, "scale": 0.4}, {**ITS_THREE, "lambda": 0.4}, 3, True),
    "task_arithmetic mean": ("task_arithmetic", {**THREE, "normalize": True}, {**ITS_THREE, "normalize": True}, 3, True),
    "ties": ("ties", SPARSE, ITS_SPARSE, 3, True),
    "ties scaled": ("ties", SPARSE | SCALED, ITS_SPARSE | ITS_SCALED, 3, True),
    "dare_linear": ("dare_linear", SPARSE, ITS_SPARSE, 3, True),
    "dare_linear bare": ("dare_linear", {**SPARSE, "rescale": "none"}, {**ITS_SPARSE, "rescale": False}, 3, True),
    "dare_ties": ("dare_ties", SPARSE, ITS_SPARSE, 3, True),
    "breadcrumbs": ("breadcrumbs", {**SPARSE, "outliers": 0.2}, {**ITS_SPARSE, "gamma": 0.2}, 3, True),
    "breadcrumbs_ties": ("breadcrumbs_ties", {**SPARSE, "outliers": 0.2}, {**ITS_SPARSE, "gamma": 0.2}, 3, True),
    "della": ("della", {**SPARSE, "spread": 0.2}, {**ITS_SPARSE, "epsilon": 0.2}, 3, True),
    "della_linear": ("della_linear", {**SPARSE, "spread": 0.2}, {**ITS_SPARSE, "epsilon": 0.2}, 3, True),
    "sce": ("sce", {"density": 0.6}, {"select_topk": 0.6}, 3, True),
    "sce of all": ("sce", {}, {}, 3, True),
    "model_stock": ("model_stock", {}, {}, 3, True),
    "model_stock by row": ("model_stock", {"by_row": True}, {"filter_wise": True}, 3, True),
    "passthrough": ("passthrough", {"scale": 0.9}, {"scale": 0.9}, 1, False),
}  # fmt: skip


def tensors(shape: str, scale: float = 1.0) -> list[np.ndarray]:
    """A base and three models near it, some of whose values are the base's, times `scale`."""
    draw = np.random.default_rng(len(shape))
    base = draw.standard_normal(SHAPES[shape], np.float32)
    offsets = [np.float32(0.3) * draw.standard_normal(SHAPES[shape], np.float32) for _ in range(3)]
    whole = [base, *(base + offset * (draw.random(SHAPES[shape]) < 0.9) for offset in offsets)]
    return [np.float32(scale) * tensor for tensor in whole]


def uniform(shape: str) -> np.random.Generator:
    """The numbers that random masks are drawn from, one array for each model."""
    return np.random.default_rng(100 + len(shape))
