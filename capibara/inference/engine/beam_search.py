"""Beam search as in T5X's `decoding.beam_search`: K live beams and up to K finished ones for each prompt.

Every step takes the 2 K candidates with the highest log probabilities of all K x V, so that K beams stay live even if K
finish. Finished beams are ranked by their log probability divided by the length penalty ((5 + tokens) / 6) ** alpha.
The search for a prompt ends when no live beam can still beat its K finished ones, independently of the batch's other
prompts.

The beams of a prompt are adjacent rows of one cache; each step reorders these rows to follow the live beams.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capibara import sharding
from capibara.core import tree
from capibara.core.types import Params
from capibara.inference.engine.programs.programs import Same, on_mesh
from capibara.models import api
from capibara.models.api import Cache, Model, ReadBatch
from capibara.sharding import Rules

NEVER = -1e7  # T5X's log probability of an excluded token: finite
_STEPS = 64  # steps in one program; after it the host checks whether the search is done

State = dict[str, Any]
"""The state on the devices, for B prompts with K beams of at most T tokens. `cache` has B * K rows; `last` [B, K],
`texts` [B, K, T] and `log_p` [B, K] describe the live beams, likeliest last; `ended_texts`, `scores` and `ended`
(whether the entry is used) describe the finished ones; `steps`, `done`, `limits` and `before` are [B]; `ends` is [B,
E]."""


class Sizes(NamedTuple):
    """Static shapes of the programs: K beams of at most `tokens`, in rows with `capacity` tokens of `dtype`."""

    num_decodes: int
    tokens: int
    capacity: int
    encoder_length: int | None = None
    dtype: str | None = None


class BeamRequests(NamedTuple):
    """The requests of B prompts.

    Attributes:
      limits: [B] most tokens of a beam; 0: no prompt.
      before: [B] tokens of the prompt that count towards the length.
      ends: [B, E] end token ids; -1: none.
      alpha, min_log_prob: as in BeamSearch.
    """

    limits: np.ndarray
    before: np.ndarray
    ends: np.ndarray
    alpha: np.ndarray
    min_log_prob: np.ndarray


class BeamResults(NamedTuple):
    """The results for B prompts; the best of the K beams comes last.

    `texts` [B, K, T], 0 after the end token; `scores` [B, K]; whether the entry is used [B, K]; `steps` [B], the number
    of tokens that the search generated.
    """

    texts: jax.Array
    scores: jax.Array
    there: jax.Array
    steps: jax.Array


class Programs(NamedTuple):
    """Jitted functions; a state that is passed to one is donated.

    Attributes:
      begin: (params, batch of B prompts, BeamRequests) -> state with the first token of each beam, and whether all are done.
      advance: (params, state, BeamRequests, most) -> the same after at most `most` more tokens.
      results: state -> BeamResults, replicated on every device.
    """

    begin: Callable[[Params, ReadBatch, BeamRequests], tuple[State, jax.Array]]
    advance: Callable[[Params, State, BeamRequests, Any], tuple[State, jax.Array]]
    results: Callable[[State], BeamResults]


def build(model: Model, usable: int, sizes: Sizes, mesh: Mesh | None = None, rules: Rules = Rules()) -> Programs:
    """The programs for a model and the first `usable` ids of its vocabulary; cached. `mesh`, `rules`: the engine's."""
    return _build(Same(model), usable, sizes, mesh, rules)


@functools.lru_cache(maxsize=16)
def _build(same: Same, usable: int, sizes: Sizes, mesh: Mesh | None, rules: Rules) -> Programs:
    model, K = same.model.plain, sizes.num_decodes

    def known(x: object) -> Any:
        """Replicates a value, so that every process can read it."""
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec())) if mesh else x

    def begin(params: Params, batch: ReadBatch, requests: BeamRequests) -> tuple[State, jax.Array]:
        rows = len(batch["tokens"])
        empty = model.start_cache(rows, sizes.capacity, dtype=sizes.dtype, encoder_length=sizes.encoder_length)
        logits, cache = model.prefill(params, batch, empty)
        state = _nothing_found(rows, sizes, requests) | {
            "cache": jax.tree.map(lambda x: jnp.repeat(x, K, axis=0), cache)
        }
        state = _laid_out(_chosen(jnp.repeat(logits, K, axis=0), usable, state, requests))
        return state, known(jnp.all(state["done"]))

    def advance(params: Params, state: State, requests: BeamRequests, most: jax.Array) -> tuple[State, jax.Array]:
        def step(carried: tuple[State, jax.Array]) -> tuple[State, jax.Array]:
            state, created = carried
            logits, cache = model.decode(params, state["last"].reshape(-1), state["cache"])
            return _laid_out(_chosen(logits, usable, state | {"cache": cache}, requests)), created + 1

        def goes_on(carried: tuple[State, jax.Array]) -> jax.Array:
            return ~jnp.all(carried[0]["done"]) & (carried[1] < most)

        state, _ = jax.lax.while_loop(goes_on, step, (state, jnp.int32(0)))
        return state, known(jnp.all(state["done"]))

    def results(state: State) -> BeamResults:
        any_B1 = jnp.any(state["ended"], axis=1, keepdims=True)
        texts = jnp.where(any_B1[..., None], state["ended_texts"], state["texts"])
        scores = jnp.where(any_B1, state["scores"], state["log_p"])
        there = jnp.where(any_B1, state["ended"], state["log_p"] > NEVER / 2)
        return known(BeamResults(texts, scores, there, state["steps"]))

    jit = functools.partial(on_mesh, mesh, rules)
    return Programs(begin=jit(begin), advance=jit(advance, donate_argnums=1), results=jit(results))


def search(programs: Programs, params: Params, batch: ReadBatch, requests: BeamRequests) -> BeamResults:
    """Runs the search to its end; returns the results on the host.

    Args:
      programs: from `build`.
      params: from `Model.serving`.
      batch: prompts, as for `Model.prefill`.
      requests: of the prompts.
    """
    state, done = programs.begin(params, batch, requests)
    while not bool(done):
        state, done = programs.advance(params, state, requests, np.int32(_STEPS))
    return jax.device_get(programs.results(state))


def beam_requests_of(
    limits: Sequence[int], before: Sequence[int], ends: Sequence[Sequence[int]], alpha: float, min_log_prob: float
) -> BeamRequests:
    """Builds an BeamRequests from lists with one entry per prompt."""
    longest = max(map(len, ends))
    rows = [[*row_ends, *[-1] * (longest - len(row_ends))] for row_ends in ends]
    ints, floats = functools.partial(np.asarray, dtype=np.int32), functools.partial(np.asarray, dtype=np.float32)
    return BeamRequests(ints(limits), ints(before), ints(rows), floats(alpha), floats(min_log_prob))


def _laid_out(state: State) -> State:
    """Shards the state over the active mesh: prompts (with their beams) as rows, keys and values by heads."""
    B, K = state["last"].shape

    def of_cache(axes: tuple[str | None, ...], x: jax.Array) -> jax.Array:
        by_beam = x.reshape(B, K, *x.shape[1:])
        return sharding.constrain(by_beam, (axes[0], None, *axes[1:])).reshape(x.shape)

    cache = jax.tree.map(of_cache, api.paged.axes(state["cache"]), state["cache"], is_leaf=tree.is_axes)
    names = lambda x: ("batch",) + (None,) * (x.ndim - 1)  # noqa: E731
    rest = {name: sharding.constrain(x, names(x)) for name, x in state.items() if name != "cache"}
    return rest | {"cache": cache}


def _nothing_found(rows: int, sizes: Sizes, requests: BeamRequests) -> State:
    B, K, T = rows, sizes.num_decodes, sizes.tokens
    first_K = jnp.where(jnp.arange(K) == 0, 0.0, NEVER).astype(jnp.float32)  # at first a prompt's beams are identical
    nothing = jnp.zeros((B, K, T), jnp.int32)
    return {
        "last": jnp.zeros((B, K), jnp.int32),
        "texts": nothing,
        "log_p": jnp.broadcast_to(first_K, (B, K)),
        "ended_texts": nothing,
        "scores": jnp.full((B, K), NEVER, jnp.float32),
        "ended": jnp.zeros((B, K), bool),
        "steps": jnp.zeros(B, jnp.int32),
        "done": jnp.asarray(requests.limits) <= 0,
    }


def _penalty(alpha: jax.Array | np.ndarray, tokens: jax.Array) -> jax.Array:
    """Of brevity."""
    return ((5.0 + tokens.astype(jnp.float32)) / 6.0) ** alpha


def _chosen(logits: jax.Array, usable: int, state: State, requests: BeamRequests) -> State:
    """Adds a token to each beam, given the `logits` [B * K, V] after its last one; done prompts are unchanged."""
    (B, K, T), E = state["texts"].shape, requests.ends.shape[1]
    totals, parents, tokens = _candidates(logits, usable, state["log_p"], (1 + E) * K)
    steps_B, before_B = state["steps"], jnp.asarray(requests.before)
    texts = _taken(state["texts"], parents)
    texts = jnp.where(jnp.arange(T) == steps_B[:, None, None], tokens[..., None], texts)
    ended = jnp.any(tokens[..., None] == jnp.asarray(requests.ends)[:, None], axis=-1)

    go_on = totals + jnp.where(ended, NEVER, 0.0)
    order = jnp.flip(jax.lax.top_k(go_on, K)[1], axis=1)
    scores = totals / _penalty(requests.alpha, before_B + steps_B + 1)[:, None] + jnp.where(ended, 0.0, NEVER)
    all_scores = jnp.concatenate([state["scores"], scores], axis=1)
    best = jnp.flip(jax.lax.top_k(all_scores, K)[1], axis=1)
    new = {
        "last": _taken(tokens, order),
        "texts": _taken(texts, order),
        "log_p": _taken(go_on, order),
        "ended_texts": _taken(jnp.concatenate([state["ended_texts"], texts], axis=1), best),
        "scores": _taken(all_scores, best),
        "ended": _taken(jnp.concatenate([state["ended"], ended], axis=1), best),
        "steps": steps_B + 1,
    }
    new["done"] = _done(new, requests)
    done_B = state["done"]
    retained = {n: jnp.where(done_B.reshape(B, *(1,) * (x.ndim - 1)), state[n], x) for n, x in new.items()}
    return retained | {"cache": _reordered(state["cache"], _taken(parents, order))}


def _candidates(
    logits: jax.Array, usable: int, log_p_BK: jax.Array, count: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The `count` likeliest extensions, [B, count]: log probabilities, the beams that they extend, and their tokens."""
    (B, K), V = log_p_BK.shape, logits.shape[-1]
    log_p = sharding.constrain(jax.nn.log_softmax(logits), ("batch", None))
    log_p = jnp.where(jnp.arange(V) < usable, log_p, -jnp.inf) + log_p_BK.reshape(-1, 1)
    each = min(count, V)  # the overall likeliest are among each beam's likeliest
    best, tokens = (x.reshape(B, K * each) for x in jax.lax.top_k(log_p, each))
    totals, at = jax.lax.top_k(best, min(count, K * each))
    return totals, at // each, _taken(tokens, at).astype(jnp.int32)


def _done(state: State, requests: BeamRequests) -> jax.Array:
    """[B]: whether no better beam is possible, or the limit is reached."""
    limits, steps_B = jnp.asarray(requests.limits), state["steps"]
    # No beam is longer than the limit, and log probabilities never increase.
    penalty_B1 = _penalty(requests.alpha, jnp.asarray(requests.before) + limits + 1)[:, None]
    best_B1 = state["log_p"][:, -1:] / penalty_B1
    worst = jnp.where(state["ended"], jnp.min(state["scores"], axis=1, keepdims=True), NEVER)
    unlikely_B = jnp.all(best_B1 < requests.min_log_prob / penalty_B1, axis=1)
    return (steps_B >= limits) | jnp.all(worst > best_B1, axis=1) | unlikely_B


def _taken(x_BN: jax.Array, index_BM: jax.Array) -> jax.Array:
    """Gathers entries of each prompt by index: [B, M, ...]."""
    return jnp.take_along_axis(x_BN, index_BM.reshape(*index_BM.shape, *(1,) * (x_BN.ndim - 2)), axis=1)


def _reordered(cache: Cache, parents_BK: jax.Array) -> Cache:
    """Reorders the cache's rows to follow the live beams; what a prompt's beams share stays."""
    B, K = parents_BK.shape

    def moved(x: jax.Array) -> jax.Array:
        return _taken(x.reshape(B, K, *x.shape[1:]), parents_BK).reshape(x.shape)

    def of_layer(layer: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {name: x if name.startswith("cross_") else moved(x) for name, x in layer.items()}

    return cache | {"layers": tuple(map(of_layer, cache["layers"]))}
