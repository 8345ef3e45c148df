"""Small reward models of each family as Hugging Face folders, and their scores of some texts."""

from __future__ import annotations

import pathlib

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from capibara.interop import open_model
from capibara.interop.hf import config as hf_config
from capibara.interop.hf import folder as hf_folder
from capibara.models import api

FAMILIES = {
    "llama": "LlamaForSequenceClassification",
    "mistral": "MistralForSequenceClassification",
    "gemma": "GemmaForSequenceClassification",
    "gemma2": "Gemma2ForSequenceClassification",
    "qwen2": "Qwen2ForSequenceClassification",
    "qwen3": "Qwen3ForSequenceClassification",
    "phi3": "Phi3ForSequenceClassification",
}
TEXTS = [[5, 9, 11, 3], [7, 2, 40, 41, 42, 8, 9], [12]]
SIZES = dict(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    intermediate_size=48, max_position_embeddings=64, rms_norm_eps=1e-6, pad_token_id=0, sliding_window=None,
)  # fmt: skip


def values(model_type: str) -> dict:
    more = {"architectures": [FAMILIES[model_type]], "id2label": {"0": "LABEL_0"}, "model_type": model_type}
    if model_type == "gemma2":
        more |= {"sliding_window": 32, "query_pre_attn_scalar": 8}
    if model_type.startswith("gemma"):
        more["hidden_activation"] = "gelu_pytorch_tanh"
    return SIZES | more


def write(path: pathlib.Path, model_type: str) -> None:
    """Writes a folder of random parameters."""
    model = api.build(hf_config.from_hf(values(model_type), dtype="float32"))
    params = jax.device_get(jax.jit(model.init)(jax.random.key(1)))
    params = jax.tree.map(
        lambda x: x + 0.2 * np.random.default_rng(x.size).normal(size=x.shape).astype(x.dtype), params
    )
    config = hf_config.to_hf(model.config, values(model_type))
    shapes = open_model.hf_shapes(model, model_type)
    assert shapes["score.weight"] == (1, 32) and "lm_head.weight" not in shapes
    tensors = open_model.hf_tensors(params, model, model_type)
    hf_folder.save_hf(str(path), config, shapes, tensors, {}, dtype="float32")


def scores(path: pathlib.Path) -> list[float]:
    """The scores of TEXTS, each by itself, of a folder's model."""
    return [values[-1] for values in token_scores(path)]


def token_scores(path: pathlib.Path) -> list[list[float]]:
    """The scores after each token of TEXTS."""
    foreign = open_model.open_model(str(path))
    model = api.build(hf_config.from_hf(foreign.config, dtype="float32"))
    here = SingleDeviceSharding(jax.devices()[0])
    params = open_model.load_params(foreign, model, jax.tree.map(lambda _: here, model.abstract_params))
    result = []
    for ids in TEXTS:
        row = {"tokens": np.array([ids]), "positions": np.arange(len(ids))[None]}
        row["segment_ids"] = np.ones_like(row["tokens"])
        result.append(model.logits(params, row)[0, :, 0].tolist())
    return result
