"""MaxText's names of a decoder's parameters, and Hugging Face's names of the same.

Source: maxtext 0.2.5, maxtext/models and maxtext/checkpoint_conversion/utils/param_mapping.py. Scanned layers are stacked
along param_scan_axis, experts along the first axis; layers of a pattern are stacked by their place in it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

HEADS_OUT = frozenset(
    {"query", "key", "value"}
)  # [embedding, heads, head_dim]; the others' last axis is what they write
ROTATED = frozenset({"query", "key", "query_norm", "key_norm"})


@dataclasses.dataclass(frozen=True)
class Block:
    """A decoder block of MaxText.

    Attributes:
      model_type: of the corresponding config.json.
      architecture: of transformers.
      names: MaxText's name of a parameter of a layer -> Hugging Face's, "{e}" for the expert.
      offset: whether scales of norms are stored with the 1 that Hugging Face adds, and embeddings with their factor.
      folded: whether queries are stored divided by the square root of head_dim; else the attention divides.
    """

    model_type: str
    architecture: str
    names: Mapping[str, str]
    offset: bool = False
    folded: bool = True


def _attention(theirs: str = "self_attention") -> dict[str, str]:
    parts = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"}
    kinds = {"kernel": "weight", "bias": "bias"}
    names = {f"{theirs}/{a}/{b}": f"self_attn.{x}.{y}" for a, x in parts.items() for b, y in kinds.items()}
    return names | {f"{theirs}/{side}_norm/scale": f"self_attn.{side[0]}_norm.weight" for side in ("query", "key")}


_MLP = {"mlp/wi_0/kernel": "mlp.gate_proj.weight", "mlp/wi_1/kernel": "mlp.up_proj.weight"} | {
    "mlp/wo/kernel": "mlp.down_proj.weight"
}
_NORMS = {
    "pre_self_attention_layer_norm/scale": "input_layernorm.weight",
    "post_self_attention_layer_norm/scale": "post_attention_layernorm.weight",
}
_LLAMA = _NORMS | _attention() | _MLP
_GEMMA = {"pre_self_attention_norm/scale": "input_layernorm.weight"} | _attention() | _MLP
_GEMMA2 = _GEMMA | {
    "post_self_attention_norm/scale": "post_attention_layernorm.weight",
    "pre_ffw_norm/scale": "pre_feedforward_layernorm.weight",
    "post_ffw_norm/scale": "post_feedforward_layernorm.weight",
}


def _experts(theirs: str, ours: str, parts: tuple[str, str, str]) -> dict[str, str]:
    names = {
        f"{theirs}/{name}": f"{ours}.experts.{{e}}.{part}.weight" for name, part in zip(("wi_0", "wi_1", "wo"), parts)
    }
    return names | {f"{theirs}/gate/kernel": f"{ours}.gate.weight"}


BLOCKS = {
    "llama2": Block("llama", "LlamaForCausalLM", _LLAMA),
    "mistral": Block("mistral", "MistralForCausalLM", _LLAMA),
    "mixtral": Block(
        "mixtral",
        "MixtralForCausalLM",
        _NORMS | _attention() | _experts("MoeBlock_0", "block_sparse_moe", ("w1", "w3", "w2")),
    ),
    "gemma": Block(
        "gemma", "GemmaForCausalLM", _GEMMA | {"pre_ffw_norm/scale": "post_attention_layernorm.weight"}, offset=True
    ),
    "gemma2": Block("gemma2", "Gemma2ForCausalLM", _GEMMA2, offset=True),
    "gemma3": Block("gemma3_text", "Gemma3ForCausalLM", _GEMMA2, offset=True, folded=False),
    "qwen2": Block("qwen2", "Qwen2ForCausalLM", _LLAMA, folded=False),
    "qwen3": Block("qwen3", "Qwen3ForCausalLM", _LLAMA, folded=False),
    "qwen3_moe": Block(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _NORMS | _attention() | _experts("moe_block", "mlp", ("gate_proj", "up_proj", "down_proj")),
        folded=False,
    ),
    "olmo3": Block(
        "olmo3",
        "Olmo3ForCausalLM",
        _attention("attention")
        | _MLP
        | {
            "post_self_attention_layer_norm/scale": "post_attention_layernorm.weight",
            "post_mlp_layer_norm/scale": "post_feedforward_layernorm.weight",
        },
        folded=False,
    ),
}

EMBEDDING, OUTPUT, NORM = "token_embedder/embedding", "decoder/logits_dense/kernel", "decoder/decoder_norm/scale"
ENDS = {EMBEDDING: "model.embed_tokens.weight", OUTPUT: "lm_head.weight", NORM: "model.norm.weight"}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the layers of a parameter lie.

    Attributes:
      name: the parameter's, without the layer.
      part: its place in the pattern of layers; None: there is no pattern.
      number: of its layer, or of its repetition of the pattern; None: all are stacked.
      rest: whether it belongs to the layers after the last whole pattern.
    """

    name: str
    part: int | None
    number: int | None
    rest: bool = False


def place(stored: str) -> Place | None:
    """Where a parameter lies; None: it is no layer's."""
    if match := re.fullmatch(r"decoder/layers_remainder/layers_(\d{1,4})/(.*)", stored):
        return Place(match[2], int(match[1]), 0, rest=True)
    if match := re.fullmatch(r"decoder/(?:scanned_blocks|layers)/layers_(\d{1,4})/(.*)", stored):
        return Place(match[2], int(match[1]), None)
    if match := re.fullmatch(r"decoder/layers(?:_(\d{1,4}))?/(.*)", stored):
        number, name = int(match[1]) if match[1] else None, match[2]
        if local := re.fullmatch(r"(\w+)_(local|global)(/.*)", name):  # Gemma 2's pairs of layers
            return Place(local[1] + local[3], ("local", "global").index(local[2]), number)
        return Place(name, None, number)
    return None
