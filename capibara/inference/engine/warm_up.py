"""Compiles an engine's programs before the first request."""

from __future__ import annotations

from collections.abc import Callable

from capibara.inference.engine.cache import batching
from capibara.inference.engine.cache.batching import EngineConfig
from capibara.inference.engine.core import EngineCore
from capibara.inference.engine.requests.request import LIKELIEST
from capibara.inference.engine.requests.stream import Stream
from capibara.inference.engine.runner.decode import compile_steps
from capibara.inference.sampling.sampling import Sampling


def warm_up(
    core: EngineCore,
    config: EngineConfig,
    length: int,
    encodes: bool,
    submit: Callable[..., Stream],
    vocab_size: int,
    show: Callable[[int, int], None],
) -> None:
    """Compiles the programs for prompts of all lengths, and the steps.

    Args:
      core: of the engine.
      config: of the engine.
      length: positions of a slot.
      encodes: whether an encoder reads the prompts.
      submit: as `Engine.submit`.
      vocab_size: ids of the model.
      show: called with the numbers of compiled programs and of all programs.
    """
    pages, prefixes, core.prefill.prefixes = core.pages, core.prefill.prefixes, None
    sampling = Sampling(temperature=0.0, max_new_tokens=1)
    shapes = batching.prompt_shapes(config, length, encodes, core.prefill_tokens, core.reads_in_slot)
    prompts = [one for one in shapes if not pages or pages.fits(one[0], one[1])]
    for done, (rows, size, likeliest) in enumerate(prompts):
        show(done, len(prompts) + 2)
        tokens = [[(row + 1) % vocab_size] * size for row in range(rows)]
        for stream in [submit(prompt, sampling, likeliest=likeliest) for prompt in tokens]:
            stream.result()
    core.prefill.prefixes = prefixes
    core.runner.statistics.clear()
    for done, alternatives in enumerate((0, LIKELIEST), len(prompts)):
        show(done, len(prompts) + 2)
        compile_steps(core.runner, core.params.current, alternatives)
    show(len(prompts) + 2, len(prompts) + 2)
