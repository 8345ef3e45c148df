"""Measures an engine: tokens per second in prefill and decode, and latencies."""

from __future__ import annotations

import statistics
import time

import numpy as np

from capibara.core.types import UserError
from capibara.inference.engine.engine import Engine
from capibara.inference.engine.requests.stream import Completion
from capibara.inference.sampling.sampling import Sampling

_READINGS = 5


def measure(
    engine: Engine, sampling: Sampling, prompt_tokens: int, vocab_size: int, adapter: str | None = None
) -> dict[str, float]:
    """Times the engine on prompts of random tokens; it must not be used otherwise meanwhile.

    Args:
      engine: without its own thread.
      sampling: of all requests.
      prompt_tokens: length of each prompt.
      vocab_size: number of ids to draw from.
      adapter: the engine's adapter to use; None: no adapter.

    Returns:
      `prefill_tokens_per_s` for one prompt; `decode_tokens_per_s` for a single row and `_all_slots` for all slots;
      percentiles in milliseconds of the time to the first token (all slots requested at once) and of each text's mean
      time between tokens, as some arrive together; with speculative decoding the percentage of correct guesses.

    Raises:
      UserError: sampling uses beam search, or several texts per prompt.
    """
    _check(sampling)
    random = np.random.default_rng(0)

    def prompt() -> list[int]:
        return random.integers(0, vocab_size, prompt_tokens).tolist()

    def together(count: int) -> list:
        streams = [engine.submit(prompt(), sampling, adapter=adapter) for _ in range(count)]
        return [stream.result() for stream in streams]

    together(engine.slots)  # compiles
    readings = []
    for _ in range(_READINGS):
        begin_s = time.monotonic()
        next(iter(stream := engine.submit(prompt(), sampling, adapter=adapter)), None)
        readings.append(time.monotonic() - begin_s)
        stream.cancel()
        stream.result()
    [alone] = together(1)
    everyone = together(engine.slots)
    first_ms = [1e3 * completion.waited_s for completion in everyone]
    between_ms = [1e3 * between for completion in everyone if (between := _between_tokens(completion))]
    result = {
        "prefill_tokens_per_s": prompt_tokens / statistics.median(readings),
        "decode_tokens_per_s": 1 / between if (between := _between_tokens(alone)) else 0.0,
    }
    times = [piece.at_s for completion in everyone for piece in completion.pieces]
    begin_s = max(completion.pieces[0].at_s for completion in everyone if completion.pieces)
    result["decode_tokens_per_s_all_slots"] = sum(at > begin_s for at in times) / max(max(times) - begin_s, 1e-9)
    for name, values in (("first_token_ms", first_ms), ("between_tokens_ms", between_ms)):
        for percent in (50, 90, 99):
            result[f"{name}_p{percent}"] = float(np.percentile(values, percent)) if values else 0.0
    if engine.statistics.drafted:
        result["guesses_right_percent"] = 100 * engine.statistics.acceptance
    return result


def report(engine: Engine, sampling: Sampling, prompt_tokens: int, vocab_size: int, adapter: str | None = None) -> str:
    """The result of `measure` as a table."""
    measured = measure(engine, sampling, prompt_tokens, vocab_size, adapter)
    return "\n".join(f"{name:32} {value:12.1f}" for name, value in measured.items())


def _between_tokens(completion: Completion) -> float:
    """Mean seconds between a text's tokens; 0: it has fewer than two."""
    times = [piece.at_s for piece in completion.pieces if piece.token is not None]
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0


def _check(sampling: Sampling) -> None:
    if sampling.num_decodes > 1:
        raise UserError(
            f"--benchmark times one text per prompt, and Sampling.num_decodes is {sampling.num_decodes}: leave one of both "
            "out"
        )
    if sampling.beams is not None:
        raise UserError("--benchmark times tokens one by one, and Sampling.beams is set: leave one of both out")
