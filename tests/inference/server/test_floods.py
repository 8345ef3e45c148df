"""Requests that raise inside the engine, and requests that are all wrong: others are answered, and little is echoed."""

from __future__ import annotations

import gc
import json
import logging
import os
import pathlib
import re
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from capibara.inference.engine.requests.request import Request
from capibara.inference.engine.runner import decode, prompt_batches
from capibara.inference.sampling.text import TextStream
from tests.inference.server.test_server import GREEDY, Running

STOP = "\x07planted"
MARK = 77  # a top_k: what a program over all slots can see of a request
PLANTED = "Planted"  # the prompt of such requests; no other is as long, nor longer by its text


@pytest.fixture(scope="module")
def running(served):
    with Running(served) as running:
        yield running


def asked(prompt="The river", **options):
    return json.dumps({"prompt": prompt, **GREEDY, **options})


def is_bad(request):
    return STOP in request.sampling.stop


FAULTS = {
    "prefill": (prompt_batches, "batch_of", lambda requests, *_: any(map(is_bad, requests))),
    "sampling": (decode, "settings_of", lambda samplings: STOP in samplings[0].stop),
    "decoding": (Request, "receive", lambda request, *_: is_bad(request) and request.received == 2),
    "detokenizing": (TextStream, "feed", lambda stream, *_: STOP in stream._stop),
    "the end of a text": (TextStream, "close", lambda stream: STOP in stream._stop),
}
# Programs over the rows of several requests: the state that they were given is gone when they fail.
PROGRAMS = {
    "the decode program": ("step", lambda *args: MARK in args[2].top_k),
    "a later decode program": ("step", lambda *args: ((args[2].top_k == MARK) & (args[3].index > 4)).any()),
    "the prefill program": ("prefill", lambda _, batch: len(PLANTED) in batch["counts"]),
    "admission to a slot": ("admit", lambda *args: MARK in args[4].top_k),
}


def flood(running, count):
    """Statuses of `count` good requests, and of as many whose handling raises, whole or streamed."""

    def send(number):
        if number % 2:
            wrong = asked(PLANTED, stop=[STOP], top_k=MARK, stream=number % 4 == 1)
            return running.http("POST", "/v1/completions", wrong)[:2]
        return running.http("POST", "/v1/completions", asked())[:2]

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(send, range(2 * count)))
    return answers[::2], answers[1::2]


def plant(monkeypatch, engine, where):
    if where in FAULTS:
        owner, name, concerns = FAULTS[where]
        real = getattr(owner, name)

        def planted(*args, **kwargs):
            if concerns(*args):
                raise FloatingPointError("planted")
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, planted)
        return
    name, concerns = PROGRAMS[where]
    compiled = engine.core.runner.programs

    def failing(*args):
        done = getattr(compiled, name)(*args)
        if concerns(*args):
            raise FloatingPointError("planted")
        return done

    for owner in (engine.core.runner, engine.core.prefill):
        monkeypatch.setattr(owner, "programs", compiled._replace(**{name: failing}))


def settled_arrays(at_most):
    """Arrays on the devices, at most so many if that is reached in time: the engine may still drop what ran ahead."""
    end_s = time.monotonic() + (10 if at_most else 1)
    while True:
        gc.collect()
        arrays = len(jax.live_arrays())
        if arrays <= at_most or time.monotonic() > end_s:
            return arrays
        time.sleep(0.1)


def settled_requests(at_most):
    """Requests in memory, at most so many if that is reached in time: a program that is compiled holds its requests."""
    end_s = time.monotonic() + 30
    while True:
        gc.collect()
        count = sum(isinstance(one, Request) for one in gc.get_objects())
        if count <= at_most or time.monotonic() > end_s:
            return count
        time.sleep(0.1)


@pytest.mark.parametrize("where", [*FAULTS, *PROGRAMS])
@pytest.mark.parametrize("count", [6, pytest.param(400, marks=pytest.mark.heavy)])
def test_a_flood_of_requests_that_raise_leaves_the_others_alone(running, served, monkeypatch, where, count):
    want = json.loads(running.http("POST", "/v1/completions", asked())[1])["choices"]
    plant(monkeypatch, served.engine, where)
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "disabled", True)  # pytest keeps what is logged
    sizes, resident = [], []
    for _ in range(3 if count > 100 else 2):
        good, bad = flood(running, count)
        for status, body in good:
            assert status == 200 and json.loads(body)["choices"] == want
        for index, (status, body) in enumerate(bad):  # a stream has begun with 200, and ends with the error
            assert status == (200 if not index % 2 else 500) and b"internal error (FloatingPointError)" in body
        assert running.http("GET", "/health")[0] == 200
        arrays = settled_arrays(sizes[0][1] if sizes else 0)
        kept = settled_requests(4)
        sizes.append((kept, arrays, served.engine.load, running.service.texts))
        resident.append(int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    assert max(kept for kept, *_ in sizes) <= 4 < count  # those that local variables hold
    assert sizes[-1][1] <= sizes[0][1] and sizes[-1][2:] == ((0, 0), 0)
    if count > 100:  # a state of the slots kept by each request would be more than 200 MiB in a round
        assert resident[-1] - resident[-2] < 32 * 2**20, [size >> 20 for size in resident]


LONG = "Q" * 5000
WRONG = {
    "an unknown parameter": asked(**{LONG: 1}),
    "an unknown option of streams": asked(stream=True, stream_options={LONG: 1}),
    "model": asked(model=LONG),
    "a number": asked(temperature=LONG),
    "an integer": asked(seed=LONG),
    "a number with many digits": asked(max_tokens=0).replace('"max_tokens": 0', f'"max_tokens": {"7" * 4000}'),
    "stop": asked(stop=[LONG]),
    "a stop that is no text": asked(stop={LONG: LONG}),
    "prompt": asked(prompt={LONG: LONG}),
    "prompts": asked(prompt=[LONG, 1]),
    "ids": asked(prompt=[1, 2, LONG]),
    "an id with many digits": asked(prompt=[7]).replace("[7]", f"[{'7' * 4000}]"),
    "a prompt that is too long": asked(prompt=LONG),
    "no JSON": LONG,
    "a text alone": json.dumps(LONG),
    "JSON with an end": asked() + LONG,
    "tool_choice": {"tool_choice": LONG},
    "a role": {"messages": [{"role": LONG, "content": "a"}]},
    "a role that a template rejects": {"messages": [{"role": "Q" * 250, "content": "a"}]},
    "a message": {"messages": [LONG]},
    "a message's parameter": {"messages": [{"role": "user", "content": "a", LONG: LONG}]},
    "content": {"messages": [{"role": "user", "content": {LONG: LONG}}]},
    "parts": {"messages": [{"role": "user", "content": [{"type": LONG, "text": "a"}]}]},
    "tool calls": {
        "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": LONG, "arguments": LONG}}]}]
    },
    "tools": {"tools": [{"type": LONG, "function": LONG}]},
    "tools without a function": {"tools": [LONG]},
    "response_format": {"response_format": {"type": LONG}},
}


@pytest.mark.parametrize("name", WRONG)
def test_at_most_200_characters_of_a_request_come_back(running, name):
    body, path = WRONG[name], "/v1/completions"
    if isinstance(body, dict):
        path, about = "/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
        body = json.dumps(about | body)
    status, answer, _ = running.http("POST", path, body)
    assert 400 <= status < 500, answer[:300]
    assert sum(map(len, re.findall(rb"Q{5,}|7{5,}", answer))) <= 200, answer


@pytest.mark.parametrize(
    "method, path, headers",
    [
        ("GET", f"/{LONG}", {}),
        ("Q" * 900, "/v1/models", {}),
        ("GET", f"/v1/models/{LONG}", {}),
        ("POST", "/v1/completions", {"Content-Type": LONG}),
        ("GET", "/v1/models", {"Host": LONG}),
        ("GET", "/v1/models", {"Origin": f"https://{LONG}"}),
        ("OPTIONS", "/v1/models", {"Origin": "http://localhost", "Access-Control-Request-Method": LONG}
         | {"Access-Control-Request-Headers": LONG}),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_at_most_200_characters_of_a_request_line_and_headers_come_back(running, method, path, headers):
    status, answer, found = running.http(method, path, None, headers)
    everything = answer + str(found).encode()
    assert sum(map(len, re.findall(rb"Q{5,}", everything))) <= 200, (status, everything)
