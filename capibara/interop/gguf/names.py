"""The model families that GGUF files can hold: their tensors, and how llama.cpp stores each of them.

A table has a tensor's name in a Hugging Face checkpoint, with {layer} and {expert} for numbers; the gguf package maps
it to the name in a GGUF file. Dimensions are letters, in the order of the checkpoint: v vocabulary, p positions, d
embed, f hidden width of the MLP, g twice that (gate and up), q query heads times head_dim, k key heads times head_dim,
c queries, keys and values together, h head_dim, n query heads, e experts, m hidden width of an expert; for Gemma 3n w
rows of the per-layer table, y its width and x that of all layers, r LAuReL's rank, s streams, z their square.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from capibara.core.types import UserError
from capibara.interop.gguf import catalog
from capibara.interop.gguf.layout import gemma3n
from capibara.interop.gguf.layout.family import Family as Declared
from capibara.interop.gguf.layout.tensors import Change, Shape, Tensor, package
from capibara.interop.hf import families as hf_families


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
      name, dims: of the tensor in the checkpoint.
      change: how GGUF stores it.
      when: the value of config.json that the tensor requires.
      of_kv_layers: whether layers that reuse others' keys and values lack it.
    """

    name: str
    dims: str
    change: Change = Change.NONE
    when: str = ""
    of_kv_layers: bool = False


@dataclasses.dataclass(frozen=True)
class Family:
    """One model_type.

    Attributes:
      model_type, architecture: its names in config.json.
      arch: its name in GGUF.
      rows: the table.
      fields: values of config.json that are metadata of the file (gguf.config.FIELDS).
      fixed: values of config.json that llama.cpp requires.
      renamed: values of config.json with another name in this family.
    """

    model_type: str
    architecture: str
    arch: str
    rows: tuple[Row, ...]
    fields: tuple[str, ...]
    fixed: Mapping[str, Any]
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def get(self, config: Mapping[str, Any], name: str) -> Any:
        """A value of config.json by its usual name; None if it is missing."""
        return config.get(self.renamed.get(name, name))

    def tensors(self, config: Mapping[str, Any]) -> list[Tensor]:
        """All tensors of a model with this configuration."""
        sizes, layers = self._sizes(config), self._size(config, "num_hidden_layers")
        gguf = package()
        arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == self.arch)
        names = gguf.get_tensor_name_map(arch, layers)
        result = []
        for row in self.rows:
            if row.when and not _applies(row.when, config):
                continue
            shape = tuple(sizes[letter] for letter in row.dims.split())
            rows = sizes["v"] if row.dims.startswith("w ") and sizes["w"] != sizes["v"] else None
            of_row = gemma3n.kv_layers(config) if row.of_kv_layers else layers
            for layer in range(of_row if "{layer}" in row.name else 1):
                of_map = row.name.replace("{layer}", str(layer)).replace(".{expert}", "")
                of_map = f"{of_map}.weight" if of_map.endswith((".sinks", "_scale")) else of_map
                stored = names.get_name(of_map, try_suffixes=(".weight", ".bias"))
                for index in range(sizes["e"]) if "{expert}" in row.name else (None,):
                    name = row.name.format(layer=layer, expert=index)
                    result.append(Tensor(name, shape, stored, row.change, index, sizes["e"], rows))
        return result

    def unread(self, config: Mapping[str, Any]) -> dict[str, tuple[Shape, float]]:
        """Tensors that only the file has, by name: shapes, and fill values."""
        if self.model_type != gemma3n.MODEL_TYPE:
            return {}
        sizes = self._sizes(config)
        return gemma3n.unread(config, (sizes["k"], sizes["d"]), sizes["h"])

    @property
    def factors(self) -> bool:
        """Whether llama.cpp reads factors of rotary frequencies."""
        return self.arch == "llama"

    def layers(self, config: Mapping[str, Any]) -> int:
        """Number of layers."""
        return self._size(config, "num_hidden_layers")

    def experts(self, config: Mapping[str, Any]) -> int:
        """Number of experts in a layer; 0: there are none."""
        return self.get(config, "num_experts") or 0

    def heads(self, config: Mapping[str, Any]) -> tuple[int, int]:
        """Numbers of query heads, and of key and value heads."""
        heads = self._size(config, "num_attention_heads")
        return heads, self.get(config, "num_key_value_heads") or heads

    def head_dim(self, config: Mapping[str, Any]) -> int:
        return self.get(config, "head_dim") or self._size(config, "hidden_size") // self.heads(config)[0]

    def _sizes(self, config: Mapping[str, Any]) -> dict[str, int]:
        (heads, kv_heads), head_dim = self.heads(config), self.head_dim(config)
        embed = self._size(config, "hidden_size")
        hidden = gemma3n.width(self.get(config, "intermediate_size")) or 4 * embed
        streams, per_layer = config.get("altup_num_inputs") or 1, config.get("hidden_size_per_layer_input") or 0
        queries, keys = heads * head_dim, kv_heads * head_dim
        return {
            "v": self._size(config, "vocab_size"),
            "p": self.get(config, "max_position_embeddings") or 0,
            "d": embed,
            "f": hidden,
            "g": 2 * hidden,
            "q": queries,
            "k": keys,
            "c": queries + 2 * keys,
            "h": head_dim,
            "n": heads,
            "e": self.get(config, "num_experts") or streams - 1,
            "w": config.get("vocab_size_per_layer_input") or 0,
            "x": per_layer * self._size(config, "num_hidden_layers"),
            "y": per_layer,
            "r": config.get("laurel_rank") or 0,
            "s": streams,
            "z": streams**2,
            "m": self.get(config, "moe_intermediate_size") or hidden,
        }

    def _size(self, config: Mapping[str, Any], name: str) -> int:
        value = self.get(config, name)
        if not isinstance(value, int) or value < 1:
            name = self.renamed.get(name, name)
            raise UserError(f"{name} of config.json is {value!r}, must be an integer above 0")
        return value


def _applies(when: str, config: Mapping[str, Any]) -> bool:
    return not tied(config) if when == "untied" else bool(config.get(when))


def tied(config: Mapping[str, Any]) -> bool:
    """Whether the head is tied to the embedding; if config.json does not say, the default of its model_type."""
    return bool(config.get("tie_word_embeddings", hf_families.FAMILIES[config["model_type"]].tied))


def _rows(*lines: tuple[str, ...]) -> tuple[Row, ...]:
    return tuple(
        Row(name, dims, Change(rest[0]) if rest else Change.NONE, rest[1] if rest[1:] else "")
        for name, dims, *rest in lines
    )


def _without(rows: tuple[Row, ...], *words: str) -> tuple[Row, ...]:
    return tuple(row for row in rows if not any(word in row.name for word in words))


def _changed(rows: tuple[Row, ...], change: Change, *words: str) -> tuple[Row, ...]:
    """The table with this change for the tensors whose names contain one of the words."""
    hit = lambda row: any(word in row.name for word in words)  # noqa: E731
    return tuple(dataclasses.replace(row, change=change) if hit(row) else row for row in rows)


_L = "model.layers.{layer}."
_PLAIN = _rows(
    ("model.embed_tokens.weight", "v d"),
    (_L + "input_layernorm.weight", "d"),
    (_L + "self_attn.q_proj.weight", "q d"),
    (_L + "self_attn.k_proj.weight", "k d"),
    (_L + "self_attn.v_proj.weight", "k d"),
    (_L + "self_attn.o_proj.weight", "d q"),
    (_L + "post_attention_layernorm.weight", "d"),
    (_L + "mlp.gate_proj.weight", "f d"),
    (_L + "mlp.up_proj.weight", "f d"),
    (_L + "mlp.down_proj.weight", "d f"),
    ("model.norm.weight", "d"),
    ("lm_head.weight", "v d", "", "untied"),
)
_QKV_BIAS = _rows(
    (_L + "self_attn.q_proj.bias", "q"), (_L + "self_attn.k_proj.bias", "k"), (_L + "self_attn.v_proj.bias", "k")
)
_QK_NORM = _rows((_L + "self_attn.q_norm.weight", "h"), (_L + "self_attn.k_norm.weight", "h"))
_LLAMA_BIAS = tuple(
    dataclasses.replace(row, when="attention_bias") for row in (*_QKV_BIAS, Row(_L + "self_attn.o_proj.bias", "d"))
)


def _paired(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    return _changed(_changed(rows, Change.QUERIES, "q_proj"), Change.KEYS, "k_proj")


_DENSE = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_MIXTRAL = _without(_PLAIN, *_DENSE) + _rows(
    (_L + "block_sparse_moe.gate.weight", "e d"),
    (_L + "block_sparse_moe.experts.{expert}.w1.weight", "m d"),
    (_L + "block_sparse_moe.experts.{expert}.w2.weight", "d m"),
    (_L + "block_sparse_moe.experts.{expert}.w3.weight", "m d"),
)
_QWEN3_MOE = (
    _without(_PLAIN, *_DENSE)
    + _QK_NORM
    + _rows(
        (_L + "mlp.gate.weight", "e d"),
        (_L + "mlp.experts.{expert}.gate_proj.weight", "m d"),
        (_L + "mlp.experts.{expert}.up_proj.weight", "m d"),
        (_L + "mlp.experts.{expert}.down_proj.weight", "d m"),
    )
)
_EXPERTS_OF = _L + "mlp.experts."
_GPT_OSS = (
    _without(_PLAIN, *_DENSE)
    + _QKV_BIAS
    + _rows(
        (_L + "self_attn.o_proj.bias", "d"),
        (_L + "self_attn.sinks", "n"),
        (_L + "mlp.router.weight", "e d"),
        (_L + "mlp.router.bias", "e"),
        *((f"{_EXPERTS_OF}{name}_proj.weight", "e m d") for name in ("gate", "up")),
        (_EXPERTS_OF + "down_proj.weight", "e d m"),
        *((f"{_EXPERTS_OF}{name}_proj.bias", "e m") for name in ("gate", "up")),
        (_EXPERTS_OF + "down_proj.bias", "e d"),
    )
)
_PHI3 = _without(_PLAIN, "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj") + _rows(
    (_L + "self_attn.qkv_proj.weight", "c d"), (_L + "mlp.gate_up_proj.weight", "g d")
)
_OWN = tuple(
    dataclasses.replace(row, of_kv_layers=any(part in row.name for part in ("k_proj", "v_proj", "k_norm")))
    for row in _PLAIN + _QK_NORM
)
_GEMMA3N = _OWN + _rows(
    (_L + "pre_feedforward_layernorm.weight", "d"),
    (_L + "post_feedforward_layernorm.weight", "d"),
    ("model.embed_tokens_per_layer.weight", "w x"),
    ("model.per_layer_model_projection.weight", "x d"),
    ("model.per_layer_projection_norm.weight", "y"),
    ("model.altup_projections.{expert}.weight", "d d"),
    ("model.altup_unembed_projections.{expert}.weight", "d d"),
    (_L + "altup.modality_router.weight", "s d"),
    (_L + "altup.router_norm.weight", "d"),
    (_L + "altup.prediction_coefs.weight", "z s"),
    (_L + "altup.correction_coefs.weight", "s s"),
    (_L + "altup.correct_output_scale", "d"),
    (_L + "laurel.linear_left.weight", "r d"),
    (_L + "laurel.linear_right.weight", "d r"),
    (_L + "laurel.post_laurel_norm.weight", "d"),
    (_L + "per_layer_input_gate.weight", "y d"),
    (_L + "per_layer_projection.weight", "d y"),
    (_L + "post_per_layer_input_norm.weight", "d"),
)
_SANDWICH = _rows((_L + "pre_feedforward_layernorm.weight", "d"), (_L + "post_feedforward_layernorm.weight", "d"))


def _gemma(*more: Row) -> tuple[Row, ...]:
    return _changed((*_PLAIN, *more), Change.PLUS_ONE, "norm")


_H = "transformer.h.{layer}."
_GPT2 = _rows(
    ("transformer.wte.weight", "v d"),
    ("transformer.wpe.weight", "p d"),
    *((_H + f"{norm}.{part}", "d") for norm in ("ln_1", "ln_2") for part in ("weight", "bias")),
    (_H + "attn.c_attn.weight", "d c", "transposed"),
    (_H + "attn.c_attn.bias", "c"),
    (_H + "attn.c_proj.weight", "q d", "transposed"),
    (_H + "attn.c_proj.bias", "d"),
    (_H + "mlp.c_fc.weight", "d f", "transposed"),
    (_H + "mlp.c_fc.bias", "f"),
    (_H + "mlp.c_proj.weight", "f d", "transposed"),
    (_H + "mlp.c_proj.bias", "d"),
    ("transformer.ln_f.weight", "d"),
    ("transformer.ln_f.bias", "d"),
    ("lm_head.weight", "v d", "", "untied"),
)
_G = "gpt_neox.layers.{layer}."
_GPT_NEOX = _rows(
    ("gpt_neox.embed_in.weight", "v d"),
    *((_G + f"{norm}_layernorm.{part}", "d") for norm in ("input", "post_attention") for part in ("weight", "bias")),
    (_G + "attention.query_key_value.weight", "c d", "interleaved"),
    (_G + "attention.query_key_value.bias", "c", "interleaved"),
    (_G + "attention.dense.weight", "d q"),
    (_G + "attention.dense.bias", "d"),
    (_G + "mlp.dense_h_to_4h.weight", "f d"),
    (_G + "mlp.dense_h_to_4h.bias", "f"),
    (_G + "mlp.dense_4h_to_h.weight", "d f"),
    (_G + "mlp.dense_4h_to_h.bias", "d"),
    ("gpt_neox.final_layer_norm.weight", "d"),
    ("gpt_neox.final_layer_norm.bias", "d"),
    ("embed_out.weight", "v d"),
)

_SIZES = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "max_position_embeddings")
_ROPED = (*_SIZES, "num_key_value_heads", "head_dim", "rms_norm_eps")
_SILU = {"hidden_act": "silu"}
_GELU = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
_EXPERTS = ("num_experts", "num_experts_per_tok")

FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            "llama", "LlamaForCausalLM", "llama", _paired(_PLAIN + _LLAMA_BIAS), _ROPED, _SILU | {"mlp_bias": False}
        ),
        Family("mistral", "MistralForCausalLM", "llama", _paired(_PLAIN), (*_ROPED, "sliding_window"), _SILU),
        Family(
            "mixtral",
            "MixtralForCausalLM",
            "llama",
            _paired(_MIXTRAL),
            (*_ROPED, *_EXPERTS, "sliding_window"),
            _SILU,
            {"num_experts": "num_local_experts"},
        ),
        Family("qwen2", "Qwen2ForCausalLM", "qwen2", _PLAIN + _QKV_BIAS, _ROPED, _SILU | {"use_sliding_window": False}),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            "qwen3",
            _PLAIN + _QK_NORM,
            _ROPED,
            _SILU | {"use_sliding_window": False, "attention_bias": False},
        ),
        Family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            "qwen3moe",
            _QWEN3_MOE,
            (*_ROPED, *_EXPERTS, "moe_intermediate_size"),
            _SILU
            | {"use_sliding_window": False, "attention_bias": False, "norm_topk_prob": True}
            | {"decoder_sparse_step": 1, "mlp_only_layers": []},
        ),
        Family(
            "gpt_oss",
            "GptOssForCausalLM",
            "gpt-oss",
            _GPT_OSS,
            (*_ROPED, *_EXPERTS, "moe_intermediate_size", "sliding_window"),
            _SILU | {"attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
            {"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
        ),
        Family("gemma", "GemmaForCausalLM", "gemma", _gemma(), _ROPED, _GELU),
        Family(
            "gemma2",
            "Gemma2ForCausalLM",
            "gemma2",
            _gemma(*_SANDWICH),
            (*_ROPED, "sliding_window", "attn_logit_softcapping", "final_logit_softcapping"),
            _GELU,
        ),
        Family(
            "gemma3_text",
            "Gemma3ForCausalLM",
            "gemma3",
            _gemma(*_SANDWICH, *_QK_NORM),
            (*_ROPED, "sliding_window", "final_logit_softcapping"),
            _GELU | {"attn_logit_softcapping": None},
        ),
        Family(
            gemma3n.MODEL_TYPE,
            "Gemma3nForCausalLM",
            "gemma3n",
            _GEMMA3N,
            (*_ROPED, "sliding_window", *gemma3n.FIELDS),
            gemma3n.FIXED,
        ),
        Family(
            "phi3",
            "Phi3ForCausalLM",
            "phi3",
            _PHI3,
            (*_SIZES, "num_key_value_heads", "rms_norm_eps", "sliding_window", "original_max_position_embeddings"),
            _SILU,
        ),
        Family(
            "gpt2",
            "GPT2LMHeadModel",
            "gpt2",
            _GPT2,
            (*_SIZES, "layer_norm_eps"),
            {"activation_function": "gelu_new", "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
            {
                "hidden_size": "n_embd",
                "num_hidden_layers": "n_layer",
                "num_attention_heads": "n_head",
                "max_position_embeddings": "n_positions",
                "intermediate_size": "n_inner",
                "layer_norm_eps": "layer_norm_epsilon",
            },
        ),
        Family(
            "gpt_neox",
            "GPTNeoXForCausalLM",
            "gptneox",
            _GPT_NEOX,
            (*_SIZES, "layer_norm_eps", "use_parallel_residual"),
            {"hidden_act": "gelu", "attention_bias": True},
        ),
    )
}


DECLARED: tuple[Declared, ...] = tuple(
    family
    for module in pkgutil.iter_modules(catalog.__path__, f"{catalog.__name__}.")
    for family in importlib.import_module(module.name).FAMILIES
)


def of_config(config: Mapping[str, Any]) -> Family | Declared:
    """The family of a config.json.

    Raises:
      UserError: none is known.
    """
    model_type = config.get("model_type")
    for family in DECLARED:
        if family.model_type == model_type and (family.applies is None or family.applies(config)):
            return family
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    known = ", ".join(dict.fromkeys((*FAMILIES, *(family.model_type for family in DECLARED))))
    raise UserError(
        f"model_type {model_type!r} has no GGUF form here, must be one of {known}; docs/extending.md says how to add one"
    )


def of_arch(arch: Any, values: Mapping[str, Any]) -> Family | Declared:
    """The family of a file, by its architecture and the metadata under it: some families share an architecture.

    Raises:
      UserError: none is known.
    """
    if arch == "llama":
        windowed = "mistral" if values.get("attention.sliding_window") else "llama"
        return FAMILIES["mixtral" if values.get("expert_count") else windowed]
    declared = [family for family in DECLARED if family.arch == arch]
    result = [family for family in declared if family.when and values.get(family.when)]
    result += [family for family in declared if not family.when]
    if result:
        return result[0]
    for family in FAMILIES.values():
        if family.arch == arch:
            return family
    known = ", ".join(sorted({family.arch for family in FAMILIES.values()} | {family.arch for family in DECLARED}))
    raise UserError(f"general.architecture {arch!r} is not known here, must be one of {known}")
