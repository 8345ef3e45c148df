"""What a family of Hugging Face models is: the keys of its config.json and their meaning."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from capibara.core.types import UserError
from capibara.models.api import DecoderConfig, TransformerConfig

Values = Mapping[str, Any]


class Kind(enum.StrEnum):
    """The kind of our model."""

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_DECODER = "encoder_decoder"


KINDS = {"full_attention": "global", "sliding_attention": "local"}


# The sizes of latent attention, as all of its families call them.
LATENT_SIZES = {
    "kv_rank": "kv_lora_rank",
    "query_rank": "q_lora_rank",
    "rotary_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """An architecture.

    Attributes:
      model_type: its name.
      kind: of our model.
      architectures: class names in config.json with these tensors; the first one is written.
      keys: our fields -> its keys.
      fixed: our fields with fixed values.
      defaults: its keys -> their values if config.json does not set them.
      only: its keys -> supported values; the first one is written.
      tied: whether the head is tied to the embedding if config.json does not say.
      activation: key of the activation's name; "": it has none, and `fixed` says it.
      gated: whether its MLP is gated.
      transform: key of the activation before an encoder's head; "": that of the layers, or `fixed` says it.
      window: which layers have a window: "none", "all" or "types" (as in layer_types).
      kinds: the entries of layer_types, and our kinds of layers.
      rope: whether positions are rotary.
      rope_unless: key that, if true, leaves out the rotary positions and all keys about them; "": none.
      pairs: which dimensions of a head are rotated together.
      pairs_key: key that says whether these are adjacent ones.
      mscale: whether mscale_all_dim of YaRN is a factor of the scores, too.
      rope_by_layer: whether layers with a window have rotary positions of their own.
      old_rope: whether rotary positions are written for transformers 4 too; not where its keys would replace those of 5.
      theta, share: keys of the base of rotary frequencies and of the share of a head that is rotated, outside of
        rope_parameters.
      fraction: share of a head that is rotated if config.json does not say.
      experts: key of the number of experts; "": it has none.
      moe: fields of our Moe with fixed values.
      moe_keys: other fields of our Moe -> its keys.
      mixer_keys: fields of our mixer -> its keys, for messages; `read` reads them.
      read_moe: further fields of our Moe, which come before the others.
      partial: whether only a part of a head may be rotated.
      mtp_key: key of the number of modules that predict further tokens; "": its files have none that are read.
      mtp: fields of our Mtp with fixed values.
      aliases: other names of its keys; one of these comes first where a file has both.
      biases: keys of optional biases in config.json, and the value of our `bias` for each.
      sides: objects of config.json with the keys of each stack of an encoder-decoder, for which `write` gives further values;
        (): the keys stand in no object.
      read_keys: further keys that it reads.
      divides: whether transformers requires embed_dim to be a multiple of the number of heads.
      config: the class of our decoder's configuration; None: DecoderConfig.
      prepare: the values as the others read them, with what transformers does where a config.json is silent.
      read, write: convert values of config.json to further fields of ours, and a configuration to those values.
    """

    model_type: str
    kind: Kind = Kind.DECODER
    architectures: tuple[str, ...]
    keys: dict[str, str]
    fixed: dict[str, Any] = dataclasses.field(default_factory=dict)
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    only: dict[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    tied: bool = False
    activation: str = "hidden_act"
    gated: bool = True
    transform: str = ""
    window: str = "none"
    kinds: dict[str, str] = dataclasses.field(default_factory=lambda: dict(KINDS))
    rope: bool = True
    rope_unless: str = ""
    pairs: str = "halves"
    pairs_key: str = ""
    mscale: bool = False
    rope_by_layer: bool = False
    old_rope: bool = True
    theta: str = "rope_theta"
    share: str = "partial_rotary_factor"
    fraction: float = 1.0
    experts: str = ""
    moe: dict[str, Any] = dataclasses.field(default_factory=dict)
    moe_keys: dict[str, str] = dataclasses.field(default_factory=dict)
    mixer_keys: dict[str, str] = dataclasses.field(default_factory=dict)
    read_moe: Callable[[Values], dict[str, Any]] | None = None
    partial: bool = False
    mtp_key: str = ""
    mtp: dict[str, Any] = dataclasses.field(default_factory=dict)
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)
    biases: dict[str, str] = dataclasses.field(default_factory=dict)
    sides: tuple[str, ...] = ()
    read_keys: tuple[str, ...] = ()
    divides: bool = False
    config: type[DecoderConfig] | None = None
    prepare: Callable[[Values], Values] | None = None
    read: Callable[[Values], dict[str, Any]] | None = None
    write: Callable[[TransformerConfig], dict[str, Any]] | None = None


KEYS = {
    "vocab_size": "vocab_size",
    "embed_dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
}
WITHOUT_GROUPS = {ours: theirs for ours, theirs in KEYS.items() if ours not in ("num_kv_heads", "head_dim")}
LAYER_NORM = {"norm_eps": "layer_norm_eps"}
CAPS = {"attention_soft_cap": "attn_logit_softcapping", "logit_soft_cap": "final_logit_softcapping"}
NO_BIAS = {"attention_bias": (False, None)}
ATTENTION_BIAS = {"attention_bias": "attention"}
ONLY_SILU = {"hidden_act": ("silu", "swish")}  # of mixers, too
MTP_KEY = "num_nextn_predict_layers"
CAUSAL = {"use_bidirectional_attention": (False, None)}
SILU = {"hidden_act": "silu", "rope_theta": 10_000.0, "rms_norm_eps": 1e-6}
QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
GEMMA = {"norm_scale": "offset", "embedding_scale": "sqrt_dim"}
TANH_DEFAULT = {"rope_theta": 10_000.0, "rms_norm_eps": 1e-6, "head_dim": 256}


def with_rope(values: Values, rope: Values) -> Values:
    """The values with these rotary positions where the file says nothing of them."""
    if values.get("rope_parameters") is not None or values.get("rope_scaling"):
        return values
    return {**values, "rope_parameters": dict(rope)}


def rope_by_kind(values: Values, usual: Values, *needed: str) -> Values:
    """The values with an object of rotary positions for each of layer_types.

    Args:
      values: of config.json.
      usual: those objects where the file has none.
      needed: keys that each of them must have.

    Raises:
      UserError: a kind of layers has no such object.
    """
    rope = values.get("rope_parameters")
    if rope is None:
        return {**values, "rope_parameters": dict(usual)}
    objects = [rope.get(kind) for kind in values.get("layer_types") or ()]
    if not all(isinstance(of_kind, Mapping) and of_kind.keys() >= {*needed} for of_kind in objects):
        with_keys = f" with {' and '.join(needed)}" if needed else ""
        raise UserError(
            f"config.json of a {values['model_type']} has rope_parameters without an object for each of layer_types{with_keys}: "
            "copy the file again"
        )
    return values


def typed(values: Values, is_full: Callable[[int], bool]) -> Values:
    """The values with layer_types, for which `is_full` says what layers have no window where the file does not."""
    if values.get("layer_types") is not None:
        return values
    layers = range(values.get("num_hidden_layers") or 0)
    return {**values, "layer_types": ["full_attention" if is_full(i) else "sliding_attention" for i in layers]}


def last_of(count: int) -> Callable[[Values], Values]:
    """A `prepare` of models in which the last one of so many layers has no window."""
    return lambda values: typed(values, lambda i: (i + 1) % count == 0)


def first_of(count: int) -> Callable[[Values], Values]:
    """A `prepare` of models in which the first one of so many layers has no window."""
    return lambda values: typed(values, lambda i: i % count == 0)


def shortest(kinds: Sequence[str]) -> tuple[str, ...]:
    """The shortest pattern that the layers' kinds repeat."""
    count = len(kinds)
    sizes = (n for n in range(1, count + 1) if all(kinds[i] == kinds[i % n] for i in range(count)))
    size = next(sizes, 0)  # a model without layers is refused by its number of them
    return tuple(kinds[:size])


def expert_layers(sparse: Sequence[bool], of: str) -> dict[str, Any]:
    """The fields of our Moe that say which layers have experts.

    Args:
      sparse: for each layer, whether it has.
      of: the keys that say so and their values, for messages.

    Raises:
      UserError: none has.
    """
    if True not in sparse:
        raise UserError(
            f"config.json has {of}, must be experts in some of num_hidden_layers = {len(sparse)} layers: take another model"
        )
    first = sparse.index(True)
    if all(sparse[first:]):
        return {"first_dense": first}
    return {"pattern": shortest(["experts" if is_sparse else "dense" for is_sparse in sparse])}


# Entries of layer_types in older files, which transformers reads as those of today.
OLD_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}


def recurrent(values: Values, name: str, *, both: bool = True, windows: bool = False) -> dict[str, Any]:
    """Our layer_pattern for layer_types, in which recurrent layers have this name.

    Args:
      values: of config.json.
      name: of recurrent layers.
      both: whether there must be layers of both kinds.
      windows: whether layers that attend may have a window.

    Raises:
      UserError: a layer is of another kind, or there is not one entry for each layer.
    """
    count, kinds = values["num_hidden_layers"], {name: "recurrent", "full_attention": "global"}
    kinds |= {"sliding_attention": "local"} if windows else {}
    stated = values.get("layer_types")
    if not isinstance(stated, list):
        raise UserError(f"config.json has layer_types = {stated!r}, must be a list with one entry for each layer")
    types = [OLD_KINDS[kind] if kind in OLD_KINDS else kind for kind in stated]
    if unknown := [kind for kind in types if kind not in kinds]:
        raise UserError(f"config.json has layer_types {unknown[0]!r}, must be one of {', '.join(kinds)}")
    if len(types) != count:
        raise UserError(f"config.json has {len(types)} layer_types, must be one for each of {count} layers")
    if both and (name not in types or len({*types} - {name}) == 0):
        raise UserError(f"config.json has layer_types {types[0]!r} alone, must have both of {', '.join(kinds)}")
    return {"layer_pattern": shortest([kinds[kind] for kind in types])}


def write_recurrent(config: TransformerConfig, name: str, *, windows: bool = False) -> dict[str, Any]:
    """The way back: layer_types, of a decoder whose layers are all of these kinds."""
    assert isinstance(config, DecoderConfig), "the family's kind"
    names = {"recurrent": name} | ({"local": "sliding_attention"} if windows else {})
    return {"layer_types": [names.get(str(kind), "full_attention") for kind in config.kinds]}


def unrotated(types: Sequence[str], rotated: Sequence[object], window: int | None, of: str) -> dict[str, Any]:
    """Our layer_pattern and window for layer_types, and for which layers have rotary positions.

    Args:
      types: the entries of layer_types.
      rotated: a true value for each layer with rotary positions.
      window: sliding_window.
      of: the keys that say so, for messages.

    Raises:
      UserError: a layer is of a kind that our decoder does not have.
    """
    kinds = []
    for layer, (name, turned) in enumerate(zip(types, rotated, strict=True)):
        if name not in KINDS:
            raise UserError(f"config.json has layer_types {name!r}, must be one of {', '.join(KINDS)}")
        if name == "sliding_attention" and not (turned and window):
            missing = "rotary positions" if window else "a sliding_window"
            raise UserError(
                f"config.json has {of} for a layer {layer} with a window and without {missing}, "
                f"sliding_window = {window}: take another model"
            )
        kinds.append(KINDS[name] if turned else "unrotated")
    pattern = shortest(kinds)
    return {"layer_pattern": pattern, "window": window if "local" in pattern else None}
