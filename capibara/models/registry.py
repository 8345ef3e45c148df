"""Maps a configuration class to its model class. Models from user code register here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from flax import nnx

from capibara.core.types import UserError
from capibara.models.layers.config import TransformerConfig

_Module = TypeVar("_Module", bound=type[nnx.Module])
_MODULES: dict[type[TransformerConfig], type[nnx.Module]] = {}


def model_of(config: type[TransformerConfig]) -> Callable[[_Module], _Module]:
    """Class decorator: registers a model class for a configuration class. The model is built by `Module(config, rngs)`.

    Args:
      config: the configuration class. Its subclasses use the same model unless they register their own.

    Raises:
      UserError: one of the two is no such class, or the model class lacks a method.
    """
    if not (isinstance(config, type) and issubclass(config, TransformerConfig)):
        raise UserError(
            f"@model_of({getattr(config, '__name__', config)}) must name a configuration, a class that derives from "
            "TransformerConfig: write @model_of(MyConfig) above the model"
        )

    def register(module: _Module) -> _Module:
        if not (isinstance(module, type) and issubclass(module, nnx.Module)):
            name = getattr(module, "__name__", module)
            raise UserError(f"@model_of({config.__name__}) decorates {name}, must decorate a class of nnx.Module")
        for name in ("__call__", "head"):
            if not any(name in vars(cls) for cls in module.__mro__):
                raise UserError(f"{module.__name__} has no `{name}`: write it as in examples/extend/my_model.py")
        _MODULES[config] = module
        return module

    return register


def configurations() -> tuple[type[TransformerConfig], ...]:
    """The classes of configurations that name their own models, the last that was registered first."""
    return tuple(reversed(_MODULES))


def module_of(config: TransformerConfig) -> type[nnx.Module]:
    """The model class of a configuration.

    Raises:
      UserError: no model class is registered.
    """
    for one in type(config).__mro__:
        if one in _MODULES:
            return _MODULES[one]
    own = type(config).__name__
    raise UserError(f"{own} has no model: decorate the class of its models with @model_of({own})")
