"""Chooses the type of each tensor of a GGUF file: by --dtype, and for K-quants by llama-quantize's mixtures.

The mixtures are those of llama.cpp (src/llama-quant.cpp): attention values and the MLP's down projection get more bits
in some layers, the head gets 6, and rows that do not divide into blocks of 256 get another type.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from capibara.interop.gguf import k_quants
from capibara.interop.gguf import names as gguf_names
from capibara.interop.gguf.layout import tensors as gguf_tensors
from capibara.interop.gguf.layout.family import Family
from capibara.interop.gguf.layout.tensors import Tensor

_ByLayer = Callable[[int, int], str]  # (layer, number of layers) -> a type; "": the default one

HEAD, EMBEDDING = "output.weight", "token_embd.weight"
_PLAIN = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0"}
_FILE_TYPES = {"f32": "ALL_F32"}
# Types with blocks of 256 -> types for rows that are only multiples of 32.
_NARROW = {"Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
# The largest values of the types: blocks have a step, and some a minimum, in float16.
MOST = {
    "F16": 65504.0,
    "Q8_0": 127 * 65504.0,
    "Q4_0": 8 * 65504.0,
    "Q5_0": 16 * 65504.0,
    "Q5_1": 65504.0,
    "Q3_K": 128 * 65504.0,
    "Q4_K": 63 * 65504.0,
    "Q5_K": 63 * 65504.0,
    "Q6_K": 4096 * 65504.0,
}


def _more(layer: int, layers: int) -> bool:
    """Whether a layer gets more bits: the first and last eighth, and every third between them."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _constant(kind: str) -> _ByLayer:
    return lambda layer, layers: kind


def _first(kind: str, count: int = 0, *, share: int = 0, then: str = "") -> _ByLayer:
    """`kind` for the first layers, a number or a share of them; `then` for the others."""
    return lambda layer, layers: kind if layer < (layers // share if share else count) else then


_MORE: _ByLayer = lambda layer, layers: "Q6_K" if _more(layer, layers) else ""  # noqa: E731


@dataclasses.dataclass(frozen=True)
class Mixture:
    """A mixture of types under llama-quantize's name.

    Attributes:
      plain: the type of most matrices.
      values: of attention's values, or of queries, keys and values together.
      down: of the down projection of the MLP or an expert.
      out, out_of_eight: of attention's output projection, and with eight experts.
      head: of the output projection.
    """

    plain: str
    values: _ByLayer = _constant("")
    down: _ByLayer = _constant("")
    out: str = ""
    out_of_eight: str = ""
    head: str = "Q6_K"


MIXTURES = {
    "q3_k_s": Mixture("Q3_K", out_of_eight="Q5_K"),
    "q3_k_m": Mixture(
        "Q3_K", _first("Q5_K", 2, then="Q4_K"), _first("Q5_K", share=16, then="Q4_K"), out="Q4_K", out_of_eight="Q5_K"
    ),
    "q3_k_l": Mixture("Q3_K", _constant("Q5_K"), _constant("Q5_K"), out="Q5_K"),
    "q4_k_s": Mixture("Q4_K", _first("Q5_K", 4), _first("Q5_K", share=8), out_of_eight="Q5_K"),
    "q4_k_m": Mixture("Q4_K", _MORE, _MORE, out_of_eight="Q5_K"),
    "q5_k_s": Mixture("Q5_K"),
    "q5_k_m": Mixture("Q5_K", _MORE, _MORE),
    "q6_k": Mixture("Q6_K"),
}
# Of Falcon, whose layers llama-quantize treats otherwise.
_FALCON = {
    "q3_k_m": dataclasses.replace(
        MIXTURES["q3_k_m"],
        down=lambda layer, layers: "Q5_K" if layer < layers // 16 else "Q4_K" if _more(layer, layers) else "",
        out="",
    ),
    "q3_k_l": dataclasses.replace(MIXTURES["q3_k_l"], down=_constant("Q4_K"), out="Q4_K"),
    "q4_k_s": dataclasses.replace(MIXTURES["q4_k_s"], down=_constant("")),
    "q4_k_m": dataclasses.replace(
        MIXTURES["q4_k_m"],
        down=lambda layer, layers: "Q6_K" if layer < layers // 16 else "Q5_K" if _more(layer, layers) else "",
    ),
}
MXFP4 = "mxfp4"  # experts in MXFP4, the rest in bf16
DTYPES = (*_PLAIN, *MIXTURES, MXFP4)


_VALUES = ("attn_v", "attn_qkv")
_LAYER = re.compile(r"blk\.(\d+)\.(attn_v|attn_qkv|attn_k|attn_output|ffn_down)(?:_exps|_shexp)?\.weight$")
_SMALL = ("altup_", "laurel_", "per_layer_model_proj")  # of Gemma 3n, which llama.cpp does not put in blocks


@dataclasses.dataclass(frozen=True)
class Types:
    """The types of a file's tensors.

    Attributes:
      dtype: one of DTYPES.
      layers: number of layers.
      mixture: of the dtype; None: it is none of a mixture.
      values, downs: the numbers of the layers with values, and with a down projection, in order.
      experts: experts per layer; 0: none.
      tied: whether the head is tied to the embedding.
      large: whether llama.cpp treats it as a 70B model, whose values get more bits.
    """

    dtype: str
    layers: int
    mixture: Mixture | None
    values: tuple[int, ...]
    downs: tuple[int, ...]
    experts: int
    tied: bool
    large: bool

    @classmethod
    def of(cls, dtype: str, config: Mapping[str, object], family: Family, tensors: Iterable[Tensor]) -> Types:
        """The types for a config.json and its tensors."""
        layers, experts = family.layers(config), family.experts(config)
        heads, kv_heads = family.heads(config)
        large = layers == 80 and (family.arch == "qwen2" or family.arch == "llama" and heads != kv_heads)
        falcon = dataclasses.replace(known, head="Q8_0") if (known := _FALCON.get(dtype, MIXTURES.get(dtype))) else None
        mixture = falcon if family.arch == "falcon" else MIXTURES.get(dtype)
        parts = {(int(layer[1]), layer[2]) for tensor in tensors if (layer := _LAYER.match(tensor.stored))}
        of_values = tuple(sorted(layer for layer, part in parts if part in _VALUES))
        downs = tuple(range(layers)) if experts > 1 else tuple(sorted(i for i, part in parts if part == "ffn_down"))
        tied = gguf_names.tied(config)
        return cls(dtype, layers, mixture, of_values, downs, experts, tied, large and experts != 8)

    def type(self, name: str, shape: tuple[int, ...]) -> Any:
        """The type of a tensor of the file, of the gguf package; `shape` is in numpy's order."""
        types = gguf_tensors.package().GGMLQuantizationType
        if len(shape) == 1 or name.endswith(gguf_tensors.EXACT):
            return types.F32
        kind = self._wanted(name)
        for narrower in (_NARROW.get(kind, "F16"), "F16"):
            block, _ = gguf_tensors.package().GGML_QUANT_SIZES[types[kind]]
            kind = kind if shape[-1] % block == 0 else narrower
        return types[kind]

    def _wanted(self, name: str) -> str:
        """The type of a matrix whose rows divide into its blocks."""
        if self.dtype == MXFP4:
            return "MXFP4" if "_exps." in name else "BF16"
        if self.blocks and any(part in name for part in _SMALL):
            return "F16"
        mixture = self.mixture
        if mixture is None:
            return "Q8_0" if self.dtype == "q4_0" and name in (HEAD, EMBEDDING) else _PLAIN[self.dtype]
        if name == HEAD or self.tied and name == EMBEDDING:
            return mixture.head
        layer = _LAYER.match(name)
        if layer is None:
            return mixture.plain
        index, part, eight = int(layer[1]), layer[2], self.experts == 8
        if eight and part in (*_VALUES, "attn_k"):
            return "Q8_0"  # small, and all experts depend on them
        if part in _VALUES:
            kind = mixture.values(self.values.index(index), len(self.values)) or mixture.plain
            return "Q5_K" if self.large and kind in ("Q3_K", "Q4_K") else kind
        if part == "ffn_down":
            return mixture.down(self.downs.index(index), self.layers) or mixture.plain
        if part == "attn_output":
            return (mixture.out_of_eight if eight else mixture.out) or mixture.plain
        return mixture.plain

    @property
    def file_type(self) -> Any:
        """general.file_type, of the gguf package."""
        if self.dtype == MXFP4:
            return gguf_tensors.package().LlamaFileType.MOSTLY_MXFP4_MOE
        return gguf_tensors.package().LlamaFileType[_FILE_TYPES.get(self.dtype, f"MOSTLY_{self.dtype.upper()}")]

    @property
    def blocks(self) -> bool:
        """Whether matrices are quantized."""
        return self.dtype.startswith("q") or self.dtype == MXFP4


def quantized(value: np.ndarray, kind: Any) -> np.ndarray:
    """Quantizes float32 rows to a type of the gguf package, in one contiguous array."""
    if kind.name in k_quants.KINDS:
        return k_quants.quantize(value, kind.name)
    if kind.name in ("Q4_0", "Q5_0"):
        value = value + np.float32(0)  # turns -0 into 0, whose scale a block of zeros has
    return np.ascontiguousarray(gguf_tensors.package().quantize(value, kind))
