"""Which keys of a config.json a family reads, as transformers 5.24 does, and by what names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf import families, wrappers
from capibara.interop.hf.families import FAMILIES
from capibara.interop.hf.layout.family import Family, Kind

Values = Mapping[str, Any]

# Neutral for the model: bookkeeping, training, generation and heads that are not read. Keys with other values that no
# family reads are reported.
_NEUTRAL = frozenset(
    """
_name_or_path _commit_hash architectures auto_map attention_dropout attention_probs_dropout_prob attn_implementation
attn_pdrop bos_token_id cache_implementation chunk_size_feed_forward classifier_dropout classifier_dropout_prob
decoder_start_token_id directionality dropout_rate dtype embd_pdrop eos_token_id forced_bos_token_id forced_eos_token_id
gradient_checkpointing hidden_dropout hidden_dropout_prob id2label initializer_factor initializer_range
is_encoder_decoder is_llama_config keys_to_ignore_at_inference label2id max_position_embeddings max_length model_type n_ctx
n_positions num_labels output_attentions output_hidden_states output_past output_router_logits pad_token_id
pooler_dropout pooler_fc_size pooler_hidden_act pooler_hidden_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type prefix pretraining_tp
problem_type quantization_config reorder_and_upcast_attn resid_pdrop return_dict rope_interleaved router_aux_loss_coef
router_jitter_noise input_jitter_noise summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
task_specific_params text_config torch_dtype torchscript transformers_version transformers.js_config unsloth_fixed
unsloth_version use_cache vision_config audio_config residual_dropout eod_token_id
dropout activation_dropout encoder_layerdrop decoder_layerdrop init_std qa_dropout seq_classif_dropout summary_last_dropout embedding_dropout mlp_dropout classifier_pooling cls_token_id
sep_token_id mask_token_id enable_moe_fp32_combine deterministic_flash_attn initializer_cutoff_factor sparse_prediction sparse_pred_ignore_index reference_compile
repad_logits_with_grad linear_a_log_min linear_a_log_max linear_dt_min linear_dt_max linear_dt_init_floor
w_init_variance_scale final_w_init_variance_scale use_mamba_kernels use_mambapy use_associative_scan
""".split()
)
# transformers 5.24 computes layers that differ by it, in families that know it.
_REFUSED = ("per_layer_config",)
_ROPE = ("rope_parameters", "rope_scaling", "max_position_embeddings", "original_max_position_embeddings")
_EXPERTS = ("num_experts_per_tok", "norm_topk_prob", "router_aux_loss_coef", "output_router_logits")
_WINDOWS = ("sliding_window", "layer_types")
_T5 = ("num_decoder_layers", "scale_decoder_outputs")


def canonical(values: Values, family: Family) -> dict[str, Any]:
    """The values that the family reads, under its own names.

    Raises:
      UserError: a key changes the model in a way that no family here has.
    """
    for key in _REFUSED:
        if values.get(key) and key not in read(family):
            raise UserError(f"config.json has {key} = {str(values[key])[:60]}, must be without: take another model")
    named = {key: value for key, value in values.items() if key not in family.aliases}
    named |= {family.aliases[key]: value for key, value in values.items() if key in family.aliases}
    # A family of the user's own code has functions that may read any key.
    return {key: value for key, value in named.items() if key in read(family) or family.model_type not in families.OWN}


def read(family: Family) -> frozenset[str]:
    """The keys that a family reads."""
    names = {
        *family.keys.values(),
        *family.defaults,
        *family.only,
        *family.biases,
        family.activation,
        *family.read_keys,
        *family.moe_keys.values(),
        *family.mixer_keys.values(),
        *((family.pairs_key,) if family.pairs_key else ()),
        *((family.transform,) if family.transform else ()),
        *((family.mtp_key,) if family.mtp_key else ()),
    }
    names |= {"model_type", "architectures", "tie_word_embeddings", "quantization_config", "quantization"}
    names |= {"id2label", "num_labels"} if families.score_architecture(family) else set()
    names |= {*_ROPE, family.theta, family.share} if family.rope else set()
    names |= {*_EXPERTS, family.experts} if family.experts else set()
    names |= set(_WINDOWS if family.window == "types" else _WINDOWS[:1] if family.window == "all" else ())
    names |= set(_T5) if family.kind == Kind.ENCODER_DECODER and family.model_type in families.T5S else set()
    return frozenset(names)


def unread(values: Values, family: Family) -> list[str]:
    """The keys of a config.json that say something, and that the family does not read: transformers does not either."""
    known = read(family) | _NEUTRAL | family.aliases.keys() | set(families.OTHER_NAMES)
    neutral: tuple[Any, ...] = (None, False, 0, 1, "", [], {})
    return [key for key, value in values.items() if key not in known and (value is True or value not in neutral)]


def notes(config: Values, stored: Iterable[str]) -> Iterator[str]:
    """What of a folder is not read, a line each.

    Args:
      config: contents of config.json.
      stored: names of the tensors.
    """
    values = wrappers.text_part(config)
    if (family := FAMILIES.get(str(values.get("model_type")))) is None:
        return
    if ignored := unread(values, family):
        shown = ", ".join(f"{key} = {str(values[key])[:40]}" for key in ignored[:8])
        yield f"config.json has {shown}, which {family.model_type} models do not read"
    unused = [name for name in stored if wrappers.names(config).of_part(name)]
    if unused:
        yield f"{len(unused):,} tensors of other parts than the language model are not read, {min(unused)} the first of them"
