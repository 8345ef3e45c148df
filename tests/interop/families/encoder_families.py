"""Cases of interop/hf/catalog/encoders, which transformers' MaskedLM classes make."""

from __future__ import annotations

from typing import Any

import numpy as np
from family_sizes import SIZES, VOCAB, rope

ROWS, LENGTH, PADDING = 2, 24, 7
FIRST = 8  # of the tokens that a batch has: those before it are special ones
ENCODER = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
ENCODER |= {"tie_word_embeddings": True, "layer_norm_eps": 1e-5, "pad_token_id": 1}
BERT = dict(ENCODER, hidden_act="gelu", type_vocab_size=2)
DEBERTA = dict(BERT, model_type="deberta-v2", relative_attention=True, hidden_act="relu", pad_token_id=0)
ESM = dict(ENCODER, model_type="esm", mask_token_id=6)  # that of `masked`
XLM = dict(vocab_size=VOCAB, emb_dim=32, n_layers=3, n_heads=4, max_position_embeddings=64, layer_norm_eps=1e-5)
XLM |= dict(tie_word_embeddings=True, pad_token_id=2)
MODERN = {key: value for key, value in ENCODER.items() if key != "layer_norm_eps"}
MODERN |= {"model_type": "modernbert", "num_hidden_layers": 5, "norm_eps": 1e-4, "pad_token_id": 0}
MODERN |= {"cls_token_id": 1, "sep_token_id": 2}
WHOLE, WINDOW = "full_attention", "sliding_attention"
YARN = rope("yarn", theta=500.0, factor=4.0, original_max_position_embeddings=16)

CASES: dict[str, dict[str, Any]] = {
    "roberta": dict(BERT, model_type="roberta", hidden_act="relu"),
    "xlm-roberta": dict(BERT, model_type="xlm-roberta", pad_token_id=3, type_vocab_size=1),
    "data2vec-text": dict(BERT, model_type="data2vec-text", pad_token_id=3),
    "roformer": dict(BERT, model_type="roformer", embedding_size=24, hidden_act="gelu_new", pad_token_id=0),
    "roformer_whole": dict(BERT, model_type="roformer", type_vocab_size=3, pad_token_id=0),
    "esm": dict(ESM, position_embedding_type="rotary", token_dropout=True, rope_theta=500.0),
    "esm_absolute": dict(ESM, emb_layer_norm_before=True, pad_token_id=3),
    "xlm": dict(XLM, model_type="xlm", gelu_activation=False),
    "flaubert": dict(XLM, model_type="flaubert"),
    "camembert": dict(BERT, model_type="camembert", hidden_act="gelu_new"),
    "electra": dict(BERT, model_type="electra", embedding_size=24, hidden_act="gelu_new", pad_token_id=0),
    "electra_whole": dict(BERT, model_type="electra", embedding_size=32, type_vocab_size=3, pad_token_id=0),
    "albert": dict(
        BERT, model_type="albert", embedding_size=24, hidden_act="gelu", num_hidden_layers=4, num_hidden_groups=2
    )
    | {"pad_token_id": 0, "type_vocab_size": 3},
    "deberta-v2": dict(
        DEBERTA, pos_att_type="p2c|c2p", share_att_key=True, position_buckets=4, max_relative_positions=16
    )
    | {"norm_rel_ebd": "layer_norm", "position_biased_input": False, "type_vocab_size": 0},
    "deberta-v2_own": dict(DEBERTA, pos_att_type=["c2p", "p2c"], max_relative_positions=5),
    "ernie": dict(
        BERT, model_type="ernie", use_task_id=True, task_type_vocab_size=4, hidden_act="relu", pad_token_id=0
    ),
    "megatron-bert": dict(BERT, model_type="megatron-bert", hidden_act="gelu_new", pad_token_id=0),
    "distilbert": dict(model_type="distilbert", vocab_size=VOCAB, dim=32, hidden_dim=48, n_layers=3, n_heads=4)
    | {"activation": "relu", "max_position_embeddings": 64, "tie_word_embeddings": True, "pad_token_id": 0},
    "xlm-roberta-xl": dict(BERT, model_type="xlm-roberta-xl", hidden_act="gelu_new"),
    "mpnet": dict(ENCODER, model_type="mpnet", hidden_act="relu", relative_attention_num_buckets=32),
    "modernbert": dict(MODERN, attention_bias=True, mlp_bias=True, norm_bias=True, classifier_bias=True)
    | {"hidden_activation": "gelu_pytorch_tanh", "classifier_activation": "silu", "local_attention": 9}
    | {
        "layer_types": [WHOLE, WINDOW, WINDOW, WHOLE, WINDOW],
        "rope_parameters": {WHOLE: YARN, WINDOW: rope(theta=500.0)},
    },
    "modernbert_plain": dict(MODERN, num_hidden_layers=4, layer_types=None, decoder_bias=False)
    | {
        "hidden_activation": "gelu",
        "classifier_activation": "gelu",
        "local_attention": 6,
        "tie_word_embeddings": False,
    },
    "nomic_bert": dict(BERT, model_type="nomic_bert", hidden_act="silu", head_dim=12, type_vocab_size=2, pad_token_id=0)
    | {"rope_parameters": YARN},
    "gte": dict(BERT, model_type="gte", hidden_act="gelu_new", type_vocab_size=3, head_dim=12, rope_parameters=YARN),
    "gte_untyped": dict(
        BERT, model_type="gte", type_vocab_size=0, tie_word_embeddings=False, rope_parameters=rope(theta=500.0)
    ),
    "jina_embeddings_v3": dict(BERT, model_type="jina_embeddings_v3", hidden_act="relu", rope_parameters=YARN),
    # Narrow: with wide heads transformers' own float32 is too far from float64.
    "roberta-prelayernorm": dict(BERT, model_type="roberta-prelayernorm", hidden_act="relu", pad_token_id=3)
    | {"hidden_size": 8, "intermediate_size": 24, "num_attention_heads": 8},
    "eurobert": {key: value for key, value in BERT.items() if key not in ("layer_norm_eps", "hidden_act")}
    | {
        "model_type": "eurobert",
        "mask_token_id": 3,
        "rms_norm_eps": 1e-4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "pad_token_id": 0,
    }
    | {"attention_bias": True, "mlp_bias": True, "rope_parameters": YARN},
}
TYPES = {case["model_type"] for case in CASES.values()}


def batch(token_types: int) -> dict[str, np.ndarray]:
    """Tokens, and the types of as many; the last row ends with padding, where `segment_ids` are 0."""
    random = np.random.default_rng(0)
    tokens = random.integers(FIRST, VOCAB, (ROWS, LENGTH)).astype(np.int32)
    segments = np.ones(tokens.shape, np.int32)
    segments[-1, LENGTH - PADDING :] = 0
    made = {"tokens": tokens, "segment_ids": segments}
    if token_types > 1:
        made["token_types"] = random.integers(0, token_types, tokens.shape).astype(np.int32)
    return made


def arguments(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What transformers' models call the entries of a batch."""
    names = {"tokens": "input_ids", "segment_ids": "attention_mask", "token_types": "token_type_ids"}
    return {theirs: batch[ours].astype(np.int64) for ours, theirs in names.items() if ours in batch}


def masked(batch: dict[str, np.ndarray], mask: int = FIRST - 2) -> dict[str, np.ndarray]:
    """The batch with every third of its tokens masked, which are the ones to predict: `weights` are 1 there."""
    here = (np.arange(LENGTH) % 3 == 0) & (batch["segment_ids"] == 1)
    tokens = np.where(here, mask, batch["tokens"]).astype(np.int32)
    return batch | {"tokens": tokens, "targets": batch["tokens"], "weights": here.astype(np.float32)}
