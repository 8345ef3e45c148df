"""Every decoder family against the reference logits in golden/, which golden/make.py wrote."""

import dataclasses
import json
import pathlib
import sys

import jax
import numpy as np
import pytest

from capibara.core import tree
from capibara.interop.hf import tables
from capibara.interop.hf.layout import tensors
from capibara.models import api
from capibara.models.architectures.decoder import DecoderConfig
from capibara.models.architectures.gemma3n.config import Gemma3nConfig
from capibara.models.layers.rope import Rope

GOLDEN = pathlib.Path(__file__).resolve().parent / "golden"
sys.path.insert(0, str(GOLDEN))

import answers  # noqa: E402

ANSWERS = json.loads((GOLDEN / "decoders.json").read_text())

SIZES = dict(
    vocab_size=96, embed_dim=32, mlp_dim=48, num_layers=2, num_heads=4, num_kv_heads=2, norm_eps=1e-5, dtype="float32"
)
LLAMA = dict(SIZES, head="separate")
GPT2 = dict(
    SIZES,
    num_kv_heads=None,
    mlp_dim=128,
    norm="layer",
    bias="all",
    activation="gelu",
    positions="learned",
    max_length=64,
)
GPT_NEOX = dict(
    LLAMA,
    embed_dim=64,
    num_kv_heads=None,
    norm="layer",
    bias="all",
    activation="gelu_exact",
    residual="parallel",
    rope=Rope(fraction=0.25),
)
GEMMA = dict(
    SIZES,
    head_dim=16,
    num_kv_heads=1,
    norm_eps=1e-6,
    norm_scale="offset",
    activation="geglu",
    embedding_scale="sqrt_dim",
)
GEMMA2 = dict(
    GEMMA,
    num_layers=3,
    num_kv_heads=2,
    norm_placement="sandwich",
    layer_pattern=("local", "global"),
    window=8,
    attention_scale=8**-0.5,
    attention_soft_cap=2.0,
    logit_soft_cap=3.0,
)
GEMMA3 = dict(
    GEMMA,
    num_layers=8,
    norm_placement="sandwich",
    qk_norm="head",
    layer_pattern=(*("local",) * 5, "global"),
    window=8,
    attention_scale=8**-0.5,
    rope=Rope(theta=1e6, local_theta=10_000.0, scaling="linear", factor=8.0),
)
GEMMA3N = dict(
    SIZES,
    num_layers=8,
    num_kv_heads=2,
    head_dim=16,
    norm_eps=1e-6,
    layer_pattern=("local", "local", "local", "global"),
    window=8,
    logit_soft_cap=3.0,
    rope=Rope(theta=1e6, local_theta=10_000.0),
    streams=3,
    laurel_rank=6,
    per_layer_dim=8,
    per_layer_vocab_size=answers.VOCAB - 6,
    kv_shared_layers=4,
    activation_sparsity=(0.8,) * 3,
)
LLAMA3_SCALING = Rope(theta=500.0, scaling="llama3", factor=8.0, original_length=16)
YARN_SCALING = Rope(theta=500.0, scaling="yarn", factor=4.0, original_length=64, beta_fast=2.0, beta_slow=0.25)
DYNAMIC_SCALING = Rope(theta=500.0, scaling="dynamic", factor=2.0, original_length=16)
LONG_SCALING = Rope(
    theta=500.0,
    scaling="longrope",
    factor=4.0,
    original_length=16,
    short_factors=(1.0, 1.1, 1.3, 1.5),
    long_factors=(1.0, 2.0, 5.0, 9.0),
)

FAMILIES = {
    "gpt2": ("gpt2", GPT2),
    "gpt_neox": ("gpt_neox", GPT_NEOX),
    "gpt_neox_unbiased": ("gpt_neox", GPT_NEOX | dict(bias="mlp")),
    "gpt_neox_tanh": ("gpt_neox", GPT_NEOX | dict(activation="gelu")),
    "llama": ("llama", LLAMA),
    "llama_linear": ("llama", LLAMA | dict(rope=Rope(scaling="linear", factor=4.0))),
    "llama_llama3": ("llama", LLAMA | dict(head_dim=16, rope=LLAMA3_SCALING)),
    "llama_yarn": ("llama", LLAMA | dict(head_dim=16, rope=YARN_SCALING)),
    "llama_dynamic": ("llama", LLAMA | dict(rope=DYNAMIC_SCALING)),
    "llama_biased": ("llama", LLAMA | dict(bias="attention")),
    "llama_mlp_biased": ("llama", LLAMA | dict(bias="mlp")),
    "llama_all_biased": ("llama", LLAMA | dict(bias="all")),
    "smollm2": ("llama", SIZES | dict(rope=Rope(theta=100_000.0))),
    "mistral": ("mistral", LLAMA | dict(layer_pattern=("local",), window=8)),
    "gemma": ("gemma", GEMMA),
    "gemma_biased": ("gemma", GEMMA | dict(bias="attention")),
    "gemma2": ("gemma2", GEMMA2),
    "gemma3": ("gemma3_text", GEMMA3),
    "gemma3n": ("gemma3n_text", GEMMA3N),
    "qwen2": ("qwen2", SIZES | dict(bias="qkv", rope=Rope(theta=1e6))),
    "qwen3": ("qwen3", LLAMA | dict(head_dim=16, qk_norm="head", rope=Rope(theta=1e6))),
    "qwen3_biased": ("qwen3", LLAMA | dict(head_dim=16, qk_norm="head", rope=Rope(theta=1e6), bias="attention")),
    "phi3": ("phi3", LLAMA | dict(layer_pattern=("local",), window=7)),
    "phi3_partial": ("phi3", LLAMA | dict(rope=Rope(theta=500.0, fraction=0.5))),
    "phi3_long": ("phi3", LLAMA | dict(rope=LONG_SCALING)),
    "phi3_short": ("phi3", LLAMA | dict(rope=dataclasses.replace(LONG_SCALING, factor=2.0, original_length=32))),
}


def logits(model_type: str, config: DecoderConfig) -> np.ndarray:
    """Of the committed tokens, with the weights that the reference had."""
    model = api.build(config)
    names = tree.path_names(model.abstract_params)
    shapes = {name: leaf.shape for name, leaf in zip(names, jax.tree.leaves(model.abstract_params), strict=True)}
    values = tensors.read(tables.of(model_type, shapes, {}), shapes, answers.draw)
    assert values.keys() == shapes.keys()
    params = tree.map_with_names(lambda name, _: values[name], model.abstract_params)
    tokens = np.array(ANSWERS["tokens"], np.int32)
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    batch = {"tokens": tokens, "positions": positions, "segment_ids": np.ones_like(tokens)}
    return np.asarray(jax.jit(model.logits)(params, batch))


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_the_reference(name):
    model_type, config = FAMILIES[name]
    kind = Gemma3nConfig if name == "gemma3n" else DecoderConfig
    got, want = logits(model_type, kind(**config)), ANSWERS[name]
    some = got[-1][np.ix_(ANSWERS["positions"], ANSWERS["entries"])]
    np.testing.assert_allclose(some, want["logits"], rtol=0, atol=2e-4)
    np.testing.assert_allclose([got.mean(), got.std()], [want["mean"], want["std"]], rtol=0, atol=2e-4)
