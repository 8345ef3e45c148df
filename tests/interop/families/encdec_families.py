"""Cases of encoder-decoders (interop/hf/catalog/encdec and LongT5), which transformers' ConditionalGeneration classes make."""

from __future__ import annotations

from typing import Any

import numpy as np
from family_sizes import VOCAB, rope

ROWS, LENGTH, PADDING = 2, 20, 5
BART: dict[str, Any] = dict(
    vocab_size=VOCAB,
    d_model=32,
    encoder_layers=2,
    decoder_layers=3,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    max_position_embeddings=64,
    scale_embedding=True,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    forced_eos_token_id=None,
    decoder_start_token_id=0,
)
LONG: dict[str, Any] = dict(
    model_type="longt5",
    vocab_size=VOCAB,
    d_model=32,
    d_kv=12,
    d_ff=48,
    num_layers=3,
    num_decoder_layers=2,
    num_heads=4,
    local_radius=6,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=20,
    feed_forward_proj="relu",
    tie_word_embeddings=True,
    pad_token_id=0,
    eos_token_id=1,
    decoder_start_token_id=0,
)
SIDE: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    hidden_activation="gelu_pytorch_tanh",
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    query_pre_attn_scalar=20,
    sliding_window=5,
    attn_logit_softcapping=3.0,
    final_logit_softcapping=4.0,
    pad_token_id=1,
    bos_token_id=2,
    eos_token_id=1,
    rope_parameters=rope(theta=500.0),
)
# Its decoder sees no token that is its padding's, with which other cases begin.
GEMMA: dict[str, Any] = dict(model_type="t5gemma", vocab_size=VOCAB, decoder_start_token_id=0)

CASES: dict[str, dict[str, Any]] = {
    "bart": dict(BART, model_type="bart", activation_function="gelu_new"),
    "mbart": dict(BART, model_type="mbart", activation_function="relu", scale_embedding=False),
    "longt5": dict(LONG, feed_forward_proj="gated-gelu"),
    "longt5_plain": dict(LONG, local_radius=3, tie_word_embeddings=False, num_decoder_layers=None),
    "mt5": dict(
        {key: value for key, value in LONG.items() if key != "local_radius"},
        model_type="mt5",
        feed_forward_proj="gated-gelu",
    ),
    "t5gemma": dict(GEMMA, encoder=SIDE, decoder=SIDE | {"num_hidden_layers": 4}),
    "t5gemma_whole": dict(
        GEMMA,
        tie_word_embeddings=False,
        **{
            side: SIDE
            | {"layer_types": ["full_attention"] * 2, "attention_bias": True, "hidden_activation": "silu"}
            | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "query_pre_attn_scalar": 400}
            | {"num_hidden_layers": 2}
            | {"rope_parameters": rope("yarn", 500.0, factor=4.0, original_max_position_embeddings=16)}
            for side in ("encoder", "decoder")
        },
    ),
    "pegasus": dict(BART, model_type="pegasus", activation_function="silu", eos_token_id=1),
    "blenderbot": dict(BART, model_type="blenderbot", activation_function="gelu"),
    # Its padding, from which positions are counted, is a token that no batch here has.
    "m2m_100": dict(BART, model_type="m2m_100", activation_function="relu", pad_token_id=12),
    "marian": dict(BART, model_type="marian", activation_function="swish"),
    "mvp": dict(BART, model_type="mvp", activation_function="gelu", scale_embedding=False),
    "plbart": dict(BART, model_type="plbart", activation_function="gelu"),
}
TYPES = {case["model_type"] for case in CASES.values()}


def encoder_entries() -> dict[str, np.ndarray]:
    """What the encoder reads; the last row ends with padding, where `encoder_segment_ids` are 0."""
    tokens = np.random.default_rng(1).integers(3, VOCAB, (ROWS, LENGTH)).astype(np.int32)
    segments = np.ones(tokens.shape, np.int32)
    segments[-1, LENGTH - PADDING :] = 0
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)
    return {"encoder_tokens": tokens, "encoder_segment_ids": segments, "encoder_positions": positions}


def arguments(row: int | None = None) -> dict[str, np.ndarray]:
    """What transformers' models call them, of all rows or of the real tokens of one."""
    batch = encoder_entries()
    names = {"encoder_tokens": "input_ids", "encoder_segment_ids": "attention_mask"}
    whole = {theirs: batch[ours].astype(np.int64) for ours, theirs in names.items()}
    if row is None:
        return whole
    count = int(whole["attention_mask"][row].sum())
    return {name: value[row : row + 1, :count] for name, value in whole.items()}
