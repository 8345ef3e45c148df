"""Follows a text through a grammar, and says which tokens may come next; llguidance does the work."""

from __future__ import annotations

import functools
import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from capibara.core import extras
from capibara.core.types import UserError
from capibara.data.tokenizers.vocabulary import Vocabulary
from capibara.inference.grammars import schemas, trial
from capibara.inference.grammars.lark import quoted
from capibara.inference.sampling.grammar import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_COMPILED = 32  # grammars that are kept
_MOST_CHARACTERS = 1 << 18  # of a grammar
_MOST_CHOICES = 1999  # llguidance follows at most 2000 alternatives at once
# llguidance's defaults allow 500 MB for one grammar: 250,000 states of 2 kB (its documentation).
_LIMITS = {"max_lexer_states": 50_000, "max_grammar_size": 100_000, "initial_lexer_fuel": 500_000}
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)  # a schema within Lark's notation may have ::= in a text


class Grammars:
    """Compiles grammars for a vocabulary, and keeps the latest.

    Args:
      vocabulary: of the model.
    """

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._compiled = functools.lru_cache(maxsize=_COMPILED)(self._compile)

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher at the beginning of a text; thread-safe, and quick if the grammar was compiled before.

        Raises:
          UserError: the grammar is malformed, too complex, or has something that llguidance does not support.
        """
        return Matcher(self._compiled(grammar).deep_copy(), self._tokenizer)

    @functools.cached_property
    def _tokenizer(self) -> LLTokenizer:
        llguidance = _llguidance()
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Tokens(self._vocabulary)))

    def _compile(self, grammar: Grammar) -> LLMatcher:
        llguidance = _llguidance()
        name, text = _source(grammar)
        if len(text) > _MOST_CHARACTERS:
            raise UserError(
                f"Grammar.{name} has {len(text)} characters, must have at most {_MOST_CHARACTERS}: shorten it"
            )
        if len(grammar.choice or ()) > _MOST_CHOICES:
            raise UserError(
                f"Grammar.choice has {len(grammar.choice or ())} texts, must have at most {_MOST_CHOICES}: shorten it"
            )
        limits = llguidance.LLParserLimits(**_LIMITS, verbose_errors=False)
        try:
            compiled = llguidance.LLMatcher(self._tokenizer, _written(grammar), log_level=0, limits=limits)
        except ValueError as error:
            raise UserError(f"Grammar.{name} cannot be used: {_brief(error)}") from None
        if not compiled.is_error():
            first = compiled.deep_copy()  # what explodes or matches no text shows at the first token
            first.compute_bitmask()
            compiled = first if first.is_error() else compiled
        if compiled.is_error():
            raise UserError(f"Grammar.{name} cannot be used: {_brief(compiled.get_error())}")
        return compiled


class Matcher:
    """A text's place in its grammar.

    Args:
      matcher: of llguidance.
      tokenizer: that it was made with.
    """

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer):
        self._matcher, self._end = matcher, tokenizer.eos_token
        self._words = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)

    @property
    def complete(self) -> bool:
        """Whether the text matches and nothing can follow."""
        return self._matcher.is_stopped() and self._matcher.is_accepting()

    def allow(self, row: np.ndarray, ends: frozenset[int]) -> None:
        """Writes which tokens may come next.

        Args:
          row: one bit per token, [words] uint32, the lowest bit of a word first; overwritten.
          ends: the tokens that end a text: allowed where the text matches.

        Raises:
          UserError: the grammar became too complex, or no token can follow.
        """
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        self._check()
        row[:] = 0
        count = min(len(row), len(self._words))
        row[:count] = self._words[:count]
        accepts = bool(self._words[self._end // 32] >> (self._end % 32) & 1)
        for token in {*ends, self._end}:
            bit = np.uint32(1 << token % 32)
            if token // 32 >= len(row):  # the model has no row for it
                continue
            row[token // 32] = row[token // 32] | bit if accepts and token in ends else row[token // 32] & ~bit
        if not row.any():
            raise UserError("no token of the model continues the text as Grammar says: write it for this vocabulary")

    def accept(self, token: int) -> None:
        """Goes one token on.

        Raises:
          UserError: the grammar became too complex.
        """
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise UserError(f"the text cannot follow Grammar any more: {_brief(self._matcher.get_error())}")


class _Tokens:
    """A vocabulary in the form that llguidance reads; its attributes have the names that it looks for."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        pieces = vocabulary.pieces
        self.tokens = [piece or _name(vocabulary, token) for token, piece in enumerate(pieces)]
        self.special_token_ids = [token for token, piece in enumerate(pieces) if not piece]
        self.eos_token_id, self.bos_token_id = vocabulary.eos_id, None

    def __call__(self, text: str) -> list[int]:
        return self._vocabulary.encode(text)


def _name(vocabulary: Vocabulary, token: int) -> bytes:
    return (vocabulary.spelling(token) or f"<id {token}>").encode()


def _llguidance() -> Any:
    return extras.require("llguidance", extra="grammar", why="structured output")


def _source(grammar: Grammar) -> tuple[str, str]:
    """The field that is set, and its text."""
    for name in ("json_schema", "regex", "lark"):
        if (value := getattr(grammar, name)) is not None:
            return name, str(value)
    return "choice", "".join(grammar.choice or ())


def _written(grammar: Grammar) -> str:
    """The grammar as llguidance reads it."""
    matcher = _llguidance().LLMatcher
    if grammar.regex is not None:
        return matcher.grammar_from_regex(grammar.regex)
    if grammar.lark is not None:
        text = _lark(grammar.lark)
        schemas.check_embedded(text)
        trial.check(text)
        return matcher.grammar_from_lark(text)
    if grammar.choice is not None:
        return matcher.grammar_from_lark("start: " + " | ".join(map(quoted, grammar.choice)))
    assert isinstance(grammar.json_schema, (str, bool))
    schema = schemas.prepared(grammar.json_schema)
    return matcher.grammar_from_json_schema(json.dumps(schema), overrides=schemas.options(schema))


def _lark(text: str) -> str:
    """A grammar in Lark's notation; llama.cpp's GBNF is translated.

    Raises:
      ValueError: it is no GBNF.
    """
    if not _GBNF_RULE.search(text):
        return text
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(text)
    except Exception as error:  # it raises plain exceptions
        raise ValueError(str(error)) from None


def _brief(error: object) -> str:
    """The first lines of a message of llguidance, which quotes what it refuses, as one line."""
    text = " ".join(str(error).replace("<non-verbose/>", "").split())[:300]
    return "no text of this vocabulary matches" if text == "NoExtensionBias" else text
