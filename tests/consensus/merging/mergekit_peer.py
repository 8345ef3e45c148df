"""Merges the tensors of cases.py by mergekit, and prints the results as JSON; runs in mergekit's environment."""

from __future__ import annotations

import json

import merge_cases as cases
import numpy as np
import torch
from mergekit.merge_methods import merge_tensors


def merged(case: str, shape: str, scale: float) -> list[float]:
    method, _, settings, count, has_base = cases.CASES[case]
    base, *models = map(torch.from_numpy, cases.tensors(shape, scale))
    # mergekit's slerp calls the first model the base.
    given = [base, *models[:count]] if has_base else models[:count]
    index = 0 if has_base or method == "slerp" else None
    draw = cases.uniform(shape)

    def bernoulli(probability: torch.Tensor) -> torch.Tensor:
        mask = draw.random(cases.SHAPES[shape], dtype=np.float32) < probability.numpy().reshape(cases.SHAPES[shape])
        return torch.from_numpy(mask.astype(np.float32)).reshape(probability.shape)

    torch.bernoulli = bernoulli
    ids = [f"model {i}" for i in range(len(given))]
    per_model = {
        name: dict(zip(ids[-count:], value)) if isinstance(value, list) else value for name, value in settings.items()
    }
    result = merge_tensors(given, method, parameters=per_model, ids=ids, base_index=index)
    return [float(f"{float(value):.8g}") for value in result.flatten()]


if __name__ == "__main__":
    answers = {
        str(scale): {case: {shape: merged(case, shape, scale) for shape in cases.SHAPES} for case in cases.CASES}
        for scale in cases.SCALES
    }
    print(json.dumps(answers))
