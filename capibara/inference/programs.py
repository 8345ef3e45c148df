"""The compiled programs of an engine: reading a prompt, giving it a slot, one token more for every slot."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capibara.inference.choose import Settings, choose, log_probability
from capibara.models.api import Cache, Model, put_rows
from capibara.types import Params

State = dict[str, Any]
"""On the devices, of B slots: `cache`; `tokens` [B], the last of each; `seen` [B, V] bool, the tokens of each text."""


class Chosen(NamedTuple):
    """Tokens [B], their log probabilities [B] and, where asked for, the likeliest tokens and theirs [B, n]."""

    tokens: jax.Array
    log_probabilities: jax.Array
    likeliest: jax.Array
    their_log_probabilities: jax.Array


class Programs(NamedTuple):
    """Jitted functions; a state that is given to one is gone.

    Attributes:
      serving: parameters -> what the others take; adapters are merged.
      start: () -> state in which no slot has read anything.
      begin: (params, batch) -> logits [1, V] and the cache of one row, of as many places as the batch has.
      resume: (params, batch, row, places) -> the same after more tokens, the row grown to so many places.
      admit: (state, row, logits, slot, settings, index, forced, seen, alternatives) -> state with the row in the slot,
        and its next token.
      step: (params, state, settings, index, forced, alternatives) -> state, and every slot's next token.
      row: (state, slot, places) -> the cache of that slot, cut to its first places.
    """

    serving: Callable[[Params], Params]
    start: Callable[[], State]
    begin: Callable[..., tuple[jax.Array, Cache]]
    resume: Callable[..., tuple[jax.Array, Cache]]
    admit: Callable[..., tuple[State, Chosen]]
    step: Callable[..., tuple[State, Chosen]]
    row: Callable[..., Cache]


class _Same:
    """A model as a key: models have no hash of their own."""

    def __init__(self, model: Model):
        self.model = model

    def __hash__(self) -> int:
        return id(self.model)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.model is self.model


def build(
    model: Model,
    usable: int,
    slots: int,
    length: int,
    encoder_length: int | None = None,
    mesh: Mesh | None = None,
) -> Programs:
    """The programs for a model, `usable` ids of a vocabulary, and so many slots of `length` places; made once.

    `mesh` is that of parameters which are spread over devices: all of them then know what was chosen.
    """
    return _build(_Same(model), usable, slots, length, encoder_length, mesh)


@functools.lru_cache(maxsize=16)
def _build(same: _Same, usable: int, slots: int, length: int, encoder_length: int | None, mesh) -> Programs:
    model, adapted = same.model.plain, same.model
    everywhere = NamedSharding(mesh, PartitionSpec()) if mesh else None

    def start() -> State:
        cache = model.start_cache(slots, length, encoder_length=encoder_length)
        seen = jnp.zeros((slots, model.config.vocab_size), bool)
        return {"cache": cache, "tokens": jnp.zeros(slots, jnp.int32), "seen": seen}

    def begin(params: Params, batch: dict) -> tuple[jax.Array, Cache]:
        row = model.start_cache(1, batch["tokens"].shape[1], encoder_length=encoder_length)
        return model.prefill(params, batch, row)

    def resume(params: Params, batch: dict, row: Cache, places: int) -> tuple[jax.Array, Cache]:
        empty = model.start_cache(1, places, encoder_length=encoder_length)
        return model.resume(params, batch, put_rows(empty, row, jnp.int32(0)))

    def pick(logits, settings: Settings, index, forced, seen, alternatives: int) -> Chosen:
        logits = jnp.where(jnp.arange(logits.shape[-1]) < usable, logits, -jnp.inf)
        tokens = jnp.where(forced >= 0, forced, choose(logits, settings, index, seen))
        likeliest = jax.lax.top_k(logits, min(alternatives, logits.shape[-1]))
        normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        chosen = Chosen(tokens, log_probability(logits, tokens), likeliest[1], likeliest[0] - normaliser)
        return jax.lax.with_sharding_constraint(chosen, everywhere) if mesh else chosen

    def admit(state, row, logits, slot, settings, index, forced, seen, alternatives: int) -> tuple[State, Chosen]:
        chosen = pick(logits, settings, index, forced, seen, alternatives)
        new = {
            "cache": put_rows(state["cache"], row, slot),
            "tokens": state["tokens"].at[slot].set(chosen.tokens[0]),
            "seen": state["seen"].at[slot].set(seen[0].at[chosen.tokens[0]].set(True)),
        }
        return new, chosen

    def step(params, state, settings, index, forced, alternatives: int) -> tuple[State, Chosen]:
        logits, cache = model.decode(params, state["tokens"], state["cache"])
        chosen = pick(logits, settings, index, forced, state["seen"], alternatives)
        seen = state["seen"].at[jnp.arange(slots, dtype=jnp.int32), chosen.tokens].set(True)
        return {"cache": cache, "tokens": chosen.tokens, "seen": seen}, chosen

    def row(state: State, slot: jax.Array, places: int) -> Cache:
        one = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, slot, 1), state["cache"])
        return jax.tree.map(lambda x: x[:, :, :places] if x.ndim == 4 else x, one)

    return Programs(
        serving=jax.jit(lambda params: model.serving(adapted.merge(params))),
        start=jax.jit(start, out_shardings=everywhere),
        begin=jax.jit(begin),
        resume=jax.jit(resume, static_argnums=3),
        admit=jax.jit(admit, donate_argnums=0, static_argnums=8),
        step=jax.jit(step, donate_argnums=1, static_argnums=5),
        row=jax.jit(row, static_argnums=2),
    )
