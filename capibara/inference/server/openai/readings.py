"""Requests that read texts without continuing them: embeddings, tokenize and detokenize."""

from __future__ import annotations

import base64
from typing import Any, Literal

import numpy as np
import pydantic

from capibara.core.fields import short
from capibara.data.tokenizers import entries
from capibara.inference.server.openai.conversations import rendered
from capibara.inference.server.openai.prompts import given_prompts, invalid, prompt_ids
from capibara.inference.server.openai.requests import ChatRequest
from capibara.inference.server.service import bounds
from capibara.inference.server.service.bodies import Parameters
from capibara.inference.server.service.http_errors import Refusal
from capibara.inference.server.service.service import Served, ServerConfig

Json = dict[str, Any]


class EmbeddingRequest(Parameters):
    """The body of POST /v1/embeddings."""

    of_reward_models = False
    ignored = ("user",)

    input: Any
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None

    @property
    def waits(self) -> bool:
        return True


class TokenizeRequest(Parameters):
    """The body of POST /tokenize: a prompt, or messages; a template writes special tokens itself, unless more are asked for."""

    prompt: str | None = None
    messages: list[Any] | None = pydantic.Field(None, min_length=1)
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Parameters):
    """The body of POST /detokenize."""

    tokens: list[int]


def embeddings(request: EmbeddingRequest, served: Served, config: ServerConfig) -> Json:
    """The embeddings of texts, each of length 1.

    Raises:
      Refusal: a parameter is invalid, or a text is too long.
    """
    bounds.check_prompt(request.input, served, config, "input", config.max_embeddings)
    texts = [_embedded_ids(item, served, config) for item in given_prompts(request.input, "input")]
    with invalid("input"):
        vectors = served.engine.reader.embed(texts, config.pooling, served.adapter_of(request.model))
    if request.dimensions not in (None, vectors.shape[1]):
        message = f"dimensions is {short(request.dimensions)}, and embeddings of this model have {vectors.shape[1]}: leave it out"
        raise Refusal(400, message, param="dimensions", code="unsupported_value")
    data = [
        {"object": "embedding", "index": index, "embedding": _written(vector, request.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    tokens = sum(map(len, texts))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": request.model or served.name, "usage": usage}


def tokenize(request: TokenizeRequest, served: Served, config: ServerConfig) -> Json:
    """The token ids of a prompt, or of a conversation up to its next answer.

    Raises:
      Refusal: a parameter is invalid.
    """
    if (request.prompt is None) == (request.messages is None):
        raise Refusal(400, "either prompt or messages must be set", param="prompt", code="invalid_value")
    if request.prompt is not None:
        bounds.check_prompt(request.prompt, served, config)
        with invalid("prompt"):
            plain = request.add_special_tokens is False
            ids = served.vocabulary.encode(request.prompt) if plain else prompt_ids(request.prompt, served)
    else:
        names = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
        asked = {"model": request.model or served.name} | {name: getattr(request, name) for name in names}
        chat = ChatRequest.model_validate(asked)
        chat.check()
        talk, text = rendered(chat, served, config)
        ids = [*(served.vocabulary.begin_ids if request.add_special_tokens else ()), *talk.ids_of(text)]
    strings = [entries.entry(served.vocabulary, token) for token in ids] if request.return_token_strs else None
    return {"count": len(ids), "max_model_len": served.length, "tokens": ids, "token_strs": strings}


def detokenize(request: DetokenizeRequest, served: Served, config: ServerConfig) -> Json:
    """The text of token ids, special tokens as they are spelled.

    Raises:
      Refusal: the model has no row for a token.
    """
    bounds.check_tokens(len(request.tokens), served, config, "tokens")
    vocabulary = served.vocabulary
    ids = prompt_ids(request.tokens, served, "tokens")
    text, plain = "", list[int]()
    for token in ids:
        if spelled := vocabulary.spelling(token):
            text, plain = text + vocabulary.decode(plain) + spelled, []
        else:
            plain.append(token)
    return {"prompt": text + vocabulary.decode(plain)}


def _embedded_ids(text: str | list[int], served: Served, config: ServerConfig) -> list[int]:
    ids = prompt_ids(text, served, "input")
    if isinstance(text, str):
        ids = [*ids, *served.vocabulary.closing_ids]
    bounds.check_tokens(len(ids), served, config, "input")
    return ids


def _written(vector: np.ndarray, encoding: str | None) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
