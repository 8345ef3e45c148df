"""Configures generation: the options of a request besides its prompt."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.inference.sampling.grammar import Grammar

_NOT_WITH_BEAMS = (
    "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
    "allowed_ids", "bad_words", "min_new_tokens", "grammar", "thinking_tokens", "num_decodes", "num_return",
)  # fmt: skip
_LARGEST_BIAS = 1e4


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSearch:
    """Beam search for the likeliest texts, as in T5X's `decoding.beam_search`; deterministic.

    A text's score is its log probability divided by ((5 + its tokens) / 6) ** alpha (Wu et al. 2016, arXiv:1609.08144,
    section 7); for a decoder the prompt's tokens count too. The search ends when no live beam can beat the finished
    ones. If none has finished, the live ones are returned, with their log probabilities as scores.

    Attributes:
      num_decodes: number of beams: live ones, and finished ones that are kept.
      alpha: strength of the length penalty, which favours longer texts; 0: none.
      num_return: number of texts to return, with their scores.
      min_log_prob: the search ends when all live beams are less likely than this.
    """

    num_decodes: int = 4
    alpha: float = 0.6
    num_return: int = 1
    min_log_prob: float = -1e7

    def __post_init__(self) -> None:
        if not 1 <= self.num_decodes <= 1024:
            raise UserError(f"BeamSearch.num_decodes is {self.num_decodes}, must be from 1 to 1024: try 4")
        if not 0 <= self.alpha < math.inf:
            raise UserError(f"BeamSearch.alpha is {self.alpha}, must be finite and at least 0: try 0.6")
        if not 1 <= self.num_return <= self.num_decodes:
            raise UserError(
                f"BeamSearch.num_return is {self.num_return}, must be from 1 to num_decodes ({self.num_decodes})"
            )
        if not self.min_log_prob < 0:
            raise UserError(f"BeamSearch.min_log_prob is {self.min_log_prob}, must be below 0 (-1e7: no limit)")


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen, and when a text ends.

    Attributes:
      max_new_tokens: most tokens to generate.
      temperature: divides the logits; 0: greedy.
      top_k: keep only the k likeliest tokens; None: all.
      top_p: keep only the likeliest tokens that together reach this probability (Holtzman et al. 2020); None: all.
      min_p: keep only tokens with at least this share of the likeliest one's probability (Nguyen et al. 2024,
        arXiv:2407.01082); None: all.
      repetition_penalty: divides positive logits of tokens that occur in the prompt or the text, and multiplies
        negative ones (Keskar et al. 2019, arXiv:1909.05858); 1: off.
      presence_penalty: subtracted from the logit of each token that the text has; the prompt does not count.
      frequency_penalty: the same, for each time that the text has the token.
      logit_bias: token id -> number that is added to its logit, before the penalties; None: none.
      allowed_ids: token ids that the text may have; an end token only if it is one of them. None: all.
      bad_words: words that the text must not have: of the tokens of each, alone or after a space, the last one is not
        chosen after the others.
      min_new_tokens: least tokens to generate before an end token.
      grammar: what the text must match; None: anything.
      seed: equal seeds draw equal texts.
      stop: strings that end the text.
      include_stop: whether the text contains the stop string, or the text of the end token, that ended it.
      thinking_tokens: most tokens between the tags of a thought, after which the closing tag is inserted; None: no
        limit.
      thinking_tags: opening and closing tag of a thought.
      num_decodes: number of texts to draw per prompt; the likeliest is returned (by its log probability under the
        distribution that its tokens were drawn from), as in T5X's `temperature_sample`.
      num_return: how many of them to return, with their log probabilities.
      beams: beam search, which ignores temperature and seed; None: draw tokens one by one.
    """

    max_new_tokens: int = 128
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    min_new_tokens: int = 0
    grammar: Grammar | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    thinking_tokens: int | None = None
    thinking_tags: tuple[str, str] = ("<think>", "</think>")
    num_decodes: int = 1
    num_return: int = 1
    beams: BeamSearch | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"Sampling.max_new_tokens is {self.max_new_tokens}, must be at least 1")
        if not self.temperature >= 0:  # rejects NaN too
            raise UserError(f"Sampling.temperature is {self.temperature}, must be at least 0 (0: greedy)")
        if self.top_k is not None and not 1 <= self.top_k < 2**31:
            raise UserError(f"Sampling.top_k is {self.top_k}, must be from 1 to 2**31 - 1, or None for all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"Sampling.top_p is {self.top_p}, must be above 0 and at most 1, or None for all tokens")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise UserError(f"Sampling.min_p is {self.min_p}, must be from 0 to 1, or None for all tokens")
        if not self.repetition_penalty > 0:
            raise UserError(f"Sampling.repetition_penalty is {self.repetition_penalty}, must be above 0 (1: off)")
        self._check_changes()
        if not -(2**63) <= self.seed < 2**63:
            raise UserError(f"Sampling.seed is {self.seed}, must be from -2**63 to 2**63 - 1")
        if isinstance(self.stop, str) or not all(self.stop):
            raise UserError(f'Sampling.stop is {self.stop!r}, must be a tuple of strings with text: try ("\\n\\n",)')
        if self.thinking_tokens is not None and self.thinking_tokens < 1:
            raise UserError(f"Sampling.thinking_tokens is {self.thinking_tokens}, must be at least 1, or None")
        if len(self.thinking_tags) != 2 or not all(self.thinking_tags):
            raise UserError(f"Sampling.thinking_tags is {self.thinking_tags!r}, must be two strings with text")
        if not 1 <= self.num_decodes <= 1024:
            raise UserError(f"Sampling.num_decodes is {self.num_decodes}, must be from 1 to 1024: try 1")
        if not 1 <= self.num_return <= self.num_decodes:
            raise UserError(
                f"Sampling.num_return is {self.num_return}, must be from 1 to Sampling.num_decodes ({self.num_decodes})"
            )
        if self.num_decodes > 1 and self.temperature == 0 and self.beams is None:
            raise UserError(
                f"Sampling.num_decodes is {self.num_decodes} and Sampling.temperature 0: texts would be equal, set a "
                "temperature above 0, or Sampling.beams = @BeamSearch()"
            )
        for name in _NOT_WITH_BEAMS if self.beams is not None else ():
            if (value := getattr(self, name)) != getattr(Sampling, name):
                raise UserError(
                    f"Sampling.{name} is {value}, which beam search does not support: leave it or Sampling.beams out"
                )

    def _check_changes(self) -> None:
        """Checks what changes logits beside temperature and limits."""
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) <= 100:
                raise UserError(f"Sampling.{name} is {getattr(self, name)}, must be from -100 to 100 (0: off)")
        for token, bias in (self.logit_bias or {}).items():
            if not isinstance(token, int) or token < 0 or not abs(bias) <= _LARGEST_BIAS:
                raise UserError(
                    f"Sampling.logit_bias has {token!r}: {bias}, must have token ids from 0 on, and numbers from "
                    f"-{_LARGEST_BIAS:.0f} to {_LARGEST_BIAS:.0f}"
                )
        if self.allowed_ids is not None and not self.allowed_ids:
            raise UserError("Sampling.allowed_ids is (), must have at least one token id, or be None for all")
        if not all(self.bad_words):
            raise UserError(
                f'Sampling.bad_words is {self.bad_words!r}, must be a tuple of strings with text: try ("no",)'
            )
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise UserError(
                f"Sampling.min_new_tokens is {self.min_new_tokens}, must be from 0 to Sampling.max_new_tokens "
                f"({self.max_new_tokens})"
            )


def changed(sampling: Sampling) -> dict[str, Any]:
    """The fields that differ from the defaults, as JSON values."""
    fields, default = dataclasses.asdict(sampling), dataclasses.asdict(Sampling())
    return json.loads(json.dumps({name: x for name, x in fields.items() if x != default[name]}))


def of_values(fields: Mapping[str, object], others: Sampling = Sampling()) -> Sampling:
    """`others` with the fields replaced that are in these JSON values.

    Raises:
      UserError: a value is out of range.
      TypeError: a field is unknown, or a value has the wrong type.
    """
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    if values.get("beams") is not None:
        values["beams"] = BeamSearch(**values["beams"])
    if values.get("grammar") is not None:
        values["grammar"] = Grammar(**values["grammar"])
    if isinstance(biases := values.get("logit_bias"), Mapping):  # JSON's keys are texts
        values["logit_bias"] = {int(token) if str(token).isdecimal() else token: bias for token, bias in biases.items()}
    return dataclasses.replace(others, **values)
