"""Low-rank adapters beside a frozen base (Hu et al. 2021, arXiv:2106.09685).

The adapter of the weight "layers/attention/query" is "layers/attention/query_lora". Its factors `a` [in ..., r] and `b`
[r, out ...] are parameters of their own, stacked along the layers and sharded as the weight's dimensions are. Every
expert has its own adapter: `a` of "layers/mlp/up_lora" is [layers, experts, in, r].

Adapters that share one `a` (Lora.fused) store it with the first of them by name. Where layers differ in rank, factors
have the largest rank, padded with zeros in layers of a smaller one; the padding has no gradient and stays zero.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import fnmatch
import functools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.config import configurable
from capibara.core import projections, tree
from capibara.core.projections import in_dims, stack_dims
from capibara.core.types import UserError
from capibara.models.adapters import trainable_tokens
from capibara.models.adapters.lora_experts import Factors
from capibara.models.layers import layers
from capibara.models.layers.quantized_weights import BaseDtype, Blocks, FrozenWeight, StoredWeight, Whole

SUFFIX = "_lora"
ALL_LINEAR = "all-linear"
# A router can have an adapter too, but is stored in float32.
_LINEAR = projections.ADAPTABLE


_Number = TypeVar("_Number", int, float)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
    """Adapters of rank r: y = x W + scale (x a) b. `b` starts at zero and W is frozen.

    Patterns are shell patterns over parameter names, in which `*` also matches slashes ("*attention/query",
    "decoder/*"), or the last component of a name ("query"). Targets, ranks and alphas may apply to some layers only, by
    names with layer numbers ("layers/3/attention/query", "layers/[0-5]/*").

    Attributes:
      rank: r.
      alpha: scale is alpha / r.
      rslora: scale is alpha / sqrt(r) instead, so that larger ranks learn equally fast (Kalajdzievski 2023,
        arXiv:2312.03732).
      dora: also trains the norms of the columns of W + scale a b (Liu et al. 2024, arXiv:2402.09353). As in the paper,
        the norm that the columns are divided by gets no gradient.
      targets: patterns of the weights that get an adapter; "all-linear" is every projection of the layers and their
        experts and, as in PEFT, the routers. The default is PEFT's for models with separate query and value weights.
      rank_pattern, alpha_pattern: pairs of a pattern and the rank or alpha of the weights it matches; the first match
        wins.
      fused: groups of weights of a block that share one `a`, as PEFT's adapter does where transformers stores the group
        as one tensor: (("query", "key", "value"), ("gate", "up")).
      dropout: share of an adapter's inputs that a train step drops; all micro-batches of a step drop the same ones.
      modules_to_save: patterns of other parameters to train in full.
      trainable_tokens: ids of tokens whose embedding rows are trained, in a tied head too (decoders only).
      base_dtype: storage format of the frozen parameters. nf4 makes it QLoRA (Dettmers et al. 2023, arXiv:2305.14314).
      double_quantization: also stores the blocks' scales in 8 bits.
    """

    rank: int = 16
    alpha: float = 32.0
    rslora: bool = False
    dora: bool = False
    targets: tuple[str, ...] = ("query", "value")
    rank_pattern: tuple[tuple[str, int], ...] = ()
    alpha_pattern: tuple[tuple[str, float], ...] = ()
    fused: tuple[tuple[str, ...], ...] = ()
    dropout: float = 0.0
    modules_to_save: tuple[str, ...] = ()
    trainable_tokens: tuple[int, ...] = ()
    base_dtype: BaseDtype = BaseDtype.FLOAT32
    double_quantization: bool = False

    def __post_init__(self) -> None:
        for name, rank in (("rank", self.rank), *((f"rank_pattern {p!r}", r) for p, r in self.rank_pattern)):
            if rank < 1:
                raise UserError(f"Lora.{name} is {rank}, must be at least 1: try 16")
        for name, alpha in (("alpha", self.alpha), *((f"alpha_pattern {p!r}", a) for p, a in self.alpha_pattern)):
            if not 0 < alpha < math.inf:
                raise UserError(f"Lora.{name} is {alpha}, must be finite and above 0: try twice the rank")
        if not 0 <= self.dropout < 1:
            raise UserError(f"Lora.dropout is {self.dropout}, must be from 0 to below 1: try 0.05")
        if not self.targets:
            raise UserError(f'Lora.targets is empty: try ("query", "value"), or ("{ALL_LINEAR}",)')
        trainable_tokens.check(self.trainable_tokens)
        grouped = [name for group in self.fused for name in group]
        for name in grouped:
            if name not in _LINEAR or grouped.count(name) > 1:
                known = ", ".join(_LINEAR)
                raise UserError(f"Lora.fused has {name!r}, must be one of {known}, and each in one group")
        if self.double_quantization and not self.base_dtype.in_blocks:
            raise UserError(
                f"Lora.double_quantization is for a base in blocks, and base_dtype is {str(self.base_dtype)!r}: set 'nf4', "
                "or leave it out"
            )

    def scale_of(self, name: str) -> float:
        """The factor that the adapter's product is scaled by."""
        return self._scale(name)

    def of_layers(self, name: str, numbers: Sequence[int]) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Rank and scale of the named adapter in each of the layers with these numbers; both are 0 in layers without it."""
        names = [self.numbered(name, layer) for layer in numbers]
        there = [self._targets(name) or self._targets(item) for item in names]
        ranks = tuple(self._rank(name, item) if has else 0 for item, has in zip(names, there))
        return ranks, tuple(self._scale(name, item) if has else 0.0 for item, has in zip(names, there))

    def _targets(self, name: str) -> bool:
        return ALL_LINEAR in self.targets or any(_matches(name, pattern) for pattern in self.targets)

    def _rank(self, *names: str) -> int:
        return _first(self.rank_pattern, names, self.rank)

    def _scale(self, *names: str) -> float:
        rank = self._rank(*names)
        return _first(self.alpha_pattern, names, self.alpha) / (rank**0.5 if self.rslora else rank)

    def chosen(self, names: Mapping[str, Sequence[int]]) -> list[str]:
        """The names of the weights that have an adapter in at least one layer.

        Args:
          names: weight name -> numbers of the layers that have it.

        Raises:
          UserError: a pattern matches no weight.
        """
        every = {name: [name, *(self.numbered(name, layer) for layer in layers)] for name, layers in names.items()}
        result = [name for name, ways in every.items() if any(map(self._targets, ways))]
        targets = [pattern for pattern in self.targets if pattern != ALL_LINEAR]
        _check_patterns("targets", targets, every, names)
        _check_patterns("rank_pattern", [pattern for pattern, _ in self.rank_pattern], every, result)
        _check_patterns("alpha_pattern", [pattern for pattern, _ in self.alpha_pattern], every, result)
        return result

    def first_of(self, name: str, others: Collection[str]) -> str:
        """The weight of the same block that stores the `a` which this weight's adapter shares.

        Args:
          name: name of the weight.
          others: last components of the names of the block's weights that have adapters.
        """
        last = name.rpartition("/")[2]
        group = next((group for group in self.fused if last in group), ())
        return min((other for other in group if other in others), default=last)

    @staticmethod
    def numbered(name: str, layer: int) -> str:
        """The name that patterns see for a weight in one layer: "layers/3/attention/query"."""
        return re.sub(r"(?<![^/])layers/", f"layers/{layer}/", name, count=1)

    def trains(self, name: str) -> bool:
        """Whether training changes the named parameter."""
        *owners, last = name.split("/")
        adapter = any(owner.endswith(SUFFIX) for owner in owners) and last not in ("seed", "scale")
        is_new = name in ("score", "critic")  # heads of scores and values, which the base does not have
        return adapter or is_new or any(_matches(name, pattern) for pattern in self.modules_to_save)


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or name.rpartition("/")[2] == pattern


def _first(patterns: Sequence[tuple[str, _Number]], names: Sequence[str], otherwise: _Number) -> _Number:
    """The value of the first pattern that matches any of the names."""
    result = (value for pattern, value in patterns if any(_matches(name, pattern) for name in names))
    return next(result, otherwise)


def _check_patterns(
    field: str, patterns: Sequence[str], every: Mapping[str, Sequence[str]], names: Collection[str]
) -> None:
    for pattern in patterns:
        if not any(_matches(item, pattern) for name in names for item in every[name]):
            raise UserError(f"Lora.{field} has {pattern!r}, which must match one of {', '.join(names) or 'no weights'}")


_current_step: contextvars.ContextVar[jax.Array | None] = contextvars.ContextVar("lora_step", default=None)


@contextlib.contextmanager
def at_step(step: jax.Array | None) -> Iterator[None]:
    """A context for tracing in which adapters apply the dropout of this train step; None: no dropout."""
    token = _current_step.set(step)
    try:
        yield
    finally:
        _current_step.reset(token)


class Adapter(nnx.Module):
    """The low-rank factors of one weight.

    `a` is initialised from a uniform distribution of variance 1 / (3 fan-in), as in PEFT and Microsoft's loralib; `b`
    to 0.

    Args:
      name: name of the weight.
      lora: the configuration of all adapters.
      weight: the weight, stacked along the layers.
      axes: the weight's logical axes.
      rngs: source of the initial `a`.
      first: the adapter whose `a` and seed this one shares.
      some: the numbers of the layers of modules that some layers lack.
    """

    def __init__(
        self,
        name: str,
        lora: Lora,
        weight: jax.Array,
        axes: tuple[str | None, ...],
        rngs: nnx.Rngs,
        first: Adapter | None = None,
        some: tree.LayersOf = MappingProxyType({}),
    ):
        stacked, inputs = stack_dims(axes), in_dims(axes)
        shape, split = weight.shape, stacked + inputs
        ranks, scales = lora.of_layers(name, tree.layer_numbers(name, some, shape[0]) if stacked else (0,))
        self.inputs, self.dropout = inputs, lora.dropout
        self.scale: nnx.Param | float
        if len(set(scales)) > 1:
            _check_layers(name, lora, ranks, axes)
            self.scale = nnx.Param(jnp.asarray(scales, jnp.float32), axes=("layers",))
        else:
            self.scale = scales[0]
        bound = math.prod(shape[stacked:split]) ** -0.5
        self.a = nnx.Param(_drawn(layers.next_key(rngs), shape[:split], ranks, bound), axes=(*axes[:split], None))
        b = jnp.zeros((*shape[:stacked], max(ranks), *shape[split:]), jnp.float32)
        self.b = nnx.Param(b, axes=(*axes[:stacked], None, *axes[split:]))
        # One seed per layer and expert, since a scan runs the same program for all of them.
        seed = jax.random.bits(layers.next_key(rngs), shape[:stacked], jnp.uint32) if lora.dropout else None
        self.seed = None if seed is None else nnx.Param(seed, axes=axes[:stacked])
        if first is not None:
            _check_fused(name, self.a, first.a)
            self.a, self.seed = first.a, first.seed
        lengths = jnp.sqrt(jnp.sum(jnp.square(weight), axis=tuple(range(stacked, split))))
        self.magnitude = nnx.Param(lengths, axes=(*axes[:stacked], *axes[split:])) if lora.dora else None

    def __call__(self, x: jax.Array, y: jax.Array, weight: jax.Array | Whole | Blocks) -> jax.Array:
        """The output of the weight with its adapter for x [B, T, in ...]; `y` is the output of the weight alone."""
        h_BTR = layers.dense(self._dropped(x), self.a[...], self.inputs)
        scale = self.scale[...] if isinstance(self.scale, nnx.Param) else self.scale
        y = y + jnp.asarray(scale, y.dtype) * layers.dense(h_BTR, self.b[...])
        if self.magnitude is None:
            return y
        lengths = column_lengths(weight.astype(jnp.float32), self.a[...], self.b[...], scale, self.inputs)
        return y * (self.magnitude[...] / jax.lax.stop_gradient(lengths)).astype(y.dtype)

    def of_experts(self, weight: jax.Array | Whole | Blocks, dtype: jax.typing.DTypeLike) -> Factors:
        """The adapters of one weight of all experts, [E, in, out], in the form that `moe.dispatch` takes."""
        a, b, share, step = self.a[...], self.b[...], None, _current_step.get()
        assert not isinstance(self.scale, nnx.Param), "scales that differ by layer are not for experts"
        if self.magnitude is not None:
            lengths = jax.vmap(functools.partial(column_lengths, scale=self.scale, inputs=self.inputs))
            share = self.magnitude[...] / jax.lax.stop_gradient(lengths(weight.astype(jnp.float32), a, b))
        seeds = None if self.seed is None or step is None else self.seed[...]
        of_step = None if seeds is None else step
        return Factors(a.astype(dtype), b.astype(dtype), share, seeds, of_step, self.scale, self.dropout)

    def _dropped(self, x: jax.Array) -> jax.Array:
        """Applies dropout to `x` in a train step; returns x itself otherwise."""
        step = _current_step.get()
        if self.seed is None or step is None:
            return x
        key = jax.random.fold_in(jax.random.key(self.seed[...]), step)
        retained = jax.random.bernoulli(key, 1 - self.dropout, x.shape)
        return jnp.where(retained, x / (1 - self.dropout), jnp.zeros((), x.dtype))


def _drawn(key: jax.Array, shape: tuple[int, ...], ranks: Sequence[int], bound: float) -> jax.Array:
    """Draws an initial `a` [*shape, largest rank], zero beyond each layer's rank."""
    a = jax.random.uniform(key, (*shape, max(ranks)), jnp.float32, -bound, bound)
    if len(set(ranks)) == 1:
        return a
    used = jnp.arange(max(ranks)) < jnp.asarray(ranks)[:, None]
    return jnp.where(used.reshape(len(ranks), *(1,) * (len(shape) - 1), max(ranks)), a, 0.0)


def _check_layers(name: str, lora: Lora, ranks: Sequence[int], axes: tuple[str | None, ...]) -> None:
    """Checks that the layers' adapters can be stacked.

    Raises:
      UserError: layers differ where all of them must have the same adapter.
    """
    if "experts" in axes:
        raise UserError(
            f"Lora's adapters of {name} differ between layers, those of experts must be the same in all layers"
        )
    if lora.dora and not all(ranks):
        raise UserError(
            f"Lora.dora is set, and {name} has no adapter in layer {ranks.index(0)}: give it one in all layers"
        )


def _check_fused(name: str, a: nnx.Param, first: nnx.Param) -> None:
    if a.shape != first.shape:
        raise UserError(
            f"Lora.fused groups {name} with a weight of another rank or input size ({list(a.shape[1:])} and "
            f"{list(first.shape[1:])}): give them one rank in rank_pattern"
        )


def column_lengths(weight: jax.Array, a: jax.Array, b: jax.Array, scale: jax.Array | float, inputs: int) -> jax.Array:
    """Norms of the columns of W + scale a b, one per output, without materialising the sum."""
    dims, precision = tuple(range(inputs)), jax.lax.Precision.HIGHEST
    aw = jnp.tensordot(a, weight, (dims, dims), precision=precision)
    aab = jnp.tensordot(jnp.tensordot(a, a, (dims, dims), precision=precision), b, 1, precision=precision)
    squares = jnp.sum(jnp.square(weight), dims) + jnp.sum(b * (2 * scale * aw + scale**2 * aab), 0)
    return jnp.sqrt(squares)


class _Tap:
    """Stands in for an adapter: records the input of the weight and adds nothing."""

    def __init__(self, name: str, seen: dict[str, jax.Array]):
        self._name, self._seen = name, seen

    def __call__(self, x: jax.Array, y: jax.Array, weight: jax.Array) -> jax.Array:
        self._seen[self._name] = x
        return y


def tap(module: nnx.Module) -> dict[str, jax.Array]:
    """Makes a module without adapters record the inputs of its projections: name -> input, filled when it runs."""
    seen: dict[str, jax.Array] = {}
    for name, owner, key in list(_params(module)):
        if key in _LINEAR and "experts" not in getattr(owner, key).axes:
            setattr(owner, key + SUFFIX, _Tap(name, seen))
    return seen


def attach(model: nnx.Module, lora: Lora, rngs: nnx.Rngs, some: tree.LayersOf = MappingProxyType({})) -> None:
    """Adds adapters to a model with plain parameters, and stores the frozen parameters in their storage format.

    `some`: the numbers of the layers of modules that some layers lack.

    Raises:
      UserError: a pattern of `lora` matches nothing, or a weight cannot be stored in that format.
    """
    result = {name: (owner, key) for name, owner, key in _params(model)}
    _check_patterns("modules_to_save", lora.modules_to_save, {name: [name] for name in result}, result)
    if lora.trainable_tokens:
        sizes = cast(trainable_tokens.Embedding, model).config
        whole = lora.trains("embedding")
        trainable_tokens.check_sizes(lora.trainable_tokens, sizes.vocab_size, sizes.data_kind, whole)
    numbers = {
        name: tree.layer_numbers(name, some, getattr(owner, key).shape[0])
        for name, (owner, key) in result.items()
        if _adaptable(name)
    }
    chosen = lora.chosen(numbers)
    for name, (owner, key) in result.items():
        param = getattr(owner, key)
        if not lora.trains(name):
            setattr(owner, key, _stored(name, param, lora))
        elif name in chosen:
            raise UserError(f"Lora.modules_to_save has {name}, which has an adapter: remove it from one of the two")
        if name in chosen:
            weight = getattr(owner, key)[...].astype(jnp.float32)
            siblings = {other.rpartition("/")[2] for other in chosen if result[other][0] is owner}
            first = getattr(owner, lora.first_of(name, siblings) + SUFFIX, None)
            setattr(owner, key + SUFFIX, Adapter(name, lora, weight, param.axes, rngs, first, some))
    if lora.trainable_tokens:
        table_VD = cast(trainable_tokens.Embedding, model).embedding[...]
        setattr(model, trainable_tokens.ATTRIBUTE, trainable_tokens.Rows(table_VD, lora.trainable_tokens))


def _stored(name: str, param: nnx.Param, lora: Lora) -> nnx.Param | StoredWeight:
    """A frozen parameter in the storage format `lora.base_dtype`."""
    axes = param.axes
    *owner, last = name.split("/")
    linear = "layers" in owner and last in _LINEAR
    if linear and lora.base_dtype.in_blocks:
        return StoredWeight(param, lora.base_dtype, block_dim(axes), double=lora.double_quantization)
    wide = len(axes) - stack_dims(axes) > 1 and {"embed", "expert_embed"} & set(axes)
    value = param[...].astype(jnp.bfloat16 if wide and lora.base_dtype is not BaseDtype.FLOAT32 else jnp.float32)
    return FrozenWeight(value, axes=axes) if linear else nnx.Param(value, axes=axes)


def block_dim(axes: tuple[str | None, ...]) -> int:
    """The last dimension that a weight contracts, counted from the end."""
    return stack_dims(axes) + in_dims(axes) - 1 - len(axes)


def _params(module: nnx.Module, prefix: str = "") -> Iterator[tuple[str, nnx.Module, str]]:
    """(name, module that owns it, attribute) of every parameter."""
    for key, value in sorted(vars(module).items()):
        if isinstance(value, nnx.Param):
            yield prefix + key, module, key
        elif isinstance(value, nnx.Module):
            yield from _params(value, f"{prefix}{key}/")


def _adaptable(name: str) -> bool:
    *owner, last = name.split("/")
    return "layers" in owner and last in (*_LINEAR, "router")
