"""Compiles an engine's programs before its first request: else the first prompt of each size waits for its own."""

from __future__ import annotations

from collections.abc import Iterator

from capibara.inference.engine import Engine
from capibara.inference.sampling import Sampling


def warm_up(engine: Engine, vocab_size: int) -> Iterator[tuple[int, int]]:
    """Reads a prompt of every size and writes two tokens; gives (how many are done, of how many).

    Prompts whose beginning was read before, for another request, have programs of their own: those are compiled later.

    Args:
      engine: without a thread of its own.
      vocab_size: ids to choose from.
    """
    sizes = engine.prompt_sizes
    asked = [*((size, 0) for size in sizes), (sizes[0], 1)]
    sampling = Sampling(max_new_tokens=2, temperature=1.0)
    for done, (size, likeliest) in enumerate(asked):
        yield done, len(asked)
        # Each of another token: none begins as another does. With the text it is as long as the size.
        prompt = [done % vocab_size] * max(size - 1, 1)
        engine.submit(prompt, sampling, likeliest=likeliest).result()
    yield len(asked), len(asked)
