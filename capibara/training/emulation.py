"""The rule by which `--emulate=N` shrinks any run to fit a laptop; its program stays the same otherwise."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jax.sharding import AbstractMesh

from capibara import sharding
from capibara.data.dataset import TooLong
from capibara.data.sources.sources import DataFormat
from capibara.models.api import TransformerConfig
from capibara.training.trainer import Trainer

RULE = (
    "models wider than 256 shrink: embed_dim to 128, mlp_dim, expert widths, latent ranks and head_dim by the same factor (to "
    "multiples of 64, of head_dim to multiples of 8), at most 4 layers or one of each pattern and pipeline part; rows to at most 128 tokens "
    "(longer conversations are cut; those of pairs and prompts stay), windows by the same factor, one row per batch shard and micro-batch; vocabularies "
    "beyond 1024 to that of the data; heads, experts, mesh axes and everything else stay"
)
_WIDEST, _WIDTH, _LAYERS, _LENGTH, _VOCABULARY = 256, 128, 4, 128, 1024


def shrunk(trainer: Trainer, device_count: int) -> Trainer:
    """A run that `RULE` has shrunk to fit `device_count` emulated devices; the run itself if its model is small."""
    model, plan, dataset = trainer.model, trainer.plan, trainer.dataset
    if model.embed_dim <= _WIDEST:
        return trainer
    sizes = plan.mesh_shape(trainer.training_loss.training_devices(device_count))
    pipeline = plan.pipeline(AbstractMesh(tuple(sizes.values()), tuple(sizes)))
    parts = pipeline.stages * pipeline.repeats if pipeline else 1
    rows = math.prod(sizes[axis] for axis in sharding.batch_axes(sizes, plan.rules)) * plan.micro_batches
    # Both answers of a preference pair, or a prompt and its answer, would not fit a shorter row.
    length = min(dataset.length, _LENGTH) if dataset.data_format is DataFormat.TEXTS else dataset.length
    rows *= 1 if trainer.loss is None else trainer.loss.rows_of_a_prompt
    rows *= pipeline.microbatches if pipeline else 1
    is_cut = length < dataset.length and dataset.source is not None and dataset.source.has_conversations
    return dataclasses.replace(
        trainer,
        model=_shrunk_model(model, parts, length / dataset.length, _vocabulary(trainer)),
        plan=dataclasses.replace(plan, batch_size=rows),
        dataset=dataclasses.replace(
            dataset,
            length=length,
            encoder_length=_at_most(dataset.encoder_length, _LENGTH),
            task_shards=math.gcd(dataset.task_shards, rows),
            too_long=TooLong.CUT if is_cut else dataset.too_long,  # few conversations would fit the short rows
        ),
    )


def _shrunk_model(model: TransformerConfig, parts: int, shorter: float, vocabulary: int) -> TransformerConfig:
    """A smaller model for rows that are shorter by this factor, in a pipeline of `parts`, with a vocabulary of this size."""
    factor = _WIDTH / model.embed_dim

    def width(value: int | None, unit: int) -> int | None:
        return None if value is None else max(unit, round(value * factor / unit) * unit)

    unit = parts * model.period
    layers = unit * max(1, _LAYERS // unit)
    values: dict[str, Any] = {
        "embed_dim": _WIDTH,
        "mlp_dim": width(model.mlp_dim, 64) if model.mlp_dim else 0,
        "head_dim": width(model.head_size, 8),
        "num_layers": min(model.num_layers, layers),
        "vocab_size": vocabulary,
    }
    if (encoder := getattr(model, "num_encoder_layers", None)) is not None:
        values["num_encoder_layers"] = min(encoder, layers)
    for name in ("window", "encoder_window"):
        if (window := getattr(model, name, None)) is not None:
            values[name] = max(1, round(window * shorter))
    if (moe := model.moe) is not None:
        expert_dim, shared_dim = width(moe.expert_dim, 64), width(moe.shared_dim, 64)
        first_dense = min(moe.first_dense, max(0, values["num_layers"] - len(moe.pattern)))
        values["moe"] = dataclasses.replace(moe, expert_dim=expert_dim, shared_dim=shared_dim, first_dense=first_dense)
    if (latent := getattr(model, "latent", None)) is not None:
        sizes, size = {name: width(getattr(latent, name), 64) for name in ("kv_rank", "query_rank")}, values["head_dim"]
        for name, most in (("rotary_dim", size - 2), ("value_dim", size)):
            sizes[name] = min(width(getattr(latent, name), 2), most)
        values["latent"] = dataclasses.replace(latent, **sizes)
    if (inner := getattr(model, "embedding_dim", None)) is not None:
        values["embedding_dim"] = min(inner, _WIDTH // 2)
    if model.mixer is not None:
        values["mixer"] = model.mixer.narrower(factor)
    return dataclasses.replace(model, **values | model.emulated(values, factor))


def _vocabulary(trainer: Trainer) -> int:
    size = trainer.model.vocab_size
    # Read the data's vocabulary only if needed: for a SeqIO task it imports SeqIO.
    return size if size <= _VOCABULARY else min(size, trainer.dataset.get_vocabulary().size)


def _at_most(value: int | None, most: int) -> int | None:
    return None if value is None else min(value, most)
