"""T5X's names of a network's parameters, and its Gin file of the network.

Source: github.com/google-research/t5x, t5x/checkpoints.py, t5x/examples/{t5,scalable_t5,decoder_only}/network.py.
Scanned layers have their parameters in "encoder/encoder" and "decoder/decoder" ("layers" in the first versions),
stacked along the second dimension. Kernels have heads and their features in one dimension, or in two.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from capibara.core import projections
from capibara.core.types import UserError
from capibara.interop.hf import tables
from capibara.interop.hf.layout.tensors import Shape, Tensor, letters
from capibara.interop.hf.tables import T5X_DECODER_TYPE

# Kernels are matrices [inputs, outputs].
_ATTENTION = {
    projection.name: f"{letters(projection.in_axes)} {letters(projection.out_axes)}"
    for projection in projections.ATTENTION
}


def _side(side: str, attentions: Mapping[str, str], gated: bool) -> dict[str, tuple[str, str]]:
    """Our parameter -> (T5X's name, its dimensions), for the encoder or the decoder."""
    theirs, ours = f"{side}/layers_{{l}}/", f"{side}/layers/"
    result = {}
    for ours_name, (name, norm) in zip(("attention", "cross_attention"), attentions.items()):
        result[f"{ours}{ours_name}_norm/scale"] = (f"{theirs}{norm}/scale", "d")
        result |= {
            f"{ours}{ours_name}/{part}": (f"{theirs}{name}/{part}/kernel", dims) for part, dims in _ATTENTION.items()
        }
    into = {"gate": "wi_0", "up": "wi_1"} if gated else {"up": "wi"}
    result |= {f"{ours}mlp/{ours_name}": (f"{theirs}mlp/{name}/kernel", "d f") for ours_name, name in into.items()}
    result[f"{ours}mlp/down"] = (f"{theirs}mlp/wo/kernel", "f d")
    result[f"{ours}mlp_norm/scale"] = (f"{theirs}pre_mlp_layer_norm/scale", "d")
    result[f"{side}/relative_bias/table"] = (f"{side}/relpos_bias/rel_embedding", "n r")
    result[f"{ours}relative_bias/table"] = (f"{theirs}relpos_bias/rel_embedding", "n r")
    result[f"{side}/norm/scale"] = (f"{side}/{side}_norm/scale", "d")
    return result


def _names(gated: bool) -> dict[str, tuple[str, str]]:
    of_decoder = {"self_attention": "pre_self_attention_layer_norm"}
    of_decoder["encoder_decoder_attention"] = "pre_cross_attention_layer_norm"
    ends = {"embedding": ("token_embedder/embedding", "v d"), "output": ("decoder/logits_dense/kernel", "d v")}
    return (
        ends | _side("encoder", {"attention": "pre_attention_layer_norm"}, gated) | _side("decoder", of_decoder, gated)
    )


@dataclasses.dataclass(frozen=True)
class Row:
    """One tensor, or one per layer, in T5X and in a Hugging Face checkpoint; both have the same dimensions.

    Attributes:
      theirs: T5X's tensor.
      hf: Hugging Face's tensor.
    """

    theirs: Tensor
    hf: Tensor

    @property
    def order(self) -> list[int]:
        """The permutation of T5X's dimensions that yields Hugging Face's."""
        groups = self.theirs.dims.split()
        return [groups.index(group) for group in self.hf.dims.split()]


@functools.cache
def rows(gated: bool, each_positions: bool = False) -> dict[str, Row]:
    """T5X's name, with {l} for the layer's number -> its row.

    Args:
      gated: whether the MLP is gated.
      each_positions: whether each layer has its own relative positions.
    """
    names, created = _names(gated), {}
    table = tables.UMT5 if each_positions else tables.T5
    for row in (tables.UMT5_GATED if each_positions else tables.T5_GATED) if gated else table:
        name, dims = names[row.ours[0]]
        created[name] = Row(dataclasses.replace(row, name=name, dims=dims), row)
    return created


@functools.cache
def decoder_rows(gated: bool) -> dict[str, Row]:
    """Like `rows`, for a decoder-only network: the names of both sides are T5X's."""
    table = tables.T5X_DECODER if gated else tables.T5X_DECODER_PLAIN
    return {row.name: Row(row, row) for row in table}


def rows_of(config: Mapping[str, Any]) -> dict[str, Row]:
    """The rows of a model, from its config.json."""
    gated, kind = config["feed_forward_proj"].startswith("gated-"), config["model_type"]
    return decoder_rows(gated) if kind == T5X_DECODER_TYPE else rows(gated, kind == "umt5")


def scanned_name(name: str) -> str:
    """The name of a scanned parameter of all layers, from that of one layer ("{l}" for its number)."""
    side, _, rest = name.partition("/layers_{l}/")
    return f"{side}/{side}/{rest}" if rest else name


def grouped(shape: Shape, dims: str) -> Shape | None:
    """A kernel's shape with one size per group of dimensions, in either storage form; None: it has another shape."""
    groups = dims.split()
    if len(shape) == len(groups):
        return tuple(shape)
    if len(shape) != sum(map(len, groups)):
        return None
    sizes, rest = [], list(shape)
    for group in groups:
        size = 1
        for _ in group:
            size *= rest.pop(0)
        sizes.append(size)
    return tuple(sizes)


_LINE = 4096
_BOTH_WAYS = "models.DecoderOnlyModel.inputs_bidirectional_attention"
_ACTIVATIONS = {
    ("relu",): "relu",
    ("gelu",): "gelu_new",  # Flax's gelu is the approximation
    ("gelu", "linear"): "gated-gelu",
    ("silu", "linear"): "gated-silu",
    ("swish", "linear"): "gated-silu",
}
_KEYS = {
    "vocab_size": "vocab_size",
    "emb_dim": "d_model",
    "num_heads": "num_heads",
    "num_encoder_layers": "num_layers",
    "num_decoder_layers": "num_decoder_layers",
    "head_dim": "d_kv",
    "mlp_dim": "d_ff",
}
_DECODER_KEYS = {"num_layers": "num_layers"}  # instead of those of both sides


def config_of(network: Mapping[str, object]) -> dict[str, Any]:
    """The values of config.json that a T5Config determines.

    Raises:
      UserError: the activations are not supported.
    """
    values = {theirs: network[name] for name, theirs in (_KEYS | _DECODER_KEYS).items() if name in network}
    if "mlp_activations" in network:
        names = network["mlp_activations"]
        activations = tuple(names) if isinstance(names, (list, tuple)) else (names,)
        if not all(isinstance(name, str) for name in activations) or activations not in _ACTIVATIONS:
            known = ", ".join(map(str, _ACTIVATIONS))
            raise UserError(f"config.gin has T5Config.mlp_activations = {activations}, must be one of {known}")
        values["feed_forward_proj"] = _ACTIVATIONS[activations]
    return values


def computing_of(network: Mapping[str, object]) -> dict[str, Any]:
    """The dtype and dropout_rate of a T5Config, under our names, as far as it sets them.

    Raises:
      UserError: a value is invalid.
    """
    result: dict[str, Any] = {}
    if (dtype := network.get("dtype")) is not None:
        if dtype not in ("float32", "bfloat16", "float16"):
            raise UserError(f"config.gin has T5Config.dtype = {dtype!r:.100}, must be float32, bfloat16 or float16")
        result["dtype"] = dtype
    if (rate := network.get("dropout_rate")) is not None:
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate < 1:
            raise UserError(f"config.gin has T5Config.dropout_rate = {rate!r:.100}, must be from 0 to below 1")
        result["dropout_rate"] = float(rate)
    return result


def network_of(text: str) -> dict[str, Any]:
    """The values of T5Config, or of a decoder's TransformerConfig, in T5X's Gin text, with macros substituted.

    The text is only parsed, since it names modules that do not exist here. Values that are not literals are omitted.

    Raises:
      UserError: macros refer to each other.
    """
    values: dict[str, Any] = {}
    macros: dict[str, Any] = {}
    for owner, name, value in _bindings(text):
        if not owner and name.isupper():
            macros[name] = value
        elif owner.rpartition(".")[2] in ("T5Config", "TransformerConfig"):
            values[name] = value
    for name, value in list(values.items()):
        seen: set[str] = set()
        while isinstance(value, str) and value.startswith("%"):
            if value in seen:
                raise UserError(f"config.gin: {value} of T5Config.{name} is a macro of itself: give it a value")
            seen.add(value)
            value = macros.get(value[1:])
        values[name] = value
    return {name: value for name, value in values.items() if value is not None}


def inputs_attention_of(text: str) -> str:
    """Whether a decoder's inputs attend causally or in both directions, from T5X's Gin text."""
    named = [value for _, name, value in _bindings(text) if name == _BOTH_WAYS.rpartition(".")[2]]
    return "bidirectional" if named and named[-1] is True else "causal"


def vocabulary_of(text: str) -> str | None:
    """The path of the SentencePiece model, from T5X's Gin text."""
    named = [value for _, name, value in _bindings(text) if name == "sentencepiece_model_file"]
    return next((value for value in reversed(named) if isinstance(value, str) and not value.startswith("%")), None)


def _bindings(text: str) -> Iterator[tuple[str, str, Any]]:
    """(configurable, parameter, value or "%MACRO") for each line that binds one, in blocks too."""
    block = ""
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if len(line) > _LINE:
            continue  # too long for a network's size, and the patterns below take quadratic time
        if match := re.match(r"([\w./]+):\s*(?:#.*)?$", line):
            block = match[1]
            continue
        match = re.match(r"(\s*)(?:([\w./]+)\.)?(\w+)\s*=\s*(.*)$", line)
        if match is None:
            continue
        indented, owner, name, value = match.groups()
        value = value.strip()
        if value.startswith("%"):
            yield owner or (block if indented else ""), name, value.split("#")[0].strip()
            continue
        try:
            yield owner or (block if indented else ""), name, ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue  # a reference, or a value that continues on the next line: not needed


def gin_text(config: Mapping[str, object], computing: Mapping[str, object]) -> str:
    """T5X's Gin text of a network.

    Args:
      config: values of config.json.
      computing: from `computing_of`.

    Raises:
      UserError: T5X has no such activation.
    """
    named = {values: name for name, values in reversed(_ACTIVATIONS.items())}
    decoder = config["model_type"] == T5X_DECODER_TYPE
    keys = {o: t for o, t in _KEYS.items() if "coder" not in o} | _DECODER_KEYS if decoder else _KEYS
    values: dict[str, Any] = {name: config[theirs] for name, theirs in keys.items()}
    if config["feed_forward_proj"] not in named:
        known = ", ".join(sorted(named))
        raise UserError(
            f"T5X has no feed_forward_proj = {config['feed_forward_proj']!r}, must be one of {known}: use hf or gguf"
        )
    values["mlp_activations"] = named[config["feed_forward_proj"]]
    values |= computing
    values["logits_via_embedding"] = bool(config["tie_word_embeddings"])
    scanned = config["model_type"] == "umt5"
    if scanned:
        values["scan_layers"] = True
    network = "decoder_only" if decoder else "scalable_t5" if scanned else "t5"
    lines = ["from __gin__ import dynamic_registration", f"from t5x.examples.{network} import network"]
    if decoder:
        both_ways = config.get("inputs_attention") == "bidirectional"
        lines += ["from t5x import models", "", f"{_BOTH_WAYS} = {both_ways}"]
    lines += ["", f"network.{'TransformerConfig' if decoder else 'T5Config'}:"]
    return "\n".join([*lines, *(f"  {name} = {value!r}" for name, value in values.items())]) + "\n"
