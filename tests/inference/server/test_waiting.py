"""Prompts do not wait behind requests whose preparation takes long."""

from __future__ import annotations

import threading

from fastapi.testclient import TestClient

from capibara.inference.server import app
from capibara.inference.server.openai.readings import EmbeddingRequest
from capibara.inference.server.openai.requests import ChatRequest, CompletionRequest
from capibara.inference.server.prometheus import ServingMetrics
from capibara.inference.server.service.service import ServerConfig, Service


def test_a_text_is_answered_while_embeddings_are_read(served, monkeypatch):
    begun, released = threading.Barrier(3), threading.Event()

    def embed(*args):
        begun.wait(10)
        released.wait(30)
        raise RuntimeError("late")

    monkeypatch.setattr(served.engine.reader, "embed", embed)
    metrics = ServingMetrics(lambda: service.load)
    service = Service(metrics)
    service.ready(served, ServerConfig())
    client = TestClient(app.app_of(service, metrics), "http://127.0.0.1", raise_server_exceptions=False)
    body = {"model": "tiny", "input": "a"}
    each = [threading.Thread(target=client.post, args=("/v1/embeddings",), kwargs={"json": body}) for _ in range(2)]
    try:
        for thread in each:
            thread.start()
        begun.wait(10)  # both threads of long preparations are busy
        reply = client.post("/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 2})
        assert reply.status_code == 200, reply.text
    finally:
        released.set()
        for thread in each:
            thread.join(10)


def test_what_takes_long():
    plain = (
        CompletionRequest(model="tiny", prompt="a", max_tokens=3),
        ChatRequest(model="tiny", messages=[{"role": "user", "content": "a"}], temperature=0.5),
    )
    long = (
        CompletionRequest(model="tiny", prompt="a", guided_regex="a+"),
        CompletionRequest(model="tiny", prompt="a", echo=True, logprobs=1),
        ChatRequest(model="tiny", messages=[{"role": "user", "content": "a"}], response_format={"type": "json_object"}),
        EmbeddingRequest(input="a"),
    )
    assert not any(one.waits for one in plain) and all(one.waits for one in long)
