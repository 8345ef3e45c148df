"""transformers' answers when one key of a config.json is changed: the peer program of test_transformers_config_keys.py.

    python tests/interop/config_keys_peer.py FOLDER [FAMILY ...]

Writes for every family FOLDER/FAMILY/CASE/{config.json, model.safetensors, logits.npy} and FOLDER/FAMILY/cases.json.
A case is a config.json with one key changed to another legal value, and the tensors of the model that transformers makes
of it; the logits are those of transformers' from_pretrained. The keys are all that transformers' configuration class has,
those of all configurations, aliases (`attribute_map`) and the names of older versions.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "families"), str(HERE.parent / "models" / "golden")]

import answers  # noqa: E402
import config_keys  # noqa: E402
import encdec_families  # noqa: E402
import encoder_families  # noqa: E402
import make  # noqa: E402
import make_encoders  # noqa: E402
import make_moe  # noqa: E402
from family_cases import ANSWERING, CASES, CLASSES, CONSTANTS, IMPLEMENTATIONS  # noqa: E402

VISION = dict(
    hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=28, patch_size=14
)
SEEING = dict(
    model_type="gemma3",
    architectures=["Gemma3ForConditionalGeneration"],
    text_config=make.CASES["gemma3"],
    vision_config=VISION,
    mm_tokens_per_image=4,
)
WINDOW = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
# The richest configuration of each family.
FAMILIES = {
    **{name: make.CASES[name] for name in ("gpt2", "gpt_neox", "mistral", "gemma", "gemma2", "gemma3n", "phi3")},
    "llama": make.CASES["llama"] | {"head_dim": 8},
    "llama_llama3": make.CASES["llama_llama3"],
    "llama_yarn": make.CASES["llama_yarn"],
    "llama_dynamic": make.CASES["llama_dynamic"],
    "gemma3_text": make.CASES["gemma3"],
    "gemma3": SEEING,
    "qwen2": make.CASES["qwen2"] | WINDOW,
    "qwen3": make.CASES["qwen3"] | WINDOW,
    "phi3_long": make.CASES["phi3_long"],
    "mixtral": make_moe.CASES["mixtral"],
    "qwen3_moe": make_moe.CASES["qwen3_moe"] | WINDOW,
    "gpt_oss": make_moe.CASES["gpt_oss"],
    "t5": make_encoders.CASES["t5"],
    "umt5": make_encoders.CASES["t5"] | {"model_type": "umt5", "feed_forward_proj": "gated-gelu"},
    "bert": make_encoders.CASES["bert"],
    **CASES,
}
ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel", "gpt_neox": "GPTNeoXForCausalLM", "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM",
    "gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM", "gemma3n_text": "Gemma3nForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "phi3": "Phi3ForCausalLM",
    "mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "gpt_oss": "GptOssForCausalLM", "t5": "T5ForConditionalGeneration",
    "umt5": "UMT5ForConditionalGeneration", "bert": "BertForMaskedLM",
}  # fmt: skip
ACTIVATIONS = (
    "silu", "swish", "xielu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python", "gelu_accurate", "gelu_10", "quick_gelu",
    "mish", "laplace", "leaky_relu", "linear", "relu", "relu2", "relu6", "sigmoid", "tanh",
)  # fmt: skip
ROPE_KEYS = {
    "rope_theta": (500.0, 20_000.0, None),
    "partial_rotary_factor": (0.5, 0.25),
    "factor": (2.0, 6.0),
    "original_max_position_embeddings": (8, 24),
    "attention_factor": (0.5, 1.5, 0.0, None),
    "beta_fast": (4.0, 32.0, None),
    "beta_slow": (0.5, 1.0, None),
    "mscale": (1.0, 0.7),
    "mscale_all_dim": (1.0, 0.7),
    "truncate": (False, True),
    "low_freq_factor": (2.0, 0.5),
    "high_freq_factor": (8.0, 3.0),
    "rope_type": ("default", "linear", "proportional"),
    "type": ("linear", "default"),
    "llama_4_scaling_beta": (0.0, 0.5),
    "alpha": (2.0, 50.0),
}
SCALINGS = (
    {"rope_type": "linear", "factor": 4.0},
    {"type": "linear", "factor": 4.0},
    {"type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 0.7},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale_all_dim": 1.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.3},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    {"rope_type": "default"},
    {"mrope_section": [2, 1, 1], "rope_type": "default"},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    {"rope_type": "proportional", "factor": 2.0},
)
# Legal values of keys whose type does not tell them.
VALUES: dict[str, tuple[Any, ...]] = {
    "vocab_size": (104, 128),
    "hidden_size": (64, 48, 36),
    "n_embd": (64, 48),
    "d_model": (64, 48),
    "intermediate_size": (64, 40),
    "moe_intermediate_size": (16, 32),
    "n_inner": (64, 100),
    "d_ff": (64, 40),
    "d_kv": (8, 12),
    "num_hidden_layers": (1, 4, 5),
    "n_layer": (1, 3),
    "num_layers": (1, 4),
    "num_decoder_layers": (1, 4, None),
    "num_attention_heads": (8, 2),
    "n_head": (8, 2),
    "num_heads": (8, 2),
    "num_key_value_heads": (1, 4, None),
    "head_dim": (4, 32, None),
    "dim": (64, 48),
    "hidden_dim": (64, 40),
    "embedding_size": (16, 24, 32),
    "max_position_embeddings": (32, 128, 24),
    "n_positions": (32, 128),
    "n_ctx": (32, 128),
    "original_max_position_embeddings": (8, 24),
    "sliding_window": (4, 12, None),
    "max_window_layers": (0, 2),
    "sliding_window_pattern": (2, 3),
    "_sliding_window_pattern": (2, 3),
    "layer_types": (["full_attention"], ["sliding_attention"], ["sliding_attention", "full_attention"], None),
    "query_pre_attn_scalar": (4, 32, 0.5),
    "num_experts": (4, 6),
    "num_local_experts": (4, 6),
    "num_experts_per_tok": (1, 3),
    "experts_per_token": (1, 2),
    "decoder_sparse_step": (2, 3),
    "mlp_only_layers": ([0], [1]),
    "type_vocab_size": (1, 4),
    "relative_attention_num_buckets": (4, 16),
    "relative_attention_max_distance": (10, 40),
    "feed_forward_proj": ("relu", "gelu", "gated-gelu", "gated-silu", "gelu_new", "gated-gelu_new", "silu", "gated-relu"),
    "dense_act_fn": ("gelu", "relu"),
    "is_gated_act": (True, False),
    "rope_parameters": SCALINGS,
    "rope_scaling": SCALINGS,
    "rope_theta": (500.0, 20_000.0),
    "rotary_emb_base": (500.0, 20_000.0),
    "rotary_pct": (0.5, 1.0),
    "partial_rotary_factor": (0.5, 0.25),
    "rope_local_base_freq": (500.0, 20_000.0),
    "attn_logit_softcapping": (1.0, 5.0, None),
    "final_logit_softcapping": (1.0, 5.0, None),
    "use_bidirectional_attention": (True, "all", "vision", None),
    "position_embedding_type": ("relative_key", "relative_key_query", "absolute"),
    "altup_num_inputs": (2, 4),
    "altup_active_idx": (1, 2),
    "altup_coef_clip": (1.0, None),
    "laurel_rank": (3, 12),
    "hidden_size_per_layer_input": (4, 16),
    "vocab_size_per_layer_input": (80, 96),
    "num_kv_shared_layers": (0, 2, 6),
    "activation_sparsity_pattern": (None, 0.5, [0.5] * 8),
    "pos_att_type": ("c2p", "P2C", "c2p | p2c", ["c2p"], ["p2c", "c2p"], [], None),
    "position_buckets": (8, 2, -1),
    "max_relative_positions": (-1, 8, 3),
    "norm_rel_ebd": ("none", "layer_norm", "other|layer_norm"),
    "share_att_key": (True, False),
    "conv_kernel_size": (3, 0),
    "attention_head_size": (8, 16),
    "problem_type": ("regression", "single_label_classification"),
    "dtype": ("bfloat16", "float16"),
    "torch_dtype": ("bfloat16", "float16"),
    "chunk_size_feed_forward": (4, 8),
    "per_layer_config": ({"0": {"intermediate_size": 40}}, {"1": {"num_key_value_heads": 1}}, {"0": {"rms_norm_eps": 0.1}}, {"1": {"sliding_window": 3}}),
    "layerdrop": (0.1,),
    "architectures": (None, []),
    "swiglu_alpha": (1.0, 3.0),
    "swiglu_limit": (0.25, 2.0),
    "classifier_dropout": (0.1, 0.5),
    "summary_type": ("last", "mean"),
    "summary_activation": ("tanh", None),
    "transformers_version": ("4.30.0", "5.24.0"),
    "text_config": (),
    "vision_config": (),
    "id2label": ({"0": "a"}, None),
    "label2id": ({"a": 0}, None),
    "boi_token_index": (7, 8),
    "eoi_token_index": (7, 8),
    "image_token_index": (7, 8),
    "image_token_id": (7, 8),
    "moe_layer_freq": (2,),
    "mlp_layer_types": (["dense", "sparse"], ["sparse", "sparse"]),
    "mrope_section": ([2, 1, 1],),
    "use_qk_norm": (True,),
    "rope_interleaved": (True,),
    "logit_scale": (0.5, 2.0),
    "embedding_multiplier": (2.0, 0.5),
    "residual_multiplier": (2.0, 0.5),
    "attention_multiplier": (2.0, 0.5),
    "logits_scaling": (2.0, 0.5),
    "clip_qkv": (0.1,),
    "qk_layernorm": (True,),
    "attention_chunk_size": (4,),
    "cross_attention_hidden_size": (32,),
    "pruned_heads": ({"0": [0]}, {"1": [1, 2]}),
    "attn_implementation": ("sdpa", "eager"),
    "_attn_implementation": ("sdpa", "eager"),
    "torchscript": (True,),
    "use_bfloat16": (True,),
    "add_cross_attention": (True,),
    "tie_encoder_decoder": (True,),
    "is_decoder": (True,),
    "tie_word_embeddings": (True, False, None),
    "tie_last_hidden_states": (True, False),
    "scale_decoder_outputs": (True, False),
    "scale_attn_weights": (False, True),
    "rotary_dim": (2, 8),
    "ffn_dim": (64, 40),
    "ffn_hidden_size": (64, None),
    "n_heads": (8, 2),
    "n_layers": (1, 3),
    "attention_heads": (8, 2),
    "num_kv_heads": (1, 4, None),
    "num_ln_in_parallel_attn": (1, 2, None),
    "afn": ("gelu", "relu", "silu", "swish"),
    "attention_types": ([[["global"], 2]], [[["local"], 1], [["global"], 1]], None),
    "window_size": (4, 100),
    "attn_config": (
        None, {}, {"clip_qkv": 0.1}, {"clip_qkv": 0}, {"softmax_scale": 0.5}, {"alibi": False}, {"alibi_bias_max": 4},
        {"qk_ln": True}, {"prefix_lm": True}, {"attn_type": "multiquery_attention"}, {"attn_impl": "flash"},
    ),
    "swa_layers": ([0],),
    "no_rope_layers": ([0, 1], [1, 0], [1, 1, 0, 1], [0, 1, 1, 0]),
    "no_rope_layer_interval": (1, 2, 5),
    "layer_rope_theta": ([500.0] * 4, [0.0, 500.0, 500.0, 0.0], [100.0, 500.0, 500.0, 500.0], [500.0, 0.0, 500.0, 500.0], None),
    "qkv_bias": (True,),
    "bias": (True,),
    "use_bias": (True,),
    "mlp_bias": (True, False),
    "attention_bias": (True, False),
    "attention_out_bias": (True, False),
    "layer_norm_eps": (0.1, 0.01),
    "rms_norm_eps": (0.1, 0.01),
    "layer_norm_epsilon": (0.1, 0.01),
}  # fmt: skip
# Keys of other families and of older versions, which a file may have and transformers ignores or understands.
FOREIGN = (
    "rope_scaling", "rope_theta", "rotary_pct", "rotary_emb_base", "partial_rotary_factor", "rope_local_base_freq", "sliding_window",
    "sliding_window_pattern", "_sliding_window_pattern", "layer_types", "use_sliding_window", "num_local_experts", "torch_dtype",
    "pruned_heads", "attn_implementation", "_attn_implementation", "torchscript", "use_bfloat16", "tie_encoder_decoder", "is_decoder",
    "add_cross_attention", "per_layer_config", "tie_last_hidden_states", "scale_decoder_outputs", "attention_bias", "mlp_bias", "qkv_bias",
    "head_dim", "logit_scale", "use_qk_norm", "rope_interleaved", "no_rope_layers", "attention_chunk_size", "position_embedding_type",
    "embedding_multiplier", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "hidden_act", "hidden_activation",
    "n_ctx", "clip_qkv", "qk_layernorm", "original_max_position_embeddings", "attention_out_bias",
)  # fmt: skip
# Keys that a family's code reads, and that its configuration class does not declare.
UNDECLARED = {
    "deberta-v2": (
        "position_buckets", "share_att_key", "norm_rel_ebd", "conv_kernel_size", "attention_head_size", "embedding_size",
    ),
}  # fmt: skip
# Objects of a config.json that have the keys of the language model; those of both sides change together.
INNER = (("text_config",), ("encoder", "decoder"))
IGNORED = ("model_type", "vision_config", "audio_config")


def fields_of(config: Any) -> dict[str, Any]:
    """Every key of a configuration class, and its value here."""
    names = [field.name for field in dataclasses.fields(type(config))]
    config.allow_global_per_layer_attribute_access = True  # heads of two sizes, Gemma 4
    return {name: getattr(config, name, None) for name in names if name not in IGNORED}


def values_of(key: str, value: Any, layers: int) -> Iterator[Any]:
    """Other legal values of a key."""
    if key in VALUES:
        for candidate in VALUES[key]:
            if key == "layer_types" and candidate is not None:
                candidate = (candidate * layers)[:layers]
            yield candidate
    elif key in ("hidden_act", "hidden_activation", "activation_function", "activation"):
        yield from ACTIVATIONS
    elif isinstance(value, bool):
        yield not value
        yield None
    elif key.endswith("token_id") or key.endswith("token_ids"):
        yield from (3, 4)
    elif isinstance(value, int):
        yield from (value + 1, value * 2 + 2)
    elif isinstance(value, float):
        yield from (value * 2 + 0.125, value / 2 + 0.25)
    elif value is None:
        yield from (1, True)
    elif isinstance(value, str):
        yield from (value + "_x",)


def cases_of(base: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each key and its new value, in the words of config_keys.changed."""
    yield "", None
    objects = next((names for names in INNER if names[-1] in base), ())
    inner = f"{'+'.join(objects)}." if objects else ""
    config = AutoConfig.for_model(**base)
    text = getattr(config, objects[-1]) if inner else config
    layers = getattr(text, "num_hidden_layers", 2)
    values = base[objects[-1]] if inner else base
    known = fields_of(text)
    further = (*FOREIGN, *UNDECLARED.get(base["model_type"], ()))
    for key in [*known, *(name for name in further if name not in known)]:
        for value in values_of(key, known.get(key), layers):
            if key not in values or values[key] != value:
                yield inner + key, value
    for key in values:  # a file without it
        if key != "model_type":
            yield f"-{inner}{key}", None
    for alias, key in type(text).attribute_map.items():
        if key in values:
            yield f"{inner}{alias}<-{key}", values[key]
            yield from ((inner + alias, value) for value in values_of(key, known.get(key), layers))
    yield from rope_cases(values.get("rope_parameters"), inner)
    if inner:
        outer = fields_of(config)
        for key in [
            *outer,
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "sliding_window",
            "rope_theta",
            "head_dim",
        ]:
            for value in values_of(key, outer.get(key), layers):
                if key not in base or base[key] != value:
                    yield key, value


def rope_cases(rope: Any, inner: str) -> Iterator[tuple[str, Any]]:
    """Single parameters of rotary positions, in the object that the file has."""
    if not isinstance(rope, dict):
        return
    nested = {f"{kind}.": parameters for kind, parameters in rope.items() if isinstance(parameters, dict)}
    for where, parameters in (nested or {"": rope}).items():
        path = f"{inner}rope_parameters.{where}"
        for key, candidates in ROPE_KEYS.items():
            yield from ((path + key, value) for value in candidates if parameters.get(key, ...) != value)
        yield from ((f"-{path}{key}", None) for key in parameters)


def kind_of(model_type: str) -> Any:
    if model_type in CLASSES:
        return getattr(transformers, CLASSES[model_type])
    if model_type in encoder_families.TYPES:
        return AutoModelForMaskedLM
    if model_type in encdec_families.TYPES:
        return AutoModelForSeq2SeqLM
    return {"bert": AutoModelForMaskedLM, "t5": AutoModelForSeq2SeqLM, "umt5": AutoModelForSeq2SeqLM}.get(
        model_type, transformers.Gemma3ForConditionalGeneration if model_type == "gemma3" else AutoModelForCausalLM
    )


def write(folder: pathlib.Path, config: dict[str, Any]) -> None:
    """A folder as a user has it: this config.json, and the tensors of the model that transformers makes of it."""
    model_type = config["model_type"]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    made = AutoConfig.from_pretrained(folder)
    kind = kind_of(model_type)
    model = kind.from_config(made) if hasattr(kind, "from_config") else kind(made)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(CONSTANTS.get(model_type, ())):
                continue
            values = answers.draw(name.replace("model.language_model.", "model."), tuple(parameter.shape))
            parameter.copy_(torch.from_numpy(values))
    model.float().save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


def read(folder: pathlib.Path, model_type: str, dtype: torch.dtype) -> np.ndarray:
    """The logits of the model that transformers loads of a folder."""
    of_encoder = model_type in ("bert", *encoder_families.TYPES)
    eager = {} if of_encoder else {"experts_implementation": "eager"}  # it supports float64
    how = IMPLEMENTATIONS.get(model_type, "eager")
    model, info = kind_of(model_type).from_pretrained(
        folder, dtype=dtype, attn_implementation=how, output_loading_info=True, **eager
    )
    if info["missing_keys"] or info["mismatched_keys"]:
        raise ValueError(f"missing {sorted(info['missing_keys'])[:3]}")
    model = model.get_submodule(ANSWERING.get(model_type, "")).eval()
    if model_type == "xglm":  # it makes the least number of the model's dtype a tensor of the default one
        torch.set_default_dtype(dtype)
    try:
        with torch.no_grad():
            if model_type in ("t5", "umt5", "bert"):
                return make_encoders.logits(make_encoders.BERT if model_type == "bert" else make_encoders.T5, model)
            if model_type in encoder_families.TYPES:
                batch = encoder_families.batch(getattr(model.config, "type_vocab_size", 0))
                arguments = encoder_families.arguments(batch)
                return model(**{name: torch.from_numpy(value) for name, value in arguments.items()}).logits.numpy()
            inputs = {"use_cache": False, "input_ids": torch.from_numpy(make.tokens())}
            if model_type in encdec_families.TYPES:
                inputs["decoder_input_ids"] = inputs["input_ids"]
                inputs["decoder_attention_mask"] = torch.ones_like(inputs["input_ids"])  # of tokens like padding, too
                inputs |= {name: torch.from_numpy(value) for name, value in encdec_families.arguments().items()}
            return model(**inputs).logits.numpy()
    finally:
        torch.set_default_dtype(torch.float32)


def main(folder: pathlib.Path, names: list[str]) -> None:
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in names or FAMILIES:
        base = dict(FAMILIES[name])
        encoder = base["model_type"] in encoder_families.TYPES
        heads = MODEL_FOR_MASKED_LM_MAPPING_NAMES if encoder else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        heads = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES if base["model_type"] in encdec_families.TYPES else heads
        architecture = (heads | CLASSES | ARCHITECTURES)[base["model_type"]]
        base.setdefault("architectures", [architecture])
        rows = []
        for number, (key, value) in enumerate(cases_of(base)):
            where = folder / name / f"{number:04}"
            rows.append({"key": key, "value": value} | answered(where, config_keys.changed(base, key, value)))
        table = {"transformers": transformers.__version__, "base": base, "cases": rows}
        (folder / name / "cases.json").write_text(json.dumps(table))
        print(name, len(rows), sum("case" in row for row in rows), flush=True)


def answered(where: pathlib.Path, config: dict[str, Any]) -> dict[str, Any]:
    """What transformers makes of a config.json: the case's folder with logits, or why it refuses."""
    try:
        write(where, config)
        logits, exact = (read(where, config["model_type"], dtype) for dtype in (torch.float32, torch.float64))
        if not np.isfinite(logits).all():
            raise ValueError("logits are not finite")
    except Exception as error:  # whatever transformers refuses is no legal value
        shutil.rmtree(where, ignore_errors=True)
        return {"refused": f"{type(error).__name__}: {str(error)[:200]}"}
    np.save(where / "logits.npy", logits)
    return {"case": where.name, "rounding": float(np.abs(logits - exact).max())}  # the reference's own


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2:])
