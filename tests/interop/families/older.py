"""Cases of interop/hf/catalog/older."""

from __future__ import annotations

from typing import Any

from sizes import LAYER, VOCAB, rope

TOKENS = dict(vocab_size=VOCAB, pad_token_id=None, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False)
GPT = dict(TOKENS, n_embd=32, n_layer=2, n_head=4, n_positions=64, layer_norm_epsilon=1e-5)
STABLELM = dict(LAYER, model_type="stablelm", use_qkv_bias=True, qk_layernorm=True)

CASES: dict[str, dict[str, Any]] = {
    "codegen": dict(GPT, model_type="codegen", n_embd=64, n_head=8, rotary_dim=4, n_inner=48),
    "gpt_bigcode": dict(GPT, model_type="gpt_bigcode", n_inner=48, multi_query=True),
    "gpt_bigcode_heads": dict(GPT, model_type="gpt_bigcode", multi_query=False, scale_attn_weights=False),
    "gpt_neo": dict(TOKENS, model_type="gpt_neo", hidden_size=32, num_layers=2, num_heads=4, intermediate_size=48)
    | dict(max_position_embeddings=64, attention_types=[[["global", "local"], 1]], window_size=6),
    "gptj": dict(GPT, model_type="gptj", rotary_dim=4, n_inner=48),
    "phi": dict(LAYER, model_type="phi", qk_layernorm=True)
    | {"rope_parameters": rope(theta=500.0, partial_rotary_factor=0.5)},
    "stablelm": dict(STABLELM, use_parallel_residual=False)
    | {"rope_parameters": rope(theta=500.0, partial_rotary_factor=0.5)},
    "stablelm_parallel": dict(STABLELM, use_parallel_residual=True)
    | {"rope_parameters": rope(theta=500.0, partial_rotary_factor=0.25)},
    "starcoder2": dict(LAYER, model_type="starcoder2", norm_epsilon=1e-5, use_bias=True, sliding_window=8)
    | {"rope_parameters": rope(theta=500.0)},
}
