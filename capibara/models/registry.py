"""Which class of models a configuration is of: the door by which a model is added from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from flax import nnx

from capibara.core.types import UserError
from capibara.models.layers.transformer import TransformerConfig

_Module = TypeVar("_Module", bound=type[nnx.Module])
_MODULES: dict[type[TransformerConfig], type[nnx.Module]] = {}


def model_of(config: type[TransformerConfig]) -> Callable[[_Module], _Module]:
    """Decorates the class of the models of a configuration, which is made by `Module(config, rngs)`.

    Args:
      config: the class of configurations; its subclasses have the same models until they name their own.
    """

    def register(module: _Module) -> _Module:
        _MODULES[config] = module
        return module

    return register


def module_of(config: TransformerConfig) -> type[nnx.Module]:
    """The class of a configuration's model.

    Raises:
      UserError: none was registered.
    """
    for one in type(config).__mro__:
        if one in _MODULES:
            return _MODULES[one]
    own = type(config).__name__
    raise UserError(f"{own} has no model: decorate the class of its models with @model_of({own})")
