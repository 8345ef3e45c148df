"""The Gin files of published decoders: each builds, and has the published number of parameters."""

import pytest

from capibara import config
from capibara.interop.hf import config as hf_config
from capibara.models import api

# A tied head counts once. Of Gemma 3 the text part: the published total of 4B, 12B and 27B (4,300,079,472,
# 12,187,325,040 and 27,432,406,640) less the vision tower (416,866,032) and the projection 1152 -> embed_dim with its
# norm. Each number is also what transformers counts for the same sizes; of Gemma 3n the text part again, without the keys
# and values that published files have for layers that read others'. Without embeddings, and with those, they are the 1.91
# and 3.98 billion of E2B and E4B.
PUBLISHED = {
    "olmo2_7b": 7_298_617_344,
    "command_r_35b": 34_980_831_232,
    "gpt2_124m": 124_439_808,
    "gpt2_355m": 354_823_168,
    "gpt2_774m": 774_030_080,
    "gpt2_1558m": 1_557_611_200,
    "gpt_neox_20b": 20_554_567_680,
    "pythia_160m": 162_322_944,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3.1_8b": 8_030_261_248,
    "llama3.2_1b": 1_235_814_400,
    "mistral_7b": 7_241_732_096,
    "gemma_2b": 2_506_172_416,
    "gemma_7b": 8_537_680_896,
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gemma2_27b": 27_227_128_320,
    "gemma3_1b": 999_885_952,
    "gemma3_4b": 3_880_263_168,
    "gemma3_12b": 11_766_034_176,
    "gemma3_27b": 27_009_346_304,
    "deepseek_v4_flash": 284_334_567_511,
    "gemma3n_e2b": 4_435_182_688,
    "gemma3n_e4b": 6_835_235_568,
    "qwen2_0.5b": 494_032_768,
    "qwen2_1.5b": 1_543_714_304,
    "qwen2_7b": 7_615_616_512,
    "qwen2_72b": 72_706_203_648,
    "qwen3_0.6b": 596_049_920,
    "qwen3_1.7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "phi3_mini": 3_821_079_552,
    "phi3_medium": 13_960_238_080,
    "smollm2_135m": 134_515_008,
    "smollm2_360m": 361_821_120,
    "smollm2_1.7b": 1_711_376_384,
}
# Of folders without a Gin file: what their config.json says beside its usual values, and what transformers counts.
_SIDES = {"layers": 12, "ffn_dim": 4096, "attention_heads": 16}
M2M = {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in _SIDES.items()}
M2M |= dict(model_type="m2m_100", vocab_size=128_112, d_model=1024)
ESM = dict(model_type="esm", vocab_size=33, hidden_size=320, num_hidden_layers=6, num_attention_heads=20)
ESM |= dict(
    intermediate_size=1280, position_embedding_type="rotary", token_dropout=True, pad_token_id=1, mask_token_id=32
)
ARIA = dict(model_type="aria_text", hidden_size=2560, num_hidden_layers=28, num_attention_heads=20, vocab_size=100_352)
ARIA |= dict(moe_num_experts=64, moe_topk=6, intermediate_size=1664)
LARA = dict(hidden_size=1024, num_hidden_layers=34)
FOLDERS = [
    (dict(model_type="rwkv", hidden_size=768, num_hidden_layers=12), 169_342_464),
    (dict(model_type="rwkv"), 7_392_649_216),
    (dict(model_type="zamba2", n_mamba_heads=80, num_mem_blocks=2), 2_662_214_560),
    (M2M, 483_905_536),
    (ESM, 7_512_353),
    (ARIA, 24_869_091_840),
    (dict(model_type="lara_mini", vocab_size=151_936, num_attention_heads=16, **LARA), 7_281_684_672),
]
OURS = {"capibara_125m": 125e6, "capibara_1b": 1e9, "capibara_8b": 8e9, "capibara_20b": 20e9, "capibara_120b": 120e9}


def kind_of(name: str) -> type[api.DecoderConfig]:
    if name.startswith("deepseek_v4"):
        return api.DeepseekV4Config
    return api.Gemma3nConfig if name.startswith("gemma3n") else api.DecoderConfig


def built(name: str) -> api.Model:
    config.parse([f"models/{name}.gin"])
    model = api.build(config.build(kind_of(name)))
    assert config.unused() == []
    return model


@pytest.mark.parametrize(("values", "count"), FOLDERS)
def test_a_folder_has_its_published_size(values, count):
    assert api.build(hf_config.from_hf(values)).param_count == count


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_published_size(name):
    model = built(name)
    assert model.param_count == PUBLISHED[name]
    assert model.config.dtype == "bfloat16"


# What a parameter count does not show: the published config.json files' rope_theta, norm epsilon and the rest, by family.
_LLAMA = dict(activation="swiglu", norm="rms", norm_eps=1e-5, residual="sequential", norm_placement="pre")
_GEMMA = dict(activation="geglu", norm="rms", norm_eps=1e-6, norm_scale="offset", embedding_scale="sqrt_dim")
_GEMMA2 = _GEMMA | dict(
    norm_placement="sandwich",
    window=4096,
    attention_soft_cap=50.0,
    logit_soft_cap=30.0,
    layer_pattern=("local", "global"),
)
_GEMMA3 = _GEMMA | dict(
    norm_placement="sandwich", qk_norm="head", layer_pattern=("local",) * 5 + ("global",), attention_soft_cap=None
)
_GPT2 = dict(activation="gelu", norm="layer", norm_eps=1e-5, positions="learned", bias="all")
_NEOX = dict(norm="layer", norm_eps=1e-5, residual="parallel", bias="all")
_QWEN2 = _LLAMA | dict(norm_eps=1e-6, bias="qkv")
_QWEN3 = _LLAMA | dict(norm_eps=1e-6, bias="none", qk_norm="head")
_GPT_OSS = _LLAMA | dict(
    activation="clamped_swiglu",
    swiglu_alpha=1.702,
    swiglu_limit=7.0,
    attention_sinks="head",
    bias="attention",
    layer_pattern=("local", "global"),
    window=128,
    head="separate",
)
_GEMMA3N = dict(
    activation="geglu",
    attention_scale=1.0,
    norm_scale="one",
    norm_eps=1e-6,
    embedding_scale="sqrt_dim",
    norm_placement="sandwich",
    qk_norm="head",
    head="tied",
    logit_soft_cap=30.0,
    kv_layers=20,
    window=512,
    layer_pattern=("local",) * 4 + ("global",),
    activation_sparsity=(0.95,) * 10,
)
_DEEPSEEK_V4 = dict(
    activation="limited_swiglu",
    swiglu_limit=10.0,
    norm_eps=1e-6,
    head="separate",
    kinds=("local", "local", "compressed_sparse") + ("compressed", "compressed_sparse") * 20,
    window=128,
    sinkhorn_steps=20,
)
FACTS = {  # file -> (fields, RoPE's base, its scaling)
    "gpt2_124m": (_GPT2, None, None),
    "gpt2_1558m": (_GPT2, None, None),
    "gpt_neox_20b": (_NEOX | dict(activation="gelu"), 1e4, "none"),
    "pythia_160m": (_NEOX | dict(activation="gelu_exact"), 1e4, "none"),
    "llama2_7b": (_LLAMA, 1e4, "none"),
    "llama2_70b": (_LLAMA, 1e4, "none"),
    "llama3_8b": (_LLAMA, 5e5, "none"),
    "llama3.1_8b": (_LLAMA, 5e5, "llama3"),
    "llama3.2_1b": (_LLAMA | dict(head="tied"), 5e5, "llama3"),
    "mistral_7b": (_LLAMA | dict(window=4096, layer_pattern=("local",)), 1e4, "none"),
    "mixtral_8x7b": (_LLAMA | dict(window=None), 1e6, "none"),
    "mixtral_8x22b": (_LLAMA | dict(window=None), 1e6, "none"),
    "gemma_2b": (_GEMMA | dict(norm_placement="pre"), 1e4, "none"),
    "gemma2_2b": (_GEMMA2, 1e4, "none"),
    "gemma2_27b": (_GEMMA2 | dict(attention_scale=144**-0.5), 1e4, "none"),
    "gemma3_1b": (_GEMMA3 | dict(window=512), 1e6, "none"),
    "gemma3_4b": (_GEMMA3 | dict(window=1024), 1e6, "linear"),
    "gemma3_27b": (_GEMMA3 | dict(window=1024, attention_scale=168**-0.5), 1e6, "linear"),
    "gemma3n_e2b": (_GEMMA3N | dict(mlp_dim=8192, num_layers=30), 1e6, "none"),
    "gemma3n_e4b": (_GEMMA3N | dict(mlp_dim=16384, num_layers=35), 1e6, "none"),
    "qwen2_0.5b": (_QWEN2 | dict(head="tied"), 1e6, "none"),
    "qwen2_7b": (_QWEN2 | dict(head="separate"), 1e6, "none"),
    "qwen3_0.6b": (_QWEN3 | dict(head="tied"), 1e6, "none"),
    "qwen3_30b_a3b": (_QWEN3 | dict(head="separate"), 1e6, "none"),
    "deepseek_v4_flash": (_DEEPSEEK_V4, 1.6e5, "yarn"),
    "gpt_oss_20b": (_GPT_OSS, 1.5e5, "yarn"),
    "gpt_oss_120b": (_GPT_OSS, 1.5e5, "yarn"),
    "phi3_mini": (_LLAMA | dict(window=2047), 1e4, "none"),
    "smollm2_135m": (_LLAMA | dict(head="tied"), 1e5, "none"),
    "smollm2_1.7b": (_LLAMA | dict(head="tied"), 1.3e5, "none"),
}


@pytest.mark.parametrize(("name", "billions"), [("gemma3n_e2b", 1.91), ("gemma3n_e4b", 3.98)])
def test_the_effective_parameters_of_gemma_3n_are_the_published(name, billions):
    model = built(name)
    sizes, c = model.abstract_params, model.config
    unused = c.kv_shared_layers * 2 * c.embed_dim * c.kv_heads * c.head_size  # as published files have them
    effective = model.param_count + unused - sizes["embedding"].size - sizes["per_layer_embedding"].size
    assert effective / 1e9 == pytest.approx(billions, abs=0.005)


@pytest.mark.parametrize("name", FACTS)
def test_a_published_model_is_made_as_published(name):
    fields, theta, scaling = FACTS[name]
    config.parse([f"models/{name}.gin"], [], [])
    model = config.build(kind_of(name))
    for field, value in fields.items():
        wanted = pytest.approx(value) if isinstance(value, float) else value
        assert getattr(model, field) == wanted, field
    if theta is not None:
        assert (model.rope.theta, model.rope.scaling) == (theta, scaling)


@pytest.mark.parametrize("name", OURS)
def test_our_models_are_near_their_names_and_fit_the_matrix_unit(name):
    model = built(name)
    assert model.param_count == pytest.approx(OURS[name], rel=0.035)
    config, tensor = model.config, min(8, model.config.kv_heads)  # tensor-parallel chips
    heads = (config.num_heads * config.head_size, config.kv_heads * config.head_size)
    widths = (config.vocab_size, config.embed_dim, config.mlp_dim, *heads)
    assert not any(width % (128 * tensor) for width in widths)
