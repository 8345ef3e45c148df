"""The HTTP application of OpenAI's and Anthropic's APIs: texts, whole or streamed, readings, models, health and metrics.

Needs FastAPI and prometheus_client: the extra `serve`.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

import fastapi
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import capibara
from capibara.core.types import UserError
from capibara.inference.engine.requests.stream import Completion
from capibara.inference.server import adapter_routes
from capibara.inference.server.anthropic.replies import MessageReply, error_of
from capibara.inference.server.anthropic.requests import CountRequest, MessagesRequest, count_tokens, message_texts
from capibara.inference.server.openai import readings, scores, texts
from capibara.inference.server.openai.replies import ChatReply, CompletionReply
from capibara.inference.server.openai.requests import ChatRequest, CompletionRequest
from capibara.inference.server.prometheus import ServingMetrics
from capibara.inference.server.responses.replies import ResponseReply
from capibara.inference.server.responses.requests import ResponsesRequest, response_texts
from capibara.inference.server.service import bodies, bounds, threads
from capibara.inference.server.service.answers import Answers, RequestedText, shutting_down
from capibara.inference.server.service.bodies import Parameters, TextParameters
from capibara.inference.server.service.http_errors import Refusal
from capibara.inference.server.service.reply import Reply
from capibara.inference.server.service.service import Served, ServerConfig, Service, State
from capibara.inference.server.visitors import Guarded, Visitors

_log = logging.getLogger("uvicorn.error")  # where errors of whole responses go
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_ANTHROPIC = "/v1/messages"  # with what these paths begin
_CLIENT_GONE = 499  # nginx's status for it; only metrics see it
_DISCARDED = 8  # times the largest body: the most that is read and discarded, so that the client reads the error
_PAUSED_AFTER_S = 1e-3
_PATIENT_BYTES = 32 * 1024
_LAST_WRITES_S = 5.0  # for a client that reads slowly, after the texts' deadline

P = TypeVar("P", bound=Parameters)
Q = TypeVar("Q", bound=TextParameters)
T = TypeVar("T")


def app_of(
    service: Service, metrics: ServingMetrics, keys: Sequence[str] = (), visitors: Visitors = Visitors()
) -> ASGIApp:
    """The application.

    Args:
      service: admits requests.
      metrics: count every request.
      keys: valid API keys, required except for health checks; empty: no key is required.
      visitors: which hosts and origins may send requests.
    """
    app = fastapi.FastAPI(title="capibara", openapi_url=None)
    checked = [fastapi.Depends(_authorised(keys))]

    for path, texts_route in _TEXTS.items():
        app.post(path, dependencies=checked)(texts_route.of(service))
    for path, reading_route in _READINGS.items():
        app.post(path, dependencies=checked)(reading_route.of(service))

    _add_adapter_routes(app, service, checked)

    @app.get("/v1/models", dependencies=checked)
    async def models() -> Response:
        served = service.served
        data = [_about(served, name) for name in (served.name, *served.adapters)] if served else []
        return JSONResponse({"object": "list", "data": data})

    @app.get("/v1/models/{name:path}", dependencies=checked)
    async def model(name: str) -> Response:
        served = service.served
        if served is None or name not in (served.name, *served.adapters):
            raise Refusal(404, f"{name[:100]!r} is no model here", param="model", code="model_not_found")
        return JSONResponse(_about(served, name))

    @app.get("/version", dependencies=checked)
    async def version() -> Response:
        return JSONResponse({"version": capibara.__version__})

    @app.get("/health")
    async def health() -> Response:
        state = service.state
        return JSONResponse({"status": str(state)}, 503 if state is State.FAILED else 200)

    @app.get("/ready")
    async def ready() -> Response:
        state = service.state
        return JSONResponse({"status": str(state)}, 200 if state is State.READY else 503)

    @app.get("/metrics", dependencies=checked)
    async def page() -> Response:
        return Response(metrics.page(), media_type=_PROMETHEUS)

    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(UserError, _invalid_request)
    app.add_exception_handler(HTTPException, _not_found)
    app.add_exception_handler(ClientDisconnect, _disconnected)
    app.add_exception_handler(Exception, _failed)
    guarded = Guarded(_BodyGate(app, service), service, visitors)
    return _RequestCounter(guarded, service, metrics, {getattr(route, "path", "") for route in app.routes})


def _add_adapter_routes(app: fastapi.FastAPI, service: Service, checked: Sequence[Any]) -> None:
    """Adds the paths that load and unload adapters."""

    @app.post("/v1/load_lora_adapter", dependencies=checked)
    async def load_adapter(request: Request) -> Response:
        began_s = time.monotonic()
        parsed, served = await _received(service, request, adapter_routes.LoadRequest)
        return await adapter_routes.load(parsed, served, service.config, began_s)

    @app.post("/v1/unload_lora_adapter", dependencies=checked)
    async def unload_adapter(request: Request) -> Response:
        return await adapter_routes.unload(*await _received(service, request, adapter_routes.UnloadRequest))


class _TextsRoute(Generic[Q]):
    """A path whose requests are for texts.

    Args:
      kind: of the body.
      asks_of: the texts that a request asks for.
      reply_of: what becomes of them.
    """

    def __init__(
        self,
        kind: type[Q],
        asks_of: Callable[[Q, Served, ServerConfig], list[RequestedText]],
        reply_of: Callable[[Q, Served, Sequence[RequestedText]], Reply],
    ):
        self._kind, self._asks_of, self._reply_of = kind, asks_of, reply_of

    def of(self, service: Service) -> Callable[[Request], Awaitable[Response]]:
        """What answers the requests."""

        async def answer(request: Request) -> Response:
            began_s = time.monotonic()
            parsed, served, asks = await _prepared(service, request, self._kind, self._asks_of, began_s)
            reply, answers = self._reply_of(parsed, served, asks), service.ask(asks, began_s)
            if parsed.stream:
                return _Events(answers, reply)
            completions = await _unless_disconnected(request, answers)
            return Response(status_code=_CLIENT_GONE) if completions is None else JSONResponse(reply.whole(completions))

        return answer


class _ReadingRoute(Generic[P]):
    """A path whose requests have texts that are read and not continued.

    Args:
      kind: of the body.
      work: makes the response.
    """

    def __init__(self, kind: type[P], work: Callable[[P, Served, ServerConfig], dict[str, Any]]):
        self._kind, self._work = kind, work

    def of(self, service: Service) -> Callable[[Request], Awaitable[Response]]:
        """What answers the requests."""

        async def answer(request: Request) -> Response:
            _, _, result = await _prepared(service, request, self._kind, self._work, time.monotonic())
            service.count_read(result.get("usage", {}).get("prompt_tokens", 0))
            return JSONResponse(result)

        return answer


_TEXTS: dict[str, _TextsRoute[Any]] = {
    "/v1/completions": _TextsRoute(CompletionRequest, texts.completion_texts, CompletionReply),
    "/v1/chat/completions": _TextsRoute(ChatRequest, texts.chat_texts, ChatReply),
    "/v1/responses": _TextsRoute(ResponsesRequest, response_texts, ResponseReply),
    "/v1/messages": _TextsRoute(MessagesRequest, message_texts, MessageReply),
}
_READINGS: dict[str, _ReadingRoute[Any]] = {
    "/v1/embeddings": _ReadingRoute(readings.EmbeddingRequest, readings.embeddings),
    "/v1/score": _ReadingRoute(scores.ScoreRequest, scores.scores),
    "/score": _ReadingRoute(scores.ScoreRequest, scores.scores),
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), _ReadingRoute(scores.RerankRequest, scores.ranks)),
    "/v1/messages/count_tokens": _ReadingRoute(CountRequest, count_tokens),
    "/tokenize": _ReadingRoute(readings.TokenizeRequest, readings.tokenize),
    "/detokenize": _ReadingRoute(readings.DetokenizeRequest, readings.detokenize),
}


def _about(served: Served, name: str) -> dict[str, Any]:
    """Describes the model, or one of its adapters, as vLLM does; but paths of this machine are not told."""
    return {
        "id": name,
        "object": "model",
        "created": int(served.created_s),
        "owned_by": "capibara",
        "root": served.name,
        "parent": None if name == served.name else served.name,
        "max_model_len": served.length,
    }


def _authorised(keys: Sequence[str]) -> Callable[[Request], Awaitable[None]]:
    known = [key.encode() for key in keys]

    async def check(request: Request) -> None:
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        # Anthropic's clients send the key in a header of its own.
        token = token if kind.lower() == "bearer" else request.headers.get("x-api-key", "")
        # All keys are compared, each in constant time.
        right = [hmac.compare_digest(token.strip(" \t").encode("latin-1"), key) for key in known]
        if known and not any(right):
            raise Refusal(
                401,
                "the API key is missing or wrong: send it as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    return check


# Answers.


async def _received(service: Service, request: Request, kind: type[P]) -> tuple[P, Served]:
    """The parsed body of a request that no text waits for, and the model."""
    served = service.check_room(0)
    with service.reading() as take:
        parsed = await _parsed(service, kind, await _body(request, service.config, take), 0)
        bodies.check_model(parsed, served)
    return parsed, served


async def _prepared(
    service: Service, request: Request, kind: type[P], work: Callable[[P, Served, ServerConfig], T], began_s: float
) -> tuple[P, Served, T]:
    """The parsed body, the model, and what `work` makes of them, in a thread."""
    served, config = service.check_room(), service.config
    with service.reading() as take:
        body = await _body(request, config, take)
        parsed = await _parsed(service, kind, body, config.max_texts * bounds.most_tokens(served, config))
        bodies.check_model(parsed, served)
        # Templates and tokenizers may take long; other requests' tokens must not wait for them.
        pool = threads.READING if parsed.waits else threads.PREPARING
        running = asyncio.get_running_loop().run_in_executor(pool, work, parsed, served, config)
        try:
            async with asyncio.timeout(began_s + config.timeout_s - time.monotonic()):
                return parsed, served, await running
        except TimeoutError:
            raise Refusal(504, "the prompt took too long: shorten it", code="timeout") from None


async def _parsed(service: Service, kind: type[P], body: bytes, most_tokens: int) -> P:
    """Parses one body at a time and yields to others half of the time; a thread would delay them at each read."""
    async with service.parsing:
        began_s = time.monotonic()
        try:
            return bodies.read(kind, body, most_tokens)
        finally:
            took_s = time.monotonic() - began_s
            await asyncio.sleep(took_s if took_s > _PAUSED_AFTER_S else 0)


async def _body(request: Request, config: ServerConfig, take: Callable[[int], None]) -> bytes:
    content = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content != "application/json":  # a cross-origin page cannot send this without a preflight
        raise Refusal(
            415, f"Content-Type is {content[:60]!r}, must be 'application/json'", code="unsupported_media_type"
        )
    most, size, parts = config.max_body_kib * 1024, 0, []
    if "content-length" not in request.headers and "transfer-encoding" not in request.headers:
        raise Refusal(411, "the request has no Content-Length: send it", code="length_required")
    too_large = Refusal(413, f"the body must have at most {config.max_body_kib} KiB: shorten it", code="body_too_large")
    announced = _announced(request.headers)
    if announced > _DISCARDED * most or (announced > most and "expect" in request.headers):
        raise too_large
    async for part in request.stream():  # `http_protocol` enforces a deadline
        size += len(part)
        if size <= most:
            take(len(part))
            parts.append(part)
        elif size > _DISCARDED * most:
            break
        else:
            parts.clear()
    if size > most:
        raise too_large
    return b"".join(parts)


def _announced(headers: Headers) -> int:
    return int(headers.get("content-length", 0))  # h11 has checked that it is a number


async def _unless_disconnected(request: Request, answers: Answers) -> list[Completion] | None:
    """The complete texts; None: the client has disconnected."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    leaving, work = asyncio.create_task(disconnected()), asyncio.create_task(answers.all())
    try:
        await asyncio.wait({leaving, work}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        answers.cancel()
        leaving.cancel()
        work.cancel()


class _Events(StreamingResponse):
    """The texts as server-sent events; cancels them when the client disconnects."""

    def __init__(self, answers: Answers, reply: Reply):
        super().__init__(_events(answers, reply), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left_s = self._answers.deadline_s - time.monotonic()
        try:
            async with asyncio.timeout(left_s + _LAST_WRITES_S):
                await super().__call__(scope, receive, send)
        except TimeoutError:  # the client is not reading
            pass
        finally:
            self._answers.cancel()


async def _events(answers: Answers, reply: Reply) -> AsyncIterator[str]:
    completions: dict[int, Completion] = {}
    try:
        for event in reply.begin():
            yield reply.written(event)
        async for index, item in answers:
            if isinstance(item, Completion):
                completions[index] = item
            for event in reply.end(index, item) if isinstance(item, Completion) else reply.piece(index, item):
                yield reply.written(event)
        for event in reply.close([completions[index] for index in range(len(completions))]):
            yield reply.written(event)
    except Refusal as refusal:
        yield reply.written(reply.error(refusal))
    except UserError as error:  # of the request, such as a grammar that became too complex
        yield reply.written(reply.error(Refusal(400, bounds.quoted(str(error)), code="invalid_value")))
    except Exception as error:
        _log.error("A stream of texts ended with an error", exc_info=error)  # raising it would cut the response off
        yield reply.written(reply.error(_fault(error)))
    yield reply.last


# Errors.


def _error(request: Request, refusal: Refusal) -> Response:
    """An error in the form of the request's API."""
    body = error_of(refusal) if request.scope["path"].startswith(_ANTHROPIC) else refusal.body
    return JSONResponse(body, refusal.status, refusal.headers)


async def _refused(request: Request, refusal: Exception) -> Response:
    assert isinstance(refusal, Refusal)
    return _error(request, refusal)


async def _invalid_request(request: Request, error: Exception) -> Response:
    return _error(request, Refusal(400, bounds.quoted(str(error)), code="invalid_value"))


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    refusal = Refusal(
        error.status_code, f"{request.method[:20]} {request.scope['path'][:160]}: {error.detail}", code="no_such_url"
    )
    return JSONResponse(refusal.body, error.status_code, error.headers)


async def _disconnected(_: Request, __: Exception) -> Response:
    return PlainTextResponse("", _CLIENT_GONE)


async def _failed(request: Request, error: Exception) -> Response:
    return _error(request, _fault(error))


def _fault(error: Exception) -> Refusal:
    return Refusal(500, f"internal error ({type(error).__name__}): see the server's log", code="internal")


class _BodyGate:
    """Calls an application once a request's body has arrived, in full or large part: incomplete ones stay cheap."""

    def __init__(self, app: ASGIApp, service: Service):
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        has_body = "content-length" in headers or "transfer-encoding" in headers
        # A request that its headers alone disqualify is refused at once.
        is_refused = _announced(headers) > _DISCARDED * self._service.config.max_body_kib * 1024
        if scope["method"] != "POST" or "expect" in headers or is_refused or not has_body:
            await self._app(scope, receive, send)
            return
        body = bytearray()
        message: Message = {"more_body": True}
        while message.get("more_body") and len(body) < _PATIENT_BYTES:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
        first = [{"type": "http.request", "body": bytes(body), "more_body": message.get("more_body", False)}]

        async def receive_again() -> Message:
            return first.pop() if first else await receive()

        await self._app(scope, receive_again, send)


class _RequestCounter:
    """Counts an application's requests, and logs them if requested."""

    def __init__(self, app: ASGIApp, service: Service, metrics: ServingMetrics, paths: set[str]):
        self._app, self._service, self._metrics, self._paths = app, service, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, began_s, answered = scope["path"], time.monotonic(), False

        async def counted_send(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                answered = True
                # Arbitrary paths are no labels: each would add a time series.
                self._metrics.request(path if path in self._paths else "other", message["status"])
                if self._service.config.access_log:
                    passed_ms = 1e3 * (time.monotonic() - began_s)
                    line = f"{scope['client'][0]} {scope['method']} {path!r} {message['status']} {passed_ms:.0f} ms"
                    print(line, file=sys.stderr, flush=True)
            await send(message)

        try:
            await self._app(scope, receive, counted_send)
        except asyncio.CancelledError:  # the process ends, and this client has not completed its request
            if not answered:
                await JSONResponse(shutting_down().body, 503)(scope, receive, counted_send)
