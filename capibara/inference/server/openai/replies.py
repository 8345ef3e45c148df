"""Responses of OpenAI's completions and chat API, whole or in chunks."""

from __future__ import annotations

import abc
import itertools
import math
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from capibara.inference.calls.message import REASONING_KEYS
from capibara.inference.engine.requests.stream import Completion, Piece
from capibara.inference.server.openai.log_probabilities import (
    LEAST_LOGPROB,
    named,
    prompt_log_probabilities,
    token_log_probabilities,
)
from capibara.inference.server.openai.requests import ApiRequest, ChatRequest, CompletionRequest
from capibara.inference.server.service import joined
from capibara.inference.server.service.answers import RequestedText
from capibara.inference.server.service.chat_answer import ChatAnswer
from capibara.inference.server.service.reply import Json, Reply
from capibara.inference.server.service.service import Served

_CALLED = {"stop": "tool_calls"}  # a text that was cut off stays that


class OpenAiReply(Reply):
    """The response to one request.

    Args:
      request: the request.
      served: the model.
      asks: the requested texts, n for each prompt.
    """

    last = "data: [DONE]\n\n"
    kind = chunk_kind = prefix = ""

    def __init__(self, request: ApiRequest, served: Served, asks: Sequence[RequestedText]):
        self._asked, self._served, self._asks = request, served, asks
        self._about = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": request.model,
        }
        options = request.stream_options
        self._tells_usage = options is not None and options.include_usage
        self._counts = self._tells_usage and options is not None and options.continuous_usage_stats
        self._written = 0

    def whole(self, completions: Sequence[Completion]) -> Json:
        choices = [
            self._choice(index, self._text_of(completion), self._pieces_of(completion), str(completion.finish))
            for index, completion in enumerate(self._best(completions))
        ]
        response = self._about | {"object": self.kind, "choices": choices, "usage": self._usage(completions)}
        return response | joined.report(completions[0])

    def piece(self, index: int, piece: Piece) -> list[Json]:
        self._written += piece.token is not None
        return [self._chunk(index, self._text_of(piece), [piece], None)] if piece.text or self._shows(piece) else []

    def _shows(self, piece: Piece) -> bool:
        """Whether a piece without text has something to say."""
        return piece.token is not None and (self._names_tokens or bool(self._asked.return_token_ids))

    def end(self, index: int, completion: Completion) -> list[Json]:
        return [self._chunk(index, "", self._ending(completion), str(completion.finish))]

    def close(self, completions: Sequence[Completion]) -> list[Json]:
        """The final chunk with the usage, if the request asks for it."""
        if not self._tells_usage:
            return []
        return [self._about | {"object": self.chunk_kind, "choices": [], "usage": self._usage(completions)}]

    @property
    def _names_tokens(self) -> bool:
        return False

    @property
    def _by_id(self) -> bool:
        """Whether tokens are named by their ids."""
        return bool(self._asked.return_tokens_as_token_ids)

    def _text_of(self, part: Piece | Completion) -> str:
        return part.text

    def _pieces_of(self, completion: Completion) -> list[Piece]:
        return [*completion.pieces, *self._ending(completion)]

    def _ending(self, completion: Completion) -> list[Piece]:
        """The end token, if the request asks for ids: one who trains on them needs it, as from vLLM."""
        return [completion.ending] if self._asked.return_token_ids and completion.ending is not None else []

    @abc.abstractmethod
    def _choice(self, index: int, text: str, pieces: Iterable[Piece], finish: str) -> Json:
        """A whole text."""

    @abc.abstractmethod
    def _part(self, text: str, pieces: Iterable[Piece], finish: str | None, index: int) -> Json:
        """The fields of a choice besides its index and finish reason."""

    def _best(self, completions: Sequence[Completion]) -> list[Completion]:
        """The texts to return: of those drawn for each prompt the n with the highest log probability per token."""
        drawn, n = self._asked.drawn, self._asked.n or 1
        if drawn == n:
            return list(completions)
        best: list[Completion] = []
        for first in range(0, len(completions), drawn):
            best += sorted(completions[first : first + drawn], key=_mean_log_probability, reverse=True)[:n]
        return best

    def _chunk(self, index: int, text: str, pieces: Sequence[Piece], finish: str | None) -> Json:
        choice: Json = {"index": index, "finish_reason": finish} | self._part(text, pieces, finish, index)
        if not pieces:  # the chunk has no token
            choice["logprobs"] = None
        if self._asked.return_token_ids:
            choice["token_ids"] = _ids(pieces)
        chunk = self._about | {"object": self.chunk_kind, "choices": [choice]}
        return chunk | {"usage": self._usage_so_far() if self._counts else None} if self._tells_usage else chunk

    def _usage_so_far(self) -> Json:
        read = sum(len(ask.ids) for ask in self._asks[:: self._asked.drawn])
        return {"prompt_tokens": read, "completion_tokens": self._written, "total_tokens": read + self._written}

    def _usage(self, completions: Sequence[Completion]) -> Json:
        n = self._asked.drawn
        read = sum(len(ask.ids) for ask in self._asks[::n]) + sum(map(joined.more_read, completions))
        written = sum(map(joined.written, completions))
        cached = sum(completion.cached_tokens for completion in completions[::n])
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


class CompletionReply(OpenAiReply):
    """Of /v1/completions."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"
    _asked: CompletionRequest

    def __init__(self, request: CompletionRequest, served: Served, asks: Sequence[RequestedText]):
        super().__init__(request, served, asks)
        n, drawn = request.n or 1, request.drawn
        self._shown = [ask for first in range(0, len(asks), drawn) for ask in asks[first : first + n]]
        self._offsets = [0] * len(self._shown)
        self._echoed = [served.vocabulary.decode(ask.ids) if request.echo else "" for ask in self._shown]

    def _text_of(self, part: Piece | Completion) -> str:
        return part.lead + part.text  # it continues the prompt

    def begin(self) -> list[Json]:
        with_ids = bool(self._asked.return_token_ids)
        chunks = [self._chunk(index, text, [], None) for index, text in enumerate(self._echoed) if text or with_ids]
        for chunk in chunks:
            (choice,) = chunk["choices"]
            index = choice["index"]
            if with_ids:
                choice["prompt_token_ids"] = list(self._shown[index].ids)
            if self._names_tokens and self._echoed[index]:
                choice["logprobs"] = self._of_prompt(index)
        return chunks

    @property
    def _names_tokens(self) -> bool:
        return self._asked.logprobs is not None

    def _choice(self, index: int, text: str, pieces: Iterable[Piece], finish: str) -> Json:
        echoed = self._of_prompt(index) if self._names_tokens and self._echoed[index] else {}
        part = self._part(self._echoed[index] + text, pieces, finish, index)
        if echoed:
            part["logprobs"] = {name: values + part["logprobs"][name] for name, values in echoed.items()}
        ask = self._shown[index]
        extra = dict[str, Any].fromkeys(
            ("prompt_logprobs", "token_ids", "prompt_token_ids")
        )  # as vLLM's clients expect
        if self._asked.return_token_ids:
            extra = {"token_ids": _ids(pieces), "prompt_token_ids": list(ask.ids)}
        if self._asked.prompt_logprobs is not None:
            extra["prompt_logprobs"] = prompt_log_probabilities(
                self._served.vocabulary, ask, self._asked.prompt_logprobs
            )
        return {"index": index, "finish_reason": finish} | part | extra

    def _of_prompt(self, index: int) -> Json:
        """The log probabilities of an echoed prompt's tokens; the first has none."""
        ask, vocabulary = self._shown[index], self._served.vocabulary
        assert ask.scores is not None, "they were asked for"
        tokens = [named(vocabulary, token, self._by_id) for token in ask.ids]
        count = self._asked.likeliest
        each = [max(LEAST_LOGPROB, value) for value in ask.scores.log_probabilities.tolist()]
        likeliest = [
            self._named_values([(token, value), *zip(ids[:count].tolist(), values[:count].tolist())])
            for token, value, ids, values in zip(
                ask.ids[1:], each, ask.scores.likeliest, ask.scores.their_log_probabilities
            )
        ]
        stream = vocabulary.stream()
        ends = [*itertools.accumulate(len(stream.feed(token)) for token in ask.ids)]
        self._offsets[index] = ends[-1]
        return {
            "tokens": tokens, "token_logprobs": [None, *each], "top_logprobs": [None, *likeliest],
            "text_offset": [0, *ends[:-1]],
        }  # fmt: skip

    def _part(self, text: str, pieces: Iterable[Piece], finish: str | None, index: int) -> Json:
        return {"text": text, "logprobs": self._logprobs(index, pieces) if self._names_tokens else None}

    def _logprobs(self, index: int, pieces: Iterable[Piece]) -> Json:
        result: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for piece in pieces:
            if piece.token is not None:
                result["tokens"].append(named(self._served.vocabulary, piece.token, self._by_id))
                result["token_logprobs"].append(max(LEAST_LOGPROB, piece.log_probability))
                every = [(piece.token, piece.log_probability), *piece.likeliest]
                result["top_logprobs"].append(self._named_values(every))
                result["text_offset"].append(self._offsets[index])
            self._offsets[index] += len(self._text_of(piece))
        return result

    def _named_values(self, each: Iterable[tuple[int, float]]) -> dict[str, float]:
        """Log probabilities by the tokens' names, the chosen token's first, as vLLM returns it."""
        values: dict[str, float] = {}
        for token, value in each:
            values.setdefault(named(self._served.vocabulary, token, self._by_id), max(LEAST_LOGPROB, value))
        return values


class ChatReply(OpenAiReply):
    """The response of /v1/chat/completions."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"
    _asked: ChatRequest

    def __init__(self, request: ChatRequest, served: Served, asks: Sequence[RequestedText]):
        super().__init__(request, served, asks)
        self._answers = [ChatAnswer(ask, request.tools or [], request.parallel_tool_calls is not False) for ask in asks]

    def begin(self) -> list[Json]:
        first = {"role": "assistant", "content": ""}
        chunks = [self._chunk(index, "", [], None) for index in range(len(self._asks))]
        for chunk in chunks:
            chunk["choices"][0]["delta"] = first
            if self._asked.return_token_ids:
                chunk["prompt_token_ids"] = list(self._asks[0].ids)
        if self._asked.echoed:
            chunks += [self._chunk(index, self._asked.echoed, [], None) for index in range(len(self._asks))]
        return chunks

    @property
    def _names_tokens(self) -> bool:
        return bool(self._asked.logprobs)

    def whole(self, completions: Sequence[Completion]) -> Json:
        for answer, completion in zip(self._answers, completions, strict=True):
            for piece in completion.pieces:
                answer.add(piece)
            answer.close()
        ask, extra = self._asks[0], dict[str, Any](prompt_logprobs=None, prompt_token_ids=None)
        if self._asked.return_token_ids:
            extra["prompt_token_ids"] = list(ask.ids)
        if self._asked.prompt_logprobs is not None:
            extra["prompt_logprobs"] = prompt_log_probabilities(
                self._served.vocabulary, ask, self._asked.prompt_logprobs
            )
        return super().whole(completions) | extra

    def _choice(self, index: int, text: str, pieces: Iterable[Piece], finish: str) -> Json:
        answer = self._answers[index]
        finish = _CALLED.get(finish, finish) if answer.message.calls else finish
        message = self._without_thoughts(answer.message.whole())
        if self._asked.echoed:
            message["content"] = self._asked.echoed + (message.get("content") or "")
        extra = {"token_ids": _ids(pieces)} if self._asked.return_token_ids else {}
        return {
            "index": index, "finish_reason": finish, "message": message, "logprobs": self._logprobs(pieces),
        } | extra  # fmt: skip

    def _without_thoughts(self, part: Json) -> Json:
        """A message or a delta, without its thoughts if the request does not ask for them."""
        if self._asked.include_reasoning is not False:
            return part
        return {name: value for name, value in part.items() if name not in REASONING_KEYS}

    def piece(self, index: int, piece: Piece) -> list[Json]:
        self._written += piece.token is not None
        delta = self._without_thoughts(self._answers[index].add(piece))
        if not delta and not self._shows(piece):
            return []
        chunk = self._chunk(index, "", [piece], None)
        chunk["choices"][0]["delta"] = delta
        return [chunk]

    def end(self, index: int, completion: Completion) -> list[Json]:
        answer = self._answers[index]
        delta = self._without_thoughts(answer.close())
        finish = str(completion.finish)
        finish = _CALLED.get(finish, finish) if answer.message.calls else finish
        chunk = self._chunk(index, "", self._ending(completion), finish)
        chunk["choices"][0]["delta"] = delta
        return [chunk | joined.report(completion)]

    def _usage(self, completions: Sequence[Completion]) -> Json:
        counts = [answer.reasoning_tokens for answer in self._answers if answer.reads_thoughts]
        details = {"completion_tokens_details": {"reasoning_tokens": sum(counts)}} if counts else {}
        return super()._usage(completions) | details

    def _part(self, text: str, pieces: Iterable[Piece], finish: str | None, index: int) -> Json:
        return {"delta": {} if finish else {"content": text}, "logprobs": self._logprobs(pieces)}

    def _logprobs(self, pieces: Iterable[Piece]) -> Json | None:
        if not self._names_tokens:
            return None
        each = token_log_probabilities(self._served.vocabulary, pieces, self._by_id)
        return {"content": each, "refusal": None}


def _ids(pieces: Iterable[Piece]) -> list[int]:
    return [piece.token for piece in pieces if piece.token is not None]


def _mean_log_probability(completion: Completion) -> float:
    each = [piece.log_probability for piece in completion.pieces if piece.token is not None]
    return sum(each) / len(each) if each else -math.inf
