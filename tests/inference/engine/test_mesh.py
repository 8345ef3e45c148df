"""Texts from a model that is sharded over a mesh equal those of one device; its programs lower for a TPU slice."""

from __future__ import annotations

import functools
import math

import jax
import pytest

from capibara import sharding
from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.sampling.sampling import Sampling
from capibara.models import api
from capibara.models.api import DecoderConfig, EncoderDecoderConfig, Gemma3nConfig, StreamingHeads
from capibara.models.parts.moe import Moe
from capibara.sharding import Plan

VOCABULARY, LENGTH, SLOTS = ByteVocabulary(), 64, 4
SIZES = dict(vocab_size=384, embed_dim=32, num_layers=2, num_heads=4, mlp_dim=64, dtype="float32")
CONFIGS = {
    "decoder": DecoderConfig(**SIZES, num_kv_heads=2, layer_pattern=("local", "global"), window=16),
    "experts": DecoderConfig(**SIZES, moe=Moe(num_experts=4, top_k=2, expert_dim=32)),
    "gpt_oss": DecoderConfig(
        **SIZES,
        num_kv_heads=2,
        layer_pattern=("local", "global"),
        window=16,
        bias="attention",
        activation="clamped_swiglu",
        attention_sinks="head",
        moe=Moe(num_experts=4, top_k=2, expert_dim=32, bias="all"),
    ),
    "gemma3n": Gemma3nConfig(
        **SIZES | dict(num_layers=3),
        num_kv_heads=2,
        layer_pattern=("local", "global"),
        window=16,
        streams=2,
        laurel_rank=4,
        per_layer_dim=8,
        per_layer_vocab_size=380,
        kv_shared_layers=1,
        activation_sparsity=(0.5,),
    ),
    "streaming": DecoderConfig(
        **SIZES, streaming=StreamingHeads(heads=((0, 2), (1, 3)), sink_tokens=2, recent_window=6)
    ),
    "uneven_streaming": DecoderConfig(
        **SIZES, streaming=StreamingHeads(heads=((0,), (0, 1, 2)), sink_tokens=2, recent_window=6)
    ),
    "encoder_decoder": EncoderDecoderConfig(**SIZES),
}
MESHES = [dict(data=2, fsdp=1), dict(fsdp=1, tensor=2), dict(fsdp=4), dict(data=2, fsdp=1, tensor=2)]
GREEDY = Sampling(temperature=0.0, max_new_tokens=12)
PROMPTS = ["def f", "a longer prompt, of many words and some more", "", "import numpy", "class A", "x = 1"]


@functools.cache
def made(name):
    model = api.build(CONFIGS[name])
    # Large weights, so that one token is far likelier than the others and texts do not agree by chance.
    params = jax.tree.map(lambda x: x * 3, jax.jit(model.init)(jax.random.key(1)))
    if name == "gemma3n":  # begins at zero
        params["layers"]["altup"]["correct_scale"] += 0.5
    return model, params


def texts(name, sizes=None, **config):
    model, params = made(name)
    if sizes is not None:
        plan = Plan(batch_size=8, **sizes)
        mesh = sharding.make_mesh(plan, jax.devices()[: math.prod(sizes.values())])
        params = jax.device_put(params, sharding.shardings(mesh, plan.rules, model.axes, model.abstract_params))
    encoder_length = 48 if name == "encoder_decoder" else None
    one = Engine(model, params, VOCABULARY, LENGTH, EngineConfig(slots=SLOTS, **config), encoder_length)
    return one, [stream.result().tokens for stream in [one.submit(prompt, GREEDY) for prompt in PROMPTS]]


@functools.cache
def of_one_device(name):
    return texts(name)[1]


def matrix():
    for name, config in [
        ("decoder", {}),
        ("decoder", dict(page_size=8)),
        ("decoder", dict(cache_dtype="int8")),
        ("decoder", dict(cache_dtype="int8", page_size=8)),
        ("decoder", dict(draft_tokens=3)),
        ("experts", {}),
        ("gpt_oss", {}),
        ("gpt_oss", dict(page_size=8)),
        ("gemma3n", {}),
        ("gemma3n", dict(page_size=8)),
        ("gemma3n", dict(draft_tokens=3)),
        ("streaming", {}),
        ("streaming", dict(page_size=8)),
        ("streaming", dict(draft_tokens=3)),
        ("encoder_decoder", {}),
    ]:
        for index, sizes in enumerate(MESHES):
            short = (
                (name, config) == ("decoder", {})
                and index == 2
                or (index == 3 and {"cache_dtype", "page_size"} <= config.keys())
            )
            yield pytest.param(name, config, sizes, marks=() if short else pytest.mark.heavy)


@pytest.mark.parametrize("name, config, sizes", list(matrix()), ids=str)
def test_greedy_texts_are_those_of_one_device(name, config, sizes):
    one, found = texts(name, sizes, **config)
    assert found == (texts(name, **config)[1] if "cache_dtype" in config else of_one_device(name))
    rows, heads = sizes.get("data", 1) * sizes["fsdp"], sizes.get("tensor", 1)
    for layer in one.core.runner.state["cache"]["layers"]:
        key = layer.get("key", layer.get("key_pages"))
        own = key.sharding.shard_shape(key.shape)
        assert own[1] == key.shape[1] // heads
        assert own[0] == (key.shape[0] if "key_pages" in layer else SLOTS // rows)


def test_streaming_heads_that_do_not_divide_a_mesh_give_the_texts_of_one_device():
    """Three of four stream in one layer, and one in the other."""
    assert texts("uneven_streaming", dict(fsdp=2, tensor=2))[1] == of_one_device("uneven_streaming")
