"""Compiles an engine's programs before the first request, or those of usual requests before and the rest after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from capibara.inference.engine.cache import batching
from capibara.inference.engine.cache.batching import PART_TOKENS, EngineConfig
from capibara.inference.engine.core import EngineCore
from capibara.inference.engine.programs.compiler import Task
from capibara.inference.engine.requests.request import LIKELIEST, Request
from capibara.inference.engine.runner import step_rows
from capibara.inference.engine.runner.decode import step_task
from capibara.inference.engine.runner.slot_state import put_task, row_task
from capibara.inference.sampling.sampler import settings_of
from capibara.inference.sampling.sampling import Sampling

_GREEDY = Sampling(temperature=0.0, max_new_tokens=1)


def warm_up(
    core: EngineCore,
    config: EngineConfig,
    length: int,
    encodes: bool,
    request_of: Callable[..., Request],
    show: Callable[[int, int], None],
    background: bool,
) -> None:
    """Compiles the programs for prompts of all lengths, and the steps.

    Args:
      core: of the engine.
      config: of the engine.
      length: positions of a slot.
      encodes: whether an encoder reads the prompts.
      request_of: `InputProcessor.request`.
      show: called with the numbers of compiled programs and of all that are compiled here.
      background: whether only the first are compiled here, and the others after the engine has started.
    """
    settings_of([_GREEDY])  # its random key is computed by programs, too
    shapes = batching.prompt_shapes(
        config, length, encodes, core.prefill_tokens, core.reads_in_slot, core.mixed is not None
    )
    step = lambda *how: step_task(core.runner, core.params, *how)  # noqa: E731
    first, rest = [step(0)], list[Task]()
    few = [] if core.on_mesh else [step(0, size) for size in step_rows.sizes_of(config.slots)]
    for rows, size, likeliest in shapes:
        if core.pages and not core.pages.fits(rows, size):
            continue
        options: dict[str, Any] = {"ends": (), "likeliest": likeliest, "adapter": None}
        requests = [request_of([1] * size, _GREEDY, lambda: False, **options) for _ in range(rows)]
        tasks = core.prompts.of_prompt(requests[0], None) if rows == 1 else [core.prompts.together(requests)]
        (first if rows == 1 and size <= PART_TOKENS and not likeliest else rest).extend(tasks)
    mixed = core.mixed.tasks if core.mixed else []
    rest = [*few, *mixed, *_of_prefixes(core, length), *rest, step(LIKELIEST)]
    if not background or core.on_mesh:
        first, rest = [*first, *rest], []
    for done, task in enumerate(first):
        show(done, len(first))
        core.compiler.compile(task)
    show(len(first), len(first))
    for task in rest:
        core.compiler.add(task)


def _of_prefixes(core: EngineCore, length: int) -> list[Task]:
    """The programs that copy a slot's row for the prefix cache, and put it into the slot of a later prompt."""
    if core.prefill.prefixes is None or not core.reads_in_slot:
        return []
    return [of(core.runner, positions) for positions in batching.buckets(length) for of in (row_task, put_task)]
