"""Where our parameters are in a Hugging Face checkpoint: one table an architecture. Needs numpy alone.

Dimensions are letters: v vocabulary, p positions, d embed, n heads, h head_dim, f hidden width of the MLP. "nh d" is a
tensor of two dimensions, the first of which runs over heads and, within each, over its own.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterator, Mapping

import numpy as np

Shape = tuple[int, ...]

# Our parameters' dimensions, those of layers without the leading one.
OURS = {
    "embedding": "vd",
    "position_embedding": "pd",
    "output": "vd",
    **dict.fromkeys(("final_norm/scale", "final_norm/bias"), "d"),
    **{f"layers/{name}_norm/{part}": "d" for name in ("attention", "mlp") for part in ("scale", "bias")},
    **{f"layers/{name}_post_norm/{part}": "d" for name in ("attention", "mlp") for part in ("scale", "bias")},
    **{f"layers/attention/{name}": "dnh" for name in ("query", "key", "value")},
    **{f"layers/attention/{name}_bias": "nh" for name in ("query", "key", "value")},
    **{f"layers/attention/{name}_norm/scale": "h" for name in ("query", "key")},
    "layers/attention/out": "nhd",
    "layers/attention/out_bias": "d",
    **dict.fromkeys(("layers/mlp/up", "layers/mlp/gate"), "df"),
    "layers/mlp/up_bias": "f",
    "layers/mlp/down": "fd",
    "layers/mlp/down_bias": "d",
}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint.

    Attributes:
      name: its own, with {} for the number of the layer.
      dims: its dimensions.
      ours: the parameters that it holds.
      along: the letter along which it holds several, one after the other.
    """

    name: str
    dims: str
    ours: tuple[str, ...]
    along: str = ""

    def shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """Its shape in the checkpoint, given those of our parameters, without the layers."""
        sizes = self._sizes(shapes)
        return tuple(math.prod(sizes[letter] for letter in group) for group in self.dims.split())

    def split(self, value: np.ndarray, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, np.ndarray]]:
        """The parameters of ours that it holds: names and values."""
        letters, sizes = self.dims.replace(" ", ""), self._sizes(shapes)
        value = value.reshape([sizes[letter] for letter in letters])
        parts = [value]
        if self.along:
            ends = np.cumsum([self._size(path, shapes) for path in self.ours])[:-1]
            parts = np.split(value, ends, axis=letters.index(self.along))
        for path, part in zip(self.ours, parts, strict=True):
            yield path, part.transpose([letters.index(letter) for letter in OURS[path]])

    def _sizes(self, shapes: Mapping[str, Shape]) -> dict[str, int]:
        sizes = dict(zip(OURS[self.ours[0]], shapes[self.ours[0]], strict=True))
        return sizes | ({self.along: sum(self._size(path, shapes) for path in self.ours)} if self.along else {})

    def _size(self, path: str, shapes: Mapping[str, Shape]) -> int:
        return shapes[path][OURS[path].index(self.along)]


def read(
    table: tuple[Tensor, ...], shapes: Mapping[str, Shape], value: Callable[[str, Shape], np.ndarray]
) -> dict[str, np.ndarray]:
    """All parameters of a model, by the names of capibara.tree.

    Args:
      table: of the architecture; what the model does not have (an untied head) is passed over.
      shapes: of our parameters, those of layers with the leading dimension.
      value: (name, shape) -> that tensor of the checkpoint.
    """
    params: dict[str, np.ndarray] = {}
    for tensor in table:
        if tensor.ours[0] not in shapes:
            continue
        if "{}" not in tensor.name:
            params.update(tensor.split(value(tensor.name, tensor.shape(shapes)), shapes))
            continue
        inner = {path: shapes[path][1:] for path in tensor.ours}
        layers = [
            dict(tensor.split(value(tensor.name.format(index), tensor.shape(inner)), inner))
            for index in range(shapes[tensor.ours[0]][0])
        ]
        params.update({path: np.stack([layer[path] for layer in layers]) for path in tensor.ours})
    return params


def draw(name: str, shape: Shape) -> np.ndarray:
    """A tensor's value where there is no checkpoint: its name is the seed. Scales of norms lie around 1."""
    values = 0.25 * np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
    is_scale = name.endswith("weight") and ("norm" in name or ".ln_" in name)
    return (values + is_scale).astype(np.float32)


def _table(*rows: tuple[str, ...]) -> tuple[Tensor, ...]:
    """Rows are (name, dims, our parameters, letter they follow each other along)."""
    return tuple(Tensor(name, dims, tuple(ours.split()), *along) for name, dims, ours, *along in rows)


def _without(table: tuple[Tensor, ...], *words: str) -> tuple[Tensor, ...]:
    return tuple(tensor for tensor in table if not any(word in tensor.name for word in words))


_L, _A, _M = "model.layers.{}.", "layers/attention/", "layers/mlp/"

LLAMA = _table(
    ("model.embed_tokens.weight", "v d", "embedding"),
    (_L + "input_layernorm.weight", "d", "layers/attention_norm/scale"),
    (_L + "self_attn.q_proj.weight", "nh d", _A + "query"),
    (_L + "self_attn.k_proj.weight", "nh d", _A + "key"),
    (_L + "self_attn.v_proj.weight", "nh d", _A + "value"),
    (_L + "self_attn.o_proj.weight", "d nh", _A + "out"),
    (_L + "post_attention_layernorm.weight", "d", "layers/mlp_norm/scale"),
    (_L + "mlp.gate_proj.weight", "f d", _M + "gate"),
    (_L + "mlp.up_proj.weight", "f d", _M + "up"),
    (_L + "mlp.down_proj.weight", "d f", _M + "down"),
    ("model.norm.weight", "d", "final_norm/scale"),
    ("lm_head.weight", "v d", "output"),
)

QWEN2 = LLAMA + _table(
    (_L + "self_attn.q_proj.bias", "nh", _A + "query_bias"),
    (_L + "self_attn.k_proj.bias", "nh", _A + "key_bias"),
    (_L + "self_attn.v_proj.bias", "nh", _A + "value_bias"),
)

_QK_NORM = _table(
    (_L + "self_attn.q_norm.weight", "h", _A + "query_norm/scale"),
    (_L + "self_attn.k_norm.weight", "h", _A + "key_norm/scale"),
)
QWEN3 = LLAMA + _QK_NORM

GEMMA2 = _without(LLAMA, "post_attention_layernorm") + _table(
    (_L + "post_attention_layernorm.weight", "d", "layers/attention_post_norm/scale"),
    (_L + "pre_feedforward_layernorm.weight", "d", "layers/mlp_norm/scale"),
    (_L + "post_feedforward_layernorm.weight", "d", "layers/mlp_post_norm/scale"),
)
GEMMA3 = GEMMA2 + _QK_NORM

_QKV = f"{_A}query {_A}key {_A}value"
_QKV_BIAS = f"{_A}query_bias {_A}key_bias {_A}value_bias"

PHI3 = _without(LLAMA, "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj") + _table(
    (_L + "self_attn.qkv_proj.weight", "nh d", _QKV, "n"),
    (_L + "mlp.gate_up_proj.weight", "f d", f"{_M}gate {_M}up", "f"),
)

_H = "transformer.h.{}."
GPT2 = _table(
    ("transformer.wte.weight", "v d", "embedding"),
    ("transformer.wpe.weight", "p d", "position_embedding"),
    (_H + "ln_1.weight", "d", "layers/attention_norm/scale"),
    (_H + "ln_1.bias", "d", "layers/attention_norm/bias"),
    (_H + "attn.c_attn.weight", "d nh", _QKV, "n"),
    (_H + "attn.c_attn.bias", "nh", _QKV_BIAS, "n"),
    (_H + "attn.c_proj.weight", "nh d", _A + "out"),
    (_H + "attn.c_proj.bias", "d", _A + "out_bias"),
    (_H + "ln_2.weight", "d", "layers/mlp_norm/scale"),
    (_H + "ln_2.bias", "d", "layers/mlp_norm/bias"),
    (_H + "mlp.c_fc.weight", "d f", _M + "up"),
    (_H + "mlp.c_fc.bias", "f", _M + "up_bias"),
    (_H + "mlp.c_proj.weight", "f d", _M + "down"),
    (_H + "mlp.c_proj.bias", "d", _M + "down_bias"),
    ("transformer.ln_f.weight", "d", "final_norm/scale"),
    ("transformer.ln_f.bias", "d", "final_norm/bias"),
)

_G = "gpt_neox.layers.{}."
GPT_NEOX = _table(
    ("gpt_neox.embed_in.weight", "v d", "embedding"),
    (_G + "input_layernorm.weight", "d", "layers/attention_norm/scale"),
    (_G + "input_layernorm.bias", "d", "layers/attention_norm/bias"),
    (_G + "attention.query_key_value.weight", "nh d", _QKV, "h"),  # each head has its query, key and value together
    (_G + "attention.query_key_value.bias", "nh", _QKV_BIAS, "h"),
    (_G + "attention.dense.weight", "d nh", _A + "out"),
    (_G + "attention.dense.bias", "d", _A + "out_bias"),
    (_G + "post_attention_layernorm.weight", "d", "layers/mlp_norm/scale"),
    (_G + "post_attention_layernorm.bias", "d", "layers/mlp_norm/bias"),
    (_G + "mlp.dense_h_to_4h.weight", "f d", _M + "up"),
    (_G + "mlp.dense_h_to_4h.bias", "f", _M + "up_bias"),
    (_G + "mlp.dense_4h_to_h.weight", "d f", _M + "down"),
    (_G + "mlp.dense_4h_to_h.bias", "d", _M + "down_bias"),
    ("gpt_neox.final_layer_norm.weight", "d", "final_norm/scale"),
    ("gpt_neox.final_layer_norm.bias", "d", "final_norm/bias"),
    ("embed_out.weight", "v d", "output"),
)
