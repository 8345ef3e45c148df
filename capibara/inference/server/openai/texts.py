"""The texts that requests of OpenAI's completions and chat API ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from capibara.core.fields import short
from capibara.inference.calls import choice
from capibara.inference.server.openai import courses, sampling_options, structured
from capibara.inference.server.openai.conversations import rendered
from capibara.inference.server.openai.prompts import given_prompts, invalid, prompt_ids, prompt_scores, truncated
from capibara.inference.server.openai.requests import ApiRequest, ChatRequest, CompletionRequest
from capibara.inference.server.service import bounds
from capibara.inference.server.service.answers import RequestedText
from capibara.inference.server.service.http_errors import Refusal
from capibara.inference.server.service.service import Served, ServerConfig


def completion_texts(request: CompletionRequest, served: Served, config: ServerConfig) -> list[RequestedText]:
    """The texts of a completion: n for the first prompt, n for the second, ...

    Raises:
      Refusal: a parameter is invalid, or a prompt is too long.
    """
    bounds.check_prompt(request.prompt, served, config, is_cut=request.truncate_prompt_tokens is not None)
    prompts = given_prompts(request.prompt)
    _check_count(request, len(prompts), config)
    asks: list[RequestedText] = []
    for prompt in prompts:
        asks += _asks(
            request,
            prompt_ids(prompt, served, special=request.add_special_tokens is not False),
            (),
            served,
            config,
            "prompt",
        )
    return asks


def chat_texts(request: ChatRequest, served: Served, config: ServerConfig) -> list[RequestedText]:
    """The n answers to a conversation.

    Raises:
      Refusal: a parameter is invalid, the chat template rejects the messages, or they are too long.
    """
    strategy = courses.strategy_for(request, served, config)
    asks = _chat_asks(courses.with_tool(request, served), served, config)
    asking = lambda changed: chat_texts(changed, served, config)[0]  # noqa: E731
    course = courses.course_of(request, strategy, asks[0].sampling, served, config, asking)
    return asks if course is None else [dataclasses.replace(asks[0], course=course)]


def _chat_asks(request: ChatRequest, served: Served, config: ServerConfig) -> list[RequestedText]:
    """The n texts of a request; its tools are all that the model may call."""
    if request.top_logprobs is not None and not request.logprobs:
        raise Refusal(400, "top_logprobs needs logprobs = true", param="top_logprobs", code="invalid_value")
    if None not in (limits := (request.max_tokens, request.max_completion_tokens)) and limits[0] != limits[1]:
        both = " and max_completion_tokens is ".join(map(short, limits))
        raise Refusal(
            400, f"max_tokens is {both}: they mean the same, leave one out", param="max_tokens", code="invalid_value"
        )  # fmt: skip
    with invalid("tool_choice"):
        choice.check(request.tool_choice, request.tools or [])
    _check_count(request, 1, config)
    tools = request.tools if request.tool_choice != "none" else None
    talk, text = rendered(request, served, config)
    dialect = served.dialect.used(bool(tools), config.reasoning).after(text)
    asks = _asks(request, talk.ids_of(text), dialect.ends_of(talk), served, config, "messages")
    parallel, thinks = request.parallel_tool_calls is not False, dialect.thinks_after(text)
    with invalid("tool_choice"):
        asked, is_format = asks[0].sampling.grammar, request.has_format
        forced = choice.grammar(dialect, request.tool_choice, tools or [], parallel, asked, is_format)
        if forced is not None:
            served.engine.check(forced)
        samplings = [choice.forced(ask.sampling, forced, dialect, thinks) for ask in asks]
    spelled, tool = dialect.spelled, None if tools is None else served.tool
    options: dict[str, Any] = {"dialect": dialect, "thinks": thinks, "tool": tool}
    return [
        dataclasses.replace(ask, sampling=sampling, spelled=ask.spelled or spelled, **options)
        for ask, sampling in zip(asks, samplings)
    ]


def _check_count(request: ApiRequest, prompts: int, config: ServerConfig) -> None:
    texts, name = prompts * request.drawn, "n" if request.drawn == (request.n or 1) else "best_of"
    if texts > config.max_texts:
        count = short(request.drawn)
        shown = f"{prompts} prompts, {name} = {count}" if prompts > 1 else f"{name} is {count}"
        raise Refusal(400, f"{shown}: at most {config.max_texts} texts in all", param=name, code="too_many_texts")


def _asks(
    request: ApiRequest,
    ids: Sequence[int],
    ends: tuple[int, ...],
    served: Served,
    config: ServerConfig,
    param: str,
) -> list[RequestedText]:
    ids = truncated(ids, request.truncate_prompt_tokens, request.truncation_side, bounds.most_tokens(served, config))
    bounds.check_tokens(len(ids), served, config, param)
    room = served.length + 1 - (len(ids) if served.encoder_length is None else 1)
    grammar = structured.grammar_of(request.structured, served)
    sampling = sampling_options.sampling_of(request, served, config, room, grammar)
    seeds = [(sampling.seed + k) % sampling_options.SEEDS for k in range(request.drawn)]
    adapter = None if request.model == served.name else request.model
    ends = (*ends, *sampling_options.end_ids(request, served))
    likeliest = request.prompt_likeliest
    scores = None if likeliest is None else prompt_scores(ids, likeliest, adapter, served)
    spelled = tuple(served.dialect.ids.values()) if request.skip_special_tokens is False else ()
    options: dict[str, Any] = {"spelled": spelled, "salt": request.cache_salt or "", "scores": scores}
    return [
        RequestedText(ids, dataclasses.replace(sampling, seed=seed), ends, request.likeliest, adapter, **options)
        for seed in seeds
    ]
