"""The same small case for us and for torch: final hidden states, an output projection, answers and a reference."""

from __future__ import annotations

import numpy as np

B, T, D, V = 3, 14, 8, 20
DPO = {
    "sigmoid": dict(beta=0.1),
    "smoothed": dict(beta=0.5, label_smoothing=0.2),
    "sft": dict(beta=0.3, sft_weight=0.7),
    "ipo": dict(kind="ipo", beta=0.25),
    "ipo_smoothed": dict(kind="ipo", beta=0.1, label_smoothing=0.1),
}
GRPO = {
    "grpo": dict(kl=0.0),
    "kl": dict(kl=0.2, low=0.1, high=0.3),
    "dr_grpo": dict(token_weights="max_length", kl=0.05),
}
NEW_TOKENS = 9  # of DR_GRPO


def case() -> dict[str, np.ndarray]:
    """Each row has a pair: the chosen answer at 2 to 5, the rejected one at 9 to 9 + 1, 2 or 3; of Grpo both are one."""
    rng = np.random.default_rng(7)
    segments = np.tile(np.repeat([1, 2, 0], [7, 6, 1]), (B, 1)).astype(np.int32)
    weights = np.zeros((B, T), np.float32)
    weights[:, 2:6] = 1
    for row in range(B):
        weights[row, 9 : 10 + row] = 1
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return {
        "hidden": draw(B, T, D),
        "head": draw(V, D),
        "targets": rng.integers(0, V, (B, T)).astype(np.int32),
        "weights": weights,
        "segments": segments,
        "other_hidden": draw(B, T, D),  # of the reference, and of the model that gave Grpo's answers
        "gains": np.array([1.0, -0.7, 0.3], np.float32),
    }
