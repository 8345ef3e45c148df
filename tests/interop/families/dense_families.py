"""Cases of interop/hf/catalog/dense."""

from __future__ import annotations

from typing import Any

from family_sizes import LAYER, RMS, SIZES, VOCAB, rope

WHOLE, WINDOW = "full_attention", "sliding_attention"
YARN = rope("yarn", theta=500.0, factor=4.0, original_max_position_embeddings=16)
LLAMA3 = rope("llama3", theta=500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0) | {
    "original_max_position_embeddings": 16
}
GEMMA4 = dict(RMS, model_type="gemma4_text", num_hidden_layers=6, head_dim=12, global_head_dim=16, sliding_window=5)
GEMMA4 |= dict(layer_types=[WINDOW, WINDOW, WHOLE] * 2, final_logit_softcapping=9.0, tie_word_embeddings=True)
GEMMA4_ROPE = {"sliding_attention": rope(theta=100.0)}
GEMMA4_ROPE |= {"full_attention": rope("proportional", theta=500.0, partial_rotary_factor=0.5, factor=2.0)}

CASES: dict[str, dict[str, Any]] = {
    "cohere": dict(LAYER, model_type="cohere", logit_scale=0.0625, use_qk_norm=True, tie_word_embeddings=True)
    | {"rope_parameters": rope(theta=500.0)},
    "granite": dict(RMS, model_type="granite", embedding_multiplier=3.0, residual_multiplier=0.4, logits_scaling=2.0)
    | {"attention_multiplier": 0.2, "attention_bias": True, "mlp_bias": True, "rope_parameters": rope()},
    "arcee": dict(RMS, model_type="arcee", head_dim=12, attention_bias=True, mlp_bias=True, rope_parameters=rope()),
    "seed_oss": dict(
        RMS, model_type="seed_oss", head_dim=12, attention_bias=True, attention_out_bias=True, mlp_bias=True
    )
    | {"rope_parameters": rope()},
    "helium": dict(RMS, model_type="helium", head_dim=8, attention_bias=True, mlp_bias=True, rope_parameters=rope()),
    "ernie4_5": dict(RMS, model_type="ernie4_5", head_dim=12, use_bias=True, rope_parameters=rope(theta=500.0))
    | {"tie_word_embeddings": True},
    "ministral": dict(RMS, model_type="ministral", head_dim=12, num_hidden_layers=3, sliding_window=5)
    | {"layer_types": [WINDOW, WHOLE, WINDOW], "rope_parameters": rope()},
    "smollm3": dict(RMS, model_type="smollm3", num_hidden_layers=4, no_rope_layers=[1, 0, 1, 1], attention_bias=True)
    | {"mlp_bias": True, "use_sliding_window": True, "sliding_window": 5, "layer_types": [WHOLE, WHOLE, WINDOW, WHOLE]}
    | {"rope_parameters": rope(theta=500.0), "tie_word_embeddings": True},
    "olmo": dict(SIZES, model_type="olmo", clip_qkv=1.5, attention_bias=True, rope_parameters=rope()),
    "olmo3": dict(RMS, model_type="olmo3", num_hidden_layers=4, sliding_window=5, attention_bias=True)
    | {"layer_types": [WINDOW, WHOLE, WINDOW, WHOLE]}
    | {"rope_parameters": {WHOLE: YARN, WINDOW: rope(theta=500.0)}},
    "exaone4": dict(RMS, model_type="exaone4", num_hidden_layers=4, sliding_window=5, rope_parameters=rope(theta=500.0))
    | {"layer_types": [WINDOW, WINDOW, WHOLE, WINDOW]},
    "exaone4_whole": dict(RMS, model_type="exaone4", sliding_window=None, rope_parameters=rope(theta=500.0))
    | {"layer_types": [WHOLE, WHOLE]},
    "glm": dict(
        RMS, model_type="glm", head_dim=16, attention_bias=True, rope_parameters=rope(partial_rotary_factor=0.5)
    ),
    "glm4": dict(RMS, model_type="glm4", head_dim=16, attention_bias=True)
    | {"rope_parameters": rope(partial_rotary_factor=0.5)},
    "cohere2": dict(LAYER, model_type="cohere2", num_hidden_layers=4, logit_scale=0.0625, sliding_window=5)
    | {"layer_types": [WINDOW, WINDOW, WINDOW, WHOLE], "attention_bias": True, "tie_word_embeddings": True}
    | {"rope_parameters": rope(theta=500.0)},
    "vaultgemma": dict(RMS, model_type="vaultgemma", num_hidden_layers=3, head_dim=12, sliding_window=5)
    | {"layer_types": [WINDOW, WHOLE, WINDOW], "query_pre_attn_scalar": 10, "attention_bias": True}
    | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "tie_word_embeddings": True}
    | {"rope_parameters": rope()},
    "internlm3": dict(RMS, model_type="internlm3", head_dim=12, attention_bias=True, mlp_bias=True)
    | {"rope_parameters": rope()},
    "iquestcoder": dict(RMS, model_type="iquestcoder", head_dim=12, attention_bias=True, mlp_bias=True)
    | {"rope_parameters": rope(theta=500.0)},
    "cwm": dict(RMS, model_type="cwm", num_hidden_layers=4, head_dim=12, mlp_bias=True, sliding_window=5)
    | {"layer_types": [WHOLE, WINDOW, WINDOW, WINDOW], "rope_parameters": LLAMA3},
    "jais2": dict(LAYER, model_type="jais2", head_dim=12, attention_bias=True, mlp_bias=True, rope_parameters=rope()),
    "exaone": dict(RMS, model_type="exaone", head_dim=12, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3),
    "hunyuan_v1_dense": dict(RMS, model_type="hunyuan_v1_dense", head_dim=12, attention_bias=True)
    | {"rope_parameters": rope("dynamic", theta=500.0, factor=1.0, alpha=20.0)},
    "nanochat": dict(
        RMS, model_type="nanochat", final_logit_softcapping=3.0, attention_bias=True, rope_parameters=rope()
    ),
    "granite_swa": dict(
        RMS, model_type="granite_swa", num_hidden_layers=4, embedding_multiplier=3.0, residual_multiplier=0.4
    )
    | {
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
        "attention_bias": True,
        "mlp_bias": True,
        "sliding_window": 5,
    }
    | {"layer_types": [WHOLE, WINDOW, WINDOW, WHOLE], "layer_rope_theta": [500.0, 100.0, 100.0, 0.0]}
    | {"rope_parameters": rope(theta=500.0), "tie_word_embeddings": True},
    "granite_swa_yarn": dict(
        RMS, model_type="granite_swa", num_hidden_layers=4, sliding_window=5, rope_parameters=YARN
    ),
    "hyperclovax": dict(RMS, model_type="hyperclovax", head_dim=12, embedding_multiplier=3.0, residual_multiplier=0.4)
    | {"attention_multiplier": 0.2, "logits_scaling": 0.5, "attention_bias": True, "mlp_bias": True}
    | {"use_post_norm": True, "rope_parameters": rope()},
    "hyperclovax_pre": dict(RMS, model_type="hyperclovax", use_post_norm=False, rope_parameters=rope()),
    "ministral3": dict(RMS, model_type="ministral3", head_dim=12, sliding_window=9)
    | {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 8}},
    "apertus": dict(RMS, model_type="apertus", hidden_act="xielu", attention_bias=True, rope_parameters=LLAMA3),
    "apertus1p5": dict(
        RMS, model_type="apertus1p5_text", hidden_act="xielu", attention_bias=True, rope_parameters=LLAMA3
    ),
    "apertus1p5_pruned": dict(RMS, model_type="apertus1p5_text", vocab_size=112, output_vocab_size=VOCAB)
    | {"hidden_act": "xielu", "num_hidden_layers": 1, "rope_parameters": rope()},
    "olmo2": dict(RMS, model_type="olmo2", rope_parameters=rope(theta=500.0)),
    "gemma4": dict(GEMMA4, hidden_size_per_layer_input=8, vocab_size_per_layer_input=96, num_kv_shared_layers=2)
    | {"num_hidden_layers": 5, "layer_types": [WINDOW, WHOLE, WINDOW, WINDOW, WHOLE], "rope_parameters": GEMMA4_ROPE}
    | {"use_double_wide_mlp": True, "attention_k_eq_v": False},
    "gemma4_keys": dict(GEMMA4, hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=1)
    | {"layer_types": [WINDOW, WHOLE] * 3, "tie_word_embeddings": False},
    "gemma4_moe": dict(GEMMA4, hidden_size_per_layer_input=8, vocab_size_per_layer_input=96, num_kv_shared_layers=1)
    | {"num_hidden_layers": 4, "layer_types": [WINDOW, WHOLE, WINDOW, WHOLE], "rope_parameters": GEMMA4_ROPE}
    | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 6}
    | {"top_k_experts": 2, "moe_intermediate_size": 24},
    "modernbert-decoder": {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    | dict(model_type="modernbert-decoder", num_hidden_layers=5, norm_eps=1e-4, pad_token_id=0, local_attention=9)
    | dict(attention_bias=True, mlp_bias=True, norm_bias=True, classifier_bias=True, tie_word_embeddings=True)
    | dict(hidden_activation="gelu_pytorch_tanh", classifier_activation="silu", cls_token_id=1, sep_token_id=2)
    | {"layer_types": [WHOLE, WINDOW, WINDOW, WHOLE, WINDOW]}
    | {"rope_parameters": {WHOLE: YARN, WINDOW: rope(theta=500.0)}},
}
