"""Recurrent layers in a decoder: documents of a row, states of the engine, adapters, and what is refused."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara import sharding
from capibara.core.types import UserError
from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.sampling.sampling import BeamSearch, Sampling
from capibara.models import api
from capibara.models.api import (
    ChannelMix,
    DecoderConfig,
    EncoderConfig,
    GatedDelta,
    KimiDelta,
    Lightning,
    Lora,
    Mamba,
    Mamba2,
    Moe,
    Multipliers,
    RgLru,
    Rwkv4,
    ShortConv,
    ZambaConfig,
)
from capibara.models.flops import flops_per_token
from capibara.optim.matrices import sides
from capibara.sharding import Plan

SIZES = dict(vocab_size=384, embed_dim=32, num_layers=5, num_heads=4, num_kv_heads=2, mlp_dim=48, dtype="float32")
MIXERS = {"conv": ShortConv(taps=4), "delta": GatedDelta(key_heads=2, value_heads=4, key_dim=8, value_dim=6, taps=3)}
MIXERS |= {"mamba2": Mamba2(heads=6, head_dim=4, groups=2, state_dim=8, bias="all", least_step=0.01, most_step=2.0)}
MIXERS |= {"mamba": Mamba(inner_dim=24, state_dim=5, step_rank=6, taps=3, bias="all", norms="scaled", norms_eps=1e-5)}
MIXERS |= {"turning": dataclasses.replace(MIXERS["delta"], most_strength=2.0, norm_eps=1e-3)}
MIXERS |= {"rg_lru": RgLru(inner_dim=32, blocks=4, taps=3)}
MIXERS |= {"kimi": KimiDelta(heads=3, head_dim=8, taps=3)}
MIXERS |= {"ling": KimiDelta(heads=3, head_dim=8, taps=3, maps="whole", least_decay=-5.0)}
MIXERS |= {"lightning": Lightning(heads=3, head_dim=8)}
MIXERS |= {"rwkv": Rwkv4(inner_dim=24)}
OF_TWO = {name: dict(mixer=mixer, layer_pattern=("recurrent", "recurrent", "global")) for name, mixer in MIXERS.items()}
# Layers of one branch: a mixer alone (Mamba 2), and a mixer, an MLP or attention (Nemotron-H).
OF_ONE = {"alone": dict(mixer=MIXERS["mamba2"], layer_pattern=("recurrent",), mlp_dim=0, positions="none")}
OF_ONE |= {"branches": dict(mixer=MIXERS["mamba2"], layer_pattern=("recurrent", "feed_forward", "global"))}
# Norms of inputs before mixers and of outputs behind attention (OLMo Hybrid).
MIXED = {"mixed": OF_TWO["turning"] | dict(norm_placement="mixed", qk_norm="whole")}
# Attention and a mixer side by side in each layer, with factors (Falcon-H1).
FACTORS = Multipliers(
    attention_input=1.2, attention_output=0.7, mixer_input=1.1, mixer_output=0.9, mlp_gate=0.8, mlp_output=0.6
)
SSM = dict(norm="before", projection_multipliers=(0.4, 0.5, 0.6, 0.7, 0.8))
HYBRID = {
    "hybrid": dict(
        mixer=dataclasses.replace(MIXERS["mamba2"], **SSM), layer_pattern=("hybrid",), multipliers=FACTORS, bias="all"
    )
}
HYBRID |= {
    "hybrid_bare": dict(mixer=dataclasses.replace(MIXERS["mamba2"], norm="none"), layer_pattern=("hybrid", "global"))
}
# Branches that are added to the normalised stream (MiniMax-Text-01).
ADDED = Multipliers(attention_residual=1.3, mixer_residual=0.8, mlp_residual=1.1, mixer_output=0.7)
STREAM = {"stream": OF_TWO["lightning"] | dict(norm_placement="stream", multipliers=ADDED)}
# States of both branches (RWKV-4).
OF_RWKV = dict(mixer=Rwkv4(), channel_mixer=ChannelMix(), activation="relu2", norm="layer")
CHANNELS = {"channels": OF_RWKV | dict(layer_pattern=("recurrent",), positions="none", embedding_norm="layer")}
CHANNELS |= {"channels_attended": OF_RWKV | dict(layer_pattern=("recurrent", "hybrid", "global"))}
# Blocks that layers share in turn (Zamba2): the second period of layers reads the other block.
OF_ZAMBA = dict(mixer=MIXERS["mamba2"], shared_blocks=2, adapter_rank=3, activation="geglu_exact")
ZAMBA = {"zamba": OF_ZAMBA | dict(layer_pattern=("recurrent", "hybrid"), positions="none", bias="mlp")}
ZAMBA |= {
    "zamba_adapted": OF_ZAMBA | dict(layer_pattern=("hybrid", "recurrent", "hybrid"), adapters="all", num_kv_heads=4)
}
MODELS = OF_TWO | OF_ONE | MIXED | HYBRID | STREAM | CHANNELS | ZAMBA
GREEDY = Sampling(temperature=0.0, max_new_tokens=8)
LENGTH = 96


def config_of(name, **options):
    return (ZambaConfig if name in ZAMBA else DecoderConfig)(**SIZES | MODELS[name] | options)


def made(config):
    model = api.build(config)
    keys = iter(jax.random.split(jax.random.key(0), 100))
    return model, jax.tree.map(lambda s: jax.random.normal(next(keys), s.shape) * 0.3, model.abstract_params)


def row(tokens, segments):
    segments = np.asarray(segments, np.int32)
    positions = np.concatenate([np.arange(np.sum(segments == s)) for s in dict.fromkeys(segments.tolist())])
    return {"tokens": tokens[None], "segment_ids": segments[None], "positions": positions[None].astype(np.int32)}


def engine(name, **config):
    model, params = made(config_of(name))
    return Engine(model, params, ByteVocabulary(), LENGTH, EngineConfig(**{"prefix_cache_mib": 0, "slots": 2} | config))


@pytest.mark.parametrize("loop", ["scan", "unroll"])
@pytest.mark.parametrize("name", MODELS)
def test_documents_of_a_row_know_nothing_of_each_other(name, loop):
    model, params = made(config_of(name, layer_loop=loop))
    tokens = np.random.default_rng(0).integers(3, 300, 90).astype(np.int32)
    parts = [slice(0, 20), slice(20, 21), slice(21, 90)]
    segments = np.concatenate([np.full(part.stop - part.start, i + 1) for i, part in enumerate(parts)])
    logits = jax.jit(model.logits)
    packed = np.asarray(logits(params, row(tokens, segments)))[0]
    for part in parts:
        alone = np.asarray(logits(params, row(tokens[part], np.ones(part.stop - part.start))))[0]
        np.testing.assert_allclose(packed[part], alone, rtol=0, atol=1e-5 * np.abs(alone).max())


@pytest.mark.parametrize("name", MIXERS)
def test_each_kind_of_layer_has_its_own_parameters(name):
    model, _ = made(config_of(name, num_layers=7))
    shapes = model.abstract_params["layers"]
    assert model.config.module_layers == {"attention": (2, 5), "mixer": (0, 1, 3, 4, 6)}
    assert shapes["attention"]["query"].shape[0] == 2 and shapes["mixer"]["out"].shape[0] == 5
    assert shapes["mlp"]["up"].shape[0] == 7


def test_norms_are_where_the_kinds_of_layers_have_them():
    model, _ = made(config_of("mixed"))
    shapes, numbers = model.abstract_params["layers"], model.config.module_layers
    assert {name: shapes[name]["scale"].shape[0] for name in shapes if name.endswith("_norm")} == {
        "attention_norm": 4, "mlp_norm": 4, "attention_post_norm": 1, "mlp_post_norm": 1
    }  # fmt: skip
    assert numbers["mlp_norm"] == numbers["mixer"] and numbers["mlp_post_norm"] == numbers["attention"]


def test_a_hybrid_layer_has_attention_and_a_mixer():
    model, _ = made(config_of("hybrid"))
    shapes = model.abstract_params["layers"]
    assert shapes["attention"]["query"].shape[0] == shapes["mixer"]["out"].shape[0] == 5
    assert not model.config.module_layers and model.config.runs_in_stages
    alternating, _ = made(config_of("hybrid_bare"))
    assert alternating.config.module_layers == {"mixer": (0, 2, 4)}
    assert "out_norm" not in alternating.abstract_params["layers"]["mixer"]


def test_a_hybrid_layer_adds_both_results():
    model, params = made(config_of("hybrid", num_layers=1, final_norm="none"))
    batch = row(np.arange(20, dtype=np.int32) + 5, np.ones(20))

    last = {"attention": "out", "mixer": "out", "mlp": "down"}

    def without(*modules):
        layer = dict(params["layers"])
        for module in modules:
            layer[module] = layer[module] | {
                name: layer[module][name] * 0 for name in (last[module], f"{last[module]}_bias")
            }
        return np.asarray(model.hidden(params | {"layers": layer}, batch)[0], np.float64)

    stream, of_both = without(*last), without("mlp")
    of_each = without("mlp", "mixer") + without("mlp", "attention") - stream
    np.testing.assert_allclose(of_both, of_each, atol=1e-5)
    assert np.abs(of_both - stream).max() > 0.1


@pytest.mark.parametrize("name", ["hybrid", "hybrid_bare"])
def test_pages_hold_the_keys_of_hybrid_layers_beside_their_states(name):
    prompts = [list(range(10, 50)), list(range(60, 67))]
    paged = engine(name, page_size=16, pages=12)
    streams = [paged.submit(prompt, GREEDY) for prompt in prompts]
    want = [engine(name).submit(prompt, GREEDY).result().tokens for prompt in prompts]
    assert [stream.result().tokens for stream in streams] == want


def test_a_layer_of_one_branch_has_one_module():
    model, _ = made(config_of("branches", num_layers=7))
    shapes = model.abstract_params["layers"]
    assert model.config.module_layers == {"mixer": (0, 3, 6), "mlp": (1, 4), "attention": (2, 5)}
    assert {
        name: module["up" if name == "mlp" else "out"].shape[0]
        for name, module in shapes.items()
        if name != "branch_norm"
    } == {"mixer": 3, "mlp": 2, "attention": 2}  # noqa: E501
    alone, _ = made(config_of("alone"))
    assert set(alone.abstract_params["layers"]) == {"mixer", "branch_norm"} and not alone.config.module_layers


@pytest.mark.parametrize("name", MODELS)
def test_a_long_prompt_is_read_in_parts_beside_others(name):
    long = list(range(10, 90))
    want = engine(name).submit(long, GREEDY).result().tokens
    one = engine(name, prefill_tokens=32)
    others = [one.submit("x", GREEDY), one.submit(long, GREEDY), one.submit("other", GREEDY)]
    found = [stream.result().tokens for stream in others]
    assert found[1] == want
    assert found[0] == engine(name).submit("x", GREEDY).result().tokens
    assert found[2] == engine(name).submit("other", GREEDY).result().tokens


@pytest.mark.parametrize("name", MODELS)
def test_a_prefix_is_reused_where_its_state_ends(name):
    one, first = engine(name, prefix_cache_mib=16), list(range(10, 50))
    one.submit(first, GREEDY).result()
    later = first + list(range(60, 80))
    found = one.submit(later, GREEDY).result()
    assert found.cached_tokens == len(first)
    assert found.tokens == engine(name).submit(later, GREEDY).result().tokens
    other = first[:30] + list(range(100, 120))  # a state of 40 tokens is none of 30
    found = one.submit(other, GREEDY).result()
    assert found.cached_tokens == 0
    assert found.tokens == engine(name).submit(other, GREEDY).result().tokens


def test_guesses_cannot_be_taken_back():
    with pytest.raises(UserError, match="EngineConfig.draft_tokens is 3, and the model's layers have states"):
        engine("delta", draft_tokens=3)


@pytest.mark.parametrize("name", MODELS)
def test_beams_take_their_states_with_them(name):
    one, prompt = engine(name), list(range(50, 57))
    found = one.submit(prompt, Sampling(max_new_tokens=8, beams=BeamSearch(num_decodes=3, alpha=0.0))).result()
    model, params = made(config_of(name))
    tokens = np.array([*prompt, *found.tokens], np.int32)
    logits = jax.jit(model.logits)(params, row(tokens, np.ones(len(tokens))))[0]
    log_p = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits))[:-1], tokens[1:, None], axis=1)[len(prompt) - 1 :]
    assert len(found.tokens) == 8
    np.testing.assert_allclose(found.decodes[-1].score, log_p.sum(), rtol=1e-4)


@pytest.mark.parametrize("name", MIXERS)
def test_adapters_of_all_weights_merge_to_the_same_logits(name):
    lora = Lora(rank=3, targets=("all-linear",), rank_pattern=(("layers/3/mixer/out", 2),))
    model = api.build(config_of(name, lora=lora))
    keys = iter(jax.random.split(jax.random.key(0), 300))
    params = jax.tree.map(lambda s: jax.random.normal(next(keys), s.shape) * 0.3, model.abstract_params)
    factor = params["layers"]["mixer"]["out_lora"]
    assert "scale" in factor and factor["a"].shape[0] == 4  # layers 0, 1, 3 and 4
    factor["scale"] = jnp.asarray([lora.of_layers("layers/mixer/out", (0, 1, 3, 4))[1]]).reshape(-1)
    assert len(set(np.asarray(factor["scale"]).tolist())) == 2 and factor["scale"][2] != factor["scale"][0]
    batch = row(np.arange(30, dtype=np.int32) + 5, np.ones(30))
    want = np.asarray(jax.jit(model.logits)(params, batch))
    got = np.asarray(jax.jit(model.plain.logits)(jax.jit(model.merge)(params), batch))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())


def test_a_recurrence_has_flops_of_its_own():
    def count(config, length):
        model = api.build(config)
        return flops_per_token(config, model.abstract_params, model.axes, length)

    config = config_of("delta")
    wide = dataclasses.replace(config, mixer=dataclasses.replace(config.mixer, taps=4))
    taps = 4 * (2 * 8 * 2 + 4 * 6) * 2 * 3  # a tap more of each channel, in four layers, forwards and backwards
    assert count(wide, 64) - count(config, 64) == taps
    # One of five layers has keys: the others cost the same however long the row is.
    assert count(config, 128) - count(config, 64) == 2 * 3 * 4 * 16 * 32


def test_each_layer_and_head_of_lightning_attention_forgets_at_its_own_rate():
    config = config_of("lightning", num_layers=7)
    rates = config.mixer.rates(7)
    np.testing.assert_allclose(rates[0], [2 ** (-8 / 3 * head) * (1 + 1e-5) for head in (1, 2, 3)])
    np.testing.assert_allclose(rates[6] / rates[0], 1.17e-5, rtol=1e-2)
    assert (np.diff(rates, axis=0) < 0).all() and (np.diff(rates, axis=1) < 0).all()
    model, params = made(config)
    alike, _ = made(dataclasses.replace(config, layer_loop="unroll"))
    batch = row(np.arange(40, dtype=np.int32) + 5, np.ones(40))
    want = np.asarray(jax.jit(model.logits)(params, batch))
    np.testing.assert_allclose(jax.jit(alike.logits)(params, batch), want, atol=1e-5 * np.abs(want).max())


def test_layers_that_differ_by_their_number_are_no_stages():
    alone = dict(mixer=MIXERS["lightning"], layer_pattern=("recurrent",), positions="none")
    config = DecoderConfig(**SIZES | dict(num_layers=4) | alone)
    assert not config.module_layers and not config.runs_in_stages
    assert DecoderConfig(**SIZES | alone | dict(mixer=MIXERS["mamba2"])).runs_in_stages


def test_a_context_axis_is_refused():
    config = config_of("delta")
    model, params = made(config)
    plan = Plan(batch_size=2, context=2, fsdp=1)
    mesh = sharding.make_mesh(plan, jax.devices()[:2])
    batch = row(np.arange(32, dtype=np.int32), np.ones(32))
    with sharding.activate(mesh, plan.rules), pytest.raises(UserError, match="Plan.context is above 1, and recurrent"):
        jax.eval_shape(lambda: model.logits(params, sharding.balanced(batch)))


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(layer_pattern=("recurrent", "global")), "DecoderConfig.mixer is None"),
        (dict(mixer=ShortConv()), "DecoderConfig.mixer is for recurrent layers, layer_pattern has global"),
        (dict(mixer=ShortConv(), layer_pattern=("recurrent",)), "positions .'rope'. are of attention, no layer"),
        (
            HYBRID["hybrid"] | dict(norm_placement="mixed"),
            "must have recurrent layers and others that attend alone, layer_pattern has hybrid",
        ),
        (dict(layer_pattern=("hybrid",)), "DecoderConfig.mixer is None"),
        (
            OF_TWO["lightning"] | dict(multipliers=ADDED),
            r"attention_residual, mixer_residual and mlp_residual \(1.3, 0.8, 1.1\) must be 1.0 where .* is 'pre'",
        ),
        (STREAM["stream"] | dict(residual="parallel"), "norm_placement is 'stream' and residual 'parallel'"),
        (
            dict(multipliers=Multipliers(mlp_gate=2.0), activation="gelu"),
            "Multipliers.mlp_gate .2.0. must be 1.0 without a gate, DecoderConfig.activation is 'gelu'",
        ),
        (dict(multipliers=Multipliers(mlp_gate=2.0), moe=Moe(num_experts=4)), "must be 1.0 with DecoderConfig.moe"),
        (
            dict(multipliers=FACTORS),
            r"mixer_output and mixer_residual \(1.1, 0.9, 1.0\) must be 1.0 where DecoderConfig.mixer is None",
        ),
        (OF_RWKV | dict(mixer=None), "DecoderConfig.channel_mixer is not supported where mixer is None"),
        (
            CHANNELS["channels"] | dict(activation="swiglu"),
            "channel_mixer is not supported where activation is 'swiglu', not 'relu2'",
        ),
        (CHANNELS["channels"] | dict(bias="all"), "channel_mixer is not supported where bias is 'all'"),
        (CHANNELS["channels"] | dict(moe=Moe(num_experts=4)), "channel_mixer is not supported where moe is set"),
        (dict(mlp_dim=-1), "DecoderConfig.mlp_dim is -1, must be at least 0"),
        (dict(norm_placement="mixed"), "norm_placement is 'mixed', must have recurrent layers and others"),
        (OF_ONE["branches"] | dict(mlp_dim=0), "mlp_dim is 0, and layer_pattern has feed_forward layers"),
        (OF_ONE["alone"] | dict(moe=Moe(num_experts=4)), "the layers have no MLP, and moe is set"),
        (OF_ONE["branches"] | dict(residual="parallel"), "layers have one branch each, and residual is 'parallel'"),
        (OF_ONE["branches"] | dict(norm_placement="post"), "norm_placement is 'post'"),
        (OF_ONE["branches"] | dict(moe=Moe(num_experts=4, first_dense=1)), "Moe.first_dense is 1"),
        (OF_ONE["branches"] | dict(moe=Moe(num_experts=4, pattern=("experts", "dense"))), "Moe.pattern has 'dense'"),
        (dict(moe=Moe(num_experts=4, first_dense=4, pattern=("dense", "experts"))), "leave none of .* layers experts"),
        (
            dict(mixer=ShortConv(), layer_pattern=("recurrent", "global"), positions="alibi"),
            "positions .'alibi'. are of attention in every layer",
        ),
        (
            dict(mixer=ShortConv(), layer_pattern=("recurrent", "global"), inputs_attention="bidirectional"),
            "recurrent layers read forwards",
        ),
    ],
)
def test_what_contradicts_is_refused(fields, message):
    with pytest.raises(UserError, match=message):
        DecoderConfig(**SIZES | fields)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: ShortConv(taps=1), "ShortConv.taps is 1, must be at least 2"),
        (lambda: Moe(num_experts=4, pattern=("dense",)), "Moe.pattern is .'dense',., must have 'experts'"),
        (lambda: Mamba(step_rank=0), "Mamba.step_rank is 0, must be at least 1"),
        (lambda: Mamba(norms_eps=0.0), "Mamba.norms_eps is 0.0, must be above 0"),
        (lambda: Lightning(head_dim=0), "Lightning.head_dim is 0, must be at least 1"),
        (lambda: Lightning(norm_eps=0.0), "Lightning.norm_eps is 0.0, must be finite and above 0"),
        (
            lambda: Mamba2(projection_multipliers=(1.0,)),
            "Mamba2.projection_multipliers has 1 numbers, must have one for",
        ),
        (lambda: Mamba2(projection_multipliers=(0.0,) * 5), "Mamba2.projection_multipliers has 0.0, must be finite"),
        (lambda: Multipliers(mlp_gate=-1.0), "Multipliers.mlp_gate is -1.0, must be finite and above 0"),
        (lambda: Rwkv4(inner_dim=0), "Rwkv4.inner_dim is 0, must be at least 1, or None"),
        (lambda: Mamba2(norm_eps=0.0), "Mamba2.norm_eps is 0.0, must be above 0"),
        (lambda: RgLru(inner_dim=25, blocks=4), "RgLru.inner_dim .25. must be a multiple of blocks .4.: try 24"),
        (lambda: KimiDelta(heads=0), "KimiDelta.heads is 0, must be at least 1"),
        (lambda: KimiDelta(least_decay=0.0), "KimiDelta.least_decay is 0.0, must be finite and below 0"),
        (lambda: GatedDelta(taps=0), "GatedDelta.taps is 0"),
        (lambda: GatedDelta(most_strength=3.0), "GatedDelta.most_strength is 3.0, must be above 0 and at most 2"),
        (lambda: GatedDelta(norm_eps=0.0), "GatedDelta.norm_eps is 0.0, must be finite and above 0"),
        (lambda: GatedDelta(key_dim=0), "GatedDelta.key_dim is 0, must be at least 1"),
        (lambda: GatedDelta(key_heads=3, value_heads=8), "value_heads .8. must be a multiple of key_heads .3.: try 9"),
    ],
)
def test_sizes_are_checked(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_layers_without_an_mlp_are_of_decoders():
    sizes = dict(vocab_size=384, embed_dim=32, num_layers=2, num_heads=4, mlp_dim=0)
    with pytest.raises(UserError, match="EncoderConfig.mlp_dim is 0, must be at least 1"):
        EncoderConfig(**sizes, max_length=64)
    attends_alone = api.build(DecoderConfig(**sizes))
    assert set(attends_alone.abstract_params["layers"]) == {"attention", "branch_norm"}


@pytest.mark.parametrize("name", ["mamba", "mamba2", "delta", "kimi", "rg_lru"])
def test_rates_are_kept_whole_and_not_drawn_to_zero(name):
    """Rounded to bfloat16, rates and steps would be others in generation than in training."""
    model = api.build(dataclasses.replace(config_of(name), dtype="bfloat16"))
    axes = model.axes["layers"]["mixer"]
    rates = [own for own in axes if own.startswith(("decay_log", "decay_bias", "time_bias", "rate", "skip"))]
    assert rates
    for own in rates:
        assert sides(axes[own]) is None and "norm" in axes[own], own


def test_only_layers_with_experts_have_statistics():
    model, params = made(config_of("branches", num_layers=8, moe=Moe(num_experts=4, top_k=2)))
    _, stats = jax.jit(model.hidden)(params, row(np.arange(20, dtype=np.int32), np.ones(20)))
    assert stats and {value.shape[0] for value in stats.values()} == {3}  # layers 1, 4 and 7
