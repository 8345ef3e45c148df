"""The compiled programs of an engine: prefill, admission to a slot, and decode steps of all slots."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capibara import sharding
from capibara.core import tree
from capibara.core.types import Params, PyTree
from capibara.inference.sampling.sampler import Settings, choose, log_probability
from capibara.models.api import BatchAdapters, Cache, Model, paged, put_rows

State = dict[str, Any]
"""On the devices, for B slots: `cache`; `tokens` [B], the last of each; `seen` [B, V] bool, the tokens of each text."""


class SampledTokens(NamedTuple):
    """Tokens [B, T], their log probabilities [B, T] and, if requested, the likeliest tokens and theirs [B, T, n].

    `drawn` [B, T]: log probabilities under the distributions that the tokens were drawn from, from `choose`. `counts`
    [B]: number of valid tokens, at least one.
    """

    tokens: jax.Array
    log_probabilities: jax.Array
    drawn: jax.Array
    likeliest: jax.Array
    their_log_probabilities: jax.Array
    counts: jax.Array


class Sizes(NamedTuple):
    """Static sizes of the programs: `slots` slots of `length` positions in `dtype` (None: the compute dtype).

    An encoder reads `encoder_length` tokens; layers with a window have `spare` additional positions; a program gives a
    row at most `steps` tokens. `pool` is the size of the slots' pages; None: each slot has all its positions.
    """

    slots: int
    length: int
    encoder_length: int | None = None
    dtype: str | None = None
    spare: int = 0
    steps: int = 1
    pool: paged.Sizes | None = None


class Step(Protocol):
    """A jitted step."""

    def __call__(self, *args: Any) -> tuple[State, SampledTokens]: ...

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """Like jax.jit's."""


class Programs(NamedTuple):
    """Jitted functions; a state that is passed to one is donated. `table`: the pages of each slot; None: no pages.

    Attributes:
      serving: parameters -> parameters in the layout of the others; merges adapters.
      start: () -> state with empty slots.
      prefill: (params, batch of n rows) -> logits [n, V] and the cache of these rows, with the batch's positions.
      resume: (params, batch, row, positions) -> the same after more tokens, with the row grown to `positions`.
      one: (rows of any tree, index) -> the tree of that row alone.
      admit: (state, row, logits, slot, settings, index, forced, seen, table, alternatives) -> state with the row in the
        slot, and its next token.
      step: (params, state, settings, index, forced, count, table, alternatives, beside) -> state, and every slot's next
        `count` tokens, at most Sizes.steps; a forced token is the first one. `beside`: the adapters of the slots, as
        `adapters` of a batch; None: no adapters.
      verify: (params, state, settings, index, forced, guesses, counts, table, alternatives, beside) -> state, and every
        slot's next tokens: the correct ones of its first `counts` guesses, and one more. A forced token is the first
        one.
      row: (state, slot, table, positions) -> the cache of that slot, cut to its first positions.
    """

    serving: Callable[[Params], Params]
    start: Callable[[], State]
    prefill: Callable[..., tuple[jax.Array, Cache]]
    resume: Callable[..., tuple[jax.Array, Cache]]
    one: Callable[..., Any]
    admit: Callable[..., tuple[State, SampledTokens]]
    step: Step
    verify: Callable[..., tuple[State, SampledTokens]]
    row: Callable[..., Cache]


class Same:
    """A model as a dict key, compared by identity."""

    def __init__(self, model: Model):
        self.model = model

    def __hash__(self) -> int:
        return id(self.model)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.model is self.model


def mesh_of(params: Params) -> jax.sharding.Mesh | None:
    """The mesh of sharded parameters, or None."""
    sharding = getattr(jax.tree.leaves(params)[0], "sharding", None)
    mesh = sharding.mesh if isinstance(sharding, jax.sharding.NamedSharding) else None
    return mesh if isinstance(mesh, jax.sharding.Mesh) and mesh.size > 1 else None


def build(
    model: Model,
    usable: int,
    sizes: Sizes,
    mesh: Mesh | None = None,
    rules: sharding.Rules = sharding.Rules(),
) -> Programs:
    """The programs for a model and the first `usable` ids of its vocabulary; cached.

    `mesh` is that of sharded parameters. Slots are sharded on it like rows of a batch, keys and values also by heads,
    as `rules` say; sampled tokens are replicated.
    """
    return _build(Same(model), usable, sizes, mesh, rules)


@functools.lru_cache(maxsize=16)
def _build(same: Same, usable: int, sizes: Sizes, mesh: Mesh | None, rules: sharding.Rules) -> Programs:
    model, adapted = same.model.plain, same.model
    replicated = functools.partial(_replicated, mesh)
    empty = functools.partial(
        model.start_cache, dtype=sizes.dtype, encoder_length=sizes.encoder_length, spare=sizes.spare
    )

    def prefill(params: Params, batch: dict) -> tuple[jax.Array, Cache]:
        return model.prefill(params, batch, empty(*batch["tokens"].shape))

    def resume(params: Params, batch: dict, row: Cache, positions: int) -> tuple[jax.Array, Cache]:
        return model.resume(params, batch, put_rows(empty(1, positions), row, jnp.int32(0)))

    def admit(
        state: State, row: Cache, logits: Array, slot: Array, settings: Settings, index: Array, forced: Array,
        seen: Array, table: Array | None, alternatives: int,
    ) -> tuple[State, SampledTokens]:  # fmt: skip
        sampled = _pick(logits, usable, settings, index, forced, seen, alternatives)
        return _laid_out(_with_row(state, row, slot, seen, table, sampled.tokens[0, 0])), replicated(sampled)

    def step(
        params: Params, state: State, settings: Settings, index: Array, forced: Array, count: Array,
        table: Array | None, alternatives: int, beside: BatchAdapters | None = None,
    ) -> tuple[State, SampledTokens]:  # fmt: skip
        def next_of(state: State, done: jax.Array) -> tuple[State, SampledTokens]:
            weights, put = _unconverted(params, sizes, done), jnp.where(done == 0, forced, -1)
            return _next(model, usable, weights, state, settings, index + done, put, table, alternatives, beside)

        state, sampled = _repeated(next_of, state, count, sizes, alternatives)
        return _laid_out(state), replicated(sampled)

    def verify(
        params: Params, state: State, settings: Settings, index: Array, forced: Array, guesses: Array, counts: Array,
        table: Array | None, alternatives: int, beside: BatchAdapters | None = None,
    ) -> tuple[State, SampledTokens]:  # fmt: skip
        state = state | {"cache": paged.with_table(state["cache"], table)}
        new, sampled = _verify(
            model, usable, params, state, settings, index, forced, guesses, counts, alternatives, beside
        )
        return _laid_out(new | {"cache": paged.without_table(new["cache"])}), replicated(sampled)

    def start() -> State:
        return _laid_out(_empty_state(model.config.vocab_size, sizes, empty))

    def serving(params: Params) -> Params:
        return model.serving(adapted.merge(params))

    jit = functools.partial(on_mesh, mesh, rules)
    return Programs(
        serving=jit(serving),
        start=jit(start),
        prefill=jit(prefill),
        resume=jit(resume, static_argnums=3),
        one=jit(_one),
        admit=jit(admit, donate_argnums=0, static_argnums=9),
        step=jit(step, donate_argnums=1, static_argnums=7),
        verify=jit(verify, donate_argnums=1, static_argnums=8),
        row=jit(_row, static_argnums=3),
    )


def on_mesh(mesh: Mesh | None, rules: sharding.Rules, program: Callable, **options: Any) -> jax.stages.Wrapped:
    """Jits a program that is lowered with the mesh active, since kernels are not partitioned by the compiler."""

    @functools.wraps(program)
    def active(*args: Any) -> Any:
        with sharding.activate(mesh, rules) if mesh else contextlib.nullcontext():
            return program(*args)

    return jax.jit(active, **options)


def _replicated(mesh: Mesh | None, sampled: SampledTokens) -> SampledTokens:
    """Replicates sampled tokens on every device."""
    return jax.lax.with_sharding_constraint(sampled, NamedSharding(mesh, PartitionSpec())) if mesh else sampled


def _row(state: State, slot: jax.Array, table: jax.Array | None, positions: int) -> Cache:
    return paged.row(state["cache"], slot, positions, table)


def _one(rows: PyTree, index: jax.Array) -> PyTree:
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, index, 1), rows)


def _laid_out(state: State) -> State:
    """Shards the state over the active mesh, if there is one."""
    return _constrained(state, state_axes(state))


def state_axes(state: State) -> Any:
    """The logical axes of every array of a state."""
    return {"cache": paged.axes(state["cache"]), "tokens": ("batch",), "seen": ("batch", "act_vocab")}


def _constrained(arrays: PyTree, axes: PyTree) -> PyTree:
    return jax.tree.map(lambda names, x: sharding.constrain(x, names), axes, arrays, is_leaf=tree.is_axes)


def _next(
    model: Model,
    usable: int,
    params: Params,
    state: State,
    settings: Settings,
    index_B: jax.Array,
    forced_B: jax.Array,
    table: jax.Array | None,
    alternatives: int,
    adapters: BatchAdapters | None,
) -> tuple[State, SampledTokens]:
    """State, and the next token of every row."""
    logits, cache = model.decode(params, state["tokens"], paged.with_table(state["cache"], table), adapters)
    sampled = _pick(logits, usable, settings, index_B, forced_B, state["seen"], alternatives)
    tokens_B = sampled.tokens[:, 0]
    new = {"cache": paged.without_table(cache), "tokens": tokens_B, "seen": _with_seen(state["seen"], tokens_B)}
    return new, sampled


def _unconverted(params: Params, sizes: Sizes, turn: jax.Array) -> Params:
    """The parameters for one iteration of a loop: keeps XLA from converting or dequantizing all of them before it."""
    if sizes.steps == 1 or all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params)):
        return params  # no loop, or nothing to convert on a CPU, which decodes faster this way
    return jax.lax.optimization_barrier((params, turn))[0]


def _repeated(
    next_of: Callable[[State, jax.Array], tuple[State, SampledTokens]],
    state: State,
    count: jax.Array,
    sizes: Sizes,
    alternatives: int,
) -> tuple[State, SampledTokens]:
    """Runs `next_of` (state, tokens before) `count` times; the count is not compiled in."""
    if sizes.steps == 1:
        return next_of(state, jnp.int32(0))

    def more(done: jax.Array, so_far: tuple[State, SampledTokens]) -> tuple[State, SampledTokens]:
        state, sampled = so_far
        state, one = next_of(state, done)
        put = lambda all_, new: jax.lax.dynamic_update_slice_in_dim(all_, new, done, axis=1)  # noqa: E731
        tokens, log_probabilities, drawn, likeliest, theirs = map(put, sampled[:-1], one[:-1])
        return state, SampledTokens(tokens, log_probabilities, drawn, likeliest, theirs, sampled.counts + 1)

    B, T, n = sizes.slots, sizes.steps, min(alternatives, state["seen"].shape[1])
    nothing = SampledTokens(
        tokens=jnp.zeros((B, T), jnp.int32),
        log_probabilities=jnp.zeros((B, T)),
        drawn=jnp.zeros((B, T)),
        likeliest=jnp.zeros((B, T, n), jnp.int32),
        their_log_probabilities=jnp.zeros((B, T, n)),
        counts=jnp.zeros(B, jnp.int32),
    )
    return jax.lax.fori_loop(0, count, more, (state, nothing))


def _empty_state(vocab_size: int, sizes: Sizes, empty: Callable[[int, int], Cache]) -> State:
    """A state with caches made by `empty`."""
    B, rows = sizes.slots, lambda: empty(sizes.slots, sizes.length)
    kept = rows() if sizes.pool is None else paged.empty(jax.eval_shape(rows), sizes.length, sizes.pool)
    return {"cache": kept, "tokens": jnp.zeros(B, jnp.int32), "seen": jnp.zeros((B, vocab_size), bool)}


def _pick(
    logits_BV: jax.Array,
    usable: int,
    settings: Settings,
    index_B: jax.Array,
    forced_B: jax.Array,
    seen_BV: jax.Array,
    alternatives: int,
) -> SampledTokens:
    """The next token of every row."""
    logits_BV = jnp.where(jnp.arange(logits_BV.shape[-1]) < usable, logits_BV, -jnp.inf)
    tokens_B, drawn_B = choose(logits_BV, settings, index_B, seen_BV)
    tokens_B, drawn_B = jnp.where(forced_B >= 0, forced_B, tokens_B), jnp.where(forced_B >= 0, 0.0, drawn_B)
    likeliest = jax.lax.top_k(logits_BV, min(alternatives, logits_BV.shape[-1]))
    normaliser_B1 = jax.nn.logsumexp(logits_BV, axis=-1, keepdims=True)
    log_probability_B = log_probability(logits_BV, tokens_B)
    counts_B = jnp.ones_like(tokens_B)
    theirs = likeliest[0] - normaliser_B1
    return SampledTokens(
        tokens_B[:, None],
        log_probability_B[:, None],
        drawn_B[:, None],
        likeliest[1][:, None],
        theirs[:, None],
        counts_B,
    )


def _with_row(state: State, row: Cache, slot: Array, seen: Array, table: Array | None, token: Array) -> State:
    """The state with a row in a slot, and that row's next token."""
    return {
        "cache": paged.put_row(state["cache"], row, slot, table),
        "tokens": state["tokens"].at[slot].set(token),
        "seen": state["seen"].at[slot].set(seen[0].at[token].set(True)),
    }


def _with_seen(seen_BV: jax.Array, tokens_B: jax.Array) -> jax.Array:
    return seen_BV.at[jnp.arange(len(tokens_B), dtype=jnp.int32), tokens_B].set(True)


def _verify(
    model: Model,
    usable: int,
    params: Params,
    state: State,
    settings: Settings,
    index_B: jax.Array,
    forced_B: jax.Array,
    guesses: jax.Array,
    counts_B: jax.Array,
    alternatives: int,
    adapters: BatchAdapters | None,
) -> tuple[State, SampledTokens]:
    """Reads the guesses as if they were correct, and chooses a token after each: valid until the first wrong guess."""
    B, T = len(forced_B), 1 + guesses.shape[1]
    forced_BT = jnp.pad(forced_B[:, None], ((0, 0), (0, T - 1)), constant_values=-1)
    given_BT = jnp.concatenate([state["tokens"][:, None], guesses], axis=1)
    read = {"tokens": given_BT, "counts": counts_B + 1, "adapters": adapters}
    logits_BTV, cache = model.extend(params, read, state["cache"])
    seen = [state["seen"]]
    for before in range(T - 1):
        seen.append(_with_seen(seen[-1], guesses[:, before]))
    seen_BTV = jnp.stack(seen, axis=1)
    index_BT = index_B[:, None] + jnp.arange(T, dtype=jnp.int32)
    of_tokens = jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x), T, axis=0), settings)
    together = [x.reshape(B * T, *x.shape[2:]) for x in (logits_BTV, index_BT, forced_BT, seen_BTV)]
    logits, index, forced, seen_NV = together
    sampled = _pick(logits, usable, of_tokens, index, forced, seen_NV, alternatives)
    tokens_BT, log_probabilities, drawn, likeliest, theirs = (x.reshape(B, T, *x.shape[2:]) for x in sampled[:-1])
    right = (tokens_BT[:, :-1] == guesses) & (jnp.arange(T - 1, dtype=jnp.int32) < counts_B[:, None])
    accepted_B = jnp.sum(jnp.cumprod(right.astype(jnp.int32), axis=1), axis=1)
    at_end = lambda x: jnp.take_along_axis(x, accepted_B.reshape(B, *(1,) * (x.ndim - 1)), axis=1)[:, 0]  # noqa: E731
    tokens_B = at_end(tokens_BT)
    new = {
        "cache": cache | {"lengths": state["cache"]["lengths"] + 1 + accepted_B},
        "tokens": tokens_B,
        "seen": _with_seen(at_end(seen_BTV), tokens_B),
    }
    return new, SampledTokens(tokens_BT, log_probabilities, drawn, likeliest, theirs, accepted_B + 1)
