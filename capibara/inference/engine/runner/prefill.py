"""Prefill: reads similar prompts together, long ones in chunks, and skips cached prefixes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from capibara.core.types import Params, PyTree
from capibara.inference.engine.cache.prefix import PrefixCache, common_beginning
from capibara.inference.engine.programs.programs import Programs
from capibara.inference.engine.requests.faults import contained, is_of_request, program_of
from capibara.inference.engine.requests.request import Request
from capibara.inference.engine.runner.decode import DecodeRunner
from capibara.inference.engine.runner.prefilled import Prefilled
from capibara.inference.engine.runner.prompt_batches import PromptBatches
from capibara.inference.engine.runner.prompt_programs import PromptPrograms
from capibara.models.api import capacity


class PrefillQueue:
    """A queue of prompts to read. A prompt whose programs are being compiled waits, and others go before it.

    Args:
      programs: of the engine.
      together: most rows to read at once.
      tokens: approximate number of tokens to read at a time; longer prompts are split.
      prefixes: the prefix cache; None: no cache.
      batches: makes the batches.
      needed: says which prompts can be read with compiled programs.
      runner: reads the parts of a long prompt into its slot; None: they are read into a row.
      whole: for a prefix LM, whose inputs attend in both directions: prompts cannot be split or share prefixes.

    Attributes:
      programs: as given.
      prefixes: the prefix cache, if prompts share it.
      stalled: whether all prompts that were left by the last `run` wait for the compiler.
    """

    def __init__(
        self,
        programs: Programs,
        together: int,
        tokens: int,
        prefixes: PrefixCache | None,
        batches: PromptBatches,
        needed: PromptPrograms,
        runner: DecodeRunner | None,
        whole: bool = False,
    ):
        self.programs, self._together = programs, together
        self._runner, self._batches, self._needed = runner, batches, needed
        self._most = tokens
        self.prefixes, self.stalled = None if whole else prefixes, False
        self._waiting: list[Request] = []
        # The first prompt's row, None if it is in its slot, and the number of tokens that have been read.
        self._part: tuple[Any, int] | None = None

    @property
    def waiting(self) -> bool:
        """Whether there are prompts to read."""
        return bool(self._waiting)

    @property
    def pending(self) -> bool:
        """Whether there is a prompt that can be read now."""
        return bool(self._waiting) and not self.stalled

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def drop(self, request: Request) -> None:
        """Removes a request if it waits here."""
        if request in self._waiting:
            if self._waiting[0] is request:
                self._part = None
            self._waiting.remove(request)

    def clear(self) -> None:
        """Drops all prompts, and all rows that were read."""
        self._waiting, self._part = [], None
        if self.prefixes is not None:
            self.prefixes.clear()

    def restart(self, generation: int) -> None:
        """Handles new parameters: waiting prompts are read with them from the first token."""
        self._part = None
        for request in self._waiting:
            request.generation = generation
            _count_cached(request, 0)

    def run(self, params: Params) -> Iterator[Prefilled]:
        """Reads up to about `tokens` tokens; yields the requests whose prompts are complete."""
        left, self.stalled = self._most, False
        while left > 0 and (first := self._next()) is not None:
            if self._part is None:
                self._part = self._cached(first)
            if self._part is None and len(first.tokens) <= self._most:
                group = self._next_group(first, left)
                prompts = _distinct(group)
                left -= len(prompts) * self._batches.size(len(first.tokens))
                yield from self._read_group(params, group, prompts)
                continue
            row, known = self._part or (None, 0)
            tokens = first.tokens[: known + self._most]
            left -= self._batches.size(len(tokens) - known)
            with contained(first):
                if self._runner is not None:
                    if row is not None:
                        self._runner.put(first, row)
                    batch = self._batches.part(first, tokens[known:])
                    logits, row = self._runner.read(params, first, batch, known), None
                else:
                    logits, row = self.extend(params, first, tokens, row, known, len(first.tokens))
                self._part = row, len(tokens)
            if first.finished:
                self.drop(first)
            elif len(tokens) == len(first.tokens):
                self._waiting.pop(0)
                self._part = None
                if row is not None:  # else the slot's row is cached when the text has ended
                    self._cache_prefix(first, row)
                yield Prefilled(first, row, logits, [first])

    def _next(self) -> Request | None:
        """The first prompt whose programs are compiled, moved to the front; None: there is none."""
        if self._part is not None:
            return self._waiting[0]
        first = next(filter(self._is_compiled, self._waiting), None)
        self.stalled = first is None and bool(self._waiting)
        if first is not None:
            self._waiting = [first, *(item for item in self._waiting if item is not first)]
        return first

    def _is_compiled(self, request: Request) -> bool:
        return self._needed.are_compiled(request, lambda: self._cached(request))

    def extend(
        self, params: Params, request: Request, tokens: Sequence[int], row: Any, known: int, whole: int
    ) -> tuple[jax.Array, Any]:
        """Reads a request's tokens after the first `known`, which `row` holds; returns the logits and the new row.

        The row gets positions for `whole` tokens, or keeps more if it had them. `row` None: there was no row.
        """
        rest = tokens[known:]
        batch = self._batches.batch([request], [rest], self._batches.size(len(rest)))
        if row is None:
            return self.programs.prefill(params, batch)
        positions = max(self._batches.size(whole), capacity(row))
        return self.programs.resume(params, batch, row, positions)

    def _cached(self, request: Request) -> tuple[Any, int] | None:
        result = self.prefixes.find(request.tokens, request.sharing) if self.prefixes else None
        if result is None:
            return None
        prefix, known = result
        _count_cached(request, known)
        return prefix.row | {"lengths": np.array([known], np.int32)}, known

    def _next_group(self, first: Request, left: int) -> list[Request]:
        """Requests to read together with the first one; the number of distinct prompts is a power of two."""
        size = self._batches.size(len(first.tokens))
        most = max(1, min(self._together, left // size))
        most = 1 << (most.bit_length() - 1)  # few sizes, so that few programs are compiled
        group, prefixes = [first], self.prefixes
        for request in self._waiting[1:]:
            if self._batches.size(len(request.tokens)) != size or not self._is_compiled(request):
                continue
            again = any(same_prompt(request, other) for other in group)
            if not (again or prefixes is None) and (
                shares(request, group) or prefixes.find(request.tokens, request.sharing)
            ):
                continue  # its prefix will be in the cache
            if again or len(_distinct(group)) < most:
                group.append(request)
        prompts = _distinct(group)
        count = 1 << (len(prompts).bit_length() - 1)
        while count > 1 and not self._needed.reads_together(prompts[:count]):
            count //= 2
        retained = prompts[:count]
        return [request for request in group if any(same_prompt(request, other) for other in retained)]

    def _read_group(self, params: Params, group: list[Request], prompts: list[Request]) -> Iterator[Prefilled]:
        self._waiting = [request for request in self._waiting if request not in group]
        with program_of(group):
            read = self._read_together(params, prompts)
        for request in group:
            index = next(i for i, other in enumerate(prompts) if same_prompt(request, other))
            row = read[index]
            if isinstance(row, BaseException) and request is not prompts[index]:
                with program_of([request]):
                    (row,) = self._read_together(params, [request])
            if isinstance(row, BaseException):
                request.fail(row)
                continue
            if request is not prompts[index]:
                _count_cached(request, len(request.tokens))
            yield Prefilled(request, *row, group)

    def _read_together(self, params: Params, prompts: list[Request]) -> list[tuple[Any, jax.Array] | BaseException]:
        """The rows and logits of prompts of similar length, or the error of one that cannot be read."""
        size = self._batches.size(len(prompts[0].tokens))
        try:
            batch = self._batches.batch(prompts, [request.tokens for request in prompts], size)
            logits, rows = self.programs.prefill(params, batch)
        except BaseException as error:
            if not is_of_request(error):
                raise
            # One by one, to find out whose error it is.
            return [error] if len(prompts) == 1 else [self._read_together(params, [prompt])[0] for prompt in prompts]
        read: list[tuple[Any, jax.Array] | BaseException] = []
        for index, request in enumerate(prompts):
            row = (rows, logits) if len(prompts) == 1 else self.programs.take_row((rows, logits), np.int32(index))
            self._cache_prefix(request, row[0])
            read.append(row)
        return read

    def _cache_prefix(self, request: Request, row: PyTree) -> None:
        if self.prefixes:
            self.prefixes.keep(request.tokens, row, request.sharing)


def same_prompt(first: Request, other: Request) -> bool:
    """Whether what is read for one request can be used for the other."""
    alike = first.encoder is None and other.encoder is None and first.sharing == other.sharing
    return first is other or (alike and _read(first) == _read(other))


def _distinct(group: list[Request]) -> list[Request]:
    """The first request of each distinct prompt."""
    return [request for index, request in enumerate(group) if not any(same_prompt(request, o) for o in group[:index])]


def _read(request: Request) -> tuple[int, list[int]]:
    """All that a prefix LM's row depends on; for other models the tokens would suffice."""
    return request.prompt_tokens, request.tokens


def shares(request: Request, group: Sequence[Request]) -> bool:
    """Whether at least half of a request's prompt is the beginning of another one of the group."""
    alike = (other for other in group if other.sharing == request.sharing)
    return any(2 * common_beginning(request.tokens, other.tokens) >= len(request.tokens) for other in alike)


def _count_cached(request: Request, known: int) -> None:
    """Records that `known` prompt tokens were cached; not for a text that is reread after preemption."""
    if not request.requested:
        request.cached_tokens = known
