"""Jamba (AI21 2024, arXiv:2403.19887): Mamba whose steps, keys and queries are normalised, attention and experts in some layers."""

from __future__ import annotations

from typing import Any

from capibara.core.types import UserError
from capibara.interop.hf.catalog.hybrid.mamba import expansion, selective_rows, step_rank
from capibara.interop.hf.catalog.hybrid.mamba2 import BIASES, ENDS, FEED_FORWARD
from capibara.interop.hf.layout.family import KEYS, ONLY_SILU, Family, Values, expert_layers, recurrent
from capibara.interop.hf.layout.rows import FIRST_MLP, LLAMA, QWEN_EXPERTS, M, Names, renamed, without
from capibara.models.api import DecoderConfig, Mamba, Moe, TransformerConfig

_MIXER = {"state_dim": "mamba_d_state", "taps": "mamba_d_conv", "step_rank": "mamba_dt_rank"}


def _periodic(values: Values, name: str) -> tuple[str, list[bool]]:
    """The keys of a period and its offset with their values, and whether each layer is one of the period's.

    Raises:
      UserError: the offset is not in the period.
    """
    keys = f"{name}_layer_period", f"{name}_layer_offset"
    period, offset = (values[key] for key in keys)
    of = f"{keys[0]} = {period} and {keys[1]} = {offset}"
    if period < 1 or offset >= period:
        raise UserError(
            f"config.json has {of}, must be a period of at least 1 and an offset below it: copy the file again"
        )
    return of, [layer % period == offset for layer in range(values["num_hidden_layers"])]


def _prepare(values: Values) -> Values:
    of, attends = _periodic(values, "attn")
    if len({*attends}) < 2:
        raise UserError(
            f"config.json has {of}, must give attention to some of num_hidden_layers = {len(attends)} layers: take another model"
        )
    rank = step_rank(values["mamba_dt_rank"], values["hidden_size"], "mamba_dt_rank")
    types = ["full_attention" if here else "linear_attention" for here in attends]
    return {**values, "mamba_dt_rank": rank, "layer_types": types}


def _read(values: Values) -> dict[str, Any]:
    sizes: dict[str, Any] = {ours: values[theirs] for ours, theirs in _MIXER.items()}
    sizes |= {"inner_dim": values["mamba_expand"] * values["hidden_size"]}
    sizes |= {"bias": BIASES[bool(values["mamba_conv_bias"]), bool(values["mamba_proj_bias"])]}
    sizes |= {"norms": "scaled", "norms_eps": values["rms_norm_eps"]}
    fields = recurrent(values, "linear_attention") | {"mixer": Mamba(**sizes)}
    of, sparse = _periodic(values, "expert")
    if values["num_experts"] < 2 or not any(sparse):
        return fields
    experts = {"num_experts": values["num_experts"], "top_k": values["num_experts_per_tok"], "gates": "scores"}
    experts |= {"balance_loss": values["router_aux_loss_coef"]}
    return fields | {"moe": Moe(**experts, **expert_layers(sparse, of))}


def _period(layers: list[int], name: str) -> dict[str, int]:
    """The way back: the period of these layers, and its offset."""
    period = layers[1] - layers[0] if len(layers) > 1 else layers[0] + 1 if layers else 1
    return {f"{name}_layer_period": period, f"{name}_layer_offset": layers[0] % period if layers else 0}


def _write(config: TransformerConfig) -> dict[str, Any]:
    mixer, moe = config.mixer, config.moe
    if not (isinstance(config, DecoderConfig) and isinstance(mixer, Mamba)):
        return {}
    written: dict[str, Any] = {theirs: getattr(mixer, ours) for ours, theirs in _MIXER.items()}
    written |= {"mamba_expand": expansion(mixer.inner_dim, config.embed_dim)}
    written |= {"mamba_conv_bias": mixer.bias.of_conv, "mamba_proj_bias": mixer.bias.of_projections}
    written |= _period([layer for layer, kind in enumerate(config.kinds) if kind != "recurrent"], "attn")
    if moe is None:
        return written | {"num_experts": 1}
    written |= _period(sorted({*range(config.num_layers)} - {*config.dense_layers}), "expert")
    written |= {"num_experts": moe.num_experts, "num_experts_per_tok": moe.top_k}
    return written | {"router_aux_loss_coef": moe.balance_loss}


_BASE = renamed(without(LLAMA, ".mlp."), *FEED_FORWARD) + selective_rows("mamba")
_MLP = renamed(tuple(row for row in LLAMA if ".mlp." in row.name), *FEED_FORWARD)
_EXPERTS = renamed(FIRST_MLP + QWEN_EXPERTS, ("mlp.gate.", "mlp.router."), *FEED_FORWARD)

FAMILIES = (
    (
        Family(
            model_type="jamba",
            architectures=("JambaForCausalLM",),
            keys={ours: theirs for ours, theirs in KEYS.items() if ours != "head_dim"},
            fixed={"activation": "swiglu", "positions": "none"},
            activation="",
            rope=False,
            defaults={"vocab_size": 65_536, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32}
            | {"num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
            | {"num_experts": 16, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001}
            | {"expert_layer_period": 2, "expert_layer_offset": 1, "attn_layer_period": 8, "attn_layer_offset": 4}
            | {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": "auto"}
            | {"mamba_conv_bias": True, "mamba_proj_bias": False},
            only=ONLY_SILU,
            read_keys=("head_dim", "output_router_logits"),
            aliases={"num_local_experts": "num_experts"},
            prepare=_prepare,
            read=_read,
            write=_write,
        ),
        Names(
            _BASE + _MLP,
            (ENDS,),
            chosen=lambda shapes: _BASE + (_EXPERTS if M + "router" in shapes else _MLP),
        ),
    ),
)
