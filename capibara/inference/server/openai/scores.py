"""Requests for a reward model's scores, in the form of vLLM's score and rerank APIs, and of whole conversations."""

from __future__ import annotations

import time
import uuid
from typing import Any

import pydantic

from capibara.data.chat.formats import Conversation
from capibara.inference.server.openai.conversations import check_complete, conversation_of, rendering
from capibara.inference.server.openai.prompts import invalid
from capibara.inference.server.service import bounds
from capibara.inference.server.service.bodies import Parameters
from capibara.inference.server.service.bounds import brief
from capibara.inference.server.service.http_errors import Refusal
from capibara.inference.server.service.service import Served, ServerConfig
from capibara.inference.thinking.reward_model import RenderedAnswer, RewardModel

Json = dict[str, Any]

_NAMES = {"text_1": "queries", "text_2": "documents"}  # vLLM's older names and its newer ones


class ScoreRequest(Parameters):
    """The body of POST /v1/score: texts of users with answers, or conversations that end with an answer."""

    of_reward_models = True
    unsupported = {
        **dict.fromkeys(("softmax", "activation", "use_activation"), (False,)),
        **{"truncate_prompt_tokens": (), "priority": (0,), "mm_processor_kwargs": ({},), "chat_template": ()},
    }
    ignored = ("user", "request_id")

    text_1: Any = None
    text_2: Any = None
    queries: Any = None
    documents: Any = None
    messages: list[Any] | None = None

    @property
    def waits(self) -> bool:
        return True

    def texts(self, name: str) -> tuple[str, Any]:
        """The name and the value of a parameter that has two names.

        Raises:
          Refusal: it is missing, has both names, or stands beside messages.
        """
        other = _NAMES[name]
        values = {key: value for key in (name, other) if (value := getattr(self, key)) is not None}
        if len(values) != 1:
            problem = "are both set: leave one out" if values else "are missing: set one, or messages"
            raise Refusal(400, f"{name} and {other} {problem}", param=name, code="invalid_value")
        ((key, value),) = values.items()
        if self.messages is not None:
            message = f"{key} and messages are both set: leave one out"
            raise Refusal(400, message, param=key, code="invalid_value")
        return key, value


class RerankRequest(Parameters):
    """The body of POST /v1/rerank: a text of a user, and answers that are sorted by their scores."""

    of_reward_models = True
    unsupported = {name: values for name, values in ScoreRequest.unsupported.items() if name != "softmax"}
    ignored = ScoreRequest.ignored

    query: str
    documents: Any
    top_n: int | None = pydantic.Field(None, ge=0)  # 0: all, as in vLLM
    return_documents: bool | None = None

    @property
    def waits(self) -> bool:
        return True


def ranks(request: RerankRequest, served: Served, config: ServerConfig) -> Json:
    """The answers with the highest scores, highest first, as vLLM's, Jina's and Cohere's rerank APIs give them.

    Raises:
      Refusal: a parameter is invalid, an answer is too long, or the model has a score for each step of an answer.
    """
    if served.scorer is not None and served.scorer.scores_steps:
        message = f"{served.name} has a score for each step of an answer: ask /v1/score"
        raise Refusal(400, message, param="model", code="unsupported_model")
    bounds.check_prompt(request.query, served, config, "query")
    bounds.check_tokens(len(served.vocabulary.encode(request.query)), served, config, "query")
    pairs = ScoreRequest(model=request.model, queries=request.query, documents=request.documents)
    answer = scores(pairs, served, config)
    texts = [request.documents] if isinstance(request.documents, str) else request.documents
    results = [
        {"index": item["index"], "relevance_score": item["score"]}
        | ({} if request.return_documents is False else {"document": {"text": texts[item["index"]]}})
        for item in sorted(answer["data"], key=lambda item: -item["score"])
    ]
    usage = {key: answer["usage"][key] for key in ("prompt_tokens", "total_tokens")}
    about = {"id": f"rerank-{uuid.uuid4().hex}", "model": answer["model"], "usage": usage}
    return about | {"results": results[: request.top_n or None]}


def scores(request: ScoreRequest, served: Served, config: ServerConfig) -> Json:
    """The scores of answers: a number each, or a list of one for each step.

    Raises:
      Refusal: a parameter is invalid, the chat template rejects an answer, or it is too long.
    """
    assert served.scorer is not None, "other models are refused before"
    has_texts = any(value is not None for value in (request.text_1, request.queries, request.text_2, request.documents))
    if request.messages is not None and not has_texts:
        param, answers = "messages", _of_conversations(request.messages, served.scorer, served, config)
    else:
        param, answers = _of_pairs(request, served.scorer, served, config)
    with invalid(param):
        values = served.scorer.scores_of(answers)
    tokens = sum(len(answer.ids) for answer in answers)
    return {
        "id": f"score-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": request.model or served.name,
        "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(values)],
        "usage": {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens},
    }


def _of_pairs(
    request: ScoreRequest, scorer: RewardModel, served: Served, config: ServerConfig
) -> tuple[str, list[RenderedAnswer]]:
    """The name of the answers' parameter, and what is read of each user's text and its answer."""
    (first, queries), (second, answers) = (
        (param, _texts(value, param, served, config)) for param, value in map(request.texts, _NAMES)
    )
    if len(queries) == 1:
        queries = queries * len(answers)
    if len(queries) != len(answers):
        message = f"{first} has {len(queries)} texts and {second} {len(answers)}: send one {first}, or as many of both"
        raise Refusal(400, message, param=first, code="invalid_value")
    conversations = [
        Conversation([{"role": "user", "content": query}, {"role": "assistant", "content": answer}])
        for query, answer in zip(queries, answers)
    ]
    return second, [_rendered(conversation, second, scorer, served, config) for conversation in conversations]


def _texts(value: object, param: str, served: Served, config: ServerConfig) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        message = f"{param} is {brief(value)}, must be a text or a list of texts"
        raise Refusal(400, message, param=param, code="invalid_value")
    bounds.check_prompt(texts, served, config, param, config.max_embeddings)
    return texts


def _of_conversations(
    messages: list[Any], scorer: RewardModel, served: Served, config: ServerConfig
) -> list[RenderedAnswer]:
    """What is read of conversations, or of one."""
    if not messages or not all(isinstance(item, list) for item in messages):
        return [_of_conversation(messages, "messages", scorer, served, config)]
    if len(messages) > config.max_embeddings:
        message = f"{len(messages)} conversations: at most {config.max_embeddings} texts in all"
        raise Refusal(400, message, param="messages", code="too_many_texts")
    return [
        _of_conversation(item, f"messages[{number}]", scorer, served, config) for number, item in enumerate(messages)
    ]


def _of_conversation(
    messages: list[Any], where: str, scorer: RewardModel, served: Served, config: ServerConfig
) -> RenderedAnswer:
    bounds.check_conversation(messages, None, served, config)
    conversation = conversation_of({"messages": messages}, where)
    *before, last = conversation.messages
    if last["role"] != "assistant" or not last["content"] or set(last) & {"tool_calls", "reasoning_content"}:
        message = f"{where} ends with {brief(messages[-1])}, must end with an answer of the assistant, of text alone"
        raise Refusal(400, message, param="messages", code="invalid_messages")
    if not before:
        message = f"{where} has an answer alone: send what it answers before it"
        raise Refusal(400, message, param="messages", code="invalid_messages")
    with rendering("messages"):
        write = lambda other: scorer.template.render(other, "the request").text  # noqa: E731
        check_complete(write, conversation, write(conversation))
    return _rendered(conversation, "messages", scorer, served, config)


def _rendered(
    conversation: Conversation, param: str, scorer: RewardModel, served: Served, config: ServerConfig
) -> RenderedAnswer:
    with rendering(param):
        answer = scorer.rendered(conversation, "an answer")
    bounds.check_tokens(len(answer.ids), served, config, param)
    return answer
