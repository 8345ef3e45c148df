"""The rule by which `--emulate=N` shrinks any run to fit a laptop; its program stays the same otherwise."""

from __future__ import annotations

import math

from jax.sharding import AbstractMesh

from capibara import sharding
from capibara.data.sources.sources import DataFormat
from capibara.models.api import TransformerConfig
from capibara.training.trainer import Trainer

RULE = (
    "models wider than 256 shrink: embed_dim to 128, mlp_dim, expert widths and head_dim by the same factor (to "
    "multiples of 64, 64 and 8), at most 4 layers or one of each pattern and pipeline part; rows to at most 128 tokens "
    "(longer conversations are cut; those of pairs and prompts stay), windows by the same factor, one row per batch shard and micro-batch; vocabularies "
    "beyond 1024 to that of the data; heads, experts, mesh axes and everything else stay"
)
_WIDEST, _WIDTH, _LAYERS, _LENGTH, _VOCABULARY = 256, 128, 4, 128, 1024


def bindings(trainer: Trainer, device_count: int) -> tuple[list[str], str]:
    """Gin statements that shrink a run by `RULE`, and a line that explains them; none if the model is small already.

    They are bound like any other value, so the run folder's config.gin has the values that were used.
    """
    model, plan, dataset = trainer.model, trainer.plan, trainer.dataset
    if model.embed_dim <= _WIDEST:
        return [], ""
    sizes = plan.mesh_shape(device_count)
    pipeline = plan.pipeline(AbstractMesh(tuple(sizes.values()), tuple(sizes)))
    parts = pipeline.stages * pipeline.repeats if pipeline else 1
    rows = math.prod(sizes[axis] for axis in sharding.batch_axes(sizes, plan.rules)) * plan.micro_batches
    # Both answers of a preference pair, or a prompt and its answer, would not fit a shorter row.
    length = min(dataset.length, _LENGTH) if dataset.data_format is DataFormat.TEXTS else dataset.length
    rows *= 1 if trainer.loss is None else trainer.loss.rows_of_a_prompt
    rows *= pipeline.microbatches if pipeline else 1
    values: dict[str, tuple[object, object]] = {
        **_shrunk_model(model, parts, length / dataset.length),
        f"{type(model).__name__}.vocab_size": (model.vocab_size, _vocabulary(trainer)),
        "Dataset.length": (dataset.length, length),
        "Dataset.encoder_length": (dataset.encoder_length, _at_most(dataset.encoder_length, _LENGTH)),
        "Plan.batch_size": (plan.batch_size, rows),
        "Dataset.task_shards": (dataset.task_shards, math.gcd(dataset.task_shards, rows)),
    }
    if length < dataset.length and dataset.source is not None and dataset.source.has_conversations:
        values["Dataset.too_long"] = (str(dataset.too_long), "'cut'")  # few conversations would fit the short rows
    changed = [f"{name} = {new}" for name, (old, new) in values.items() if new != old]
    return changed, f"--emulate={device_count}: {RULE}"


def _shrunk_model(model: TransformerConfig, parts: int, shorter: float) -> dict[str, tuple[int | None, int | None]]:
    """Field -> old and new value, for a model whose rows shrink by the factor `shorter`, in a pipeline of `parts`."""
    name, factor = type(model).__name__, _WIDTH / model.embed_dim

    def width(value: int | None, unit: int) -> tuple[int | None, int | None]:
        return value, None if value is None else max(unit, round(value * factor / unit) * unit)

    unit = parts * len(getattr(model, "layer_pattern", "1"))
    layers = unit * max(1, _LAYERS // unit)
    values = {
        f"{name}.embed_dim": (model.embed_dim, _WIDTH),
        f"{name}.mlp_dim": width(model.mlp_dim, 64),
        f"{name}.head_dim": (model.head_dim, width(model.head_size, 8)[1]),
        f"{name}.num_layers": (model.num_layers, min(model.num_layers, layers)),
    }
    if (encoder := getattr(model, "num_encoder_layers", None)) is not None:
        values[f"{name}.num_encoder_layers"] = (encoder, min(encoder, layers))
    if (window := getattr(model, "window", None)) is not None:
        values[f"{name}.window"] = (window, max(1, round(window * shorter)))
    if model.moe is not None:
        values["Moe.expert_dim"] = width(model.moe.expert_dim, 64)
        values["Moe.shared_dim"] = width(model.moe.shared_dim, 64)
    return values


def _vocabulary(trainer: Trainer) -> int:
    size = trainer.model.vocab_size
    # Read the data's vocabulary only if needed: for a SeqIO task it imports SeqIO.
    return size if size <= _VOCABULARY else min(size, trainer.dataset.get_vocabulary().size)


def _at_most(value: int | None, most: int) -> int | None:
    return None if value is None else min(value, most)
