"""Steps that read prompts beside the next tokens of texts: one program, which reads the weights once for both."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from capibara.inference.engine.cache.batching import LEAST_PART, mixed_shapes
from capibara.inference.engine.cache.pages import Pages
from capibara.inference.engine.placement.parameters import ServedParams
from capibara.inference.engine.programs.compiler import Compiler, Task
from capibara.inference.engine.programs.programs import MixedTokens
from capibara.inference.engine.requests.adapters import Adapters
from capibara.inference.engine.requests.faults import contained
from capibara.inference.engine.requests.request import Request
from capibara.inference.engine.runner.decode import DecodeRunner, compile_mixed
from capibara.inference.engine.runner.next_tokens import next_tokens
from capibara.inference.engine.runner.prefill import PrefillQueue, same_prompt, shares
from capibara.inference.sampling.sampler import Settings
from capibara.models.api import Packed


class Piece(NamedTuple):
    """`size` tokens of a request's prompt, after its first `start` ones, which are in its slot."""

    request: Request
    start: int
    size: int

    @property
    def ends(self) -> bool:
        """Whether these are the prompt's last tokens."""
        return self.start + self.size == len(self.request.tokens)


class MixedSteps:
    """Makes the steps.

    Args:
      runner: has the slots' state.
      params: that the programs read.
      adapters: of the engine.
      pages: of the slots.
      most: tokens of a part of a prompt.
      compiler: compiles programs while others run.
    """

    def __init__(
        self,
        runner: DecodeRunner,
        params: ServedParams,
        adapters: Adapters,
        pages: Pages,
        most: int,
        compiler: Compiler,
    ):
        self._runner, self._params, self._adapters, self._pages = runner, params, adapters, pages
        self._slots, self._compiler = len(pages.table), compiler
        self._shapes = mixed_shapes(self._slots, most)

    @property
    def tasks(self) -> list[Task]:
        """The programs."""
        return [Task(("mixed", *shape), functools.partial(self._compile, *shape)) for shape in self._shapes]

    @property
    def compiled(self) -> bool:
        """Whether all are compiled; compiles them if not."""
        return all([self._compiler.is_compiled(task) for task in self.tasks])

    def room(self, texts: int) -> int:
        """Tokens of prompts that a step reads beside so many texts."""
        rows = min(count for _, count in self._shapes if texts < count or count == self._slots)
        return max(size for size, count in self._shapes if count == rows) - texts

    def run(self, active: Sequence[tuple[int, Request]], pieces: Sequence[Piece]) -> list[Request]:
        """Reads pieces of prompts, and requests a token for each active slot and each prompt that ends.

        Returns the requests for which all tokens have been requested.
        """
        rows = [*active, *((piece.request.slot or 0, piece.request) for piece in pieces)]
        needed = len(active) + sum(piece.size for piece in pieces)
        size, count = min(shape for shape in self._shapes if shape[0] >= needed and shape[1] >= len(rows))
        chosen = [(row, request) for row, (_, request) in enumerate(rows[: len(active)])]
        for row, piece in enumerate(pieces, len(active)):
            if piece.ends:
                with contained(piece.request):
                    self._runner.begin(piece.request)
                chosen.append((row, piece.request))
        tokens = self._tokens([slot for slot, _ in rows], active, pieces, size, count)
        numbers = np.zeros(size, np.int32)
        numbers[: len(active)] = [request.adapter for _, request in active]
        start = len(active)
        for piece in pieces:
            numbers[start : start + piece.size], start = piece.request.adapter, start + piece.size
        for piece in pieces:
            piece.request.written = piece.ends
        adapters, group = self._adapters.of(numbers.tolist()), [request for _, request in rows]
        return self._runner.mix(self._params.current, tokens, adapters, chosen, group)

    def _tokens(
        self,
        slots: Sequence[int],
        active: Sequence[tuple[int, Request]],
        pieces: Sequence[Piece],
        size: int,
        count: int,
    ) -> MixedTokens:
        """`size` tokens, of which `count` slots have some."""
        tokens, counts, positions, documents = np.zeros((4, size), np.int32)
        of_slot, ends = np.zeros(size, np.int32), np.zeros(count, np.int32)
        at = len(active)
        counts[:at], of_slot[:at], ends[:at] = 1, slots[:at], np.arange(at)
        positions[:at] = [request.row_length - 1 for _, request in active]
        for number, piece in enumerate(pieces, 1):
            part = slice(at, at + piece.size)
            tokens[part] = piece.request.tokens[piece.start : piece.start + piece.size]
            counts[part], documents[part], of_slot[part] = 1, number, slots[len(active) + number - 1]
            positions[part] = np.arange(piece.start, piece.start + piece.size)
            at += piece.size
            ends[len(active) + number - 1] = at - 1
        table, first = self._pages.table, pieces[0]
        packed = Packed(documents, ends, np.array([first.start], np.int32), table[slots[len(active)]][None])
        every = np.full(count, self._slots, np.int32)
        every[: len(slots)] = slots
        return MixedTokens(tokens, counts, positions, table[of_slot], packed, every)

    def _compile(self, size: int, count: int) -> None:
        """Compiles the program of so many tokens and slots."""
        x_N, x_S, table = np.zeros(size, np.int32), np.zeros(count, np.int32), self._pages.table
        packed = Packed(x_N, x_S, np.zeros(1, np.int32), table[:1])
        tokens = MixedTokens(x_N, x_N, x_N, table[x_N], packed, x_S)
        settings, adapters = Settings(*(x[x_S] for x in self._runner.settings)), self._adapters.of(x_N.tolist())
        next_, _ = next_tokens([], count, self._runner.vocab_size)
        compile_mixed(self._runner, self._params.current, tokens, settings, next_, adapters)


class MixedQueue(PrefillQueue):
    """A queue of prompts that can be read in pieces; see PrefillQueue."""

    def mixes(self, active: Sequence[tuple[int, Request]]) -> bool:
        """Whether the first prompt can be read in pieces beside these texts. A prompt of several requests is read once, for all."""
        if not self._waiting or any(request.likeliest for _, request in (*active, (0, self._waiting[0]))):
            return False
        first, *rest = self._waiting
        if not (active or rest) and self._part is None and len(first.tokens) <= self._most:
            return False  # the programs of prompts alone are of more sizes
        return not any(same_prompt(first, other) for other in rest)

    def pieces(self, room: int) -> list[Piece]:
        """Takes `room` tokens of prompts: whole prompts, but for the first, of which a part was read, and the last."""
        result: list[Piece] = []
        for request in [*self._waiting]:
            start, total = self._start(request, not result), len(request.tokens)
            if start is None or request.likeliest or self._begins_like(request, [piece.request for piece in result]):
                continue
            count = min(room, self._most, total - start)
            if count < total - start and count < LEAST_PART and result:
                break
            result.append(Piece(request, start, count))
            room -= count
            self._waiting.remove(request)
            self._part = None
            if count < total - start:
                self._waiting.insert(0, request)
                self._part = None, start + count
            if room < 1 or count < total - start:
                break
        self.stalled = bool(self._waiting) and not result
        return result

    def share(self, pieces: Sequence[Piece]) -> None:
        """Adds prompts that were read into their slots to the prefix cache, if others that wait begin like them."""
        if self.prefixes is None or self._runner is None:
            return
        for request in (piece.request for piece in pieces if piece.ends):
            if request.slot is not None and any(self._begins_like(other, [request]) for other in self._waiting):
                count = len(request.tokens)
                row = self._runner.row(request.slot, self._batches.size(count))
                if row is not None:
                    self.prefixes.keep(request.tokens, row | {"lengths": np.array([count], np.int32)}, request.sharing)

    def _start(self, request: Request, is_first: bool) -> int | None:
        """How many of a prompt's tokens are in its slot; None: only the first piece of a step may continue."""
        if self._part is not None and request is self._waiting[0]:
            return self._part[1]
        cached = self._cached(request)
        if cached is None:
            return 0
        row, known = cached
        if not is_first or not self._needed.puts(row):
            return None
        assert self._runner is not None, "pieces are read into slots"
        self._runner.put(request, row)
        return known

    def _begins_like(self, request: Request, others: Sequence[Request]) -> bool:
        """Whether a request's prompt begins like one of others, and can have what is read of it from the prefix cache."""
        if self.prefixes is None:
            return False
        return shares(request, others) or any(same_prompt(request, other) for other in others)
