"""Cases of interop/hf/wrappers: models that read images, too, of which the language model is compared."""

from __future__ import annotations

from typing import Any

from expert_families import M3
from family_sizes import RMS, rope
from hybrid_families import DELTA, EXPERTS, SHORT

SIGHT = dict(
    hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=28, patch_size=14
)
GRID_SIGHT = dict(depth=1, hidden_size=8, intermediate_size=8, num_heads=1, out_hidden_size=32)
TEXT = {key: value for key, value in RMS.items() if key != "tie_word_embeddings"}
# Shares of the 4 pairs of a head, as models that place tokens on a grid have them.
GRID = rope(mrope_section=[2, 1, 1])
QWEN2 = dict(TEXT, num_hidden_layers=4, use_sliding_window=True, sliding_window=8, max_window_layers=2)
WINDOWS = ["sliding_attention", "full_attention"]
GEMMA4 = dict(TEXT, model_type="gemma4_text", num_hidden_layers=3, layer_types=[WINDOWS[0], WINDOWS[0], WINDOWS[1]])
GEMMA4 |= dict(head_dim=12, global_head_dim=16, sliding_window=5, final_logit_softcapping=3.0, pad_token_id=0)
GEMMA4_SIGHT = dict(
    hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1
)
GEMMA4_SIGHT |= dict(head_dim=8, patch_size=14, position_embedding_size=16)


def around(model_type: str, text: dict[str, Any], sight: dict[str, Any] = SIGHT, **more: Any) -> dict[str, Any]:
    return dict(model_type=model_type, text_config=text, vision_config=sight, **more)


def heard(model_type: str, text: dict[str, Any], sound: dict[str, Any]) -> dict[str, Any]:
    """A model that reads sound, too; its head is its own whatever its text_config says."""
    untied = {} if model_type == "glmasr" else {"tie_word_embeddings": True}
    return dict(model_type=model_type, text_config=text | untied, audio_config=sound)


AUDIO = dict(d_model=8, encoder_attention_heads=2, encoder_ffn_dim=8, encoder_layers=1, num_mel_bins=4)
HEARING = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_mel_bins=4)

CASES: dict[str, dict[str, Any]] = {
    "llava": around("llava", dict(TEXT, model_type="llama", rope_parameters=rope(), tie_word_embeddings=True)),
    "mistral3": around(
        "mistral3", dict(TEXT, model_type="mistral", sliding_window=8, head_dim=12, rope_parameters=rope())
    )
    | dict(tie_word_embeddings=False),
    "internvl": around("internvl", dict(TEXT, model_type="qwen2", rope_parameters=rope()))
    | dict(vision_config=SIGHT | dict(image_size=[28, 28], patch_size=[14, 14])),
    "lfm2_vl": around(
        "lfm2_vl",
        dict(TEXT, model_type="lfm2", norm_eps=1e-5, num_hidden_layers=3, block_multiple_of=8, rope_parameters=rope())
        | dict(layer_types=["conv", "full_attention", "conv"]),
    ),
    "aya_vision": around(
        "aya_vision",
        dict(TEXT, model_type="cohere2", layer_norm_eps=1e-5, num_hidden_layers=4, sliding_window=8, logit_scale=0.25)
        | dict(rope_parameters=rope(), layer_types=WINDOWS * 2),
    ),
    "smolvlm": around("smolvlm", dict(TEXT, model_type="llama", rope_parameters=rope()), scale_factor=1),
    "idefics3": around("idefics3", dict(TEXT, model_type="llama", rope_parameters=rope()), scale_factor=1)
    | dict(tie_word_embeddings=True),
    "qwen2_vl": around("qwen2_vl", dict(QWEN2, rope_parameters=GRID), GRID_SIGHT | dict(embed_dim=8)),
    "qwen2_5_vl": around("qwen2_5_vl", dict(QWEN2, rope_parameters=GRID), GRID_SIGHT | dict(fullatt_block_indexes=[0]))
    | dict(tie_word_embeddings=True),
    "qwen3_vl": around(
        "qwen3_vl",
        dict(TEXT, head_dim=16, attention_bias=True, rope_parameters=rope(mrope_section=[4, 2, 2])),
        GRID_SIGHT | dict(deepstack_visual_indexes=[0], num_position_embeddings=16),
    ),
    "qwen3_vl_moe": around(
        "qwen3_vl_moe",
        dict(TEXT, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
        | dict(rope_parameters=rope(mrope_section=[4, 2, 2])),
        GRID_SIGHT | dict(deepstack_visual_indexes=[0], num_position_embeddings=16),
    ),
    "qwen3_5_vl": around(
        "qwen3_5",
        dict(TEXT, rope_parameters=rope(partial_rotary_factor=0.5, mrope_section=[2, 1, 1])) | DELTA,
        GRID_SIGHT | dict(num_position_embeddings=16),
    ),
    "qwen3_5_vl_moe": around(
        "qwen3_5_moe",
        dict(TEXT, rope_parameters=rope(partial_rotary_factor=0.5, mrope_section=[2, 1, 1])) | DELTA | EXPERTS | SHORT,
        GRID_SIGHT | dict(num_position_embeddings=16),
    ),
    "glm4v": around(
        "glm4v",
        dict(TEXT, rope_parameters=rope(partial_rotary_factor=0.5, mrope_section=[1, 1])),
        GRID_SIGHT | dict(image_size=28),
    ),
    "glm4v_moe": around(
        "glm4v_moe",
        dict(TEXT, head_dim=16, rope_parameters=rope(partial_rotary_factor=0.5, mrope_section=[2, 1, 1]))
        | dict(num_hidden_layers=3, moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=2, n_group=2)
        | dict(topk_group=1, routed_scaling_factor=1.5),
        GRID_SIGHT | dict(image_size=28),
    ),
    "kimi_k25": around(
        "kimi_k25",
        dict(TEXT, model_type="deepseek_v3", moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=2)
        | dict(n_group=2, topk_group=1, kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=8)
        | dict(
            v_head_dim=8, first_k_dense_replace=1, num_hidden_layers=3, rope_parameters=rope(), num_key_value_heads=4
        ),
        dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1),
        tie_word_embeddings=False,
    ),
    "gemma4_vl": around(
        "gemma4",
        GEMMA4 | dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=96),
        GEMMA4_SIGHT,
        audio_config=None,
    ),
    "gemma4_vl_moe": around(
        "gemma4",
        GEMMA4
        | dict(hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=4, top_k_experts=2)
        | dict(moe_intermediate_size=24),
        GEMMA4_SIGHT,
        audio_config=None,
    ),
    "minimax_m3_vl": around(
        "minimax_m3_vl",
        M3 | {"model_type": "minimax_m3_vl_text"},
        dict(
            hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=28, patch_size=14
        ),
        projector_hidden_size=8,
    ),
    "llama4_vl": around(
        "llama4",
        dict(
            TEXT,
            head_dim=16,
            num_hidden_layers=4,
            attention_chunk_size=9,
            num_local_experts=4,
            intermediate_size_mlp=40,
        )
        | dict(tie_word_embeddings=True, rope_parameters=rope()),
        SIGHT | dict(vision_output_dim=8, projector_input_dim=8, projector_output_dim=8, intermediate_size=32),
    ),
    "llava_next": around("llava_next", dict(TEXT, model_type="mistral", sliding_window=8, rope_parameters=rope()))
    | dict(tie_word_embeddings=True),
    "llava_next_video": around(
        "llava_next_video", dict(TEXT, model_type="llama", rope_parameters=rope(), tie_word_embeddings=True)
    ),
    "llava_onevision": around("llava_onevision", dict(TEXT, model_type="qwen2", rope_parameters=rope())),
    "vipllava": around("vipllava", dict(TEXT, model_type="llama", mlp_bias=True, rope_parameters=rope()))
    | dict(vision_feature_layers=[-1]),
    "video_llava": around("video_llava", dict(TEXT, model_type="llama", head_dim=12, rope_parameters=rope())),
    "cohere2_vision": around(
        "cohere2_vision",
        dict(TEXT, model_type="cohere2", layer_norm_eps=1e-5, num_hidden_layers=4, sliding_window=8, logit_scale=0.25)
        | dict(rope_parameters=rope(), layer_types=WINDOWS * 2),
    ),
    "exaone4_5": around(
        "exaone4_5",
        dict(TEXT, model_type="exaone4", num_hidden_layers=4, sliding_window=5, layer_types=WINDOWS * 2)
        | dict(rope_parameters=rope(theta=500.0)),
        GRID_SIGHT | dict(fullatt_block_indexes=[0], num_key_value_heads=1),
    ),
    "glm46v": around(
        "glm46v",
        dict(TEXT, model_type="glm4v_text", rope_parameters=rope(partial_rotary_factor=0.5, mrope_section=[1, 1])),
        GRID_SIGHT | dict(image_size=28, model_type="glm4v_vision"),
    ),
    "ovis2": around("ovis2", dict(TEXT, model_type="qwen2", rope_parameters=rope()), SIGHT | dict(vocab_size=16))
    | dict(hidden_size=32, vocab_size=96, tie_word_embeddings=False),
    "got_ocr2": around(
        "got_ocr2",
        dict(TEXT, model_type="qwen2", rope_parameters=rope()),
        dict(SIGHT, output_channels=8, global_attn_indexes=[0], mlp_dim=8, window_size=2),
    ),
    "lighton_ocr": around(
        "lighton_ocr", dict(TEXT, model_type="qwen3", head_dim=12, rope_parameters=rope()), SIGHT | dict(head_dim=8)
    ),
    "deepseek_vl": around("deepseek_vl", dict(TEXT, model_type="llama", rope_parameters=rope()))
    | dict(tie_word_embeddings=False),
    "granite4_vision": around(
        "granite4_vision",
        dict(TEXT, embedding_multiplier=3.0, residual_multiplier=0.4, logits_scaling=2.0, attention_multiplier=0.2)
        | dict(attention_bias=True, mlp_bias=True, rope_parameters=rope()),
        SIGHT | dict(hidden_size=64, image_size=56),
    )
    | dict(downsample_rate="1/2", deepstack_layer_map=[[0, 0]], spatial_target_layers=[0, 0, 1, 1]),
    "paddleocr_vl": around(
        "paddleocr_vl",
        dict(TEXT, head_dim=16, use_bias=True, rope_parameters=rope(mrope_section=[4, 2, 2])),
        SIGHT,
    ),
    "qwen2_audio": heard("qwen2_audio", dict(TEXT, model_type="qwen2", rope_parameters=rope()), AUDIO),
    "audioflamingo3": heard("audioflamingo3", dict(TEXT, model_type="qwen2", rope_parameters=rope()), HEARING),
    "voxtral": heard("voxtral", dict(TEXT, model_type="llama", head_dim=12), HEARING),
    "glmasr": heard("glmasr", dict(TEXT, model_type="llama", rope_parameters=rope()), HEARING | dict(head_dim=4)),
    "granite_speech": dict(
        model_type="granite_speech",
        text_config=dict(TEXT, model_type="granite", embedding_multiplier=3.0, logits_scaling=2.0),
        encoder_config=dict(hidden_dim=8, num_layers=1, num_heads=2, dim_head=4, input_dim=16, output_dim=8),
        projector_config=dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
        | dict(encoder_hidden_size=8),
        has_lora_adapter=False,
        tie_word_embeddings=False,
    ),
}
CLASSES = {
    "qwen2_audio": "Qwen2AudioForConditionalGeneration",
    "audioflamingo3": "AudioFlamingo3ForConditionalGeneration",
    "voxtral": "VoxtralForConditionalGeneration",
    "glmasr": "GlmAsrForConditionalGeneration",
    "granite_speech": "GraniteSpeechForConditionalGeneration",
    "llava_next": "LlavaNextForConditionalGeneration",
    "llava_next_video": "LlavaNextVideoForConditionalGeneration",
    "llava_onevision": "LlavaOnevisionForConditionalGeneration",
    "vipllava": "VipLlavaForConditionalGeneration",
    "video_llava": "VideoLlavaForConditionalGeneration",
    "cohere2_vision": "Cohere2VisionForConditionalGeneration",
    "exaone4_5": "Exaone4_5_ForConditionalGeneration",
    "glm46v": "Glm46VForConditionalGeneration",
    "ovis2": "Ovis2ForConditionalGeneration",
    "got_ocr2": "GotOcr2ForConditionalGeneration",
    "lighton_ocr": "LightOnOcrForConditionalGeneration",
    "deepseek_vl": "DeepseekVLForConditionalGeneration",
    "granite4_vision": "Granite4VisionForConditionalGeneration",
    "paddleocr_vl": "PaddleOCRVLForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "minimax_m3_vl": "MiniMaxM3SparseForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
    "lfm2_vl": "Lfm2VlForConditionalGeneration",
    "aya_vision": "AyaVisionForConditionalGeneration",
    "smolvlm": "SmolVLMForConditionalGeneration",
    "idefics3": "Idefics3ForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "glm4v": "Glm4vForConditionalGeneration",
    "glm4v_moe": "Glm4vMoeForConditionalGeneration",
    "kimi_k25": "Kimi_K25ForConditionalGeneration",
}
