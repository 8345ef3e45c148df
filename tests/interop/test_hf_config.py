"""config.json and our configurations: published files equal gin/models/, and what we write is read back."""

import dataclasses

import pytest

from capibara import config
from capibara.core.types import UserError
from capibara.interop.hf import config as hf_config
from capibara.interop.hf import keys, wrappers
from capibara.models.api import DecoderConfig, EncoderConfig, EncoderDecoderConfig, Gemma3nConfig, Moe, Rope


def sizes(vocab, width, mlp, layers, heads, kv=None, **rest):
    named = dict(vocab_size=vocab, hidden_size=width, intermediate_size=mlp, num_hidden_layers=layers)
    named |= dict(num_attention_heads=heads, **({} if kv is None else {"num_key_value_heads": kv}))
    return named | rest


def llama(*args, **rest):
    base = dict(model_type="llama", architectures=["LlamaForCausalLM"], hidden_act="silu", rms_norm_eps=1e-5)
    return base | dict(torch_dtype="bfloat16", pretraining_tp=1) | sizes(*args, **rest)


LLAMA3 = dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
GEMMA3_TEXT = dict(model_type="gemma3_text", rope_scaling={"factor": 8.0, "rope_type": "linear"}, sliding_window=1024)
GEMMA3N_TEXT = dict(
    model_type="gemma3n_text",
    altup_active_idx=0,
    altup_coef_clip=120.0,
    altup_correct_scale=True,
    altup_num_inputs=4,
    final_logit_softcapping=30.0,
    head_dim=256,
    hidden_activation="gelu_pytorch_tanh",
    hidden_size=2048,
    hidden_size_per_layer_input=256,
    laurel_rank=64,
    query_pre_attn_scalar=256,
    rope_local_base_freq=10000.0,
    rope_scaling=None,
    rope_theta=1000000.0,
    sliding_window=512,
    vocab_size=262400,
    vocab_size_per_layer_input=262144,
)
BLOCK = dict(rope_theta=1e6, rms_norm_eps=1e-6, hidden_act="silu", vocab_size=151936)
GPT_OSS = dict(
    architectures=["GptOssForCausalLM"],
    attention_bias=True,
    eos_token_id=200002,
    experts_per_token=4,
    hidden_act="silu",
    initial_context_length=4096,
    num_experts_per_tok=4,
    output_router_logits=False,
    rms_norm_eps=1e-5,
    rope_scaling=dict(
        beta_fast=32.0,
        beta_slow=1.0,
        factor=32.0,
        original_max_position_embeddings=4096,
        rope_type="yarn",
        truncate=False,
    ),
    rope_theta=150000,
    router_aux_loss_coef=0.9,
    sliding_window=128,
    swiglu_limit=7.0,
    tie_word_embeddings=False,
)
T5 = dict(model_type="t5", vocab_size=32128, relative_attention_num_buckets=32, layer_norm_epsilon=1e-6, d_kv=64)

# The fields of the published files that matter.
PUBLISHED = {
    "llama2_7b": llama(32000, 4096, 11008, 32, 32, 32, max_position_embeddings=4096, rope_scaling=None),
    "llama3.1_8b": llama(
        128256, 4096, 14336, 32, 32, 8, rope_theta=5e5, rope_scaling=LLAMA3 | {"factor": 8.0}, mlp_bias=False
    ),
    "llama3.2_1b": llama(
        128256, 2048, 8192, 16, 32, 8, rope_theta=5e5, rope_scaling=LLAMA3 | {"factor": 32.0}, head_dim=64
    )
    | {"tie_word_embeddings": True},
    "smollm2_135m": llama(49152, 576, 1536, 30, 9, 3, rope_theta=100000, tie_word_embeddings=True),
    "mistral_7b": llama(32000, 4096, 14336, 32, 32, 8, rope_theta=10000.0, sliding_window=4096)
    | dict(model_type="mistral", architectures=["MistralForCausalLM"]),
    "mixtral_8x7b": llama(32000, 4096, 14336, 32, 32, 8, rope_theta=1e6, sliding_window=None)
    | dict(model_type="mixtral", architectures=["MixtralForCausalLM"], num_local_experts=8, num_experts_per_tok=2)
    | dict(router_aux_loss_coef=0.02, output_router_logits=False),
    "gemma_2b": sizes(256000, 2048, 16384, 18, 8, 1, head_dim=256, model_type="gemma", hidden_act="gelu")
    | dict(rms_norm_eps=1e-6, rope_theta=10000.0, attention_bias=False),
    "gemma2_27b": sizes(256000, 4608, 36864, 46, 32, 16, head_dim=128, model_type="gemma2", query_pre_attn_scalar=144)
    | dict(hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", sliding_window=4096)
    | dict(attn_logit_softcapping=50.0, final_logit_softcapping=30.0, architectures=["Gemma2ForCausalLM"]),
    "gemma3_1b": sizes(262144, 1152, 6912, 26, 4, 1, head_dim=256, model_type="gemma3_text", sliding_window_pattern=6)
    | dict(query_pre_attn_scalar=256, rope_theta=1000000, rope_local_base_freq=10000, rope_scaling=None)
    | dict(sliding_window=512, attn_logit_softcapping=None, architectures=["Gemma3ForCausalLM"]),
    "gemma3_4b": dict(
        model_type="gemma3",
        architectures=["Gemma3ForConditionalGeneration"],
        vision_config={"hidden_size": 1152},
        text_config=GEMMA3_TEXT | dict(hidden_size=2560, intermediate_size=10240, num_hidden_layers=34),
    ),
    "gemma3_27b": dict(
        model_type="gemma3",
        architectures=["Gemma3ForConditionalGeneration"],
        text_config=GEMMA3_TEXT
        | dict(hidden_size=5376, intermediate_size=21504, num_hidden_layers=62, num_attention_heads=32)
        | dict(num_key_value_heads=16, head_dim=128, query_pre_attn_scalar=168),
    ),
    "gemma3n_e4b": dict(
        model_type="gemma3n",
        architectures=["Gemma3nForConditionalGeneration"],
        audio_config={"hidden_size": 1536},
        vision_config={"hidden_size": 2048},
        text_config=GEMMA3N_TEXT
        | dict(num_hidden_layers=35, num_kv_shared_layers=15, intermediate_size=[16384] * 35)
        | dict(activation_sparsity_pattern=[0.95] * 10 + [0.0] * 25),
    ),
    "gemma3n_e2b": dict(
        model_type="gemma3n",
        architectures=["Gemma3nForConditionalGeneration"],
        text_config=GEMMA3N_TEXT
        | dict(num_hidden_layers=30, num_kv_shared_layers=10, intermediate_size=[8192] * 30)
        | dict(layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 6),
    ),
    "qwen2_0.5b": BLOCK
    | sizes(151936, 896, 4864, 24, 14, 2, model_type="qwen2", tie_word_embeddings=True, sliding_window=131072)
    | dict(use_sliding_window=False, max_window_layers=24),
    "qwen3_0.6b": BLOCK
    | sizes(151936, 1024, 3072, 28, 16, 8, model_type="qwen3", head_dim=128, tie_word_embeddings=True)
    | dict(use_sliding_window=False, sliding_window=None, max_window_layers=28, attention_bias=False),
    "qwen3_30b_a3b": BLOCK
    | sizes(151936, 2048, 6144, 48, 32, 4, model_type="qwen3_moe", head_dim=128, num_experts=128)
    | dict(num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True, mlp_only_layers=[]),
    "gpt_oss_20b": sizes(201088, 2880, 2880, 24, 64, 8, model_type="gpt_oss", head_dim=64, **GPT_OSS)
    | dict(num_local_experts=32, layer_types=["sliding_attention", "full_attention"] * 12),
    "phi3_mini": sizes(32064, 3072, 8192, 32, 32, 32, model_type="phi3", sliding_window=2047, rms_norm_eps=1e-5)
    | dict(rope_scaling=None, rope_theta=10000.0, original_max_position_embeddings=4096),
    "gpt2_124m": dict(model_type="gpt2", vocab_size=50257, n_embd=768, n_layer=12, n_head=12, n_positions=1024)
    | dict(n_ctx=1024, activation_function="gelu_new", layer_norm_epsilon=1e-5, architectures=["GPT2LMHeadModel"]),
    "gpt_neox_20b": sizes(50432, 6144, 24576, 44, 64, model_type="gpt_neox", hidden_act="gelu_fast")
    | dict(rotary_pct=0.25, rotary_emb_base=10000, layer_norm_eps=1e-5, torch_dtype="float16"),
    "pythia_160m": sizes(50304, 768, 3072, 12, 12, model_type="gpt_neox", hidden_act="gelu", rotary_pct=0.25)
    | dict(use_parallel_residual=True, architectures=["GPTNeoXForCausalLM"]),
    "t5_base": T5 | dict(d_model=768, d_ff=3072, num_layers=12, num_heads=12),
    "t5_1_1_small": T5
    | dict(d_model=512, d_ff=1024, num_layers=8, num_heads=6, num_decoder_layers=8)
    | dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "bert_base": sizes(30522, 768, 3072, 12, 12, model_type="bert", hidden_act="gelu", layer_norm_eps=1e-12)
    | dict(max_position_embeddings=512, type_vocab_size=2, architectures=["BertForMaskedLM"]),
}
PRESETS = [
    *PUBLISHED,
    "gpt2_1558m",
    "gemma_7b",
    "gemma2_9b",
    "gemma3_12b",
    "mixtral_8x22b",
    "gpt_oss_120b",
    "t5_11b",
    "capibara_1b",
]


def preset(name):
    config.parse([f"models/{name}.gin"])
    kind = {"t": EncoderDecoderConfig, "b": EncoderConfig}.get(name[0], DecoderConfig)
    return config.build(Gemma3nConfig if name.startswith("gemma3n") else kind)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_says_what_the_preset_says(name):
    assert hf_config.resolved(hf_config.from_hf(PUBLISHED[name])) == hf_config.resolved(preset(name))


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_written_of_a_preset_is_read_back(name):
    values = hf_config.to_hf(preset(name))
    assert hf_config.resolved(hf_config.from_hf(values)) == hf_config.resolved(preset(name))


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_architecture_keeps_its_name_where_it_is_known(name):
    values = hf_config.to_hf(preset(name), PUBLISHED[name])
    known = PUBLISHED[name]["model_type"]
    assert values["model_type"] == (f"{known}_text" if known in ("gemma3", "gemma3n") else known)
    assert hf_config.resolved(hf_config.from_hf(values)) == hf_config.resolved(preset(name))


def test_both_ways_to_say_rope_are_one():
    old = PUBLISHED["llama3.1_8b"]
    new = {key: value for key, value in old.items() if not key.startswith("rope")}
    new["rope_parameters"] = old["rope_scaling"] | {"rope_theta": 5e5}
    assert hf_config.from_hf(new) == hf_config.from_hf(old)
    assert hf_config.from_hf(new).rope == Rope(
        theta=5e5, scaling="llama3", factor=8.0, original_length=8192, low_frequency_factor=1.0
    )
    nested = {
        key: value for key, value in PUBLISHED["gemma3_1b"].items() if key not in ("rope_theta", "rope_local_base_freq")
    }
    nested["rope_parameters"] = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    both = new | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_scaling": old["rope_scaling"]}
    # transformers 5.24: the old object replaces the new one with all that it says, its theta too.
    assert hf_config.from_hf(both).rope == dataclasses.replace(hf_config.from_hf(old).rope, theta=10_000.0)
    both["rope_theta"] = 5e5
    assert hf_config.from_hf(both) == hf_config.from_hf(old)
    first_name = {"type": "linear", "factor": 2.0}
    rope = hf_config.from_hf(both | {"rope_scaling": first_name}).rope
    assert (rope.scaling, rope.factor) == ("linear", 2.0)
    assert hf_config.from_hf(new | {"rope_parameters": first_name | {"rope_theta": 5e5}}).rope == rope
    assert hf_config.from_hf(old | {"tie_word_embeddings": None}).head == "separate"
    assert hf_config.from_hf(nested | {"rope_scaling": None}) == hf_config.from_hf(PUBLISHED["gemma3_1b"])


def test_token_ids_and_the_like_are_kept():
    like = PUBLISHED["llama3.1_8b"] | dict(eos_token_id=[7, 8], max_position_embeddings=131072)
    values = hf_config.to_hf(hf_config.from_hf(like), like, dtype="bfloat16")
    assert values["eos_token_id"] == [7, 8] and values["max_position_embeddings"] == 131072
    assert values["dtype"] == values["torch_dtype"] == "bfloat16" and values["pretraining_tp"] == 1
    images = PUBLISHED["gemma3_4b"] | dict(eos_token_id=[1, 106])
    assert hf_config.to_hf(hf_config.from_hf(images), images)["eos_token_id"] == [1, 106]
    other = hf_config.to_hf(hf_config.from_hf(PUBLISHED["qwen3_0.6b"]), like)
    assert other["model_type"] == "qwen3" and other["eos_token_id"] == [7, 8] and "pretraining_tp" not in other


REFUSED = {
    "model_type 'diffllama', must be one of llama, mistral": dict(model_type="diffllama"),
    "config.json has 2 labels, must have 1, of a reward model: take the language model": PUBLISHED["llama2_7b"]
    | dict(architectures=["LlamaForSequenceClassification"]),
    "the head of LlamaForTokenClassification is not read, take the folder of the language model": PUBLISHED["llama2_7b"]
    | dict(architectures=["LlamaForTokenClassification"]),
    "rope_type 'spiral', must be one of default, linear, llama3, yarn, dynamic, longrope": PUBLISHED["llama2_7b"]
    | dict(rope_scaling={"rope_type": "spiral", "factor": 2.0}),
    "short_factor = None, must be a list of numbers": PUBLISHED["phi3_mini"]
    | dict(rope_scaling={"type": "longrope", "long_factor": [1.0]}),
    "long_factor = ['x'], must be a list of numbers": PUBLISHED["phi3_mini"]
    | dict(rope_scaling={"type": "longrope", "short_factor": [1.0], "long_factor": ["x"]}),
    "Rope.short_factors has 1 numbers, must be one for each of 48 frequencies": PUBLISHED["phi3_mini"]
    | dict(rope_scaling={"type": "su", "short_factor": [1.0], "long_factor": [1.0]}, max_position_embeddings=131072),
    "partial_rotary_factor = 0.5 with rope_type 'linear', and transformers' llama rotates whole heads": PUBLISHED[
        "llama2_7b"
    ]
    | dict(partial_rotary_factor=0.5, rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "per_layer_config = {'0': {'intermediate_size': 40}}, must be without": PUBLISHED["llama2_7b"]
    | dict(per_layer_config={"0": {"intermediate_size": 40}}),
    "rope_parameters for full_attention alone": PUBLISHED["gemma2_27b"]
    | dict(rope_parameters={"full_attention": {"rope_type": "default"}}),
    "rope_scaling = 7, must be an object": PUBLISHED["llama2_7b"] | dict(rope_scaling=7),
    "rope_parameters = [1], must be an object": PUBLISHED["llama2_7b"] | dict(rope_parameters=[1]),
    "tie_word_embeddings = 'no', must be true or false": PUBLISHED["llama2_7b"] | dict(tie_word_embeddings="no"),
    "hidden_act = 'mish'": PUBLISHED["llama2_7b"] | dict(hidden_act="mish"),
    "layer_types 'linear_attention'": PUBLISHED["gemma2_27b"] | dict(layer_types=["linear_attention"] * 46),
    "3 layer_types": PUBLISHED["gemma2_27b"] | dict(layer_types=["full_attention"] * 3),
    "decoder_sparse_step = 2": PUBLISHED["qwen3_30b_a3b"] | dict(decoder_sparse_step=2),
    "quantization_config": PUBLISHED["llama2_7b"] | dict(quantization_config={"quant_method": "gptq"}),
    "scale_attn_by_inverse_layer_idx = True": PUBLISHED["gpt2_124m"] | dict(scale_attn_by_inverse_layer_idx=True),
    "DecoderConfig.embed_dim is -4096, must be at least 1 (in transformers' words embed_dim is hidden_size)": (
        PUBLISHED["llama2_7b"] | dict(hidden_size=-4096)
    ),
    "activation is hidden_activation": PUBLISHED["gemma3n_e4b"]
    | dict(text_config=PUBLISHED["gemma3n_e4b"]["text_config"] | dict(hidden_activation="gelu")),
    "kv_heads is num_key_value_heads": PUBLISHED["llama2_7b"] | dict(num_key_value_heads=5),
    "window is sliding_window": PUBLISHED["mistral_7b"] | dict(sliding_window=-1),
    "top_k is num_experts_per_tok": PUBLISHED["mixtral_8x7b"] | dict(num_experts_per_tok=99),
    "num_layers is num_decoder_layers": PUBLISHED["t5_base"] | dict(num_decoder_layers=-1),
    "has no hidden_size": {key: v for key, v in PUBLISHED["llama2_7b"].items() if key != "hidden_size"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_we_do_not_have_is_refused_by_name(message):
    with pytest.raises(UserError) as error:
        hf_config.from_hf(REFUSED[message])
    assert message in str(error.value) and "\n" not in str(error.value)


TINY = DecoderConfig(vocab_size=96, embed_dim=32, num_layers=2, num_heads=4, mlp_dim=48)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(positions="none", bias="qkv"), "granitemoehybrid is the nearest, without bias = 'qkv'"),
        (dict(moe=Moe(num_experts=4, routing="expert_choice")), "moe = "),
        (dict(bias="qkv", qk_norm="head"), "qk_norm = 'head'"),
        (dict(logit_soft_cap=30.0), "logit_soft_cap = 30.0"),
    ],
)
def test_a_model_that_transformers_does_not_have_is_refused_by_name(changes, message):
    with pytest.raises(UserError, match="no Hugging Face architecture has this model") as error:
        hf_config.to_hf(dataclasses.replace(TINY, **changes))
    assert message in str(error.value)


def test_a_config_class_of_no_family_is_refused_by_name():
    class OwnConfig(DecoderConfig):
        pass

    own = OwnConfig(**{field.name: getattr(TINY, field.name) for field in dataclasses.fields(TINY)})
    with pytest.raises(UserError, match="none is of OwnConfig"):
        hf_config.to_hf(own)


def test_how_a_model_is_trained_does_not_matter():
    moe = Moe(num_experts=4, dispatch="capacity", balance_loss=0.5, router_z_loss=0.1)
    assert hf_config.to_hf(dataclasses.replace(TINY, moe=moe, max_length=64))["model_type"] == "mixtral"


def test_gpt_oss_balances_its_experts_where_transformers_does():
    published = PUBLISHED["gpt_oss_20b"]
    assert hf_config.from_hf(published).moe.balance_loss == 0
    assert hf_config.from_hf(published | dict(output_router_logits=True)).moe.balance_loss == 0.9
    bare = {key: value for key, value in published.items() if key not in ("rope_scaling", "rope_theta", "layer_types")}
    assert hf_config.resolved(hf_config.from_hf(bare)) == hf_config.resolved(hf_config.from_hf(published))
    exact = hf_config.from_hf(published).rope
    rounded = dataclasses.replace(exact, yarn_bounds="whole")
    assert (exact.frequencies(64) != rounded.frequencies(64)).sum() > 3


@pytest.mark.parametrize("value", [True, 2, 0.5, "gelu", [1], {"a": 1}], ids=str)
def test_a_key_that_no_family_reads_is_told_whatever_its_value(value):
    values = llama(64, 32, 48, 2, 4)
    assert list(keys.notes(values | {"of_a_fork": value}, ())) == [
        f"config.json has of_a_fork = {value}, which llama models do not read"
    ]
    for neutral in (None, False, 0, 1, "", [], {}):
        assert not list(keys.notes(values | {"of_a_fork": neutral}, ()))


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("kinds", [None, []], ids=["default", "none"])
def test_a_model_without_layers_is_refused(name, kinds):
    values = wrappers.text_part(PUBLISHED[name])
    counts = {key: 0 for key in ("num_hidden_layers", "n_layer", "num_layers") if key in values}
    with pytest.raises(UserError, match="layers"):
        hf_config.from_hf(values | counts | ({"layer_types": kinds} if "layer_types" in values else {}))
