"""Model FLOPs per trained token, independent of the hardware (PaLM, appendix B)."""

from __future__ import annotations

from typing import Protocol, cast

import jax

from capibara.core import projections, tree
from capibara.core.types import ParamAxes, Params
from capibara.models.architectures.encoder import EncoderConfig
from capibara.models.parts.config import TransformerConfig

_TRAINED = 3  # one forward pass, and two backward: the gradients of the inputs and of the weights

_OF_DISTANCES = tuple(projection.name for projection in projections.POSITIONS)


class _Encodes(Protocol):
    """A configuration of an encoder-decoder."""

    @property
    def encoder_windows(self) -> tuple[int | None, ...]: ...


def flops_per_token(
    config: TransformerConfig, params: Params, axes: ParamAxes, length: int, encoder_length: int | None = None
) -> float:
    """FLOPs of a forward and a backward pass without recomputation, per token of a full row with one document.

    Counts 2 per matmul weight applied to the token (top_k of num_experts in a mixture of experts, and the router), and
    4 per key, head and dimension in attention: the causal half, or the keys in a local layer's window; and what a mixer
    says of its recurrence. The gradients of frozen weights are not counted.

    Args:
      config: of the model.
      params: nested dict of arrays or shapes.
      axes: the same nested dict of logical axes.
      length: tokens in a row; for an encoder-decoder, in a decoder row. Decoder tokens are counted.
      encoder_length: tokens in an encoder row; their cost is divided among the decoder's tokens.
    """
    head = {"tied": "embedding", "separate": "output", "score": "score"}[config.head]
    width = config.embedding_width if isinstance(config, EncoderConfig) else config.embed_dim
    outputs = 1 if config.head == "score" else config.vocab_size
    heads = 1 + len(config.mtp_windows)  # modules that predict further tokens read it, too
    weights = heads * outputs * width * _share(config, head)  # tied or not; the lookup is no matmul
    of_encoder = 0.0
    parts = zip(
        tree.path_names(params), jax.tree.leaves(params), jax.tree.leaves(axes, is_leaf=tree.is_axes), strict=True
    )
    for name, leaf, names in parts:
        if name.startswith("encoder/") or name.endswith(("cross_attention/key", "cross_attention/value")):
            of_encoder += _weights_per_token(config, name, leaf, names)
        else:
            weights += _weights_per_token(config, name, leaf, names) * config.passes(name)
    mixing = sum(kind.mixes for kind in config.kinds)
    recurrent = mixing * (config.mixer.flops_per_token(config) if config.mixer else 0)
    recurrent += config.num_layers * (config.channel_mixer.flops_per_token(config) if config.channel_mixer else 0)
    keys, encoder_keys = _keys(config, length, encoder_length or 0)
    per_key = config.num_heads * (config.head_size + config.value_size)
    if isinstance(config, EncoderConfig) and config.disentangled is not None:
        keys += config.depth * config.disentangled.rows * config.disentangled.terms.number / 2  # one product, not two
    decoder, encoder = 2 * (weights + per_key * keys) + recurrent, 2 * (of_encoder + per_key * encoder_keys)
    return float(_TRAINED * (decoder + encoder * (encoder_length or 0) / length))


def _weights_per_token(
    config: TransformerConfig, name: str, leaf: jax.Array | jax.ShapeDtypeStruct, names: tuple[str, ...]
) -> float:
    """Number of a parameter's weights that one token is multiplied by."""
    matrix = len([n for n in names if n != "layers"]) > 1 and not name.endswith(
        ("bias", "magnitude", "_lora/rows", "_norm/scale")
    )
    of_distances = name.rpartition("/")[2] in _OF_DISTANCES  # projected once in a step
    if not matrix or of_distances or "vocab" in names or "position" in names or {*names} <= {"layers", "norm", None}:
        return 0.0
    size = leaf.size * _share(config, name)
    if "experts" not in names:
        return size
    assert config.moe is not None, "it has experts"
    return size * config.moe.top_k / config.moe.num_experts


def _share(config: TransformerConfig, name: str) -> float:
    """Passes through a weight: three, or two if it is frozen."""
    of_rows = config.lora is not None and config.lora.trainable_tokens and name == "embedding"  # of a tied head
    return 1 if config.lora is None or config.lora.trains(name) or of_rows else (_TRAINED - 1) / _TRAINED


def _keys(config: TransformerConfig, length: int, encoder_length: int) -> tuple[float, float]:
    """Keys visible to a token, averaged over a row and summed over layers: in the decoder (or BERT), in its encoder."""

    def causal(window: int | None) -> float:
        window = length if window is None else min(window, length)
        return window / 2 if config.in_blocks else window - window**2 / (2 * length)

    def both(window: int | None, length: int = length) -> float:
        side = length if window is None else min(window, length)
        return 2 * side - 1 - side * (side - 1) / length

    match config.data_kind:
        case "masked":
            return sum(map(both, config.windows)) * config.depth / config.num_layers, 0
        case "encoder_decoder":
            encodes = cast(_Encodes, config)
            encoder_keys = sum(both(window, encoder_length) for window in encodes.encoder_windows if encoder_length)
            return sum(map(causal, config.windows)) + config.num_layers * encoder_length, encoder_keys
    usual = config.num_heads * (config.head_size + config.value_size)
    of_layers = zip(config.windows, config.attended_sizes, strict=True)
    ahead = sum(map(causal, config.mtp_windows))
    ahead += config.further_keys(length)
    return ahead + sum(causal(window) * size / usual for window, size in of_layers), 0
