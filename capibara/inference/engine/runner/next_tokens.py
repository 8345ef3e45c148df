"""What the host says about the next tokens of rows: indices, forced tokens, masks, and the history of their texts."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from capibara.inference.engine.programs.programs import NextTokens, allowed_words
from capibara.inference.engine.requests.faults import contained
from capibara.inference.engine.requests.request import LIKELIEST, Request
from capibara.inference.sampling.sampler import History

_EVERY = np.uint32(2**32 - 1)  # all tokens of a word of NextTokens.allowed


def next_tokens(active: Sequence[tuple[int, Request]], rows: int, vocab_size: int) -> tuple[NextTokens, int]:
    """What programs of `rows` rows need of the requests in some of them, and how many of the likeliest to return.

    A request whose grammar fails gets the error.
    """
    index, forced = np.zeros(rows, np.int32), np.full(rows, -1, np.int32)
    every = _all_allowed(rows, allowed_words(vocab_size))
    allowed = every
    for row, request in active:
        index[row], forced[row] = request.requested, request.forced.get(request.requested, -1)
        if request.restricted or request.requested < request.sampling.min_new_tokens:
            allowed = every.copy() if allowed is every else allowed
            with contained(request):
                request.allow(allowed[row])
    alternatives = LIKELIEST if any(request.likeliest for _, request in active) else 0
    return NextTokens(index, forced, allowed), alternatives


@functools.lru_cache(maxsize=16)
def _all_allowed(rows: int, words: int) -> np.ndarray:
    """Every token for every row; made once, since most steps have no other mask, and read-only."""
    allowed = np.full((rows, words), _EVERY)
    allowed.flags.writeable = False
    return allowed


def history_of(request: Request, vocab_size: int) -> History:
    """The history of a request's text, as one row; of the prompt only the repetition penalty counts tokens."""
    seen, counts, bias = (np.zeros((1, vocab_size), dtype) for dtype in (bool, np.int32, np.float32))
    seen[0, request.tokens] = request.sampling.repetition_penalty != 1
    np.add.at(counts[0], request.tokens[request.prompt_tokens :], 1)
    for token, value in (request.sampling.logit_bias or {}).items():
        bias[0, token] = value
    request.restrictions.bias(bias[0])
    return History(seen, counts, bias)
