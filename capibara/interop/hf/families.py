"""Supported architectures of transformers: the keys of their config.json and their meaning."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf import gemma3n, tables
from capibara.interop.hf.tables import T5X_DECODER_TYPE
from capibara.models.api import DecoderConfig, EncoderDecoderConfig, Gemma3nConfig, TransformerConfig

Values = Mapping[str, Any]

DECODER, ENCODER, ENCODER_DECODER = "decoder", "encoder", "encoder_decoder"
# Optional in a config.json; if missing, our value is None.
OPTIONAL = ("num_key_value_heads", "head_dim", "n_inner", "attn_logit_softcapping", "final_logit_softcapping")
# Keys that have other names in other versions of transformers.
OTHER_NAMES = (
    "rope_parameters", "rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor", "rotary_pct",
    "rotary_emb_base", "layer_types", "sliding_window_pattern", "_sliding_window_pattern", "num_local_experts",
    "scale_decoder_outputs", "dense_act_fn", "is_gated_act", "hidden_activation", "experts_per_token",
)  # fmt: skip

_KINDS = {"full_attention": "global", "sliding_attention": "local"}
_TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
_GATED = {"silu": "swiglu", "swish": "swiglu"} | dict.fromkeys(_TANH, "geglu")
_PLAIN = {"relu": "relu", "gelu": "gelu_exact"} | dict.fromkeys(_TANH, "gelu")
_WRITTEN = {
    "swiglu": "silu",
    "clamped_swiglu": "silu",
    "geglu": "gelu_pytorch_tanh",
    "relu": "relu",
    "gelu_exact": "gelu",
    "gelu": "gelu_new",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """An architecture.

    Attributes:
      model_type: its name.
      kind: kind of our model.
      architectures: class names in config.json with these tensors; the first one is written.
      keys: our fields -> its keys.
      fixed: our fields with fixed values.
      defaults: its keys -> their values if config.json does not set them.
      only: its keys -> supported values; the first one is written.
      tied: whether the head is tied to the embedding if config.json does not say.
      activation: key of the activation's name.
      gated: whether its MLP is gated.
      window: which layers have a window: "none", "all" or "types" (as in layer_types).
      rope: whether positions are rotary.
      rope_by_layer: whether layers with a window have rotary positions of their own.
      theta, share: keys of the base of rotary frequencies and of the share of a head that is rotated, outside of
        rope_parameters.
      fraction: share of a head that is rotated if config.json does not say.
      experts: key of the number of experts; "": it has none.
      partial: whether only a part of a head may be rotated.
      aliases: other names of its keys; one of these comes first where a file has both.
      biases: keys of optional biases in config.json, and the value of our `bias` for each.
      read_keys: further keys that it reads.
      divides: whether transformers requires embed_dim to be a multiple of the number of heads.
      config: the class of our decoder's configuration; None: DecoderConfig.
      read, write: convert values of config.json to further fields of ours, and a configuration to those values.
    """

    model_type: str
    kind: str = DECODER
    architectures: tuple[str, ...]
    keys: dict[str, str]
    fixed: dict[str, Any] = dataclasses.field(default_factory=dict)
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    only: dict[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    tied: bool = False
    activation: str = "hidden_act"
    gated: bool = True
    window: str = "none"
    rope: bool = True
    rope_by_layer: bool = False
    theta: str = "rope_theta"
    share: str = "partial_rotary_factor"
    fraction: float = 1.0
    experts: str = ""
    partial: bool = False
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)
    biases: dict[str, str] = dataclasses.field(default_factory=dict)
    read_keys: tuple[str, ...] = ()
    divides: bool = False
    config: type[DecoderConfig] | None = None
    read: Callable[[Values], dict[str, Any]] | None = None
    write: Callable[[TransformerConfig], dict[str, Any]] | None = None


_KEYS = {
    "vocab_size": "vocab_size",
    "embed_dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
}
_WITHOUT_GROUPS = {ours: theirs for ours, theirs in _KEYS.items() if ours not in ("num_kv_heads", "head_dim")}
_LAYER_NORM = {"norm_eps": "layer_norm_eps"}
_CAPS = {"attention_soft_cap": "attn_logit_softcapping", "logit_soft_cap": "final_logit_softcapping"}
_NO_BIAS = {"attention_bias": (False, None)}
_ATTENTION_BIAS = {"attention_bias": "attention"}
_CAUSAL = {"use_bidirectional_attention": (False, None)}
_SILU = {"hidden_act": "silu", "rope_theta": 10_000.0, "rms_norm_eps": 1e-6}
_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA = {"norm_scale": "offset", "embedding_scale": "sqrt_dim"}
_TANH_DEFAULT = {"rope_theta": 10_000.0, "rms_norm_eps": 1e-6, "head_dim": 256}

_EXPERTS_ALIAS = {"num_experts": "num_local_experts"}

_T5S = ("t5", "umt5", T5X_DECODER_TYPE)
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

_LIST = (
    Family(
        model_type="llama",
        architectures=("LlamaForCausalLM",),
        keys=_KEYS,
        defaults=_SILU,
        biases=_ATTENTION_BIAS | {"mlp_bias": "mlp"},
        divides=True,
    ),
    Family(
        model_type="mistral",
        architectures=("MistralForCausalLM",),
        keys=_KEYS,
        defaults=_SILU | {"sliding_window": 4096, "num_key_value_heads": 8},
        window="all",
    ),
    Family(
        model_type="gemma",
        architectures=("GemmaForCausalLM",),
        keys=_KEYS,
        fixed=_GEMMA,
        defaults=_TANH_DEFAULT | {"hidden_act": "gelu_pytorch_tanh"},
        only=_CAUSAL,
        biases=_ATTENTION_BIAS,
        tied=True,
    ),
    Family(
        model_type="gemma2",
        architectures=("Gemma2ForCausalLM",),
        keys=_KEYS | _CAPS,
        fixed=_GEMMA | {"norm_placement": "sandwich"},
        defaults=_TANH_DEFAULT
        | {"hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096, "query_pre_attn_scalar": 256}
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        only=_CAUSAL,
        biases=_ATTENTION_BIAS,
        tied=True,
        activation="hidden_activation",
        window="types",
        divides=True,
    ),
    Family(
        model_type="gemma3_text",
        architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        keys=_KEYS | {"logit_soft_cap": "final_logit_softcapping"},  # that of attention is a key, and is not computed
        rope_by_layer=True,
        read_keys=("sliding_window_pattern",),
        fixed=_GEMMA | {"norm_placement": "sandwich", "qk_norm": "head"},
        # Published files of Gemma 3 omit sizes that equal the defaults.
        defaults=_TANH_DEFAULT
        | {"hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096, "query_pre_attn_scalar": 256}
        | {"vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
        | {"num_attention_heads": 8, "num_key_value_heads": 4}
        | {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0},
        only=_CAUSAL,
        biases=_ATTENTION_BIAS,
        tied=True,
        activation="hidden_activation",
        window="types",
        divides=True,
    ),
    Family(
        model_type="gemma3n_text",
        architectures=("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
        keys=_KEYS | {"logit_soft_cap": "final_logit_softcapping"} | gemma3n.KEYS,
        rope_by_layer=True,
        read_keys=("activation_sparsity_pattern",),
        fixed={"embedding_scale": "sqrt_dim", "norm_placement": "sandwich", "qk_norm": "head"},
        defaults=_TANH_DEFAULT
        | {"hidden_activation": "gelu_pytorch_tanh", "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0}
        | gemma3n.DEFAULTS,
        only=_NO_BIAS | _CAUSAL | gemma3n.ONLY,
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
        keys={ours: theirs for ours, theirs in _KEYS.items() if ours != "head_dim"},
        read_keys=("head_dim",),
        fixed={"bias": "qkv"},
        defaults=_SILU | _QWEN_WINDOW,
        window="types",
    ),
    Family(
        model_type="qwen3",
        architectures=("Qwen3ForCausalLM",),
        keys=_KEYS,
        fixed={"qk_norm": "head"},
        defaults=_SILU | _QWEN_WINDOW | {"head_dim": 128},
        biases=_ATTENTION_BIAS,
        window="types",
    ),
    Family(
        model_type="mixtral",
        architectures=("MixtralForCausalLM",),
        keys=_KEYS,
        defaults=_SILU
        | {"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5, "num_key_value_heads": 8}
        | {"num_experts_per_tok": 2, "num_local_experts": 8},
        aliases=_EXPERTS_ALIAS,
        window="all",
        experts="num_local_experts",
    ),
    Family(
        model_type="qwen3_moe",
        architectures=("Qwen3MoeForCausalLM",),
        keys=_KEYS | {"mlp_dim": "moe_intermediate_size"},
        fixed={"qk_norm": "head"},
        defaults=_SILU
        | {"num_experts_per_tok": 8, "norm_topk_prob": False, "use_sliding_window": False, "sliding_window": 4096},
        only={"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
        aliases={"num_local_experts": "num_experts"},
        biases=_ATTENTION_BIAS,
        window="all",
        experts="num_experts",
    ),
    Family(
        model_type="gpt_oss",
        architectures=("GptOssForCausalLM",),
        keys=_KEYS | {"swiglu_alpha": "swiglu_alpha", "swiglu_limit": "swiglu_limit"},
        fixed={"attention_sinks": "head"},
        defaults=_SILU
        | {"rope_theta": 150_000.0, "rms_norm_eps": 1e-5, "head_dim": 64, "num_key_value_heads": 8}
        | {"sliding_window": 128, "num_experts_per_tok": 4, "num_local_experts": 128, "attention_bias": True}
        | {"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "output_router_logits": False},
        aliases=_EXPERTS_ALIAS,
        biases=_ATTENTION_BIAS,
        window="types",
        experts="num_local_experts",
    ),
    Family(
        model_type="phi3",
        architectures=("Phi3ForCausalLM",),
        keys={ours: theirs for ours, theirs in _KEYS.items() if ours != "head_dim"},
        read_keys=("head_dim",),
        defaults=_SILU | {"rms_norm_eps": 1e-5, "sliding_window": None, "original_max_position_embeddings": 4096},
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
        keys=_WITHOUT_GROUPS | _LAYER_NORM,
        fixed={"norm": "layer", "bias": "mlp"},
        defaults={"hidden_act": "gelu", "layer_norm_eps": 1e-5, "rotary_emb_base": 10_000.0, "attention_bias": True},
        theta="rotary_emb_base",
        share="rotary_pct",
        read_keys=("use_parallel_residual", "head_dim"),
        biases=_ATTENTION_BIAS,
        gated=False,
        fraction=0.25,
        partial=True,
        divides=True,
    ),
    Family(
        model_type="t5",
        kind=ENCODER_DECODER,
        architectures=("T5ForConditionalGeneration", "T5WithLMHeadModel"),
        keys=_T5_KEYS,
        defaults=_T5_DEFAULTS | {"feed_forward_proj": "relu"},
        aliases=_T5_ALIASES,
        tied=True,
        activation="feed_forward_proj",
        rope=False,
    ),
    Family(
        model_type="umt5",
        kind=ENCODER_DECODER,
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
        kind=ENCODER,
        architectures=("BertForMaskedLM", "BertForPreTraining"),
        keys=_WITHOUT_GROUPS
        | _LAYER_NORM
        | {"max_length": "max_position_embeddings", "token_types": "type_vocab_size"},
        defaults={"hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2, "max_position_embeddings": 512},
        only={"position_embedding_type": ("absolute",), "is_decoder": (False,), "add_cross_attention": (False,)},
        tied=True,
        gated=False,
        rope=False,
        divides=True,
    ),
)
FAMILIES: dict[str, Family] = {}
OWN = frozenset(family.model_type for family in _LIST)


def add(family: Family, names: tables.Names) -> None:
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


def head(values: Values, family: Family) -> str:
    """The head's kind: tied or separate."""
    tied = values.get("tie_word_embeddings", family.tied)
    if not isinstance(tied, bool | None):
        raise UserError(f"config.json has tie_word_embeddings = {tied!r}, must be true or false: copy the file again")
    return "tied" if tied else "separate"


def head_scale(values: Values) -> str:
    """For a tied head of T5, our value for what transformers 5 calls scale_decoder_outputs."""
    return "inverse_sqrt_dim" if values.get("scale_decoder_outputs", True) else "none"


def with_head_of(values: Values, names: Collection[str]) -> dict[str, Any]:
    """A T5's config.json with a correct tie_word_embeddings.

    transformers 5 writes tie_word_embeddings = true for all T5 models. It ties the head of files without one, and omits
    T5's scale if the file that it read had false.

    Args:
      values: of config.json.
      names: of the tensors.
    """
    scaled = values.get("scale_decoder_outputs", values.get("tie_word_embeddings", True) is not False)
    if values.get("model_type") not in _T5S or scaled:
        return dict(values)
    return dict(values) | {"tie_word_embeddings": "lm_head.weight" not in names, "scale_decoder_outputs": False}


def write_head(config: TransformerConfig) -> dict[str, Any]:
    """Values of config.json for a tied, scaled or separate head."""
    written = {"tie_word_embeddings": config.head == "tied"}
    if isinstance(config, EncoderDecoderConfig) and config.head == "tied" and config.head_scale == "none":
        written["scale_decoder_outputs"] = False
    return written


def bias(values: Values, family: Family) -> str | None:
    """Our `bias` for the keys of config.json; None: the family's own."""
    found = {family.fixed["bias"]} if "bias" in family.fixed else set()
    found |= {ours for key, ours in family.biases.items() if values.get(key)}
    return "all" if len(found) > 1 else next(iter(found), None)


def write_bias(config: TransformerConfig, family: Family) -> dict[str, bool]:
    """Values of config.json for the projections' biases."""
    return {key: config.bias in (ours, "all") for key, ours in family.biases.items()}


def activation(values: Values, family: Family) -> str:
    """Our activation for the name in config.json.

    Raises:
      UserError: it is not supported.
    """
    name, gated = values[family.activation], family.gated
    if "swiglu_limit" in family.keys:  # transformers computes gpt-oss with no other, whatever the key says
        return "clamped_swiglu"
    if family.model_type in _T5S:
        gated, name = name.startswith("gated-"), name.removeprefix("gated-")
    # Gemma's first files say gelu and mean its approximation.
    if name == "gelu" and gated and family.model_type in ("gemma", *_T5S):
        name = "gelu_new"
    known = _GATED if gated else _PLAIN
    if name not in known:
        raise UserError(f"config.json has {family.activation} = {name!r}, must be one of {', '.join(known)}")
    return known[name]


def write_activation(config: TransformerConfig, family: Family) -> dict[str, Any]:
    """Values of config.json for the activation."""
    name = _WRITTEN[str(config.activation)]
    if family.model_type in _T5S:
        name = {"swiglu": "gated-silu", "geglu": "gated-gelu"}.get(str(config.activation), name)
    written = {family.activation: name}
    # Readers of Gemma use either key.
    return written | ({"hidden_act": name, "hidden_activation": name} if family.model_type.startswith("gemma") else {})


def kinds(config: DecoderConfig) -> list[str]:
    """The kind of every layer: "global" or "local"."""
    pattern = config.layer_pattern
    return [str(pattern[i % len(pattern)]) for i in range(config.num_layers)]


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
    unknown = [kind for kind in types if kind not in _KINDS]
    if unknown:
        raise UserError(f"config.json has layer_types {unknown[0]!r}, must be one of {', '.join(_KINDS)}")
    if len(types) != num_layers:
        raise UserError(f"config.json has {len(types)} layer_types, must be one for each of {num_layers} layers")
    found = [_KINDS[kind] for kind in types]
    size = next(n for n in range(1, num_layers + 1) if all(found[i] == found[i % n] for i in range(num_layers)))
    pattern = tuple(found[:size])
    return pattern, window if "local" in pattern else None


def _default_types(values: Values, family: Family, num_layers: int) -> list[str]:
    if family.model_type.startswith("qwen"):
        first = values["max_window_layers"]
        return ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    default = {"gemma3_text": 6, "gemma3n_text": 5}.get(family.model_type, 2)
    every = values.get("sliding_window_pattern") or default
    return ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)]


def write_pattern(config: DecoderConfig, family: Family) -> dict[str, Any]:
    """Values of config.json for the layers with a window, and its length."""
    if family.window == "none":
        return {}
    found, window = kinds(config), config.window
    used = {"use_sliding_window": window is not None} if family.model_type.startswith("qwen") else {}
    if family.window == "all":
        return {"sliding_window": window} | used
    theirs = {ours: name for name, ours in _KINDS.items()}
    written: dict[str, Any] = {"layer_types": [theirs[kind] for kind in found], "sliding_window": window} | used
    if used:
        written["max_window_layers"] = found.index("local") if "local" in found else len(found)
    elif "global" in found:
        written["sliding_window_pattern"] = found.index("global") + 1
    return written


def written_defaults(config: TransformerConfig, family: Family) -> dict[str, Any]:
    """Values of config.json that our configuration does not have, if no other file sets them."""
    if family.kind == ENCODER_DECODER:
        return {"is_encoder_decoder": True, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    if family.kind == ENCODER or not family.rope:
        return {}
    assert isinstance(config, DecoderConfig), "others have no rotary positions"
    rope = config.rope
    stretched = round(rope.original_length * rope.factor) if rope.original_length else 4096
    return {"max_position_embeddings": config.max_length or stretched}
