"""One request in an engine: what was submitted, its tokens, its text, and forced tokens."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from capibara.core.types import HostBatch, UserError
from capibara.data.tokenizers import model_rows
from capibara.data.tokenizers.decoder_start import start_id
from capibara.data.tokenizers.vocabulary import Vocabulary
from capibara.inference.engine.cache.batching import EngineConfig, WhenFull
from capibara.inference.engine.cache.pages import Pages
from capibara.inference.engine.cache.prefix import Sharing
from capibara.inference.engine.programs.speculative import Drafter, Placeholders
from capibara.inference.engine.requests.adapters import Adapters, LoadedAdapter
from capibara.inference.engine.requests.following import Submission
from capibara.inference.engine.requests.stream import Finish, Piece, Stream
from capibara.inference.grammars.matcher import Grammars, Matcher
from capibara.inference.sampling import sentinels
from capibara.inference.sampling.restrictions import Restrictions, word_ids
from capibara.inference.sampling.sampling import Sampling
from capibara.inference.sampling.text import TextStream

LIKELIEST = 20  # most likeliest tokens per piece
_WORD_LISTS = 32  # lists of bad words whose tokens are kept
_CONTEXT = 16  # tokens on both sides of the end of the prompt that decide about white space there


class Request:
    """A prompt and its text; the devices may already be computing later tokens than those received.

    Attributes:
      tokens: of the prompt and, as they are received, of the text.
      prompt_tokens: number of prompt tokens.
      limit: most tokens of the text.
      likeliest: how many of the likeliest tokens to return with each piece.
      encoder: the encoder's input, as entries of a batch.
      requested: number of text tokens requested of the devices.
      received: number of those received.
      forced: index in the text -> token to force there.
      cached_tokens: prompt tokens found in the prefix cache.
      number: sequence number of the request.
      slot: its slot; None: none.
      written: whether its row is in that slot; else it is still being read.
      generation: of the parameters that its row was started with.
      row: a copy of its row's cache, for later prompts with the same prefix, and how many tokens that has read.
      drafter: guesses its next tokens; None: not used yet.
      submission: the request as submitted, for other processes.
      adapter: the number of its adapter's slot; 0: none.
      sharing: with which requests it shares what is read of its prompt.
      faults: programs with its row that failed, and no request alone made fail.
      alone_until: text tokens that it has to get alone after a program with its row failed; 0: it runs with others.
      cancelled: whether the engine has dropped it.
      finished: whether its stream has ended.
      ends: token ids that end its text.
      matcher: follows its text through its grammar; None: it has none.
      restrictions: which tokens it may have besides.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        vocabulary: Vocabulary,
        stream: Stream,
        *,
        limit: int,
        ends: Sequence[int],
        likeliest: int = 0,
        encoder: HostBatch | None = None,
        names: Mapping[int, str] | None = None,
        submission: Submission,
        restrictions: Restrictions,
        adapter: LoadedAdapter = LoadedAdapter(),
        matcher: Matcher | None = None,
    ):
        self.tokens, self.prompt_tokens = list(prompt), len(prompt)
        self.sampling, self.stream, self.limit, self.likeliest = sampling, stream, limit, likeliest
        self.encoder, self.submission, self.adapter = encoder, submission, adapter.number
        self.sharing = Sharing(adapter.version, submission.salt)
        self.requested = self.received = self.cached_tokens = self.generation = self.number = 0
        self.faults = self.alone_until = 0
        self.forced: dict[int, int] = {}
        self.slot: int | None = None
        self.written = False
        self.row: tuple[Any, int] | None = None
        self.drafter: Drafter | Placeholders | None = None
        self.cancelled = self.finished = False
        self.ends = frozenset(ends)
        self._of_text = vocabulary, sampling.stop, names, sampling.include_stop
        self.restrictions = restrictions
        self._text = self.text_stream()
        self._has_text = False
        self.matcher, self._thinks = matcher, False
        self._tags: tuple[list[int], list[int]] = ([], [])
        if matcher is not None or sampling.thinking_tokens is not None:
            opened, closed = map(vocabulary.encode, sampling.thinking_tags)
            self._tags = opened, closed
            self._thinks = self._open_in_prompt()
            if self._thinks and sampling.thinking_tokens is not None:
                self._think(0, sampling.thinking_tokens)

    def text_stream(self) -> TextStream:
        """A new TextStream for its tokens."""
        return TextStream(*self._of_text)

    @property
    def row_length(self) -> int:
        """Length of its row: tokens to be read before the next one is chosen."""
        return self.prompt_tokens + self.requested

    @property
    def restricted(self) -> bool:
        """Whether only the tokens before the next one tell which are allowed: any token may end a thought, too."""
        return not self.finished and (self.matcher is not None or self.restrictions.follow)

    @property
    def needs_history(self) -> bool:
        """Whether what its prompt or its text has changes the logits, or a bias does."""
        s = self.sampling
        penalised = s.repetition_penalty != 1 or s.presence_penalty or s.frequency_penalty
        return bool(penalised or s.logit_bias or s.allowed_ids or s.bad_words)

    def allow(self, row: np.ndarray) -> None:
        """Writes which tokens may come next, as a row of `NextTokens.allowed`; all tokens so far must be received.

        Raises:
          UserError: no token can follow.
        """
        if self.matcher is not None and not self._thinks:
            self.matcher.allow(row, self.ends)
        # A text does not end in the thought before its grammar.
        if (self._thinks and self.matcher is not None) or self.requested < self.sampling.min_new_tokens:
            for token in self.ends:
                row[token // 32] &= ~np.uint32(1 << token % 32)
        self.restrictions.allow(row, self.tokens[self.prompt_tokens :])

    def receive(
        self, token: int, log_probability: float, drawn: float, likeliest: tuple[tuple[int, float], ...]
    ) -> None:
        """Adds a computed token to the text, which may end with it."""
        if self.finished:
            return
        if token in self.ends:
            self.finish(Finish.STOP, Piece("", token, log_probability, likeliest, drawn))
            return
        self.tokens.append(token)
        self.received += 1
        self._put(Piece(self._text.feed(token), token, log_probability, likeliest, drawn))
        if self.matcher is not None and not self._thinks:
            self.matcher.accept(token)
        if self._text.stopped or (self.matcher is not None and self.matcher.complete):
            self.finish(Finish.STOP)
        elif self.received == self.limit:
            self.finish(Finish.LENGTH)
        elif self._tags[0]:
            self._follow_thought()

    def finish(self, why: Finish, ending: Piece | None = None) -> None:
        """Ends the stream; `ending` is the token that ended the text."""
        self.finished = True
        end = None if ending is None or not self.sampling.include_stop else ending.token
        if rest := ("" if end is None else self._text.feed(end)) + self._text.close():
            self._put(Piece(rest, None))
        self.stream.end(why, self.prompt_tokens, self.cached_tokens, ending, stop=self._text.stop)

    def _put(self, piece: Piece) -> None:
        if piece.text and not self._has_text:
            self._has_text = True
            piece = dataclasses.replace(piece, lead=self.lead(self.tokens[self.prompt_tokens :]))
        self.stream.put(piece)

    def lead(self, tokens: Sequence[int]) -> str:
        """The white space between the prompt and a text with these tokens that is in neither of them."""
        before = self.tokens[: self.prompt_tokens][-_CONTEXT:]
        return self._of_text[0].gap(before, tokens[:_CONTEXT])

    def fail(self, error: BaseException) -> None:
        """Ends the stream with an error of this request; nothing that was read for it is kept."""
        self.finished = self.cancelled = True
        if not isinstance(error, Exception):  # a panic of a library in Rust, which servers take for the process's end
            error = RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)
        self.stream.fail(error)

    def _open_in_prompt(self) -> bool:
        opened, closed = (_last(self.tokens, tag) for tag in self._tags)
        return opened > closed

    def _follow_thought(self) -> None:
        (opened, closed), most = self._tags, self.sampling.thinking_tokens
        if not self._thinks and most is not None and self.tokens[-len(opened) :] == opened:
            self._think(self.received, most)
        elif self._thinks and self.tokens[-len(closed) :] == closed:
            self._thinks, self.forced = False, {}

    def _think(self, first: int, most: int) -> None:
        """Starts a thought of at most `most` tokens at this index of the text."""
        self._thinks = True
        end = first + most
        self.forced = {end + i: token for i, token in enumerate(self._tags[1])}


def _last(tokens: list[int], part: list[int]) -> int:
    """The index of the last occurrence of `part`; -1: none."""
    starts = range(len(tokens) - len(part), -1, -1)
    return next((i for i in starts if tokens[i : i + len(part)] == part), -1)


class InputProcessor:
    """Validates submissions and makes requests of them.

    Args:
      vocabulary: of the model's training data.
      length: positions of a slot.
      config: of the engine.
      encoder_length: most tokens that an encoder reads; None: there is none.
      pages: shared by the slots; None: each slot has memory for its whole length.
      adapters: that requests may use.
      rows: of the model's embedding.

    Attributes:
      grammars: compiles those of requests.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        length: int,
        config: EngineConfig,
        encoder_length: int | None,
        pages: Pages | None,
        adapters: Adapters,
        rows: int,
    ):
        self._rows = rows
        self._vocabulary, self._length, self._config = vocabulary, length, config
        self._encoder_length, self._pages, self._adapters = encoder_length, pages, adapters
        self.grammars = Grammars(vocabulary)
        self._word_ids = functools.lru_cache(maxsize=_WORD_LISTS)(lambda words: word_ids(words, vocabulary))
        self._names = None if encoder_length is None else sentinels.names(vocabulary)
        self._start = vocabulary.pad_id if encoder_length is None else start_id(vocabulary)

    def check(self, sampling: Sampling, likeliest: int, adapter: str | None) -> None:
        """Raises UserError if so many likeliest tokens, or this beam search, are not supported."""
        if not 0 <= likeliest <= LIKELIEST:
            raise UserError(f"likeliest is {likeliest}, must be from 0 to {LIKELIEST}")
        if sampling.beams is None:
            return
        if self._config.draft_tokens:
            raise UserError(
                f"EngineConfig.draft_tokens is {self._config.draft_tokens}, which beam search does not support: set it to 0, "
                "or leave Sampling.beams out"
            )
        if likeliest:
            raise UserError(f"likeliest is {likeliest}, but beam search returns no other tokens: set it to 0")
        if adapter is not None:
            raise UserError(
                f"adapter is {adapter!r}, but beam search supports no adapters: merge it, or leave Sampling.beams out"
            )

    def request(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling,
        drive: Callable[[], bool],
        *,
        ends: Sequence[int],
        likeliest: int,
        adapter: str | None,
        spelled: Sequence[int] = (),
        salt: str = "",
    ) -> Request:
        """A request for the arguments of `Engine.submit`; `drive` is for its stream.

        Raises:
          UserError: the prompt does not fit in a slot, a token has no row in the model, or the adapter does not exist.
        """
        vocabulary, encoder = self._vocabulary, None
        stream = Stream(drive)
        if self._encoder_length is not None:
            read = sentinels.ids_of(prompt, vocabulary) if isinstance(prompt, str) else prompt
            stream.unread = self._beyond(len(read), self._encoder_length)
            encoder = sentinels.encoder_entries(read, self._encoder_length, vocabulary.pad_id)
            ids = [self._start]
        else:
            ids = vocabulary.prompt_ids(prompt) if isinstance(prompt, str) else list(prompt)
            if isinstance(prompt, str):
                vocabulary.tell_beginning()
        if not ids:
            raise UserError("the prompt is empty, must have at least one token")
        model_rows.check_ids(read if encoder else ids, self._rows, vocabulary, "the prompt")
        if sampling.thinking_tokens is not None:
            for tag in sampling.thinking_tags:
                model_rows.check_ids(vocabulary.encode(tag), self._rows, vocabulary, "Sampling.thinking_tags")
        ends = [token for token in (*vocabulary.end_ids, *ends) if token < self._rows]  # the others never come
        model_rows.check_ids(list(sampling.logit_bias or ()), self._rows, vocabulary, "Sampling.logit_bias")
        model_rows.check_ids(list(sampling.allowed_ids or ()), self._rows, vocabulary, "Sampling.allowed_ids")
        restrictions = Restrictions(sampling, self._word_ids(sampling.bad_words), self._rows, vocabulary.size)
        matcher = None if sampling.grammar is None else self.grammars.matcher(sampling.grammar)
        submission = Submission(
            read if encoder else ids, sampling, tuple(ends), likeliest, adapter, tuple(spelled), salt
        )
        names = (self._names or {}) | {token: vocabulary.spelling(token) for token in spelled}
        if encoder is None:
            stream.unread = self._beyond(len(ids), self._length)
            ids = ids[stream.unread :]
        loaded = self._adapters.take(adapter)
        stream.on_end = functools.partial(self._adapters.release, loaded)
        return Request(
            ids, sampling, vocabulary, stream, limit=self._limit(len(ids), sampling), ends=ends, likeliest=likeliest,
            encoder=encoder, names=names, submission=submission, restrictions=restrictions, adapter=loaded, matcher=matcher,
        )  # fmt: skip

    def probe(self) -> Request:
        """A request that works on working devices."""
        prompt, sampling = [1 % self._rows] * min(2, self._length), Sampling(temperature=0.0, max_new_tokens=2)
        return self.request(prompt, sampling, lambda: False, ends=(), likeliest=0, adapter=None)

    def _beyond(self, prompt_tokens: int, most: int) -> int:
        """How many tokens of a prompt are not read; raises UserError if rows do not slide."""
        if prompt_tokens > most and self._config.when_full is not WhenFull.SLIDE:
            raise UserError(f"the prompt has {prompt_tokens} tokens, must have at most {most}: shorten it")
        return max(prompt_tokens - most, 0)

    def _limit(self, prompt_tokens: int, sampling: Sampling) -> int:
        """Most tokens of the text."""
        limit = sampling.max_new_tokens
        if self._config.when_full is not WhenFull.SLIDE or sampling.beams is not None:  # beams do not slide
            limit = min(limit, self._length - prompt_tokens + 1)
        if self._pages:
            limit = min(limit, self._pages.most_new(prompt_tokens))  # like a slot's length
        return limit
