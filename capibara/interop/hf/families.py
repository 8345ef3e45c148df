"""Supported architectures of transformers: the keys of their config.json and their meaning."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection
from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf import catalog, gemma3n, tables
from capibara.interop.hf.layout.family import (
    ATTENTION_BIAS,
    CAPS,
    CAUSAL,
    GEMMA,
    KEYS,
    LAYER_NORM,
    NO_BIAS,
    QWEN_WINDOW,
    SILU,
    TANH_DEFAULT,
    WITHOUT_GROUPS,
    Family,
    Kind,
    Values,
    shortest,
)
from capibara.interop.hf.layout.rows import Names
from capibara.interop.hf.tables import T5X_DECODER_TYPE
from capibara.models.api import DecoderConfig, EncoderConfig, EncoderDecoderConfig, Gemma3nConfig, TransformerConfig

# Optional in a config.json; if missing, our value is None.
OPTIONAL = (
    "num_key_value_heads", "head_dim", "n_inner", "ffn_hidden_size", "attn_logit_softcapping", "final_logit_softcapping",
    "clip_qkv", "attention_multiplier",
)  # fmt: skip
# Keys that have other names in other versions of transformers.
OTHER_NAMES = (
    "rope_parameters", "rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor", "rotary_pct",
    "rotary_emb_base", "layer_types", "sliding_window_pattern", "_sliding_window_pattern", "num_local_experts",
    "scale_decoder_outputs", "dense_act_fn", "is_gated_act", "hidden_activation", "experts_per_token",
)  # fmt: skip

_TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
_GATED = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu_exact",
    "relu": "reglu",
    "relu2": "reglu2",
} | dict.fromkeys(_TANH, "geglu")
_PLAIN = {"relu": "relu", "relu2": "relu2", "gelu": "gelu_exact", "silu": "silu", "swish": "silu"}
_PLAIN |= dict.fromkeys(_TANH, "gelu")
_WRITTEN = {
    "swiglu": "silu",
    "clamped_swiglu": "silu",
    "geglu": "gelu_pytorch_tanh",
    "geglu_exact": "gelu",
    "reglu": "relu",
    "reglu2": "relu2",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "xielu": "xielu",
    "gelu_exact": "gelu",
    "gelu": "gelu_new",
}
# The projections with a bias, for each value of ours.
BIASED: dict[str, frozenset[str]] = {
    "none": frozenset(),
    "qkv": frozenset({"qkv"}),
    "out": frozenset({"out"}),
    "attention": frozenset({"qkv", "out"}),
    "mlp": frozenset({"mlp"}),
    "qkv_mlp": frozenset({"qkv", "mlp"}),
    "out_mlp": frozenset({"out", "mlp"}),
    "attention_down": frozenset({"qkv", "out", "mlp_last"}),
    "all": frozenset({"qkv", "out", "mlp"}),
}


_EXPERTS_ALIAS = {"num_experts": "num_local_experts"}

T5S = ("t5", "mt5", "umt5", "longt5", T5X_DECODER_TYPE)
_T5_KEYS = {
    "vocab_size": "vocab_size",
    "embed_dim": "d_model",
    "num_encoder_layers": "num_layers",
    "num_heads": "num_heads",
    "head_dim": "d_kv",
    "mlp_dim": "d_ff",
    "norm_eps": "layer_norm_epsilon",
    "relative_buckets": "relative_attention_num_buckets",
    "relative_distance": "relative_attention_max_distance",
}
_T5_ALIASES = {"hidden_size": "d_model", "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}
_T5_ALIASES |= {"head_dim": "d_kv"}
_T5_DEFAULTS: dict[str, float] = {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}
_T5_DEFAULTS |= {"layer_norm_epsilon": 1e-6}


def _write_radius(config: TransformerConfig) -> dict[str, Any]:
    assert isinstance(config, EncoderDecoderConfig), "the family's kind"
    return {} if config.encoder_window is None else {"local_radius": config.encoder_window - 1}


_LIST = (
    Family(
        model_type="llama",
        architectures=("LlamaForCausalLM",),
        keys=KEYS,
        defaults=SILU,
        biases=ATTENTION_BIAS | {"mlp_bias": "mlp"},
        divides=True,
    ),
    Family(
        model_type="mistral",
        architectures=("MistralForCausalLM",),
        keys=KEYS,
        defaults=SILU | {"sliding_window": 4096, "num_key_value_heads": 8},
        window="all",
    ),
    Family(
        model_type="gemma",
        architectures=("GemmaForCausalLM",),
        keys=KEYS,
        fixed=GEMMA,
        defaults=TANH_DEFAULT | {"hidden_act": "gelu_pytorch_tanh"},
        only=CAUSAL,
        biases=ATTENTION_BIAS,
        tied=True,
    ),
    Family(
        model_type="gemma2",
        architectures=("Gemma2ForCausalLM",),
        keys=KEYS | CAPS,
        fixed=GEMMA | {"norm_placement": "sandwich"},
        defaults=TANH_DEFAULT
        | {"hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096, "query_pre_attn_scalar": 256}
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        only=CAUSAL,
        biases=ATTENTION_BIAS,
        tied=True,
        activation="hidden_activation",
        window="types",
        divides=True,
    ),
    Family(
        model_type="gemma3_text",
        architectures=("Gemma3ForCausalLM",),
        keys=KEYS | {"logit_soft_cap": "final_logit_softcapping"},  # that of attention is a key, and is not computed
        rope_by_layer=True,
        read_keys=("sliding_window_pattern",),
        fixed=GEMMA | {"norm_placement": "sandwich", "qk_norm": "head"},
        # Published files of Gemma 3 omit sizes that equal the defaults.
        defaults=TANH_DEFAULT
        | {"hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096, "query_pre_attn_scalar": 256}
        | {"vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
        | {"num_attention_heads": 8, "num_key_value_heads": 4}
        | {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0},
        only=CAUSAL,
        biases=ATTENTION_BIAS,
        tied=True,
        activation="hidden_activation",
        window="types",
        divides=True,
    ),
    Family(
        model_type="gemma3n_text",
        architectures=("Gemma3nForCausalLM",),
        keys=KEYS | {"logit_soft_cap": "final_logit_softcapping"} | gemma3n.KEYS,
        rope_by_layer=True,
        read_keys=("activation_sparsity_pattern",),
        fixed={"embedding_scale": "sqrt_dim", "norm_placement": "sandwich", "qk_norm": "head"},
        defaults=TANH_DEFAULT
        | {"hidden_activation": "gelu_pytorch_tanh", "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0}
        | gemma3n.DEFAULTS,
        only=NO_BIAS | CAUSAL | gemma3n.ONLY,
        tied=True,
        activation="hidden_activation",
        window="types",
        config=Gemma3nConfig,
        read=gemma3n.read,
        write=gemma3n.write,
    ),
    Family(
        model_type="qwen2",
        architectures=("Qwen2ForCausalLM",),
        keys={ours: theirs for ours, theirs in KEYS.items() if ours != "head_dim"},
        read_keys=("head_dim",),
        fixed={"bias": "qkv"},
        defaults=SILU | QWEN_WINDOW,
        window="types",
    ),
    Family(
        model_type="qwen3",
        architectures=("Qwen3ForCausalLM",),
        keys=KEYS,
        fixed={"qk_norm": "head"},
        defaults=SILU | QWEN_WINDOW | {"head_dim": 128},
        biases=ATTENTION_BIAS,
        window="types",
    ),
    Family(
        model_type="mixtral",
        architectures=("MixtralForCausalLM",),
        keys=KEYS,
        defaults=SILU
        | {"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5, "num_key_value_heads": 8}
        | {"num_experts_per_tok": 2, "num_local_experts": 8},
        aliases=_EXPERTS_ALIAS,
        window="all",
        experts="num_local_experts",
    ),
    Family(
        model_type="qwen3_moe",
        architectures=("Qwen3MoeForCausalLM",),
        keys=KEYS | {"mlp_dim": "moe_intermediate_size"},
        fixed={"qk_norm": "head"},
        defaults=SILU
        | {"num_experts_per_tok": 8, "norm_topk_prob": False, "use_sliding_window": False, "sliding_window": 4096},
        only={"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
        aliases={"num_local_experts": "num_experts"},
        biases=ATTENTION_BIAS,
        window="all",
        experts="num_experts",
    ),
    Family(
        model_type="gpt_oss",
        architectures=("GptOssForCausalLM",),
        keys=KEYS | {"swiglu_alpha": "swiglu_alpha", "swiglu_limit": "swiglu_limit"},
        fixed={"attention_sinks": "head"},
        defaults=SILU
        | {"rope_theta": 150_000.0, "rms_norm_eps": 1e-5, "head_dim": 64, "num_key_value_heads": 8}
        | {"sliding_window": 128, "num_experts_per_tok": 4, "num_local_experts": 128, "attention_bias": True}
        | {"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "output_router_logits": False},
        aliases=_EXPERTS_ALIAS,
        biases=ATTENTION_BIAS,
        window="types",
        experts="num_local_experts",
    ),
    Family(
        model_type="phi3",
        architectures=("Phi3ForCausalLM",),
        keys={ours: theirs for ours, theirs in KEYS.items() if ours != "head_dim"},
        read_keys=("head_dim",),
        defaults=SILU | {"rms_norm_eps": 1e-5, "sliding_window": None, "original_max_position_embeddings": 4096},
        window="all",
        partial=True,
    ),
    Family(
        model_type="gpt2",
        architectures=("GPT2LMHeadModel",),
        keys={
            "vocab_size": "vocab_size",
            "embed_dim": "n_embd",
            "num_layers": "n_layer",
            "num_heads": "n_head",
            "mlp_dim": "n_inner",
            "norm_eps": "layer_norm_epsilon",
            "max_length": "n_positions",
        },
        fixed={"norm": "layer", "bias": "all", "positions": "learned"},
        aliases={"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
        | {"max_position_embeddings": "n_positions"},
        defaults={"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "n_positions": 1024},
        only={
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        tied=True,
        activation="activation_function",
        gated=False,
        rope=False,
    ),
    Family(
        model_type="gpt_neox",
        architectures=("GPTNeoXForCausalLM",),
        keys=WITHOUT_GROUPS | LAYER_NORM,
        fixed={"norm": "layer", "bias": "mlp"},
        defaults={"hidden_act": "gelu", "layer_norm_eps": 1e-5, "rotary_emb_base": 10_000.0, "attention_bias": True},
        theta="rotary_emb_base",
        share="rotary_pct",
        read_keys=("use_parallel_residual", "head_dim"),
        biases=ATTENTION_BIAS,
        gated=False,
        fraction=0.25,
        partial=True,
        divides=True,
    ),
    Family(
        model_type="t5",
        kind=Kind.ENCODER_DECODER,
        architectures=("T5ForConditionalGeneration", "T5WithLMHeadModel"),
        keys=_T5_KEYS,
        defaults=_T5_DEFAULTS | {"feed_forward_proj": "relu"},
        aliases=_T5_ALIASES,
        tied=True,
        activation="feed_forward_proj",
        rope=False,
    ),
    Family(
        model_type="mt5",
        kind=Kind.ENCODER_DECODER,
        architectures=("MT5ForConditionalGeneration",),
        keys=_T5_KEYS,
        defaults=_T5_DEFAULTS | {"feed_forward_proj": "gated-gelu"},
        aliases=_T5_ALIASES,
        tied=True,
        activation="feed_forward_proj",
        rope=False,
    ),
    Family(
        model_type="umt5",
        kind=Kind.ENCODER_DECODER,
        architectures=("UMT5ForConditionalGeneration",),
        keys=_T5_KEYS,
        fixed={"relative_tables": "each_layer"},
        defaults=_T5_DEFAULTS | {"feed_forward_proj": "gated-gelu"},
        aliases=_T5_ALIASES,
        tied=True,
        activation="feed_forward_proj",
        rope=False,
    ),
    Family(
        # LongT5 (Guo et al. 2021, arXiv:2112.07916) with local attention.
        model_type="longt5",
        kind=Kind.ENCODER_DECODER,
        architectures=("LongT5ForConditionalGeneration",),
        keys=_T5_KEYS,
        defaults=_T5_DEFAULTS | {"feed_forward_proj": "relu", "local_radius": 127},
        only={"encoder_attention_type": ("local",)},
        aliases=_T5_ALIASES,
        tied=True,
        activation="feed_forward_proj",
        rope=False,
        read=lambda values: {"encoder_window": values["local_radius"] + 1},
        write=_write_radius,
    ),
    Family(
        model_type=T5X_DECODER_TYPE,
        architectures=("T5XDecoder",),
        keys={"num_layers": "num_layers"} | {o: t for o, t in _T5_KEYS.items() if o != "num_encoder_layers"},
        fixed={"positions": "relative", "attention_scale": 1.0},
        defaults=_T5_DEFAULTS | {"feed_forward_proj": "relu", "inputs_attention": "causal"},
        activation="feed_forward_proj",
        rope=False,
    ),
    Family(
        model_type="bert",
        kind=Kind.ENCODER,
        architectures=("BertForMaskedLM", "BertForPreTraining"),
        keys=WITHOUT_GROUPS | LAYER_NORM | {"max_length": "max_position_embeddings", "token_types": "type_vocab_size"},
        defaults={"hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2, "max_position_embeddings": 512},
        only={"position_embedding_type": ("absolute",), "is_decoder": (False,), "add_cross_attention": (False,)},
        tied=True,
        gated=False,
        rope=False,
        divides=True,
    ),
)
FAMILIES: dict[str, Family] = {}
OWN = {family.model_type for family in _LIST}


def add(family: Family, names: Names) -> None:
    """Registers a family, whose folders can then be read and written: see examples/extend/my_family.py.

    Args:
      family: its config.json.
      names: its tensors.

    Raises:
      UserError: capibara has a family of that model_type.
    """
    if family.model_type in OWN and family.model_type in FAMILIES:
        raise UserError(f"capibara has a family of model_type {family.model_type!r} already: choose another name")
    FAMILIES[family.model_type] = family
    tables.NAMES[family.model_type] = names


for _family in _LIST:
    add(_family, tables.NAMES[_family.model_type])
for _module in pkgutil.walk_packages(catalog.__path__, f"{catalog.__name__}."):
    for _family, _names in () if _module.ispkg else importlib.import_module(_module.name).FAMILIES:
        OWN.add(_family.model_type)
        add(_family, _names)


_SCORED = ("llama", "mistral", "gemma", "gemma2", "qwen2", "qwen3", "phi3")


def score_architecture(family: Family) -> str | None:
    """The class of transformers that is the family's decoder with a score for each text; None: it is not supported."""
    name = family.architectures[0]
    return name.replace("ForCausalLM", "ForSequenceClassification") if family.model_type in _SCORED else None


def head(values: Values, family: Family) -> str:
    """The head's kind: tied, separate or score."""
    if (values.get("architectures") or [""])[0] == score_architecture(family):
        labels = values.get("id2label")
        count = len(labels) if isinstance(labels, dict) else values.get("num_labels", 2)
        if count != 1:
            raise UserError(f"config.json has {count} labels, must have 1, of a reward model: take the language model")
        return "score"
    tied = values.get("tie_word_embeddings", family.tied)
    if not isinstance(tied, bool | None):
        raise UserError(f"config.json has tie_word_embeddings = {tied!r}, must be true or false: copy the file again")
    return "tied" if tied else "separate"


def head_scale(values: Values) -> str:
    """For a tied head of T5, our value for what transformers 5 calls scale_decoder_outputs, which it never does in mT5."""
    if values.get("model_type") == "mt5":
        return "none"
    return "inverse_sqrt_dim" if values.get("scale_decoder_outputs", True) else "none"


def with_head_of(values: Values, names: Collection[str]) -> dict[str, Any]:
    """A T5's config.json with a correct tie_word_embeddings.

    transformers 5 writes tie_word_embeddings = true for all T5 models. It ties the head of files without one, and omits
    T5's scale if the file that it read had false. Of mT5 it reads neither key: published files say false, and have a head.

    Args:
      values: of config.json.
      names: of the tensors.
    """
    if values.get("model_type") == "mt5":
        return dict(values) | {"tie_word_embeddings": "lm_head.weight" not in names}
    scaled = values.get("scale_decoder_outputs", values.get("tie_word_embeddings", True) is not False)
    if values.get("model_type") not in T5S or (scaled and values.get("tie_word_embeddings", True) is not False):
        return dict(values)
    if scaled:
        if "lm_head.weight" in names:
            raise UserError(
                "config.json has scale_decoder_outputs = true and tie_word_embeddings = false, must not be both with a head of "
                "its own: remove one of them"
            )
        return dict(values) | {"tie_word_embeddings": True}
    return dict(values) | {"tie_word_embeddings": "lm_head.weight" not in names, "scale_decoder_outputs": False}


def write_head(config: TransformerConfig) -> dict[str, Any]:
    """Values of config.json for a tied, scaled or separate head."""
    written: dict[str, Any] = {"tie_word_embeddings": config.head == "tied"}
    if config.head == "score":
        written |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    if isinstance(config, EncoderDecoderConfig) and config.head == "tied" and config.head_scale == "none":
        written["scale_decoder_outputs"] = False
    return written


def bias(values: Values, family: Family) -> str | None:
    """Our `bias` for the keys of config.json; None: the family's own."""
    biased = set(BIASED[family.fixed.get("bias", "none")])
    biased |= {part for key, ours in family.biases.items() if values.get(key) for part in BIASED[ours]}
    return next(ours for ours, parts in BIASED.items() if parts == biased) if biased else None


def write_bias(config: TransformerConfig, family: Family) -> dict[str, bool]:
    """Values of config.json for the projections' biases."""
    return {key: BIASED[ours] <= BIASED[str(config.bias)] for key, ours in family.biases.items()}


def activation(values: Values, family: Family) -> str:
    """Our activation for the name in config.json.

    Raises:
      UserError: it is not supported.
    """
    if not family.activation:
        return family.fixed["activation"]
    name, gated = values[family.activation], family.gated
    if "swiglu_limit" in family.keys:  # transformers computes gpt-oss with no other, whatever the key says
        return "clamped_swiglu"
    if family.model_type in T5S:
        gated, name = name.startswith("gated-"), name.removeprefix("gated-")
    # Gemma's first files say gelu and mean its approximation.
    if name == "gelu" and gated and family.model_type in ("gemma", *T5S):
        name = "gelu_new"
    known = _GATED if gated else _PLAIN
    if any(row.ours[0].startswith("layers/mlp/activation/") for row in tables.NAMES[family.model_type].rows):
        known = known | {"xielu": "xielu"}  # with parameters, which the others' tensors do not hold
    if name not in known:
        raise UserError(f"config.json has {family.activation} = {name!r}, must be one of {', '.join(known)}")
    return known[name]


def plain(values: Values, key: str) -> str:
    """Our activation for the name that a key has, of what is not gated.

    Raises:
      UserError: it is not supported.
    """
    if values[key] not in _PLAIN:
        raise UserError(f"config.json has {key} = {values[key]!r}, must be one of {', '.join(_PLAIN)}")
    return _PLAIN[values[key]]


def write_activation(config: TransformerConfig, family: Family) -> dict[str, Any]:
    """Values of config.json for the activation."""
    if not family.activation:
        return {}
    name = _WRITTEN[str(config.activation)]
    if family.model_type in T5S:
        gated = {"swiglu": "gated-silu", "geglu": "gated-gelu", "reglu": "gated-relu"}
        name = gated.get(str(config.activation), name)
    written = {family.activation: name}
    if isinstance(config, DecoderConfig | EncoderConfig) and family.transform:
        written = {family.transform: _WRITTEN[str(config.before_head)]} | written
    # Readers of Gemma use either key.
    return written | ({"hidden_act": name, "hidden_activation": name} if family.model_type.startswith("gemma") else {})


def kinds(config: DecoderConfig | EncoderConfig | EncoderDecoderConfig) -> list[str]:
    """The kind of every layer: "global" or "local"."""
    return [str(kind) for kind in config.kinds]


def read_pattern(values: Values, family: Family, num_layers: int) -> tuple[tuple[str, ...], int | None]:
    """The layers' kinds as the shortest repeating pattern, and the window.

    Raises:
      UserError: a kind is not supported.
    """
    window = values.get("sliding_window")
    if family.window == "none" or not values.get("use_sliding_window", True):
        window = None
    if window is None:
        return ("global",), None
    if family.window == "all":
        return ("local",), window
    types = values.get("layer_types") or _default_types(values, family, num_layers)
    unknown = [kind for kind in types if kind not in family.kinds]
    if unknown:
        raise UserError(f"config.json has layer_types {unknown[0]!r}, must be one of {', '.join(family.kinds)}")
    if len(types) != num_layers:
        raise UserError(f"config.json has {len(types)} layer_types, must be one for each of {num_layers} layers")
    result = [family.kinds[kind] for kind in types]
    pattern = shortest(result)
    return pattern, window if "local" in pattern else None


def _default_types(values: Values, family: Family, num_layers: int) -> list[str]:
    if "max_window_layers" in family.defaults:
        first = values["max_window_layers"]
        return ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    default = {"gemma3_text": 6, "gemma3n_text": 5}.get(family.model_type, 2)
    every = values.get("sliding_window_pattern") or default
    return ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)]


def write_pattern(config: DecoderConfig | EncoderConfig, family: Family) -> dict[str, Any]:
    """Values of config.json for the layers with a window, and its length."""
    if family.window == "none":
        return {}
    result, window = kinds(config), config.window
    used = {"use_sliding_window": window is not None} if "use_sliding_window" in family.defaults else {}
    if family.window == "all":
        return {"sliding_window": window} | used
    theirs = {ours: name for name, ours in family.kinds.items()}
    theirs |= {} if window else {"global": "full_attention"}  # as all layers are without a window
    written: dict[str, Any] = {"layer_types": [theirs.get(kind) for kind in result], "sliding_window": window} | used
    if "max_window_layers" in family.defaults:
        written["max_window_layers"] = result.index("local") if "local" in result else len(result)
    elif "global" in result:
        written["sliding_window_pattern"] = result.index("global") + 1
    return written


def written_defaults(config: TransformerConfig, family: Family) -> dict[str, Any]:
    """Values of config.json that our configuration does not have, if no other file sets them."""
    if family.model_type in T5S and family.kind == Kind.ENCODER_DECODER:
        return {"is_encoder_decoder": True, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    if not family.rope or not isinstance(config, DecoderConfig | EncoderConfig):
        return {}
    rope = config.rope
    stretched = round(rope.original_length * rope.factor) if rope.original_length else 4096
    longest = family.aliases.get("max_position_embeddings", "max_position_embeddings")
    return {longest: config.max_length or stretched}
