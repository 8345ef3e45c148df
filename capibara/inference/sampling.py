"""How text is generated: what is asked for, beside the prompt."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from capibara.config import configurable
from capibara.types import UserError


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen, and when a text ends.

    Attributes:
      max_new_tokens: where a continuation is cut off.
      temperature: divides the logits; 0: greedy.
      top_k: only the k likeliest tokens; None: all.
      top_p: only the likeliest tokens that together reach this probability (Holtzman et al. 2020); None: all.
      min_p: only tokens with at least this share of the likeliest one's probability (Nguyen et al. 2024,
        arXiv:2407.01082); None: all.
      repetition_penalty: divides the positive logits of tokens that are in the text already, the prompt included, and
        multiplies the negative ones (Keskar et al. 2019, arXiv:1909.05858); 1: nothing.
      seed: equal seeds give equal text.
      stop: strings that end the text; it does not contain them.
      thinking_tokens: most tokens between the tags of a thought: then the closing one is put there; None: no limit.
      thinking_tags: what begins and ends a thought.
    """

    max_new_tokens: int = 128
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    thinking_tokens: int | None = None
    thinking_tags: tuple[str, str] = ("<think>", "</think>")

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise UserError(f"Sampling.max_new_tokens is {self.max_new_tokens}, must be at least 1")
        if not self.temperature >= 0:  # as NaN is not
            raise UserError(f"Sampling.temperature is {self.temperature}, must be at least 0 (0: greedy)")
        if self.top_k is not None and not 1 <= self.top_k < 2**31:
            raise UserError(f"Sampling.top_k is {self.top_k}, must be from 1 to 2**31 - 1, or None for all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"Sampling.top_p is {self.top_p}, must be above 0 and at most 1, or None for all tokens")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise UserError(f"Sampling.min_p is {self.min_p}, must be from 0 to 1, or None for all tokens")
        if not self.repetition_penalty > 0:
            raise UserError(f"Sampling.repetition_penalty is {self.repetition_penalty}, must be above 0 (1: nothing)")
        if not -(2**63) <= self.seed < 2**63:
            raise UserError(f"Sampling.seed is {self.seed}, must be from -2**63 to 2**63 - 1")
        if isinstance(self.stop, str) or not all(self.stop):
            raise UserError(f'Sampling.stop is {self.stop!r}, must be a tuple of strings with text: try ("\\n\\n",)')
        if self.thinking_tokens is not None and self.thinking_tokens < 1:
            raise UserError(f"Sampling.thinking_tokens is {self.thinking_tokens}, must be at least 1, or None")
        if len(self.thinking_tags) != 2 or not all(self.thinking_tags):
            raise UserError(f"Sampling.thinking_tags is {self.thinking_tags!r}, must be two strings with text")


def changed(sampling: Sampling) -> dict[str, Any]:
    """What differs from the defaults, as JSON values."""
    fields = {field.name: getattr(sampling, field.name) for field in dataclasses.fields(sampling)}
    default = Sampling()
    return json.loads(json.dumps({name: x for name, x in fields.items() if x != getattr(default, name)}))
