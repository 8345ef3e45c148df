"""Scores texts: ln p(continuation | context) of many pairs, with few compiled programs."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capibara import sharding
from capibara.core.types import Batch, HostBatch, Params, UserError
from capibara.data.tokenizers import model_rows
from capibara.data.tokenizers.vocabulary import Vocabulary
from capibara.evaluation.remix.descent import Descent, make_descent
from capibara.evaluation.remix.remixing import Pathway, RemixExperts, Routing
from capibara.evaluation.remix.remixing import layers as layers_of
from capibara.inference.engine.programs.programs import Same
from capibara.models.api import Model, Stats
from capibara.sharding import Plan

_POSITIONS = 4096  # of a batch, approximately
_MOST_ROWS = 32
_SMALLEST = 32
_BLOCK_LOGITS = 2**24  # float32 logits computed at a time
_BATCHES = 8  # batches that each of several processes scores between two exchanges
_Numbers = tuple[list[int], int]  # the indices of a batch's pairs, and the length of its rows
_Scored = tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]
InTurns = Callable[[Sequence[_Numbers], Callable[..., Iterator[Any]], int], Iterator[Any]]


class Pair(NamedTuple):
    """Token ids of a context, with the beginning token, and of its continuation; and the routing of all pairs or of none."""

    context: Sequence[int]
    continuation: Sequence[int]
    routing: Routing | None = None


class Score(NamedTuple):
    """ln p(continuation | context), whether greedy decoding would produce it, and the pathway of a pair with a routing."""

    log_probability: float
    greedy: bool
    pathway: Pathway | None = None


class Scorer:
    """Scores pairs in batches of pairs of similar length.

    Args:
      model: a decoder, or an encoder-decoder, whose encoder reads the context.
      params: its parameters.
      length: positions in a row; the beginning of a longer context is cut off.
      encoder_length: positions in a row of the encoder, for an encoder-decoder.
      start_id: the first input of an encoder-decoder's decoder.
      vocabulary: names tokens in errors; None: they are named by their ids alone.
      plan: the plan of parameters that are sharded over `mesh`.
      mesh: the mesh of the parameters; None: they are on one device.
      in_turns: distributes the batches over several processes, which all have all pairs (`hosts.in_turns`).
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        length: int,
        *,
        encoder_length: int | None = None,
        start_id: int = 0,
        vocabulary: Vocabulary | None = None,
        plan: Plan | None = None,
        mesh: Mesh | None = None,
        in_turns: InTurns = lambda things, make, every: make(things),
    ):
        self._params, self._length, self._encoder_length, self._start_id = params, length, encoder_length, start_id
        self._rows_of_model, self._vocabulary = model.config.vocab_size, vocabulary
        self._marks = model.config.data_kind == "prefix"
        self._unit, self._in_turns = 1, in_turns
        self._model, self._plan = model, plan
        self._placed: NamedSharding | None = None
        self._mesh = on_mesh = mesh if mesh is not None and mesh.size > 1 else None
        self._program = make_scores(model, plan, on_mesh)
        if on_mesh is not None:
            assert plan is not None, "parameters on several devices have a plan"
            pipeline = plan.pipeline(on_mesh)
            shards = math.prod(on_mesh.shape[axis] for axis in sharding.batch_axes(on_mesh.shape, plan.rules))
            self._unit = shards * (pipeline.microbatches if pipeline else 1)
            self._placed = sharding.batch_sharding(on_mesh, plan.rules)

    def __call__(self, pairs: Sequence[Pair], done: Callable[[int], None] = lambda count: None) -> list[Score]:
        """Scores all pairs; calls `done` with the number of finished pairs.

        Raises:
          UserError: a pair has no context or no continuation, the continuation does not fit a row, or a token has no
            row in the model.
        """
        scores: dict[int, Score] = {}
        count, batches = 0, list(self._batches(pairs))
        scored = self._in_turns(batches, functools.partial(self._scored, pairs), _BATCHES)
        for (numbers, _), result in zip(batches, scored, strict=True):
            scores |= {i: Score(*entry) for i, entry in zip(numbers, result, strict=True)}  # tuples, of other processes
            count += len(numbers)
            done(count)
        return [scores[i] for i in range(len(pairs))]

    def _scored(self, pairs: Sequence[Pair], batches: Sequence[_Numbers]) -> Iterator[list[Score]]:
        """The scores of each batch's pairs."""
        for numbers, length in batches:
            batch = self._on_devices(self._batch([pairs[i] for i in numbers], length))
            sums, hits, paths = jax.device_get(self._program(self._params, batch))
            pathways = map(Pathway, *paths) if paths else itertools.repeat(None)
            yield list(map(Score, sums.tolist(), hits.tolist(), pathways))[: len(numbers)]

    def descended(
        self,
        remix: RemixExperts,
        neighbours: Sequence[Sequence[Pair]],
        weights_PK: np.ndarray,
        scores_PLE: np.ndarray,
        done: Callable[[int], None] = lambda count: None,
    ) -> Iterator[np.ndarray]:
        """Yields the scores [L, E] of each prompt after descent on its neighbours' loss (`remix.descent`).

        Args:
          remix: how.
          neighbours: K pairs for each prompt: other prompts and their right answers.
          weights_PK: of the neighbours.
          scores_PLE: where the descent begins, of the layers with experts.
          done: called with the number of finished prompts.
        """
        program = make_model_descent(self._model, self._plan, self._mesh, remix)
        count = weights_PK.shape[1]
        at_once = self._unit // math.gcd(self._unit, count)  # whole prompts, and rows that fill the devices
        at_once *= max(_MOST_ROWS // (at_once * count), 1)
        length = min(2 ** math.ceil(math.log2(max(self._need(p) for pairs in neighbours for p in pairs))), self._length)
        for start in range(0, len(neighbours), at_once):
            # The last prompt fills up what is missing.
            at = [min(i, len(neighbours) - 1) for i in range(start, start + at_once)]
            routing = [remix.mixed(scores_PLE[i], self._model.config) for i in at]
            pairs = [pair._replace(routing=mixed) for i, mixed in zip(at, routing) for pair in neighbours[i]]
            batch = self._on_devices(self._filled(pairs, length, len(pairs)))
            result = jax.device_get(
                program(self._params, batch, jnp.asarray(weights_PK[at]), jnp.asarray(scores_PLE[at]))
            )
            if not np.isfinite(result).all():
                raise UserError(
                    f"scores of experts are not finite after {remix.steps} steps: lower RemixExperts.learning_rate "
                    f"({remix.learning_rate})"
                )
            yield from result[: len(neighbours) - start]
            done(min(start + at_once, len(neighbours)))

    def _on_devices(self, batch: HostBatch) -> Batch | HostBatch:
        if self._placed is None:
            return batch
        # Every process of the mesh has the whole batch.
        return {k: jax.make_array_from_callback(v.shape, self._placed, v.__getitem__) for k, v in batch.items()}

    def check(self, pair: Pair) -> None:
        """Raises UserError if `__call__` would."""
        self._need(pair)

    def _batches(self, pairs: Sequence[Pair]) -> Iterator[_Numbers]:
        """The indices of the pairs of each batch, longest first, with the length of its rows."""
        needs = [self._need(pair) for pair in pairs]
        order = sorted(range(len(pairs)), key=lambda i: needs[i], reverse=True)
        at = 0
        while at < len(order):
            length = min(max(_SMALLEST, 2 ** math.ceil(math.log2(max(needs[order[at]], 1)))), self._length)
            yield order[at : at + self._rows(length)], length
            at += self._rows(length)

    def _rows(self, length: int) -> int:
        """The number of rows of a batch; it depends only on their length, so that few programs are compiled."""
        rows = min(max(_POSITIONS // (length + (self._encoder_length or 0)), 1), _MOST_ROWS)
        return -(-rows // self._unit) * self._unit

    def _need(self, pair: Pair) -> int:
        """The number of positions that a pair needs in a row."""
        length = len(pair.continuation)
        if not len(pair.context) or not length:
            raise UserError("a context and a continuation must have at least one token each")
        for subject, ids in (("a context", pair.context), ("a continuation", pair.continuation)):
            if min(ids) < 0 or max(ids) >= self._rows_of_model:
                model_rows.check_ids(ids, self._rows_of_model, self._vocabulary, subject)
        if length > self._length:
            raise UserError(f"a continuation has {length} tokens, must fit Dataset.length ({self._length}): raise that")
        return length if self._encoder_length is not None else min(len(pair.context) + length - 1, self._length)

    def _batch(self, pairs: Sequence[Pair], length: int) -> HostBatch:
        return self._filled(pairs, length, self._rows(length))

    def _filled(self, pairs: Sequence[Pair], length: int, rows: int) -> HostBatch:
        names = ("tokens", "targets", "segment_ids", "positions")
        batch = {name: np.zeros((rows, length), np.int32) for name in names}
        batch["weights"] = np.zeros((rows, length), np.float32)
        if self._marks:
            batch["prefix"] = np.zeros((rows, length), np.int32)
        if self._encoder_length is not None:
            for name in ("encoder_tokens", "encoder_segment_ids", "encoder_positions"):
                batch[name] = np.zeros((rows, self._encoder_length), np.int32)
        if pairs[0].routing is not None:
            L, E = pairs[0].routing.scores.shape
            batch["pathway_at"] = np.zeros((rows, length), np.int32)
            batch["pathway_scores"] = np.zeros((rows, L, E), np.float32)
            batch["pathway_weights"] = np.zeros((rows, L), np.float32)
        for row, (context, continuation, routing) in enumerate(pairs):
            if self._encoder_length is not None:
                ids = context[: self._encoder_length]
                _fill(batch, row, ids, "encoder_tokens", "encoder_segment_ids", "encoder_positions")
                whole = [self._start_id, *continuation]
            else:
                whole = [*context, *continuation][-(length + 1) :]
            _fill(batch, row, whole[:-1], "tokens", "segment_ids", "positions")
            end = len(whole) - 1
            batch["targets"][row, :end] = whole[1:]
            batch["weights"][row, end - len(continuation) : end] = 1
            if routing is not None:
                batch["pathway_at"][row, end - len(continuation)] = 1
                batch["pathway_scores"][row], batch["pathway_weights"][row] = routing
            if self._marks:
                batch["prefix"][row, : end - len(continuation) + 1] = 1
        return batch


def _fill(
    batch: dict[str, np.ndarray], row: int, ids: Sequence[int], tokens: str, segments: str, positions: str
) -> None:
    batch[tokens][row, : len(ids)] = ids
    batch[segments][row, : len(ids)] = 1
    batch[positions][row, : len(ids)] = np.arange(len(ids))


def make_scores(model: Model, plan: Plan | None, mesh: Mesh | None) -> Callable[[Params, Batch | HostBatch], _Scored]:
    """A jitted function (params, batch) -> `score`, replicated on all devices; `mesh`: None: a single device."""
    return _scores(Same(model), plan, mesh)


def make_model_descent(model: Model, plan: Plan | None, mesh: Mesh | None, remix: RemixExperts) -> Descent:
    """`make_descent` of a model, whose parameters are on a mesh; None: on a single device."""
    assert model.config.moe is not None, "remix.check refuses others"

    def log_probabilities(params: Params, batch: Batch) -> jax.Array:
        if mesh is None:
            return score(model, params, batch)[0]
        assert plan is not None
        with sharding.activate(mesh, plan.rules, plan.pipeline(mesh)):
            return score(model, params, batch)[0]

    is_softmax = model.config.moe.score == "softmax"
    return make_descent(log_probabilities, layers_of(model.config), remix, normalised=is_softmax)


@functools.lru_cache(maxsize=8)  # a run evaluates many times
def _scores(same: Same, plan: Plan | None, mesh: Mesh | None) -> Callable[[Params, Batch | HostBatch], _Scored]:
    def scores(params: Params, batch: Batch) -> _Scored:
        if mesh is None:
            return score(same.model, params, sharding.balanced(batch))
        assert plan is not None
        with sharding.activate(mesh, plan.rules, plan.pipeline(mesh)):
            return score(same.model, params, sharding.balanced(batch))

    return jax.jit(scores, out_shardings=None if mesh is None else NamedSharding(mesh, PartitionSpec()))


def score(model: Model, params: Params, batch: Batch) -> _Scored:
    """The sum of the log-probabilities of each row's weighted targets [B], whether all of them have rank 1 [B], `_pathways`."""
    hidden_BTD, stats = model.hidden(params, batch)
    B, T, D = hidden_BTD.shape
    fewest = -(-B * T * model.config.vocab_size // _BLOCK_LOGITS)
    blocks = next(n for n in range(min(fewest, T), T + 1) if T % n == 0)

    def of_block(block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        hidden, targets = block
        logits = model.logits_of(params, hidden)
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return chosen - jax.nn.logsumexp(logits, axis=-1), jnp.argmax(logits, axis=-1).astype(jnp.int32) == targets

    def in_blocks(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(B, blocks, T // blocks, *x.shape[2:]), 1, 0)

    result, hits = jax.lax.map(of_block, (in_blocks(hidden_BTD), in_blocks(jnp.asarray(batch["targets"]))))
    result, hits = (jnp.moveaxis(x, 0, 1).reshape(B, T) for x in (result, hits))
    weights = jnp.asarray(batch["weights"])
    sums = jnp.sum(jnp.where(weights > 0, result, 0.0), axis=1)
    return sums, jnp.all(hits | (weights == 0), axis=1), _pathways(hidden_BTD, stats, batch)


def _pathways(hidden_BTD: jax.Array, stats: Stats, batch: Batch) -> tuple[jax.Array, ...]:
    """The fields of Pathway [B, ...] of rows that have a routing; empty: they have none."""
    if "pathway_at" not in batch:
        return ()
    at_BT = jnp.asarray(batch["pathway_at"])
    context_BT1 = (jnp.cumsum(at_BT[:, ::-1], axis=1)[:, ::-1] > 0)[..., None]
    sum_BD = jnp.sum(jnp.where(context_BT1, hidden_BTD.astype(jnp.float32), 0.0), axis=1)
    size_B1 = jnp.linalg.norm(sum_BD, axis=-1, keepdims=True)
    return jnp.swapaxes(stats["pathway"], 0, 1), sum_BD / jnp.maximum(size_B1, 1e-9)
