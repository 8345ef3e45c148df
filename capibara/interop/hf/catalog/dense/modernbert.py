"""ModernBERT's decoders (Weller et al. 2025, arXiv:2507.11412): its layers read forwards, with its transform before the head."""

from __future__ import annotations

from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.catalog.encoders.modern import MODERN, MODERNBERT, prepare, read_layers, write_layers
from capibara.interop.hf.layout.family import Family, Values
from capibara.interop.hf.layout.rows import BARE, BUFFERS, A, L, Names, linear, renamed, rows, without
from capibara.models.api import DecoderConfig, TransformerConfig

_ROWS = renamed(without(MODERNBERT, "Wqkv"), ("head.dense.", "lm_head.dense."), ("head.norm.", "lm_head.norm.")) + rows(
    [
        *linear(f"{L}attn.q_proj", "nh d", A + "query"),
        *linear(f"{L}attn.k_proj", "nh d", A + "key"),
        *linear(f"{L}attn.v_proj", "nh d", A + "value"),
    ]
)


def _prepare(values: Values) -> Values:
    """Checks that a window has positions."""
    values = prepare(values)
    half = values.get("sliding_window")
    half = (values["local_attention"] or 0) // 2 if half is None else half
    if half < 1 and "sliding_attention" in values["layer_types"]:
        raise UserError(
            f"config.json of a modernbert-decoder has layer_types 'sliding_attention' and local_attention = "
            f"{values['local_attention']} (sliding_window = {values.get('sliding_window')}), must be at least 2 (1): try 128"
        )
    return {**values, "sliding_window": half}


def _write(config: TransformerConfig) -> dict[str, Any]:
    assert isinstance(config, DecoderConfig), "the family's kind"
    return write_layers(config, config.window)


FAMILIES = (
    (
        Family(
            model_type="modernbert-decoder",
            architectures=("ModernBertDecoderForCausalLM",),
            fixed={"embedding_norm": "layer", "first_norm": "none", "transform": "dense"},
            read=read_layers,
            write=_write,
            **MODERN | {"prepare": _prepare},
        ),
        Names(_ROWS, (BARE, (r"^(?=(?:embeddings|final_norm)\.)", "model.")), BUFFERS),
    ),
)
