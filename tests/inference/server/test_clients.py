"""Requests of agents' libraries, recorded in November 2026: each is answered, and the model reads all of its conversation.

recorded/clients.jsonl has one request of each kind that a loop with two tools, a stream, an output type, a text or an
embedding sent, with the model's name replaced.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest

from tests.inference.server.test_other_apis import TEMPLATE
from tests.inference.server.test_server import Running
from tests.inference.server.test_tool_calls import chat_of
from tests.inference.server.test_tool_choice import says

RECORDED = [
    json.loads(line) for line in (pathlib.Path(__file__).parent / "recorded" / "clients.jsonl").read_text().splitlines()
]
ANSWER = "It is sunny."


@pytest.fixture(scope="module")
def answered(tmp_path_factory, served):
    """What the server answers to each request, and the prompt that the model reads."""
    chat = chat_of(tmp_path_factory.mktemp("chat"), TEMPLATE, ["<|im_start|>"])
    prompts: list[str] = []

    def answer(prompt):
        prompts.append(prompt)
        return ANSWER

    results = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        says(monkeypatch, chat, answer)
        with Running(dataclasses.replace(served, vocabulary=chat.vocabulary, chat=chat, length=8192)) as running:
            for item in RECORDED:
                prompts.clear()
                status, body, _ = running.http("POST", item["path"], json.dumps(item["body"]))
                results.append((status, body.decode(), "".join(prompts)))
    return results


def texts_of(value, key=""):
    """The texts of a conversation; arguments of calls are JSON, whose values the model reads."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from texts_of(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from texts_of(item, key)
    elif isinstance(value, str) and key == "arguments":
        yield from texts_of(json.loads(value), "content")
    elif isinstance(value, str) and key in ("content", "text", "output", "system", "instructions", "name", "city"):
        yield value


@pytest.mark.parametrize(
    "number", range(len(RECORDED)), ids=[f"{item['client']} {item['path']} {n}" for n, item in enumerate(RECORDED)]
)
def test_a_recorded_request_is_answered(answered, number):
    item, (status, body, prompt) = RECORDED[number], answered[number]
    assert status == 200, body
    if item["path"] in ("/v1/embeddings", "/v1/messages/count_tokens"):
        return
    asked = item["body"]
    assert '"error": {' not in body if asked.get("stream") else ANSWER in body
    if item["path"] != "/v1/completions":
        conversation = [asked.get(key) for key in ("messages", "input", "tools")]
        missing = [text for text in texts_of(conversation) if text not in prompt.replace("\\", "")]
        assert not missing, prompt
