"""Low-rank adapters beside a frozen base (Hu et al. 2021, arXiv:2106.09685), and the merged model that they make.

The adapter of the weight "layers/attention/query" is "layers/attention/query_lora": its factors `a` [in ..., r] and `b`
[r, out ...] are parameters of their own, stacked along the layers as the weight is, and sharded as its dimensions are.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from flax import nnx

from capibara.config import configurable
from capibara.models import layers
from capibara.types import Params, UserError

SUFFIX = "_lora"
ALL_LINEAR = "all-linear"
# Weights of layers that are used by `layers.dense`, which is where an adapter adds to them.
_LINEAR = ("query", "key", "value", "out", "up", "gate", "down", "shared_up", "shared_gate", "shared_down")


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
    """Adapters of rank r: y = x W + scale (x a) b, where `b` begins as zero and W is not trained.

    A pattern is a shell pattern over parameters' names, in which `*` also matches slashes ("*attention/query",
    "decoder/*"), or the last part of a name alone ("query").

    Attributes:
      rank: r.
      alpha: scale is alpha / r.
      targets: patterns of the weights that have an adapter; "all-linear" is every projection of the layers. The default
        is PEFT's for models whose queries and values are weights of their own.
      rank_pattern, alpha_pattern: pairs of a pattern and what those weights have instead; the first that matches counts.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ("query", "value")
    rank_pattern: tuple[tuple[str, int], ...] = ()
    alpha_pattern: tuple[tuple[str, float], ...] = ()

    def __post_init__(self):
        for name, rank in (("rank", self.rank), *((f"rank_pattern {p!r}", r) for p, r in self.rank_pattern)):
            if rank < 1:
                raise UserError(f"Lora.{name} is {rank}, must be at least 1: try 16")
        for name, alpha in (("alpha", self.alpha), *((f"alpha_pattern {p!r}", a) for p, a in self.alpha_pattern)):
            if not 0 < alpha < math.inf:
                raise UserError(f"Lora.{name} is {alpha}, must be finite and above 0: try twice the rank")
        if not self.targets:
            raise UserError(f'Lora.targets is empty: try ("query", "value"), or ("{ALL_LINEAR}",)')

    def rank_of(self, name: str) -> int:
        """Of the adapter of the weight of this name."""
        return next((rank for pattern, rank in self.rank_pattern if _matches(name, pattern)), self.rank)

    def scale_of(self, name: str) -> float:
        """What the adapter's product is multiplied by."""
        alpha = next((alpha for pattern, alpha in self.alpha_pattern if _matches(name, pattern)), self.alpha)
        return alpha / self.rank_of(name)

    def chosen(self, names: list[str]) -> list[str]:
        """Those of the weights that have an adapter.

        Raises:
          UserError: a pattern matches none of them.
        """
        targets = ["*" if pattern == ALL_LINEAR else pattern for pattern in self.targets]
        found = [name for name in names if any(_matches(name, pattern) for pattern in targets)]
        _check_patterns("targets", targets, names)
        _check_patterns("rank_pattern", [pattern for pattern, _ in self.rank_pattern], found)
        _check_patterns("alpha_pattern", [pattern for pattern, _ in self.alpha_pattern], found)
        return found

    def trains(self, name: str) -> bool:
        """Whether training changes the parameter of this name."""
        return any(part.endswith(SUFFIX) for part in name.split("/")[:-1])


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or name.rpartition("/")[2] == pattern


def _check_patterns(field: str, patterns: list[str], names: list[str]) -> None:
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in names):
            raise UserError(f"Lora.{field} has {pattern!r}, which must match one of {', '.join(names) or 'no weights'}")


class Adapter(nnx.Module):
    """The factors of one weight's adapter.

    `a` is drawn from the uniform distribution of variance 1 / (3 fan-in) (as in PEFT and Microsoft's loralib), `b` is 0.
    """

    def __init__(self, weight: nnx.Param, rank: int, scale: float, rngs: nnx.Rngs):
        stacked, inputs = stack_dims(weight.axes), input_dims(weight.axes)
        shape, axes, split = weight[...].shape, weight.axes, stacked + inputs
        self.scale, self.inputs = scale, inputs
        bound = math.prod(shape[stacked:split]) ** -0.5
        a = jax.random.uniform(rngs.params(), (*shape[:split], rank), jnp.float32, -bound, bound)
        self.a = nnx.Param(a, axes=(*axes[:split], None))
        b = jnp.zeros((*shape[:stacked], rank, *shape[split:]), jnp.float32)
        self.b = nnx.Param(b, axes=(*axes[:stacked], None, *axes[split:]))

    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """What the weight with its adapter makes of x [B, T, in ...], given what it makes of it alone."""
        h_BTR = layers.dense(x, self.a[...], self.inputs)
        return y + self.scale * layers.dense(h_BTR, self.b[...])


def stack_dims(axes: tuple[str | None, ...]) -> int:
    """Leading dimensions along which independent weights are stacked."""
    return next(index for index, name in enumerate(axes) if name != "layers")


def input_dims(axes: tuple[str | None, ...]) -> int:
    """Dimensions that a weight contracts, after those it is stacked along: the heads' features, or one."""
    return 2 if axes[stack_dims(axes)] == "heads" else 1


def attach(model: nnx.Module, lora: Lora, rngs: nnx.Rngs) -> None:
    """Gives a model with plain parameters its adapters.

    Raises:
      UserError: a pattern of `lora` matches nothing.
    """
    found = {name: (owner, key) for name, owner, key in _params(model) if _adaptable(name, getattr(owner, key))}
    for name in lora.chosen(list(found)):
        owner, key = found[name]
        adapter = Adapter(getattr(owner, key), lora.rank_of(name), lora.scale_of(name), rngs)
        setattr(owner, key + SUFFIX, adapter)


def _params(module: nnx.Module, prefix: str = "") -> Iterator[tuple[str, nnx.Module, str]]:
    """(name, the module that has it, its attribute) of every parameter."""
    for key, value in sorted(vars(module).items()):
        if isinstance(value, nnx.Param):
            yield prefix + key, module, key
        elif isinstance(value, nnx.Module):
            yield from _params(value, f"{prefix}{key}/")


def _adaptable(name: str, weight: nnx.Param) -> bool:
    *owner, last = name.split("/")
    return "layers" in owner and last in _LINEAR and "experts" not in weight.axes


def merge(params: Params, lora: Lora) -> Params:
    """The plain model's parameters that compute the same: every adapter added to its weight.

    Args:
      params: of a model with these adapters.
      lora: its configuration, for the scales.
    """

    def one(name: str, weight: jax.Array, adapter: Params) -> jax.Array:
        return weight.astype(jnp.float32) + _product(adapter, weight.shape, lora.scale_of(name))

    return _over_weights(params, one)


def unmerge(merged: Params, adapters: Params, lora: Lora) -> Params:
    """The plain model's parameters before `merge`, but for rounding.

    Args:
      merged: what `merge` gave.
      adapters: parameters that have the adapters; the others of them are not looked at.
      lora: as for `merge`.
    """

    def one(name: str, weight: jax.Array, adapter: Params) -> jax.Array:
        return weight - _product(adapter, weight.shape, lora.scale_of(name))

    return _over_weights(_with_adapters(merged, adapters), one)


def _over_weights(params: Params, one: Callable[[str, jax.Array, Params], jax.Array], prefix: str = "") -> Params:
    """The parameters without adapters; `one(name, weight, adapter)` in place of each weight that has one."""
    plain = {}
    for key, value in params.items():
        if key.endswith(SUFFIX):
            continue
        adapter = params.get(key + SUFFIX)
        if adapter is not None:
            plain[key] = one(prefix + key, value, adapter)
        else:
            plain[key] = _over_weights(value, one, f"{prefix}{key}/") if isinstance(value, dict) else value
    return plain


def _with_adapters(params: Params, adapters: Params) -> Params:
    inner = {k: _with_adapters(v, adapters[k]) if isinstance(v, dict) else v for k, v in params.items()}
    return inner | {k: v for k, v in adapters.items() if k.endswith(SUFFIX)}


def _product(adapter: Params, shape: tuple[int, ...], scale: float) -> jax.Array:
    """scale * a b, of the weight's shape, which has one leading dimension of layers."""
    a, b = adapter["a"], adapter["b"]
    rank = a.shape[-1]
    flat = jnp.einsum("lir,lro->lio", a.reshape(shape[0], -1, rank), b.reshape(shape[0], rank, -1))
    return scale * flat.reshape(shape)
