"""The one rule by which `--emulate=N` makes any run small enough for a laptop, its program otherwise the same."""

from __future__ import annotations

import numpy as np

from capibara.training.trainer import Trainer

RULE = (
    "models wider than 256 shrink: embed_dim to 128, mlp_dim and head_dim by the same factor (to multiples of 64 and "
    "2), at most 4 layers; rows to at most 128 tokens, one row per batch shard and micro-batch; heads, vocabulary, mesh "
    "axes and everything else stay"
)
_WIDEST, _WIDTH, _LAYERS, _LENGTH = 256, 128, 4, 128


def shrunk_bindings(trainer: Trainer, device_count: int) -> list[str]:
    """Gin statements that shrink a run by `RULE`; none where the model is small already.

    They are bound like any other value, so the run folder's config.gin says what really ran.
    """
    model, plan = trainer.model, trainer.plan
    if model.embed_dim <= _WIDEST:
        return []
    factor = model.embed_dim / _WIDTH
    mesh = plan.mesh_shape(device_count)
    batch_shards = int(np.prod([mesh[axis] for axis in plan.rules.batch]))
    name = type(model).__name__
    values = {
        f"{name}.embed_dim": (model.embed_dim, _WIDTH),
        f"{name}.mlp_dim": (model.mlp_dim, _multiple(model.mlp_dim / factor, 64)),
        f"{name}.head_dim": (model.head_dim, _multiple(model.head_size / factor, 2)),
        f"{name}.num_layers": (model.num_layers, min(model.num_layers, _LAYERS)),
        "Dataset.length": (trainer.dataset.length, min(trainer.dataset.length, _LENGTH)),
        "Plan.batch_size": (plan.batch_size, batch_shards * plan.accumulation),
    }
    return [f"{name} = {new}" for name, (old, new) in values.items() if new != old]


def _multiple(value: float, unit: int) -> int:
    return max(unit, round(value / unit) * unit)
