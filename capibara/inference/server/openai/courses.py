"""Chats whose answer takes several texts: by a thinking strategy, or with the server's own tool."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from capibara.inference.calls.parsing.tools import Tools
from capibara.inference.sampling.sampling import Sampling
from capibara.inference.server.openai.conversations import conversation_of
from capibara.inference.server.openai.prompts import invalid
from capibara.inference.server.openai.requests import ChatRequest
from capibara.inference.server.service.answers import Course, RequestedText
from capibara.inference.server.service.bounds import brief
from capibara.inference.server.service.http_errors import Refusal
from capibara.inference.server.service.reply import Json
from capibara.inference.server.service.searching import Searching
from capibara.inference.server.service.service import Served, ServerConfig
from capibara.inference.server.service.thinking import OFF, PARAM, Thinking, strategy_of
from capibara.inference.thinking.strategy import Strategy

Asking = Callable[[ChatRequest], RequestedText]


def with_tool(request: ChatRequest, served: Served) -> ChatRequest:
    """The request with the server's own tool, unless it wants no calls.

    Raises:
      Refusal: a tool of the client has the same name.
    """
    if served.tool is None or not _searches(request, served):
        return request
    tools = request.tools or []
    if (name := served.tool.name) in Tools(tools).parameters:
        message = f"tools has {name!r}, which this server calls itself: rename it"
        raise Refusal(400, message, param="tools", code="invalid_value")
    return request.model_copy(update={"tools": [*tools, served.tool.schema]})


def strategy_for(request: ChatRequest, served: Served, config: ServerConfig) -> Strategy | None:
    """The strategy of a request; None: it has none.

    Raises:
      Refusal: an option does not fit the strategy, or the server's own tool.
    """
    strategy = strategy_of(request.thinking_strategy, config)
    searches = _searches(request, served)
    unfit = {
        "n": (request.n or 1) > 1,
        "continue_final_message": bool(request.continue_final_message),
        "add_generation_prompt": request.add_generation_prompt is False,
    }
    if strategy is not None:
        fix = 'leave one out, or set thinking_strategy to {"name": "none"}'
        _check(unfit | {"tools": bool(request.tools) or searches}, "a thinking strategy", fix)
    elif served.tool is not None and searches:
        # Tokens and their ids would show the calls, and a text that follows a grammar has none.
        unfit |= {"logprobs": bool(request.logprobs), "return_token_ids": bool(request.return_token_ids)}
        unfit |= {name: value is not None for name, value in request.structured.items()}
        _check(unfit, f"the server's {served.tool.name}", 'leave it out, or set tool_choice to "none"')
    return strategy


def _searches(request: ChatRequest, served: Served) -> bool:
    return served.tool is not None and request.tool_choice != "none"


def course_of(
    request: ChatRequest,
    strategy: Strategy | None,
    sampling: Sampling,
    served: Served,
    config: ServerConfig,
    asking: Asking,
) -> Course | None:
    """How the answer to a request comes from several texts; None: it is one text.

    Args:
      request: without the server's own tool.
      strategy: from `strategy_for`.
      sampling: of its text.
      served: the model.
      config: the limits.
      asking: the text that another request asks for.

    Raises:
      Refusal: the sampling or the messages do not fit the strategy.
    """
    if strategy is not None:
        return _thinking(request, strategy, sampling, served, asking)
    if served.tool is None or not _searches(request, served):
        return None
    parallel, limit = request.parallel_tool_calls is not False, request.longest[1]

    def after(messages: Sequence[Json], written: int) -> RequestedText:
        unset = ("tool_choice", "min_tokens", "prompt_logprobs", "max_tokens", "max_completion_tokens")
        changes = {"messages": [*request.messages, *messages], "seed": sampling.seed, **dict.fromkeys(unset)}
        ask = asking(request.model_copy(update=changes))
        # Chunks may leave less room than the limit of the request, which is no fault of the client's.
        most = ask.sampling.max_new_tokens if limit is None else min(limit - written, ask.sampling.max_new_tokens)
        least = min(ask.sampling.min_new_tokens, most)
        shorter = dataclasses.replace(ask.sampling, max_new_tokens=most, min_new_tokens=least)
        return dataclasses.replace(ask, sampling=shorter)

    return Searching(served.tool, config.search_rounds, request.tools or [], parallel, limit, after)


def _check(unfit: Mapping[str, bool], which: str, fix: str) -> None:
    """Raises Refusal for a parameter that is set and does not fit."""
    for name, is_set in unfit.items():
        if is_set:
            message = f"{name} and {which} do not go together: {fix}"
            raise Refusal(400, message, param=name, code="unsupported_parameter")


def _thinking(request: ChatRequest, strategy: Strategy, sampling: Sampling, served: Served, asking: Asking) -> Thinking:
    with invalid(PARAM):
        strategy.check(sampling)
    conversation = conversation_of({"messages": request.messages})
    if conversation.messages[-1]["role"] != "user":
        message = (
            f"messages ends with {brief(request.messages[-1])}, must end with a user's text for a thinking strategy"
        )
        raise Refusal(400, message, param="messages", code="invalid_messages")
    changes = {PARAM: OFF, "seed": sampling.seed, "prompt_logprobs": None}

    def restated(text: str) -> RequestedText:
        messages = [*request.messages[:-1], {**request.messages[-1], "content": text}]
        return asking(request.model_copy(update=changes | {"messages": messages}))

    return Thinking(strategy, served.judge, conversation, restated)
