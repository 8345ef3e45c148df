"""Compiles an engine's programs before the first request, or those of usual requests before and the rest after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from capibara.inference.engine.cache import batching
from capibara.inference.engine.cache.batching import PART_TOKENS, EngineConfig
from capibara.inference.engine.core import EngineCore
from capibara.inference.engine.programs.compiler import Task
from capibara.inference.engine.requests.request import LIKELIEST, Request
from capibara.inference.engine.runner import step_rows
from capibara.inference.engine.runner.decode import step_task


def warm_up(
    core: EngineCore,
    config: EngineConfig,
    length: int,
    encodes: bool,
    request_of: Callable[[Sequence[int], int], Request],
    show: Callable[[int, int], None],
    beside: bool,
) -> None:
    """Compiles the programs for prompts of all lengths, and the steps.

    Args:
      core: of the engine.
      config: of the engine.
      length: positions of a slot.
      encodes: whether an encoder reads the prompts.
      request_of: makes a request of a prompt and a number of likeliest tokens.
      show: called with the numbers of compiled programs and of all that are compiled here.
      beside: whether only the first are compiled here, and the others after the engine has started.
    """
    shapes = batching.prompt_shapes(config, length, encodes, core.prefill_tokens, core.reads_in_slot)
    step = lambda *how: step_task(core.runner, core.params, *how)  # noqa: E731
    first, rest = [step(0)], list[Task]()
    few = [] if core.on_mesh else [step(0, size) for size in step_rows.sizes_of(config.slots)]
    for rows, size, likeliest in shapes:
        if core.pages and not core.pages.fits(rows, size):
            continue
        requests = [request_of([1] * size, likeliest) for _ in range(rows)]
        task = core.prompts.alone(requests[0], None) if rows == 1 else core.prompts.together(requests)
        (first if rows == 1 and size <= PART_TOKENS and not likeliest else rest).append(task)
    rest = [*few, *rest, step(LIKELIEST)]
    if not beside or core.on_mesh:
        first, rest = [*first, *rest], []
    for done, task in enumerate(first):
        show(done, len(first))
        core.compiler.compile(task)
    show(len(first), len(first))
    for task in rest:
        core.compiler.add(task)
