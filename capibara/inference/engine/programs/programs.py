"""The compiled programs of an engine: prefill, admission to a slot, and decode steps of all slots."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capibara import sharding
from capibara.core import tree
from capibara.core.types import Params, PyTree
from capibara.inference.engine.programs.speculative import draft
from capibara.inference.sampling.sampler import History, HistoryOfSlots, Settings, choose, log_probability
from capibara.kernels.slots import put, take
from capibara.models.api import BatchAdapters, Cache, Model, Packed, ReadBatch, mtp, paged, put_rows, selection

_WORD_BITS = 32
State = dict[str, Any]
"""On the devices, for B slots: `cache`; `tokens` [B], the last of each; `history`, a `History` of their texts."""


class NextTokens(NamedTuple):
    """What the host says about the next token of B rows.

    Attributes:
      index: [B] int32, its index in the text.
      forced: [B] int32, the token; -1: it is chosen.
      allowed: [B, words] uint32, one bit for each token that may be chosen, the lowest bit of a word first. With several
        tokens in one program it holds for all of them.
    """

    index: Any
    forced: Any
    allowed: Any


def allowed_words(vocab_size: int) -> int:
    """Words of a row of `NextTokens.allowed`."""
    return -(-vocab_size // _WORD_BITS)


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


class MixedTokens(NamedTuple):
    """N tokens of a step that reads prompts beside the next tokens of texts; see Packed for their order.

    Attributes:
      tokens: [N] int32, those of prompts; the next ones of texts are on the devices.
      counts: [N] int32, 1; 0: padding.
      positions: [N] int32, of the tokens in their rows.
      table: [N, M] int32, the pages of each token's row.
      packed: whose tokens they are, and after which S of them a token is chosen.
      slots: [S] int32, the slots of these, those of texts first; none is there twice. A number beyond them all: no slot.
    """

    tokens: Any
    counts: Any
    positions: Any
    table: Any
    packed: Packed
    slots: Any


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


class Programs(NamedTuple):
    """Jitted functions; a state that is passed to one is donated. `table`: the pages of each slot; None: no pages.

    Attributes:
      serving: parameters -> parameters in the layout of the others; merges adapters.
      start: () -> state with empty slots.
      prefill: (params, batch of n rows) -> logits [n, V] and the cache of these rows, with the batch's positions.
      resume: (params, batch, row, positions) -> the same after more tokens, with the row grown to `positions`.
      read: (params, state, batch of one row, slot [1], length [1], table [1, M]) -> logits [1, V], and the state with that
        row's tokens in the slot, after its first `length` ones.
      take_row: (rows of any tree, index) -> the tree of that row alone.
      admit: (state, row, logits, slot, settings, next, history, table, alternatives) -> state with the row in the slot, and
        its next token; `next` and `history` are of one row. Row None: the slot has it already.
      step: (params, state, settings, next, count, table, alternatives, adapters, slots) -> state, and every row's next `count`
        tokens, at most Sizes.steps; a forced token is the first one. `adapters`: those of the rows, as in a
        batch; None: no adapters. `slots` [R]: the rows are those of R slots, which differ from each other, and the other
        arguments have R rows, too; None: all slots, in order.
      mix: (params, state, tokens, settings, next, adapters) -> state after these MixedTokens, and one token for each of their slots,
        of which those in the middle of a prompt mean nothing. `settings` and `next` have S rows; `adapters` are of N rows.
      begin: (state, history, slot) -> state with the history of one row in the slot.
      verify: (params, state, settings, next, guesses, counts, table, alternatives, adapters, slots) -> state, and every row's
        next tokens: the correct ones of its first `counts` guesses, and one more. A forced token is the first one; a row
        with guesses may choose any token.
      row: (state, slot, table, positions) -> the cache of that slot, cut to its first positions.
      put: (state, row, slot, table) -> state with the row in the slot; nothing is chosen yet.
    """

    serving: Callable[[Params], Params]
    start: Callable[[], State]
    prefill: jax.stages.Wrapped
    resume: jax.stages.Wrapped
    read: jax.stages.Wrapped
    take_row: jax.stages.Wrapped
    admit: jax.stages.Wrapped
    step: jax.stages.Wrapped
    mix: jax.stages.Wrapped
    begin: jax.stages.Wrapped
    verify: jax.stages.Wrapped
    row: jax.stages.Wrapped
    put: jax.stages.Wrapped


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

    def prefill(params: Params, batch: ReadBatch) -> tuple[jax.Array, Cache]:
        return model.prefill(params, batch, empty(*batch["tokens"].shape))

    def resume(params: Params, batch: ReadBatch, row: Cache, positions: int) -> tuple[jax.Array, Cache]:
        return model.resume(params, batch, put_rows(empty(1, positions), row, jnp.int32(0)))

    def admit(
        state: State, row: Cache | None, logits: Array, slot: Array, settings: Settings, next_: NextTokens, history: History,
        table: Array | None, alternatives: int,
    ) -> tuple[State, SampledTokens]:  # fmt: skip
        sampled = _pick(logits, usable, settings, next_, history, alternatives)
        return _laid_out(_with_row(state, row, slot, history, table, sampled.tokens[:, 0])), replicated(sampled)

    def step(
        params: Params, state: State, settings: Settings, next_: NextTokens, count: Array, table: Array | None,
        alternatives: int, adapters: BatchAdapters | None = None, slots: Array | None = None,
    ) -> tuple[State, SampledTokens]:  # fmt: skip
        def next_of(state: State, done: jax.Array) -> tuple[State, SampledTokens]:
            later, weights = _later(next_, done), _unconverted(params, sizes, done)
            return _next(model, usable, weights, state, settings, later, table, alternatives, adapters, slots)

        state, sampled = _repeated(next_of, state, count, len(next_.index), sizes.steps, alternatives)
        return _laid_out(state), replicated(sampled)

    def verify(
        params: Params, state: State, settings: Settings, next_: NextTokens, guesses: Array, counts: Array,
        table: Array | None, alternatives: int, adapters: BatchAdapters | None = None, slots: Array | None = None,
    ) -> tuple[State, SampledTokens]:  # fmt: skip
        new, sampled = _verify(
            model, usable, params, state, settings, next_, guesses, counts, table, alternatives, adapters, slots
        )
        return _laid_out(new), replicated(sampled)

    def start() -> State:
        return _laid_out(_empty_state(model.config.vocab_size, sizes, empty))

    jit = functools.partial(on_mesh, mesh, rules)
    return Programs(
        serving=jit(lambda params: model.serving(adapted.merge({name: params[name] for name in adapted.axes}))),
        start=jit(start),
        prefill=jit(prefill),
        resume=jit(resume, static_argnums=3),
        read=jit(functools.partial(_read, model), donate_argnums=1),
        take_row=jit(_take_row),
        admit=jit(admit, donate_argnums=0, static_argnums=8),
        step=jit(step, donate_argnums=1, static_argnums=6),
        mix=jit(functools.partial(_mix, model, usable), donate_argnums=1),
        begin=jit(_begin, donate_argnums=0),
        verify=jit(verify, donate_argnums=1, static_argnums=7),
        row=jit(_row, static_argnums=3),
        put=jit(_put, donate_argnums=0),
    )


def on_mesh(mesh: Mesh | None, rules: sharding.Rules, program: Callable, **options: Any) -> jax.stages.Wrapped:
    """Jits a program that is lowered with the mesh active, since kernels are not partitioned by the compiler."""

    @functools.wraps(program)
    def active(*args: object) -> Any:
        with sharding.activate(mesh, rules) if mesh else contextlib.nullcontext():
            return program(*args)

    return jax.jit(active, **options)


def _replicated(mesh: Mesh | None, sampled: SampledTokens) -> SampledTokens:
    """Replicates sampled tokens on every device."""
    return jax.lax.with_sharding_constraint(sampled, NamedSharding(mesh, PartitionSpec())) if mesh else sampled


def _read(
    model: Model, params: Params, state: State, batch: ReadBatch, slot_1: Array, length_1: Array, table_1M: Array
) -> tuple[Array, State]:
    # Its length is known here alone: a step of all slots writes a token behind the row's, which is overwritten.
    row = selection.select(state["cache"], slot_1) | {"lengths": length_1}
    logits, row = model.resume(params, batch, paged.with_table(row, table_1M))
    cache = selection.merge(state["cache"], paged.without_table(row), slot_1)
    return logits, _laid_out(state | {"cache": cache})


def _row(state: State, slot: jax.Array, table: jax.Array | None, positions: int) -> Cache:
    return paged.row(state["cache"], slot, positions, table)


def _put(state: State, row: Cache, slot: Array, table: Array | None) -> State:
    return _laid_out(state | {"cache": paged.put_row(state["cache"], row, slot, table)})


def _take_row(rows: PyTree, index: jax.Array) -> PyTree:
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, index, 1), rows)


def _laid_out(state: State) -> State:
    """Shards the state over the active mesh, if there is one."""
    return _constrained(state, state_axes(state))


def state_axes(state: State) -> Any:
    """The logical axes of every array of a state."""
    return {
        "cache": paged.axes(state["cache"]),
        "tokens": ("batch",),
        "history": History(*[("batch", "act_vocab")] * 3),
    }


def _constrained(arrays: PyTree, axes: PyTree) -> PyTree:
    return jax.tree.map(lambda names, x: sharding.constrain(x, names), axes, arrays, is_leaf=tree.is_axes)


def _next(
    model: Model,
    usable: int,
    params: Params,
    state: State,
    settings: Settings,
    next_: NextTokens,
    table: jax.Array | None,
    alternatives: int,
    adapters: BatchAdapters | None,
    slots: jax.Array | None,
) -> tuple[State, SampledTokens]:
    """State, and the next token of every row."""
    tokens_B, cache = _selected(state, slots)
    logits, cache = model.decode(params, tokens_B, paged.with_table(cache, table), adapters)
    history = state["history"]
    of_rows = history if slots is None else HistoryOfSlots(history, slots)
    sampled = _pick(logits, usable, settings, next_, of_rows, alternatives)
    tokens_B = sampled.tokens[:, 0]
    return _merged(state, tokens_B, paged.without_table(cache), history.with_tokens(tokens_B, slots), slots), sampled


def _mix(
    model: Model, usable: int, params: Params, state: State, tokens: MixedTokens, settings: Settings, next_: NextTokens,
    adapters: BatchAdapters | None,
) -> tuple[State, SampledTokens]:  # fmt: skip
    packed, slots, S = tokens.packed, jnp.asarray(tokens.slots), len(tokens.slots)
    last_S = state["tokens"].at[slots].get(mode="clip")
    given_N = jnp.asarray(tokens.tokens)
    given_N = given_N.at[:S].set(jnp.where(packed.documents[:S] == 0, last_S, given_N[:S]))
    batch: ReadBatch = {"tokens": given_N[:, None], "counts": tokens.counts, "packed": packed, "adapters": adapters}
    rows = state["cache"] | {"lengths": jnp.asarray(tokens.positions)}
    logits, rows = model.resume(params, batch, paged.with_table(rows, tokens.table))
    history = state["history"]
    sampled = _pick(logits, usable, settings, next_, HistoryOfSlots(history, slots), 0)
    put = lambda x, new_S: x.at[slots].set(new_S, mode="drop")  # noqa: E731
    tokens_S, lengths_S = sampled.tokens[:, 0], jnp.asarray(tokens.positions)[packed.ends] + 1
    cache = paged.without_table(rows) | {"lengths": put(state["cache"]["lengths"], lengths_S)}
    history = history.with_tokens(tokens_S, slots)
    return {"cache": cache, "tokens": put(state["tokens"], tokens_S), "history": history}, sampled


def _begin(state: State, history: History, slot: Array) -> State:
    return state | {"history": History(*(x.at[slot].set(new[0]) for x, new in zip(state["history"], history)))}


def _selected(state: State, slots: jax.Array | None) -> tuple[Array, Cache]:
    """The last tokens and the cache of these slots, as rows; None: of all."""
    if slots is None:
        return state["tokens"], state["cache"]
    return take(state["tokens"], slots), selection.select(state["cache"], slots)


def _merged(state: State, tokens: Array, cache: Cache, history: History, slots: jax.Array | None) -> State:
    """The state with the tokens and the cache of these slots, None: of all, and with the history of all."""
    if slots is None:
        return {"cache": cache, "tokens": tokens, "history": history}
    cache = selection.merge(state["cache"], cache, slots)
    return {"cache": cache, "tokens": put(state["tokens"], tokens, slots), "history": history}


def _later(next_: NextTokens, done: jax.Array) -> NextTokens:
    """The same for the token that is `done` places later; only the first may be forced."""
    forced = jnp.where(done == 0, next_.forced, -1)
    return NextTokens(next_.index + done, forced, next_.allowed)


def _unconverted(params: Params, sizes: Sizes, turn: jax.Array) -> Params:
    """The parameters for one iteration of a loop: keeps XLA from converting or dequantizing all of them before it."""
    if sizes.steps == 1 or all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params)):
        return params  # no loop, or nothing to convert on a CPU, which decodes faster this way
    return jax.lax.optimization_barrier((params, turn))[0]


def _repeated(
    next_of: Callable[[State, jax.Array], tuple[State, SampledTokens]],
    state: State,
    count: jax.Array,
    rows: int,
    steps: int,
    alternatives: int,
) -> tuple[State, SampledTokens]:
    """Runs `next_of` (state, tokens before), which gives `rows` tokens, `count` times; the count is not compiled in."""
    if steps == 1:
        return next_of(state, jnp.int32(0))

    def more(done: jax.Array, so_far: tuple[State, SampledTokens]) -> tuple[State, SampledTokens]:
        state, sampled = so_far
        state, item = next_of(state, done)
        put = lambda all_, new: jax.lax.dynamic_update_slice_in_dim(all_, new, done, axis=1)  # noqa: E731
        tokens, log_probabilities, drawn, likeliest, theirs = map(put, sampled[:-1], item[:-1])
        return state, SampledTokens(tokens, log_probabilities, drawn, likeliest, theirs, sampled.counts + 1)

    B, T, n = rows, steps, min(alternatives, state["history"].seen.shape[1])
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
    retained = rows() if sizes.pool is None else paged.empty(jax.eval_shape(rows), sizes.length, sizes.pool)
    history = History(*(jnp.zeros((B, vocab_size), dtype) for dtype in (jnp.bool_, jnp.int32, jnp.float32)))
    return {"cache": retained, "tokens": jnp.zeros(B, jnp.int32), "history": history}


def _pick(
    logits_BV: jax.Array,
    usable: int,
    settings: Settings,
    next_: NextTokens,
    history: History | HistoryOfSlots,
    alternatives: int,
) -> SampledTokens:
    """The next token of every row."""
    logits_BV = jnp.where(jnp.arange(logits_BV.shape[-1]) < usable, logits_BV, -jnp.inf)
    tokens_B, drawn_B = choose(_restricted(logits_BV, next_.allowed), settings, next_.index, history)
    is_forced = next_.forced >= 0
    tokens_B, drawn_B = jnp.where(is_forced, next_.forced, tokens_B), jnp.where(is_forced, 0.0, drawn_B)
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


def _restricted(logits_BV: jax.Array, allowed_BW: jax.Array) -> jax.Array:
    """The logits of the tokens whose bits are set; -inf for the others."""
    every = jnp.uint32(2**_WORD_BITS - 1)

    def masked() -> jax.Array:
        ids = jnp.arange(logits_BV.shape[-1], dtype=jnp.uint32)
        words_BV = jnp.repeat(allowed_BW, _WORD_BITS, axis=1)[:, : logits_BV.shape[-1]]
        return jnp.where((words_BV >> (ids % _WORD_BITS)) & 1 == 1, logits_BV, -jnp.inf)

    return jax.lax.cond(jnp.any(allowed_BW != every), masked, lambda: logits_BV)


def _with_row(
    state: State, row: Cache | None, slot: Array, history: History, table: Array | None, token_1: Array
) -> State:
    """The state with a row in a slot, and that row's next token; row None: the slot has it."""
    put = lambda all_, item: all_.at[slot].set(item[0])  # noqa: E731
    return {
        "cache": state["cache"] if row is None else paged.put_row(state["cache"], row, slot, table),
        "tokens": state["tokens"].at[slot].set(token_1[0]),
        "history": History(*map(put, state["history"], history.with_tokens(token_1))),
    }


def _verify(
    model: Model,
    usable: int,
    params: Params,
    state: State,
    settings: Settings,
    next_: NextTokens,
    guesses: jax.Array,
    counts_B: jax.Array,
    table: jax.Array | None,
    alternatives: int,
    adapters: BatchAdapters | None,
    slots: jax.Array | None,
) -> tuple[State, SampledTokens]:
    """Reads the guesses as if they were correct, and chooses a token after each: valid until the first wrong guess.

    A model with modules that predict further tokens guesses itself.
    """
    B, T = len(guesses), 1 + guesses.shape[1]
    forced_BT = jnp.pad(next_.forced[:, None], ((0, 0), (0, T - 1)), constant_values=-1)
    last_B, row_cache = _selected(state, slots)
    cache = paged.with_table(row_cache, table)
    if model.ahead is not None:
        guesses = draft(model, params, last_B, cache, T - 1, usable)
    given_BT = jnp.concatenate([last_B[:, None], guesses], axis=1)
    read: ReadBatch = {"tokens": given_BT, "counts": counts_B + 1, "adapters": adapters}
    logits_BTV, hidden_BTD, cache = model.extend(params, read, cache)
    history = state["history"]
    histories = [history if slots is None else History(*(take(x, slots) for x in history))]
    for before in range(T - 1):
        histories.append(histories[-1].with_tokens(guesses[:, before]))
    history_BT = jax.tree.map(lambda *each: jnp.stack(each, axis=1), *histories)
    index_BT = next_.index[:, None] + jnp.arange(T, dtype=jnp.int32)
    repeated = lambda x: jnp.repeat(jnp.asarray(x), T, axis=0)  # noqa: E731
    rows = lambda x: x.reshape(B * T, *x.shape[2:])  # noqa: E731
    each_next = NextTokens(rows(index_BT), rows(forced_BT), repeated(next_.allowed))
    settings, each_history = jax.tree.map(repeated, settings), jax.tree.map(rows, history_BT)
    sampled = _pick(rows(logits_BTV), usable, settings, each_next, each_history, alternatives)
    tokens_BT, log_probabilities, drawn, likeliest, theirs = (x.reshape(B, T, *x.shape[2:]) for x in sampled[:-1])
    right = (tokens_BT[:, :-1] == guesses) & (jnp.arange(T - 1, dtype=jnp.int32) < counts_B[:, None])
    accepted_B = jnp.sum(jnp.cumprod(right.astype(jnp.int32), axis=1), axis=1)
    at_end = lambda x: jnp.take_along_axis(x, accepted_B.reshape(B, *(1,) * (x.ndim - 1)), axis=1)[:, 0]  # noqa: E731
    tokens_B = at_end(tokens_BT)
    lengths = {"lengths": row_cache["lengths"] + 1 + accepted_B}
    cache = mtp.at_token(paged.without_table(cache), hidden_BTD, accepted_B) | lengths
    of_rows = jax.tree.map(at_end, history_BT).with_tokens(tokens_B)
    history = of_rows if slots is None else History(*(put(x, new, slots) for x, new in zip(history, of_rows)))
    sampled = SampledTokens(tokens_BT, log_probabilities, drawn, likeliest, theirs, accepted_B + 1)
    return _merged(state, tokens_B, cache, history, slots), sampled
