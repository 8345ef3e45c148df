"""Which programs a prompt needs, and whether they are compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from capibara.inference.engine.placement.parameters import ServedParams
from capibara.inference.engine.programs.compiler import Compiler, Task, compiled_outputs
from capibara.inference.engine.programs.programs import Programs
from capibara.inference.engine.requests.request import LIKELIEST, Request
from capibara.inference.engine.runner.decode import (
    DecodeRunner,
    compile_admission,
    compile_read,
    step_task,
)
from capibara.inference.engine.runner.prompt_batches import PromptBatches
from capibara.inference.engine.runner.slot_state import put_task
from capibara.models.api import Cache, capacity

Part = tuple[Any, int]
"""A row, None if it is in its slot, and the number of tokens that it holds."""


class PromptPrograms:
    """The programs that read prompts.

    Args:
      programs: of the engine.
      params: that they read.
      runner: admits rows to slots.
      batches: of prompts.
      most: tokens that are read at a time.
      in_slot: whether the parts of long prompts are read into the slot.
      compiler: compiles them while others run.
    """

    def __init__(
        self,
        programs: Programs,
        params: ServedParams,
        runner: DecodeRunner,
        batches: PromptBatches,
        most: int,
        in_slot: bool,
        compiler: Compiler,
    ):
        self._programs, self._params, self._runner, self._batches = programs, params, runner, batches
        self._most, self._in_slot, self._compiler = most, in_slot, compiler

    def are_compiled(self, request: Request, cached: Callable[[], Part | None]) -> bool:
        """Whether a prompt can be read and its text decoded by compiled programs; compiles them if not.

        `cached`: the row of its prefix; None: there is none.
        """
        if not self._compiler.started:
            return True
        tasks = [step_task(self._runner, self._params, _likeliest(request)), *self.of_prompt(request, cached())]
        return all([self._compiler.is_compiled(task) for task in tasks])

    def reads_together(self, requests: Sequence[Request]) -> bool:
        """Whether prompts of one size can be read together by compiled programs; compiles them if not."""
        return not self._compiler.started or self._compiler.is_compiled(self.together(requests))

    def puts(self, row: Cache) -> bool:
        """Whether a cached row can be put into a slot by a compiled program; compiles it if not."""
        return self._compiler.is_compiled(put_task(self._runner, capacity(row)))

    def together(self, requests: Sequence[Request]) -> Task:
        """The programs that read several prompts of one size."""
        size = self._batches.size(len(requests[0].tokens))

        def compile() -> None:
            batch = self._batches.batch(requests, [[0]] * len(requests), size)
            logits, rows = compiled_outputs(self._programs.prefill, self._params.current, batch)
            compiled_outputs(self._programs.take_row, (rows, logits), np.int32(0))

        return Task(("together", len(requests), size, _encoder_shapes(requests[0])), compile)

    def of_prompt(self, request: Request, part: Part | None) -> list[Task]:
        """The programs that read the rest of a prompt, part after part, and admit its row to a slot."""
        row, known = part or (None, 0)
        rest = [min(self._most, len(request.tokens) - at) for at in range(known, len(request.tokens), self._most)]
        if not self._in_slot or (row is None and len(rest) == 1):
            return [self._alone(request, row, rest)]
        put = [] if row is None else [put_task(self._runner, capacity(row))]
        reads = [self._read(request, size) for size in sorted({*map(self._batches.part_size, rest)})]
        return [*put, *reads, self._admission(request)]

    def _alone(self, request: Request, row: Any, rest: Sequence[int]) -> Task:
        """Reads parts of these sizes into a row: the first, or one with a cached prefix."""
        sizes, likeliest = tuple(map(self._batches.size, rest)), _likeliest(request)
        positions = self._batches.size(len(request.tokens))

        def compile() -> None:
            params, grown = self._params.current, row
            for size in sizes:
                batch = self._batches.batch([request], [[0]], size)
                if grown is None:
                    logits, grown = compiled_outputs(self._programs.prefill, params, batch)
                else:
                    most = max(positions, capacity(grown))
                    logits, grown = compiled_outputs(self._programs.resume, params, batch, grown, most)
            compile_admission(self._runner, grown, logits, likeliest)

        held = None if row is None else capacity(row)
        return Task(("alone", sizes, held, positions, likeliest, _encoder_shapes(request)), compile)

    def _read(self, request: Request, size: int) -> Task:
        """Reads a part into its slot."""

        def compile() -> jax.ShapeDtypeStruct:
            return compile_read(self._runner, self._params.current, self._batches.part(request, [0] * size))

        return Task(("read", size), compile)

    def _admission(self, request: Request) -> Task:
        """Admits a row that was read into its slot."""
        likeliest = _likeliest(request)

        def compile() -> None:
            logits = compile_read(self._runner, self._params.current, self._batches.part(request, [0]))
            compile_admission(self._runner, None, logits, likeliest)

        return Task(("admission", likeliest), compile)


def _likeliest(request: Request) -> int:
    """How many of the likeliest tokens a program returns for a request."""
    return LIKELIEST if request.likeliest else 0


def _encoder_shapes(request: Request) -> tuple[tuple[int, ...], ...]:
    return tuple(x.shape for x in (request.encoder or {}).values())
