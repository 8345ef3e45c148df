"""Prompts do not wait behind requests whose preparation takes long."""

from __future__ import annotations

import http.client
import json
import threading

from capibara.inference.server import server
from capibara.inference.server.app import app_of
from capibara.inference.server.openai.readings import EmbeddingRequest
from capibara.inference.server.openai.requests import ChatRequest, CompletionRequest
from capibara.inference.server.prometheus import ServingMetrics
from capibara.inference.server.service.service import ServerConfig, Service

HELLO = [{"role": "user", "content": "Hello"}]


def post(address, path, body):
    connection = http.client.HTTPConnection(*address, timeout=60)
    connection.request("POST", path, json.dumps({"model": "tiny"} | body), {"Content-Type": "application/json"})
    return connection.getresponse().status


def test_a_text_is_answered_while_embeddings_are_read(served, monkeypatch):
    begun, released = threading.Semaphore(0), threading.Event()

    def embed(*args):
        begun.release()
        released.wait(60)
        raise RuntimeError("late")

    monkeypatch.setattr(served.engine.reader, "embed", embed)
    metrics = ServingMetrics(lambda: service.load)
    service, listening = Service(metrics), server.listen("127.0.0.1", 0)
    service.ready(served, ServerConfig())
    address = listening.getsockname()
    runs = threading.Thread(target=server.Server(app_of(service, metrics), service).run, args=([listening],))
    each = [threading.Thread(target=post, args=(address, "/v1/embeddings", {"input": "a"})) for _ in range(2)]
    try:
        for thread in (runs, *each):
            thread.start()
        for _ in each:
            assert begun.acquire(timeout=60)  # both threads of long preparations are busy
        assert post(address, "/v1/completions", {"prompt": "a", "max_tokens": 2}) == 200
    finally:
        released.set()
        for thread in each:
            thread.join(60)
        service.drain()
        runs.join(60)


def test_what_takes_long():
    plain = CompletionRequest(model="tiny", prompt="a", max_tokens=3), ChatRequest(model="tiny", messages=HELLO)
    long = (
        CompletionRequest(model="tiny", prompt="a", guided_regex="a+"),
        CompletionRequest(model="tiny", prompt="a", echo=True, logprobs=1),
        ChatRequest(model="tiny", messages=HELLO, response_format={"type": "json_object"}),
        EmbeddingRequest(input="a"),
    )
    assert not any(one.waits for one in plain) and all(one.waits for one in long)
