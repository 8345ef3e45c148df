"""Runs the decode programs: holds the slots' state on the devices, and receives tokens."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from capibara.core.types import Params
from capibara.inference.engine.cache.batching import EngineConfig, Statistics
from capibara.inference.engine.cache.pages import Pages
from capibara.inference.engine.placement.parameters import ServedParams
from capibara.inference.engine.programs.compiler import Compiler, Task, compiled_outputs
from capibara.inference.engine.programs.programs import MixedTokens, NextTokens, Programs, SampledTokens, State
from capibara.inference.engine.requests.adapters import Adapters
from capibara.inference.engine.requests.faults import contained, program_of
from capibara.inference.engine.requests.following import TokenChecksum
from capibara.inference.engine.requests.request import Request
from capibara.inference.engine.runner.decode_schedule import DecodeSchedule
from capibara.inference.engine.runner.next_tokens import history_of, next_tokens
from capibara.inference.engine.runner.prefilled import Prefilled
from capibara.inference.engine.runner.slot_state import SlotState
from capibara.inference.engine.runner.step_rows import StepRows, rows_of
from capibara.inference.sampling.sampler import History, Settings
from capibara.models.api import BatchAdapters


class Pending(NamedTuple):
    """A program whose tokens have not been received.

    Attributes:
      sampled: the tokens, on the devices.
      rows: (row of `sampled`, the request that it belongs to).
      at_s: when the program was started, by time.monotonic; None: not timed.
      group: the requests whose programs computed them.
    """

    sampled: SampledTokens
    rows: Sequence[tuple[int, Request]]
    at_s: float | None
    group: Sequence[Request]


class DecodeRunner(SlotState):
    """Runs the programs that read and write the slots' state, and is its only user; see SlotState.

    Tokens are requested from the devices and received later. Methods that request tokens return the requests for which all have
    been requested: their slots are free before the last token is received.

    Args:
      programs, state, start: as for SlotState.
      config: of the engine.
      vocab_size: ids of the model.
      adapters: of the engine.
      pages: of the slots; None: each slot has memory for its whole length.
      schedule: records the time of programs.
      compiler: compiles programs while others run.

    Attributes:
      sizes: numbers of rows, besides all slots, whose steps are compiled.
      ahead: tokens per row in the last decode program.
      checksum: of all received tokens.
      statistics: of requested tokens.
    """

    def __init__(
        self,
        programs: Programs,
        state: State,
        start: Callable[[], State],
        config: EngineConfig,
        vocab_size: int,
        adapters: Adapters,
        pages: Pages | None,
        schedule: DecodeSchedule,
        compiler: Compiler,
    ):
        super().__init__(programs, state, start, config.slots, vocab_size, pages, compiler)
        self._schedule, self._draft_tokens, self._adapters = schedule, config.draft_tokens, adapters
        self._pending = deque[Pending]()
        self.sizes: Sequence[int] = ()
        self.ahead, self.checksum, self.statistics = 0, TokenChecksum(), Statistics()

    @property
    def pending(self) -> bool:
        """Whether there are tokens to receive."""
        return bool(self._pending)

    def pending_requests(self) -> list[Request]:
        """The requests with tokens to receive; thread-safe."""
        return [request for item in list(self._pending) for _, request in item.rows]

    def restart(self) -> None:
        """Discards the state of all slots and all tokens to receive, after a program has failed."""
        super().restart()
        self._pending.clear()
        self.ahead = 0

    def admit(self, prefilled: Prefilled) -> list[Request]:
        """Moves a row that was read into its slot, and requests a token."""
        request, slot = prefilled.request, prefilled.request.slot
        assert slot is not None, "it was assigned one"
        settings = Settings(*(x[slot : slot + 1] for x in self.settings))
        next_, alternatives = next_tokens([(0, request)], 1, self.vocab_size)
        history = history_of(request, self.vocab_size)

        with program_of(prefilled.group):
            self.state, sampled = self.programs.admit(
                self._slots_state, prefilled.row, prefilled.logits, np.int32(slot), settings, next_, history, self.table,
                alternatives,
            )  # fmt: skip
        request.written = True
        return self._request(sampled, [(0, request)], np.ones(1, np.int32), prefilled.group)

    def step(self, params: Params, active: Sequence[tuple[int, Request]], count: int) -> list[Request]:
        """Requests `count` tokens for the rows of these slots."""
        rows = rows_of(active, self._slots, self.sizes)
        next_, alternatives = next_tokens(rows.active, rows.size, self.vocab_size)
        self.ahead, at_s = count, time.monotonic()
        group = [request for _, request in active]
        with program_of(group):
            self.state, sampled = self.programs.step(
                params, self._slots_state, Settings(*map(rows.of, self.settings)), next_, np.int32(count), rows.table(self._pages),
                alternatives, self._batch_adapters_of(rows), rows.slots,
            )  # fmt: skip
        self.statistics.steps += 1
        return self._request(sampled, rows.active, np.full(self._slots, count), group, at_s)

    def mix(
        self, params: Params, tokens: MixedTokens, adapters: BatchAdapters | None,
        rows: Sequence[tuple[int, Request]], group: Sequence[Request],
    ) -> list[Request]:  # fmt: skip
        """Reads tokens of the requests of a group, and requests a token for these of the rows that `tokens` has slots for."""
        count, slots = len(tokens.slots), np.where(tokens.slots < self._slots, tokens.slots, tokens.slots[0])
        next_, _ = next_tokens(rows, count, self.vocab_size)
        settings, self.ahead = Settings(*(x[slots] for x in self.settings)), 1
        with program_of(group):
            state = self._slots_state
            self.state, sampled = self.programs.mix(params, state, tokens, settings, next_, adapters)
        self.statistics.steps += 1
        return self._request(sampled, rows, np.ones(count, np.int32), group)

    def verify(
        self, params: Params, active: Sequence[tuple[int, Request]], guesses: Mapping[int, Sequence[int]]
    ) -> list[Request]:
        """Verifies guesses: requests for each slot the correct ones up to the first error, and the right token there.

        Waits for the devices, to know how many these are.
        """
        rows = rows_of(active, self._slots, self.sizes)
        next_, alternatives = next_tokens(rows.active, rows.size, self.vocab_size)
        guessed = np.zeros((rows.size, self._draft_tokens), np.int32)
        counts = np.zeros(rows.size, np.int32)
        for (row, _), (slot, _) in zip(rows.active, active):
            counts[row], guessed[row, : len(guesses[slot])] = len(guesses[slot]), guesses[slot]
        group = [request for _, request in active]
        with program_of(group):
            self.state, sampled = self._verify(params, rows, next_, guessed, counts, alternatives)
            held = jax.device_get(sampled.counts)
        self.statistics.steps += 1
        self.statistics.drafted += int(counts.sum())
        for row, request in rows.active:
            self.statistics.accepted += int(held[row]) - 1
            if counts[row] and request.drafter is not None:
                request.drafter.record(int(held[row]) - 1)
        return self._request(sampled, rows.active, held, group)

    def receive(self, left: int) -> Iterator[Request]:
        """Passes the tokens of all but the last `left` programs to requests; yields requests as they end."""
        while len(self._pending) > left:
            # The program stays in the list if this fails: some of its requests may have no slot any more.
            sampled, rows, at_s, group = self._pending[0]
            with program_of(group):
                sampled = jax.device_get(sampled)
            self._schedule.record(at_s, int(sampled.counts[0]))
            self.checksum.add(sampled.tokens)
            for row, request in rows:
                with contained(request):
                    _deliver(request, sampled, row)
            self._pending.popleft()  # before anything else can fail: no token is passed on twice
            yield from [request for _, request in rows if request.finished]

    def _verify(
        self, params: Params, rows: StepRows, next_: NextTokens, guesses: np.ndarray, counts: np.ndarray,
        alternatives: int,
    ) -> tuple[State, SampledTokens]:  # fmt: skip
        """Runs the program that verifies guesses [R, draft tokens] of these rows, of which `counts` [R] are given."""
        return self.programs.verify(
            params, self._slots_state, Settings(*map(rows.of, self.settings)), next_, guesses, counts, rows.table(self._pages),
            alternatives, self._batch_adapters_of(rows), rows.slots,
        )  # fmt: skip

    def _request(
        self,
        sampled: SampledTokens,
        rows: Sequence[tuple[int, Request]],
        counts: np.ndarray,
        group: Sequence[Request],
        at_s: float | None = None,
    ) -> list[Request]:
        """Records that `counts` tokens of each row were requested of programs of `group`; `at_s`: when, for timing."""
        self._pending.append(Pending(sampled, rows, at_s, group))
        for row, request in rows:
            request.requested += int(counts[row])
            self.statistics.tokens += int(counts[row])
        return [request for _, request in rows if request.requested == request.limit]

    def _batch_adapters_of(self, rows: StepRows) -> BatchAdapters | None:
        """The adapters, and each row's."""
        return self._adapters.of(rows.of(np.array(self._adapter_numbers, np.int32)).tolist())


def step_task(runner: DecodeRunner, params: ServedParams, alternatives: int, size: int | None = None) -> Task:
    """The programs that request tokens for `size` rows, with this many likeliest ones; None: for all slots."""
    size = size or runner._slots
    return Task(("step", size, alternatives), lambda: compile_step(runner, params.current, size, alternatives))


def compile_step(runner: DecodeRunner, params: Params, size: int, alternatives: int) -> None:
    """Compiles the programs of a runner that request tokens for so many rows, and lets it use them."""
    rows = rows_of([], runner._slots, [size])
    next_, _ = next_tokens([], size, runner.vocab_size)
    settings, table = Settings(*map(rows.of, runner.settings)), rows.table(runner._pages)
    adapters, programs = runner._batch_adapters_of(rows), runner.programs
    programs.step.lower(
        params, runner._shapes, settings, next_, np.int32(1), table, alternatives, adapters, rows.slots
    ).compile()
    if runner._draft_tokens:
        guesses, counts = np.zeros((size, runner._draft_tokens), np.int32), np.zeros(size, np.int32)
        programs.verify.lower(
            params, runner._shapes, settings, next_, guesses, counts, table, alternatives, adapters, rows.slots
        ).compile()
    if size < runner._slots:
        runner.sizes = [*runner.sizes, size]


def compile_mixed(runner: DecodeRunner, params: Params, *rest: object) -> None:
    """Compiles the programs of a step that takes these arguments after the state."""
    runner.programs.mix.lower(params, runner._shapes, *rest).compile()
    runner.programs.begin.lower(runner._shapes, _no_history(runner), np.int32(0)).compile()


def _no_history(runner: DecodeRunner) -> History:
    """An empty history of one row."""
    return History(*(np.zeros((1, runner.vocab_size), dtype) for dtype in (bool, np.int32, np.float32)))


def compile_read(runner: DecodeRunner, params: Params, batch: dict[str, Any]) -> jax.ShapeDtypeStruct:
    """Compiles the program that reads this batch of one row into a slot; returns the shape of its logits."""
    zero = np.zeros(1, np.int32)
    table = StepRows(zero, (), 1).table(runner._pages)
    return compiled_outputs(runner.programs.read, params, runner._shapes, batch, zero, zero, table)[0]


def compile_admission(runner: DecodeRunner, row: object, logits: object, alternatives: int) -> None:
    """Compiles the program that admits such a row; None: the row is in its slot."""
    settings = Settings(*(x[:1] for x in runner.settings))
    next_, _ = next_tokens([], 1, runner.vocab_size)
    runner.programs.admit.lower(
        runner._shapes, row, logits, np.int32(0), settings, next_, _no_history(runner), runner.table, alternatives
    ).compile()


def _deliver(request: Request, sampled: SampledTokens, row: int) -> None:
    """Passes a row's tokens, from arrays on the host, to its request."""
    for step in range(sampled.counts[row]):
        count = min(request.likeliest, sampled.likeliest.shape[2])
        named = zip(
            sampled.likeliest[row, step, :count].tolist(), sampled.their_log_probabilities[row, step, :count].tolist()
        )
        request.receive(
            int(sampled.tokens[row, step]),
            float(sampled.log_probabilities[row, step]),
            float(sampled.drawn[row, step]),
            tuple(named),
        )
