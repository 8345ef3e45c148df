"""Cases of interop/hf/catalog/older."""

from __future__ import annotations

from typing import Any

from family_sizes import LAYER, RMS, SIZES, VOCAB, rope

TOKENS = dict(vocab_size=VOCAB, pad_token_id=None, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False)
GPT = dict(TOKENS, n_embd=32, n_layer=2, n_head=4, n_positions=64, layer_norm_epsilon=1e-5)
STABLELM = dict(LAYER, model_type="stablelm", use_qkv_bias=True, qk_layernorm=True)

FAIRSEQ = dict(TOKENS, num_hidden_layers=2, hidden_size=32, num_attention_heads=4, max_position_embeddings=64)
OPT = dict(FAIRSEQ, model_type="opt", ffn_dim=48)
FALCON = dict(TOKENS, model_type="falcon", num_hidden_layers=2, hidden_size=32, num_attention_heads=4)
FALCON |= {"max_position_embeddings": 64, "ffn_hidden_size": 48, "rope_parameters": rope(theta=500.0)}

CASES: dict[str, dict[str, Any]] = {
    "biogpt": dict(FAIRSEQ, model_type="biogpt", intermediate_size=48, hidden_act="gelu", scale_embedding=True),
    "bitnet": dict(RMS, model_type="bitnet", attention_bias=True, rope_parameters=rope(theta=500.0)),
    "bloom": dict(TOKENS, model_type="bloom", hidden_size=48, n_layer=2, n_head=6, layer_norm_epsilon=1e-5),
    "codegen": dict(GPT, model_type="codegen", n_embd=64, n_head=8, rotary_dim=4, n_inner=48),
    "falcon": dict(FALCON, new_decoder_architecture=True, num_kv_heads=2, bias=True, tie_word_embeddings=True),
    "falcon_alibi": dict(
        FALCON, alibi=True, multi_query=False, parallel_attn=False, num_attention_heads=6, hidden_size=48
    ),
    "falcon_one_norm": dict(FALCON, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
    "falcon_old": dict(FALCON, multi_query=True, parallel_attn=True, bias=True),
    "gpt_bigcode": dict(GPT, model_type="gpt_bigcode", n_inner=48, multi_query=True),
    "gpt_bigcode_heads": dict(GPT, model_type="gpt_bigcode", multi_query=False, scale_attn_weights=False),
    "gpt_neo": dict(TOKENS, model_type="gpt_neo", hidden_size=32, num_layers=2, num_heads=4, intermediate_size=48)
    | dict(max_position_embeddings=64, attention_types=[[["global", "local"], 1]], window_size=6),
    "gpt_sw3": dict(GPT, model_type="gpt2", n_inner=48, activation_function="gelu", tie_word_embeddings=True),
    "gptj": dict(GPT, model_type="gptj", rotary_dim=4, n_inner=48),
    "mpt": dict(TOKENS, model_type="mpt", d_model=48, n_heads=6, n_layers=2, max_seq_len=64)
    | {"attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.3}},
    "nemotron": dict(SIZES, model_type="nemotron", norm_eps=1e-5, head_dim=16, attention_bias=True, mlp_bias=True)
    | {"rope_parameters": rope(theta=500.0, partial_rotary_factor=0.5)},
    "openai-gpt": dict(GPT, model_type="openai-gpt", tie_word_embeddings=True),
    "opt": dict(OPT, do_layer_norm_before=True, layer_norm_elementwise_affine=True, enable_bias=True),
    "opt_post": dict(OPT, do_layer_norm_before=False, layer_norm_elementwise_affine=False, enable_bias=False)
    | {"tie_word_embeddings": True},
    "persimmon": dict(LAYER, model_type="persimmon", qk_layernorm=True)
    | {"rope_parameters": rope(theta=500.0, partial_rotary_factor=0.5)},
    "phi": dict(LAYER, model_type="phi", qk_layernorm=True)
    | {"rope_parameters": rope(theta=500.0, partial_rotary_factor=0.5)},
    "stablelm": dict(STABLELM, use_parallel_residual=False)
    | {"rope_parameters": rope(theta=500.0, partial_rotary_factor=0.5)},
    "stablelm_parallel": dict(STABLELM, use_parallel_residual=True)
    | {"rope_parameters": rope(theta=500.0, partial_rotary_factor=0.5)},
    "starcoder2": dict(LAYER, model_type="starcoder2", norm_epsilon=1e-5, use_bias=True, sliding_window=8)
    | {"rope_parameters": rope(theta=500.0)},
    "xglm": dict(TOKENS, model_type="xglm", num_layers=2, d_model=32, attention_heads=4, ffn_dim=48)
    | {"max_position_embeddings": 64, "scale_embedding": True},
}
