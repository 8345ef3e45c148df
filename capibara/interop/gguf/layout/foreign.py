"""Metadata of GGUF files that a family does not have: harmless, or refused by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from capibara.core import limits
from capibara.core.types import UserError

# Metadata that are not part of a config.json: sizes that the tensors have too, and bookkeeping.
_KNOWN = frozenset(
    """
    attention.value_length vocab_size features_length tensor_data_layout pooling_type
    rope.scaling.finetuned rope.scaling.original_context_length
    """.split()
)
# Metadata that change what is computed, and the values with which they do not.
_NEUTRAL = {
    "attention.causal": (True,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "expert_weights_scale": (0, 1),
    "expert_weights_norm": (True,),
    "expert_gating_func": (
        0,
        1,
        3,
    ),  # softmax before and after the choice of experts are equal, with normalised weights
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "interleave_moe_layer_step": (0, 1),
    "moe_every_n_layers": (0, 1),
}


def check(
    arch: str,
    model_type: str,
    values: Mapping[str, object],
    supported: Collection[str],
    *,
    longest: int | None,
    fixed: Mapping[str, object],
) -> None:
    """Raises where the metadata say something that the family's config.json cannot, or that is not known here.

    Args:
      arch, model_type: of the family.
      values: the metadata whose keys begin with the architecture, without it.
      supported: keys that are read.
      longest: the longest row; None: not known.
      fixed: metadata that have one value in the family.
    """
    for key, value in values.items():
        if key in supported or key in _KNOWN or value in _same(key, values, longest, fixed):
            continue
        raise UserError(
            f"{arch}.{key} is {limits.shortened(value)}, {model_type} models here have none: take another file of the model"
        )


def _same(key: str, values: Mapping[str, Any], longest: int | None, fixed: Mapping[str, Any]) -> tuple[Any, ...]:
    """The values with which a key changes nothing."""
    if key == "attention.sliding_window":  # of a family without: it must not be shorter than the longest row
        return (0, values[key]) if longest is not None and values[key] >= longest else (0,)
    if key == "expert_feed_forward_length":  # of a family whose experts are as wide as other layers
        return (0, values.get("feed_forward_length", 0))
    of_all = key.removesuffix("_swa")  # what layers with a window have of their own
    neutral: tuple[Any, ...] = _NEUTRAL.get(key, (0, "", [], fixed.get(key)))
    return neutral if of_all == key else (*neutral, values.get(of_all))
