"""Runs an engine's beam-search requests in batches of similar ones, without its slots."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import cast

import jax
from jax.sharding import Mesh

from capibara.core import tree
from capibara.core.types import Params, UserError
from capibara.inference.engine import beam_search
from capibara.inference.engine.cache.batching import bucket
from capibara.inference.engine.programs import programs
from capibara.inference.engine.requests.faults import ProgramFault, contained, ends_process, is_of_request
from capibara.inference.engine.requests.request import Request
from capibara.inference.engine.requests.stream import Decode, Finish, Piece
from capibara.inference.engine.runner import prompt_batches
from capibara.inference.sampling.sampling import BeamSearch
from capibara.models.api import Model, ReadBatch
from capibara.sharding import Rules


def prompts_at_once(slots: int, num_decodes: int, mesh: Mesh | None, rules: Rules) -> int:
    """Number of prompts whose beams fit the number of slots, a multiple of the batch shards."""
    shards = 1 if mesh is None else math.prod(mesh.shape[axis] for axis in rules.batch)
    return -(-max(1, slots // num_decodes) // shards) * shards


class BeamSearcher:
    """A queue of requests that wait for beam search.

    Args:
      model: the model.
      usable: ids of its vocabulary.
      sizes: of the engine's slots; as many beams are searched at a time as there are slots, or those of one prompt.
      mesh, rules: the engine's.
    """

    def __init__(self, model: Model, usable: int, sizes: programs.Sizes, mesh: Mesh | None, rules: Rules):
        self._model, self._usable, self._sizes, self._on = model, usable, sizes, (mesh, rules)
        self._waiting: list[Request] = []

    @property
    def waiting(self) -> Sequence[Request]:
        return [request for request in self._waiting if not request.finished]

    def add(self, requests: Sequence[Request]) -> None:
        self._waiting += requests

    def drop(self, request: Request) -> None:
        """Removes a request if it waits here."""
        if request in self._waiting:
            self._waiting.remove(request)

    def run(self, params: Params) -> list[jax.Array] | None:
        """Searches for the first similar requests and ends them; returns the tokens found, None if nothing waits."""
        if not self.waiting:
            return None
        how = self.waiting[0].sampling.beams
        assert how is not None, "only beam searches wait here"
        most = prompts_at_once(self._sizes.slots, how.num_decodes, *self._on)
        together = [request for request in self.waiting if request.sampling.beams == how][:most]
        try:
            return self._search(params, together, how, most)
        finally:  # of a failed program, those that it did not come to are searched later
            self._waiting = [*self.waiting]

    def _search(self, params: Params, requests: Sequence[Request], how: BeamSearch, rows: int) -> list[jax.Array]:
        """Searches for requests together, or one by one if that fails, and ends them; returns the tokens found.

        Raises:
          ProgramFault: the devices failed in the search for one of them.
        """
        try:
            result = self._searched(params, requests, how, rows)
        except BaseException as error:
            if ends_process(error) or isinstance(error, ProgramFault):
                raise
            if len(requests) > 1 and not isinstance(error, UserError):  # that is the error of each
                return [tokens for item in requests for tokens in self._search(params, [item], how, rows)]
            if not is_of_request(error):
                raise ProgramFault(requests) from error
            for request in requests:
                request.fail(error)
            return []
        for index, request in enumerate(requests):
            with contained(request):
                of_prompt = beam_search.BeamResults(*(x[index] for x in result))
                _end(request, self._decodes(request, of_prompt), how)
        return [result.texts]

    def _searched(
        self, params: Params, requests: Sequence[Request], how: BeamSearch, rows: int
    ) -> beam_search.BeamResults:
        """Searches in `rows` rows; unused ones repeat the first prompt, and are done from the start.

        Raises:
          UserError: it does not fit in memory.
        """
        sizes, limits = self._sizes, [request.limit for request in requests]
        read = bucket(max(len(request.tokens) for request in requests), sizes.length)
        tokens = bucket(max(limits), sizes.length)
        positions = bucket(min(read + tokens, sizes.length), sizes.length)
        compiled = beam_search.build(
            self._model,
            self._usable,
            beam_search.Sizes(how.num_decodes, tokens, positions, sizes.encoder_length, sizes.dtype),
            *self._on,
        )
        idle = rows - len(requests)
        all_of = [*requests, *[requests[0]] * idle]
        beams = beam_search.beam_requests_of(
            [*limits, *[0] * idle],
            [len(request.tokens) - 1 for request in all_of],
            [sorted(request.ends) for request in all_of],
            how.alpha,
            how.min_log_prob,
        )
        tokens_of = [request.tokens for request in all_of]
        marked = self._model.config.data_kind == "prefix"
        batch = cast(ReadBatch, prompt_batches.batch_of(all_of, tokens_of, read, marked))
        try:
            return beam_search.search(compiled, params, batch, beams)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise UserError(
                f"BeamSearch.num_decodes ({how.num_decodes}) of {rows} prompts with {positions} tokens need "
                f"{self._cache_bytes(rows * how.num_decodes, positions) / 2**30:,.1f} GiB of keys and values, more memory than "
                "is free: request fewer, lower EngineConfig.slots, or shorten Dataset.length"
            ) from None

    def _cache_bytes(self, rows: int, positions: int) -> int:
        start = functools.partial(
            self._model.start_cache, rows, positions, dtype=self._sizes.dtype, encoder_length=self._sizes.encoder_length
        )
        return tree.byte_count(jax.eval_shape(start))

    def _decodes(self, request: Request, results: beam_search.BeamResults) -> list[Decode]:
        return [
            _decode(request, text[: int(results.steps)].tolist(), float(score))
            for text, score, there in zip(results.texts, results.scores, results.there)
            if there
        ]


def _decode(request: Request, tokens: list[int], score: float) -> Decode:
    """A text, up to its end."""
    at = next((i for i, token in enumerate(tokens) if token in request.ends), None)
    text, pieces = request.text_stream(), []
    for count, token in enumerate(tokens[:at], 1):
        pieces.append(text.feed(token))
        if text.stopped:
            return Decode("".join(pieces), tuple(tokens[:count]), score, Finish.STOP, request.lead(tokens[:count]))
    finish = Finish.LENGTH if at is None else Finish.STOP
    return Decode("".join(pieces) + text.close(), tuple(tokens[:at]), score, finish, request.lead(tokens[:at]))


def _end(request: Request, decodes: list[Decode], how: BeamSearch) -> None:
    """Passes the best texts to the request's stream."""
    best, text = decodes[-1], request.text_stream()
    for index, token in enumerate(best.tokens):
        request.stream.put(Piece(text.feed(token), token, lead="" if index else best.lead))
    if rest := text.close():
        request.stream.put(Piece(rest, None))
    request.finished = True
    request.stream.end(best.finish, request.prompt_tokens, 0, decodes=tuple(decodes[-how.num_return :]))
