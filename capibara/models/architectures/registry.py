"""Maps a configuration class to its model class. Models from user code register here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, Required, TypedDict, TypeVar, runtime_checkable

import jax
from flax import nnx

from capibara.core.types import Batch, Params, UserError
from capibara.models.adapters.unmerged import BatchAdapters
from capibara.models.cache.dense import Cache, LayerCache, Packed, PrefillInputs
from capibara.models.layers.stack import Stats
from capibara.models.parts.config import TransformerConfig
from capibara.sharding import RematPolicy


class ReadBatch(TypedDict, total=False):
    """The next tokens of the rows of a cache.

    Attributes:
      tokens: [B, T], padded at the right.
      counts: [B], the real tokens of each row.
      inputs: [B], of a prefill of a prefix LM: the length of the prefix; without it all tokens.
      adapters: which adapter each row has; None: no row has one.
      packed: says what rows of one token each are, where some are tokens of one prompt; None: each is a text of its own.
      encoded: [B, S, D], the encoder's output; without it the encoder reads its entries of the batch.
    """

    tokens: Required[jax.Array]
    counts: Required[jax.Array]
    inputs: jax.Array
    adapters: BatchAdapters | None
    packed: Packed | None
    encoded: jax.Array
    encoder_tokens: jax.Array
    encoder_segment_ids: jax.Array
    encoder_positions: jax.Array


class ModelModule(Protocol):
    """What a model must have to be trained, besides being an nnx.Module."""

    def __call__(self, batch: Batch, remat: RematPolicy, step: jax.Array | None) -> tuple[jax.Array, Stats]:
        """The final hidden states [B, T, D], and the layers' statistics; `step` is None outside training."""

    def head(self) -> jax.Array:
        """The output projection [V, D]."""


@runtime_checkable
class Encodes(Protocol):
    """A model with an encoder."""

    def encode(self, batch: Batch, remat: RematPolicy, step: jax.Array | None) -> tuple[jax.Array, Stats]:
        """The encoder's output [B, S, D], and its layers' statistics."""


@runtime_checkable
class Generates(Protocol):
    """A model that predicts the next token; see architectures.decoder."""

    def start_cache(
        self,
        batch: int,
        length: int,
        dtype: jax.typing.DTypeLike,
        encoder_length: int | None = None,
        spare: int = 0,
    ) -> Cache:
        """An empty cache."""

    def read(
        self, values: Sequence[Params], batch: ReadBatch, cache: Cache, is_prefill: bool
    ) -> tuple[jax.Array, Cache]:
        """The final hidden states [B, T, D] of new tokens, and the updated cache."""


@runtime_checkable
class PredictsAhead(Protocol):
    """A model with modules that predict further tokens; see architectures.decoder."""

    def predict_ahead(
        self, hidden: jax.Array, tokens: Sequence[jax.Array], batch: Batch, remat: RematPolicy, step: jax.Array | None
    ) -> tuple[list[jax.Array], list[Stats]]:
        """What the head reads of each module, [B, T, D], and the statistics of their layers."""

    def draft(
        self, hidden: jax.Array, tokens: jax.Array, now: PrefillInputs, cache: Cache
    ) -> tuple[jax.Array, LayerCache]:
        """What the head reads of the first module, and its updated cache."""


@runtime_checkable
class RunsByLayer(Protocol):
    """A model that can run layer by layer; see architectures.decoder."""

    def begin(self, batch: Batch) -> jax.Array:
        """The input of the first layer."""

    def layer(self, values: Params, x: jax.Array, batch: Batch, index: int) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The output of one layer, and the inputs of its projections."""


_Class = TypeVar("_Class", bound=Callable[..., ModelModule])  # called as MODEL(config, rngs)
_MODULES: dict[type[TransformerConfig], Callable[..., ModelModule]] = {}


def model_of(config: type[TransformerConfig]) -> Callable[[_Class], _Class]:
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

    def register(module: _Class) -> _Class:
        _check(module, config)
        _MODULES[config] = module
        return module

    return register


def _check(module: object, config: type[TransformerConfig]) -> None:
    """Raises UserError if it is no class of models."""
    if not (isinstance(module, type) and issubclass(module, nnx.Module)):
        name = getattr(module, "__name__", module)
        raise UserError(f"@model_of({config.__name__}) decorates {name}, must decorate a class of nnx.Module")
    for name in ("__call__", "head"):
        if not any(name in vars(cls) for cls in module.__mro__):
            raise UserError(f"{module.__name__} has no `{name}`: write it as in examples/extend/my_model.py")


def configurations() -> tuple[type[TransformerConfig], ...]:
    """The classes of configurations that name their own models, the last that was registered first."""
    return tuple(reversed(_MODULES))


def packs_prompts(config: TransformerConfig) -> bool:
    """Whether the model's `read` keeps prompts apart that are packed into a row: its class says so by `packs_prompts`.

    A class that has blocks or a `read` of its own must say so itself.
    """
    for cls in getattr(module_of(config), "__mro__", ()):
        if vars(cls).keys() & {"packs_prompts", "read", "block"}:
            return bool(vars(cls).get("packs_prompts", False))
    return False


def module_of(config: TransformerConfig) -> Callable[..., ModelModule]:
    """The model class of a configuration.

    Raises:
      UserError: no model class is registered.
    """
    for item in type(config).__mro__:
        if item in _MODULES:
            return _MODULES[item]
    class_name = type(config).__name__
    raise UserError(f"{class_name} has no model: decorate the class of its models with @model_of({class_name})")
