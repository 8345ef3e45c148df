"""The weights that training begins from, out of the files of others."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from capibara.models import api
from capibara.models.api import TransformerConfig
from capibara.types import Params, UserError

# What does not say which function a model computes of its weights; of a mixture's fields most are about training.
_FREE = ("dtype", "attention", "layer_loop", "quantization", "lora", "max_length", "moe")


def load(path: str, config: TransformerConfig, target: Params) -> Params:
    """The parameters of a foreign model, where training wants them.

    Args:
      path: of what interop.checkpoint.open_model reads.
      config: of the run's model; its adapters are not looked at.
      target: jax.ShapeDtypeStructs with shardings, of the model without adapters.

    Raises:
      UserError: it cannot be read, or is another model than the configuration's.
    """
    from capibara.interop import checkpoint, hf_config

    foreign = checkpoint.open_model(path)
    theirs, own = hf_config.from_hf(foreign.config), type(config).__name__
    if type(theirs) is not type(config):
        raise UserError(f"Trainer.init_from ({path!r}) is a model of {type(theirs).__name__}, this run's is of {own}")
    for name in (field.name for field in dataclasses.fields(config) if field.name not in _FREE):
        ours, wanted = _value(config, name), _value(theirs, name)
        if ours != wanted:
            raise UserError(
                f"{own}.{name} is {ours!r}, must be {wanted!r} with the weights of Trainer.init_from ({path!r}): "
                "set it so, or name the model's own --gin_file=models/...gin"
            )
    plain = api.build(dataclasses.replace(config, lora=None))
    return checkpoint.load_params(foreign, plain, jax.tree.map(lambda leaf: leaf.sharding, target))


def _value(config: TransformerConfig, name: str) -> Any:
    """Of a field; where that is None, what it stands for."""
    match name:
        case "num_kv_heads":
            return config.kv_heads
        case "head_dim":
            return config.head_size
        case "attention_scale":
            return config.attention_kind(causal=False).scale
    return getattr(config, name)
