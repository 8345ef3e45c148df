"""RWKV-4 (Peng et al. 2023), whose layers mix tokens and channels with those of the token before."""

from __future__ import annotations

from typing import Any

from capibara.interop.hf.layout.family import KEYS, Family, Values
from capibara.interop.hf.layout.rows import Names, norm, rows
from capibara.models.api import ChannelMix, Rwkv4, TransformerConfig

_L, _X, _M = "rwkv.blocks.{l}.", "layers/mixer/", "layers/mlp/"
_READ = ("key", "value", "receptance")
_LAYOUTS = {
    **{f"{_X}{name}": "ldf" for name in _READ},
    **{f"{_X}{name}_share": "ld" for name in _READ},
    **dict.fromkeys((f"{_M}up_share", f"{_M}receptance_share"), "ld"),
    **dict.fromkeys((f"{_X}decay_log", f"{_X}bonus"), "lf"),
    f"{_X}out": "lfd",
    f"{_M}receptance": "ldo",
}
_ROWS = rows(
    [
        ("rwkv.embeddings.weight", "v d", "embedding"),
        *norm("rwkv.blocks.0.pre_ln", "embedding_norm"),
        *norm(f"{_L}ln1", "layers/attention_norm"),
        (f"{_L}attention.time_decay", "f", f"{_X}decay_log"),
        (f"{_L}attention.time_first", "f", f"{_X}bonus"),
        *((f"{_L}attention.time_mix_{name}", "u u d", f"{_X}{name}_share") for name in _READ),
        *((f"{_L}attention.{name}.weight", "f d", f"{_X}{name}") for name in _READ),
        (f"{_L}attention.output.weight", "d f", f"{_X}out"),
        *norm(f"{_L}ln2", "layers/mlp_norm"),
        (f"{_L}feed_forward.time_mix_key", "u u d", f"{_M}up_share"),
        (f"{_L}feed_forward.time_mix_receptance", "u u d", f"{_M}receptance_share"),
        (f"{_L}feed_forward.key.weight", "f d", f"{_M}up"),
        (f"{_L}feed_forward.receptance.weight", "o d", f"{_M}receptance"),
        (f"{_L}feed_forward.value.weight", "d f", f"{_M}down"),
        *norm("rwkv.ln_out", "final_norm"),
        ("head.weight", "v d", "output"),
    ],
    _LAYOUTS,
)


def _prepare(values: Values) -> Values:
    return values if values.get("intermediate_size") else {**values, "intermediate_size": 4 * values["hidden_size"]}


def _read(values: Values) -> dict[str, Any]:
    width = values.get("attention_hidden_size")
    mixer = Rwkv4(inner_dim=None if width in (None, values["hidden_size"]) else width)
    return {"mixer": mixer, "layer_pattern": ("recurrent",)}


def _write(config: TransformerConfig) -> dict[str, Any]:
    mixer = config.mixer
    return {"attention_hidden_size": mixer.width(config)} if isinstance(mixer, Rwkv4) else {}


_RWKV = Family(
    model_type="rwkv",
    architectures=("RwkvForCausalLM",),
    keys={name: KEYS[name] for name in ("vocab_size", "embed_dim", "num_layers", "mlp_dim")}
    | {"norm_eps": "layer_norm_epsilon"},
    fixed={"norm": "layer", "embedding_norm": "layer", "activation": "relu2", "num_heads": 1, "positions": "none"}
    | {"channel_mixer": ChannelMix()},
    activation="",
    rope=False,
    defaults={"vocab_size": 50_277, "hidden_size": 4096, "num_hidden_layers": 32, "layer_norm_epsilon": 1e-5},
    only={"layer_norm_epsilon": (1e-5,)},  # that of the last norm whatever the key says
    mixer_keys={"inner_dim": "attention_hidden_size"},
    # Of a kernel. Reported as unread is rescale_every: for float16, transformers halves the stream in steps as it
    # evaluates, and not the epsilon of its norms. The model that it trains is the one here.
    read_keys=("context_length",),
    prepare=_prepare,
    read=_read,
    write=_write,
)

FAMILIES = ((_RWKV, Names(_ROWS, ((r"^(?=(?:blocks|embeddings|ln_out)\.)", "rwkv."),))),)
