"""Models that read images or sound, too: where their files have the language model, which is the only part that is used."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf import tables
from capibara.interop.hf import values as hf_values
from capibara.interop.hf.families import FAMILIES
from capibara.interop.hf.layout.family import Family
from capibara.interop.hf.layout.rows import Names

Values = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrapper:
    """A model around a language model.

    Attributes:
      architecture: its class name in config.json.
      text: the family that computes the language model, as far as text_config does not name another one.
      named: the model_types that text_config may have -> the families that compute them; empty: it does not name any.
      tied: whether the head is tied to the embedding if config.json does not say.
      ties: whether the wrapper's own key ties the head; if not, that of text_config does alone.
      tied_by: further keys that tie the head: "tie_embedding" comes first, "text_config" ties it if config.json does not.
      defaults: keys of text_config -> their values if it does not set them, where they are not the family's.
      fixed: keys of the family -> what transformers computes, whatever text_config says.
      spread: keys of text_config -> those of the family that have its value.
      mrope: whether the type of rotary positions may be "mrope", which are the usual ones for text.
      squared: whether all heads are as wide as the model if text_config does not say it, whatever the family's default.
      flat: whether text_config may be missing, its keys beside those of the wrapper: those that its class declares, and
        those of `defaults`.
      caps: whether transformers scales and caps logits as in the language model alone.
      parts: pattern of the modules that are left out.
      renamed: (pattern, replacement) that map the language model's names to those of its family.
    """

    architecture: str
    text: str
    named: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tied: bool = False
    ties: bool = True
    tied_by: str = ""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    spread: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    mrope: bool = False
    squared: bool = False
    flat: bool = False
    caps: bool = False
    parts: str = "vision_tower|multi_modal_projector"
    renamed: tuple[tuple[str, str], ...] = ()


# Language models whose head is a plain projection beside the layers, as all wrappers here have it.
_NAMED = {
    name: name
    for name in (
        "llama", "mistral", "ministral", "ministral3", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma", "gemma2", "phi3",
        "granite", "cohere", "cohere2", "cohere2_moe", "lfm2", "lfm2_moe", "gpt_oss", "olmo2", "smollm3", "deepseek_v3",
    )
}  # fmt: skip
_VISUAL = "visual"
_TIED = "tie_word_embeddings"
_CONNECTED = "vision_model|connector"
_QWEN2: dict[str, Any] = dict(
    text="qwen2",
    tied_by="text_config",
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "num_key_value_heads": 8, "max_window_layers": 80},
    mrope=True,
    flat=True,
    parts=_VISUAL,
)
_GLM4V: dict[str, Any] = dict(
    text="glm4",
    defaults={"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0},
    fixed={"attention_bias": True},
    squared=True,
    parts=_VISUAL,
)
_HEARD = "audio_tower|multi_modal_projector"
_VOXTRAL: dict[str, Any] = {
    "vocab_size": 131_072,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 30,
}
_VOXTRAL |= {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 100_000_000.0, "head_dim": 128}
_GLM_ASR: dict[str, Any] = {
    "vocab_size": 59_264,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
}
_GLM_ASR |= {"num_attention_heads": 16, "num_key_value_heads": 4, "rms_norm_eps": 1e-5}
_NEWLINE = "vision_tower|multi_modal_projector|image_newline"
WRAPPERS = {
    "gemma3": Wrapper(architecture="Gemma3ForConditionalGeneration", text="gemma3_text", tied=True),
    "gemma3n": Wrapper(
        architecture="Gemma3nForConditionalGeneration",
        text="gemma3n_text",
        tied=True,
        caps=True,
        parts="vision_tower|audio_tower|embed_vision|embed_audio",
    ),
    "gemma4": Wrapper(
        architecture="Gemma4ForConditionalGeneration",
        text="gemma4_text",
        tied=True,
        caps=True,
        parts="vision_tower|audio_tower|embed_vision|embed_audio",
    ),
    "llava": Wrapper(architecture="LlavaForConditionalGeneration", text="llama", named=_NAMED, tied_by="text_config"),
    "mistral3": Wrapper(architecture="Mistral3ForConditionalGeneration", text="mistral", named=_NAMED, tied=True),
    "internvl": Wrapper(architecture="InternVLForConditionalGeneration", text="qwen2", named=_NAMED, tied=True),
    "lfm2_vl": Wrapper(
        architecture="Lfm2VlForConditionalGeneration", text="lfm2", named=_NAMED, tied=True, tied_by="tie_embedding"
    ),
    "aya_vision": Wrapper(architecture="AyaVisionForConditionalGeneration", text="cohere2", named=_NAMED, tied=True),
    "smolvlm": Wrapper(architecture="SmolVLMForConditionalGeneration", text="llama", named=_NAMED, parts=_CONNECTED),
    "idefics3": Wrapper(architecture="Idefics3ForConditionalGeneration", text="llama", named=_NAMED, parts=_CONNECTED),
    "kimi_k25": Wrapper(
        architecture="Kimi_K25ForConditionalGeneration",
        text="deepseek_v3",
        named=_NAMED | {"kimi_k2": "deepseek_v3"},
        tied=True,
        parts="vision_tower|mm_projector",
        renamed=((r"^model\.blocks\.", "model.layers."),),  # as transformers 5.24 saves it
    ),
    "qwen2_vl": Wrapper(architecture="Qwen2VLForConditionalGeneration", **_QWEN2),
    "qwen2_5_vl": Wrapper(architecture="Qwen2_5_VLForConditionalGeneration", **_QWEN2),
    "qwen3_vl": Wrapper(
        architecture="Qwen3VLForConditionalGeneration",
        text="qwen3",
        defaults={"rope_theta": 500_000.0, "num_key_value_heads": 32},
        fixed={"use_sliding_window": False},
        parts=_VISUAL,
    ),
    "qwen3_vl_moe": Wrapper(
        architecture="Qwen3VLMoeForConditionalGeneration",
        text="qwen3_moe",
        defaults={"rope_theta": 500_000.0, "num_key_value_heads": 16, "num_experts_per_tok": 4},
        fixed={"use_sliding_window": False, "norm_topk_prob": True},
        parts=_VISUAL,
    ),
    "qwen3_5": Wrapper(architecture="Qwen3_5ForConditionalGeneration", text="qwen3_5_text", parts=_VISUAL),
    "qwen3_5_moe": Wrapper(architecture="Qwen3_5MoeForConditionalGeneration", text="qwen3_5_moe_text", parts=_VISUAL),
    "glm4v": Wrapper(architecture="Glm4vForConditionalGeneration", tied_by="text_config", **_GLM4V),
    "glm46v": Wrapper(architecture="Glm46VForConditionalGeneration", named={"glm4v_text": "glm4"}, **_GLM4V),
    "glm4v_moe": Wrapper(
        architecture="Glm4vMoeForConditionalGeneration",
        text="glm4_moe",
        tied_by="text_config",
        defaults={"attention_bias": True},
        fixed={"use_qk_norm": False},
        parts=_VISUAL,
    ),
    "minimax_m3_vl": Wrapper(
        architecture="MiniMaxM3SparseForConditionalGeneration",
        text="minimax_m3_vl_text",
        tied_by="text_config",
        parts="vision_tower|multi_modal_projector|patch_merge_mlp",
    ),
    "llama4": Wrapper(
        architecture="Llama4ForConditionalGeneration",
        text="llama4_text",
        ties=False,
        tied_by="text_config",
        parts="vision_model|multi_modal_projector",
    ),
    "llava_next": Wrapper(architecture="LlavaNextForConditionalGeneration", text="llama", named=_NAMED, parts=_NEWLINE),
    "llava_next_video": Wrapper(
        architecture="LlavaNextVideoForConditionalGeneration",
        text="llama",
        named=_NAMED,
        tied_by="text_config",
        parts=f"{_NEWLINE}|vision_resampler",
    ),
    "llava_onevision": Wrapper(
        architecture="LlavaOnevisionForConditionalGeneration",
        text="qwen2",
        named=_NAMED,
        tied_by="text_config",
        parts=_NEWLINE,
    ),
    "vipllava": Wrapper(architecture="VipLlavaForConditionalGeneration", text="llama", named=_NAMED),
    "video_llava": Wrapper(
        architecture="VideoLlavaForConditionalGeneration",
        text="llama",
        named=_NAMED,
        parts="video_tower|image_tower|multi_modal_projector",
    ),
    "cohere2_vision": Wrapper(
        architecture="Cohere2VisionForConditionalGeneration", text="cohere2", named=_NAMED, tied=True
    ),
    "exaone4_5": Wrapper(
        architecture="Exaone4_5_ForConditionalGeneration",
        text="exaone4",
        named=dict.fromkeys(("exaone4", "exaone4_5_text"), "exaone4"),
        parts=f"{_VISUAL}|mtp",
    ),
    "ovis2": Wrapper(
        architecture="Ovis2ForConditionalGeneration",
        text="qwen2",
        named=_NAMED,
        tied=True,
        parts="vision_tower|visual_embeddings_table",
    ),
    "got_ocr2": Wrapper(architecture="GotOcr2ForConditionalGeneration", text="qwen2", named=_NAMED, tied=True),
    "lighton_ocr": Wrapper(
        architecture="LightOnOcrForConditionalGeneration",
        text="qwen3",
        named=_NAMED,
        tied=True,
        parts="vision_encoder|vision_projection",
    ),
    "deepseek_vl": Wrapper(
        architecture="DeepseekVLForConditionalGeneration",
        text="llama",
        named=_NAMED,
        tied=True,
        parts="vision_model|aligner",
    ),
    "granite4_vision": Wrapper(
        architecture="Granite4VisionForConditionalGeneration",
        text="granite",
        caps=True,
        parts=f"{_NEWLINE}|layerwise_projectors|spatial_projectors",
    ),
    # ERNIE's block with Llama's rotary positions.
    "paddleocr_vl": Wrapper(
        architecture="PaddleOCRVLForConditionalGeneration",
        text="llama",
        tied=True,
        tied_by="text_config",
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "num_key_value_heads": 2, "head_dim": 128}
        | {"use_bias": False, _TIED: True},
        spread={"use_bias": ("attention_bias", "mlp_bias")},
        flat=True,
        parts=f"{_VISUAL}|mlp_AR",
    ),
    # Models that read sound; transformers ties the head of the last two alone.
    "qwen2_audio": Wrapper(
        architecture="Qwen2AudioForConditionalGeneration", text="qwen2", named=_NAMED, ties=False, parts=_HEARD
    ),
    "audioflamingo3": Wrapper(
        architecture="AudioFlamingo3ForConditionalGeneration", text="qwen2", named=_NAMED, ties=False, parts=_HEARD
    ),
    "voxtral": Wrapper(
        architecture="VoxtralForConditionalGeneration",
        text="llama",
        named=_NAMED,
        ties=False,
        defaults=_VOXTRAL,
        parts=_HEARD,
    ),
    "glmasr": Wrapper(
        architecture="GlmAsrForConditionalGeneration",
        text="llama",
        named=_NAMED,
        tied=True,
        defaults=_GLM_ASR,
        parts=_HEARD,
    ),
    "granite_speech": Wrapper(
        architecture="GraniteSpeechForConditionalGeneration",
        text="granite",
        named=_NAMED,
        tied=True,
        parts="encoder|projector",
    ),
}
# What families do to the logits, and transformers' wrappers do not.
_OF_LOGITS = {"logit_scale": 1.0, "logits_scaling": 1.0, "final_logit_softcapping": None}
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # read beside text_config, too
_NOT_FLAT = {"head_dim", "partial_rotary_factor", "original_max_position_embeddings"}
_GRID = ("mrope_section", "mrope_interleaved")  # shares of a head by the axes of an image, which agree for text


def text_part(values: Values) -> dict[str, Any]:
    """The values of the language model only, with its model_type; those of a language model are returned as they are.

    Raises:
      UserError: a value is none that a model has, or the wrapper has a language model that is not read.
    """
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type in FAMILIES or model_type in WRAPPERS:
        hf_values.check(values)  # keys of other types may mean other things
    if not isinstance(model_type, str) or model_type not in WRAPPERS:
        return dict(values)
    wrapper = WRAPPERS[model_type]
    inner = _inner(values, wrapper)
    family = FAMILIES[_text_type(inner, wrapper, model_type)]
    ids = {key: values[key] for key in _IDS if key in values}
    text = {**wrapper.defaults, **ids, **inner, **wrapper.fixed, "model_type": family.model_type}
    text |= {key: text[name] for name, keys in wrapper.spread.items() for key in keys}
    text |= {key: _along_text(inner[key], wrapper) for key in ("rope_scaling", "rope_parameters") if key in inner}
    if wrapper.squared and text.get("head_dim") is None:
        width, heads = (text.get(key) or 0 for key in ("hidden_size", "num_attention_heads"))
        text["head_dim"] = width // heads if heads else None
        if heads and width // heads % 2:
            raise UserError(
                f"config.json has hidden_size = {width} for {heads} heads, must be an even number of dimensions for each: copy the "
                "file again"
            )
    text["tie_word_embeddings"] = _tied(values, inner, wrapper, family)
    if not wrapper.caps:
        read = {*family.keys.values(), *family.defaults, *family.read_keys}
        text |= {key: neutral for key, neutral in _OF_LOGITS.items() if key in read}
    text.pop("architectures", None)
    return text


def names(config: Values) -> Names:
    """The tensors that a folder with this config.json has."""
    text = text_part(config)
    of_text = _without_mtp(tables.NAMES[text["model_type"]], text)
    wrapper = WRAPPERS.get(config["model_type"])
    if wrapper is None:
        return of_text
    parts = rf"{of_text.parts}|^(?:model\.)?(?:{wrapper.parts})(?:\.|$)"
    return dataclasses.replace(of_text, renamed=of_text.renamed + wrapper.renamed, parts=parts)


def _without_mtp(names: Names, text: Values) -> Names:
    """The names, with modules that predict further tokens as a part that is not read if config.json has none."""
    if names.mtp is None or text.get(FAMILIES[text["model_type"]].mtp_key):
        return names
    return dataclasses.replace(names, parts=f"{names.parts}|{names.mtp.pattern_of(text['num_hidden_layers'])}")


def with_mtp(config: Values, count: int) -> dict[str, Any]:
    """A config.json with this number of modules that predict further tokens."""
    key, wrapper = FAMILIES[text_part(config)["model_type"]].mtp_key, WRAPPERS.get(config["model_type"])
    if wrapper is None or "text_config" not in config:
        return {**config, key: count}
    return {**config, "text_config": {**config["text_config"], key: count}}


def architectures(values: Values) -> tuple[str, ...]:
    """The class names that a config.json with this model_type may have."""
    wrapper = WRAPPERS.get(values["model_type"])
    return FAMILIES[values["model_type"]].architectures if wrapper is None else (wrapper.architecture,)


def untied(config: Values) -> dict[str, Any]:
    """A config.json with a head of its own."""
    wrapper, changed = WRAPPERS.get(config["model_type"]), {**config, "tie_word_embeddings": False}
    if wrapper is None or not wrapper.tied_by:
        return changed
    if wrapper.tied_by == "text_config":
        of_text = config.get("text_config") or (_inner(config, wrapper) if _TIED in wrapper.defaults else {})
        return changed | ({"text_config": {**of_text, _TIED: False}} if of_text else {})
    return changed | {wrapper.tied_by: False}


def _inner(values: Values, wrapper: Wrapper) -> dict[str, Any]:
    """The keys of the language model."""
    inner = values.get("text_config")
    if inner is None and wrapper.flat:
        outer = {"text_config", "vision_config", "tie_word_embeddings", *_NOT_FLAT - wrapper.defaults.keys()}
        return {key: value for key, value in values.items() if key not in outer}
    return dict(inner or {})


def _text_type(inner: Values, wrapper: Wrapper, model_type: str) -> str:
    if not wrapper.named:
        return wrapper.text
    name = inner.get("model_type", wrapper.text)
    if name not in wrapper.named:
        raise UserError(
            f"config.json of a {model_type} has text_config with model_type {name!r}, must be one of "
            f"{', '.join(wrapper.named)}: take another model"
        )
    return wrapper.named[name]


def _tied(values: Values, inner: Values, wrapper: Wrapper, family: Family) -> Any:
    """Whether the head is tied, as the config.json says it."""
    tied = values.get("tie_word_embeddings", wrapper.tied) if wrapper.ties else False
    if wrapper.tied_by == "text_config":
        return tied or inner.get(_TIED, wrapper.defaults.get(_TIED, bool(wrapper.named) and family.tied))
    return values.get(wrapper.tied_by, tied)


def _along_text(rope: object, wrapper: Wrapper) -> Any:
    """The parameters of rotary positions without what only images need."""
    if not isinstance(rope, Mapping):
        return rope
    kind = rope.get("rope_type", rope.get("type", "default"))
    plain = {key: value for key, value in rope.items() if key not in _GRID}
    if wrapper.mrope and kind == "mrope":
        return plain | {"rope_type": "default"}
    return plain if len(plain) == len(rope) else {"rope_type": kind} | plain
