"""The slots' state on the devices, what the host says of each slot, and copies of slots' rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from capibara.core.types import Params
from capibara.inference.engine.cache.pages import Pages
from capibara.inference.engine.programs.compiler import Compiler, Task, compiled_outputs, shape_of
from capibara.inference.engine.programs.programs import Programs, State
from capibara.inference.engine.requests.faults import program_of
from capibara.inference.engine.requests.request import Request
from capibara.inference.engine.runner.next_tokens import history_of
from capibara.inference.engine.runner.step_rows import StepRows
from capibara.inference.sampling.sampler import GREEDY, Settings, settings_of, with_row
from capibara.models.api import Cache


class SlotState:
    """The state of all slots.

    Args:
      programs: of the engine; also an attribute.
      state: on the devices, with empty slots; as an attribute the newest, None: a program failed that had it.
      start: makes such a state.
      slots: their number.
      vocab_size: ids of the model.
      pages: of the slots; None: each slot has memory for its whole length.
      compiler: compiles programs while others run.

    Attributes:
      settings: of the slots, on the host.
      vocab_size: as given.
    """

    def __init__(
        self,
        programs: Programs,
        state: State,
        start: Callable[[], State],
        slots: int,
        vocab_size: int,
        pages: Pages | None,
        compiler: Compiler,
    ):
        self.programs, self._start, self._slots, self.vocab_size = programs, start, slots, vocab_size
        self.state: State | None = state
        self._shapes, self._compiler, self._pages = jax.tree.map(shape_of, state), compiler, pages
        self.settings, self._adapter_numbers = _idle(slots)

    @property
    def _slots_state(self) -> State:
        """The state, made anew if it was discarded."""
        if self.state is None:
            self.state = self._start()
        return self.state

    @property
    def table(self) -> np.ndarray | None:
        return None if self._pages is None else self._pages.table

    def assign(self, slot: int, request: Request) -> None:
        """Sets a slot's sampling and adapter to a request's."""
        self._set(slot, settings_of([request.sampling]), request.adapter)

    def clear(self, slot: int) -> None:
        """Resets a slot's settings."""
        self._set(slot, GREEDY, 0)

    def _set(self, slot: int, settings: Settings, adapter: int) -> None:
        self.settings = Settings(*map(lambda old, new: with_row(old, slot, new), self.settings, settings))
        self._adapter_numbers[slot] = adapter

    def row(self, slot: int, positions: int) -> Cache | None:
        """A copy of the first positions of a slot's keys and values; None while its program is compiled."""
        if not self._compiler.is_compiled(row_task(self, positions)):
            return None
        return self.programs.row(self._slots_state, np.int32(slot), self.table, positions)

    def restart(self) -> None:
        """Discards the state of all slots, after a program has failed."""
        self.settings, self._adapter_numbers = _idle(self._slots)
        self.state = None

    def begin(self, request: Request) -> None:
        """Sets the history of a request's slot before its prompt ends, if it is needed."""
        if request.needs_history:
            with program_of([request]):
                history = history_of(request, self.vocab_size)
                self.state = self.programs.begin(self._slots_state, history, np.array(request.slot, np.int32))

    def put(self, request: Request, row: Cache) -> None:
        """Copies the row of a cached prefix into a request's slot, where the rest of its prompt is read."""
        with program_of([request]):
            row = jax.device_put(row, self._slots_state["tokens"].sharding)  # as the rows that it was compiled for
            self.state = self.programs.put(self._slots_state, row, np.array(request.slot, np.int32), self.table)

    def read(self, params: Params, request: Request, batch: dict[str, Any], length: int) -> jax.Array:
        """Reads more tokens of a row whose first `length` are in the request's slot; returns the logits after them."""
        slot, known = np.array([request.slot], np.int32), np.array([length], np.int32)
        with program_of([request]):
            table = StepRows(slot, (), 1).table(self._pages)
            logits, self.state = self.programs.read(params, self._slots_state, batch, slot, known, table)
        return logits


def row_task(runner: SlotState, positions: int) -> Task:
    """The program that copies the first positions of a slot."""
    return Task(("row", positions), lambda: _compile_row(runner, positions))


def put_task(runner: SlotState, positions: int) -> Task:
    """The program that copies a row of so many positions into a slot."""

    def compile() -> None:
        row = _compile_row(runner, positions)
        runner.programs.put.lower(runner._shapes, row, np.int32(0), runner.table).compile()

    return Task(("put", positions), compile)


def _compile_row(runner: SlotState, positions: int) -> Cache:
    return compiled_outputs(runner.programs.row, runner._shapes, np.int32(0), runner.table, positions)


def _idle(slots: int) -> tuple[Settings, list[int]]:
    """The settings and the adapters' numbers of free slots."""
    return Settings(*(np.repeat(x, slots, axis=0) for x in GREEDY)), [0] * slots
