"""Parameters and paths that vLLM's and OpenAI's clients send, with values that would cost much: each is answered soon."""

from __future__ import annotations

import json

import pytest

from tests.inference.server.test_grammar_floods import CHAT, COMPLETION, check
from tests.inference.server.test_server import GREEDY, HELLO, Running
from tests.inference.server.test_tool_choice import served_with

ASKED = GREEDY | {"prompt": "The river", "max_tokens": 2}
TALK = GREEDY | {"messages": HELLO, "max_tokens": 2}
SAID = {"model": "tiny", "messages": HELLO, "max_tokens": 2}
DEEP = json.loads("[" * 100 + "]" * 100)
WIDE = {f"k{i}": i for i in range(50_000)}
COMPLETIONS = {
    "many biases": {"logit_bias": {str(i): 100 for i in range(100_000)}},
    "a bias of a huge token": {"logit_bias": {"9" * 4000: 1}},
    "a bias that is infinite": {"logit_bias": {"5": 1e999}},
    "biases of one token": {"logit_bias": {"5": 1, "05": 2, " 5": 3, "+5": 4}},
    "many allowed tokens": {"allowed_token_ids": [*range(300)] * 500},
    "an allowed token that is none": {"allowed_token_ids": [10**400]},
    "no allowed token": {"allowed_token_ids": []},
    "an allowed token below 0": {"allowed_token_ids": [-1, -(2**63)]},
    "many bad words": {"bad_words": [f"w{i}" for i in range(100_000)]},
    "a long bad word": {"bad_words": ["a" * 200_000]},
    "an empty bad word": {"bad_words": [""]},
    "bad words of all letters": {"bad_words": [chr(i) for i in range(256)]},
    "many stops": {"stop": ["s" * i for i in range(1, 900)]},
    "a long stop": {"stop": ["a" * 300_000]},
    "an empty stop": {"stop": [""]},
    "a stop of half a pair": {"stop": ["\ud800"]},
    "many stop tokens": {"stop_token_ids": [*range(100_000)]},
    "a huge n": {"n": 10**9},
    "n and best_of": {"n": 3, "best_of": 2},
    "a huge best_of": {"n": 1, "best_of": 2**70},
    "many prompts": {"prompt": ["a"] * 50_000},
    "prompts of many texts": {"prompt": ["a"] * 16, "n": 16},
    "many prompts of tokens": {"prompt": [[5]] * 50_000},
    "no prompt": {"prompt": []},
    "a prompt of none": {"prompt": [[]]},
    "prompts of both kinds": {"prompt": ["a", [5]]},
    "a token that is none": {"prompt": [[10**30]]},
    "a token that is true": {"prompt": [[True, False]]},
    "nested prompts": {"prompt": DEEP},
    "many likely tokens": {"logprobs": 10**9},
    "likely tokens of a prompt": {"prompt_logprobs": 10**9},
    "a huge seed": {"seed": 10**300},
    "a salt": {"cache_salt": "s" * 500_000},
    "a huge minimum": {"min_tokens": 2**62},
    "a cut prompt": {"truncate_prompt_tokens": -(2**70)},
    "penalties": {"presence_penalty": 1e308, "frequency_penalty": -1e308, "repetition_penalty": 1e-300},
    "a choice of none": {"guided_choice": [""] * 3},
}
CHATS = {
    "variables of a template": {"chat_template_kwargs": WIDE},
    "nested variables": {"chat_template_kwargs": {"enable_thinking": DEEP}},
    "names of Jinja": {"chat_template_kwargs": {"range": 1, "messages": [], "loop": {}, "__class__": 2}},
    "many messages": {"messages": HELLO * 20_000},
    "many parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 50_000}]},
    "many tools": {
        "tools": [{"type": "function", "function": {"name": f"f{i}", "parameters": {}}} for i in range(5000)]
    },
    "a tool's long name": {
        "tools": [{"type": "function", "function": {"name": "f" * 100_000, "parameters": {}}}],
        "tool_choice": "required",
    },
    "a stream's options": {"stream": True, "stream_options": WIDE},
    "a strategy": {"thinking_strategy": {"name": "self_consistency", "samples": 10**9}},
    "a budget": {"thinking_token_budget": 2**80},
    "calls of an assistant": {
        "messages": [
            *HELLO,
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{" * 5000}}]
                * 200,
            },
            *HELLO,
        ]
    },
}
PATHS = {
    "/v1/responses": [
        {"model": "tiny", "input": [{"role": "user", "content": "a"}] * 20_000, "max_output_tokens": 2},
        {"model": "tiny", "input": [{"type": "function_call_output", "call_id": "x" * 100_000, "output": "y"}]},
        {"model": "tiny", "input": DEEP},
        {"model": "tiny", "input": "x", "include": ["reasoning"] * 50_000},
    ],
    "/v1/messages": [
        SAID | {"system": [{"type": "text", "text": "a"}] * 50_000},
        SAID | {"stop_sequences": [f"s{i}" for i in range(50_000)]},
        SAID | {"thinking": {"type": "enabled", "budget_tokens": 10**40}},
        SAID | {"metadata": WIDE, "tools": [{"name": f"t{i}", "input_schema": {"type": "object"}} for i in range(3000)]},
    ],
    "/v1/embeddings": [
        {"model": "tiny", "input": ["a"] * 100_000},
        {"model": "tiny", "input": [[5] * 2000] * 64},
        {"model": "tiny", "input": "x", "dimensions": 10**12},
        {"model": "tiny", "input": "x", "encoding_format": "z" * 100_000},
    ],
    "/v1/rerank": [{"model": "tiny", "query": "q", "documents": ["d"] * 100_000}, {"model": "tiny", "query": DEEP, "documents": []}],
    "/v1/score": [{"model": "tiny", "text_1": ["a"] * 50_000, "text_2": ["b"] * 50_000}],
    "/v1/load_lora_adapter": [{"lora_name": "x" * 100_000, "lora_path": "/etc"}, {"lora_name": "a", "lora_path": "\x00" * 50_000}],
    "/v1/unload_lora_adapter": [{"lora_name": ["a"] * 1000}],
    "/tokenize": [{"prompt": "a" * 900_000}, {"messages": HELLO * 20_000}],
    "/detokenize": [{"tokens": [5] * 400_000}, {"tokens": [-1, 10**300]}],
}  # fmt: skip
ALL = {
    **{name: (COMPLETION, ASKED | options) for name, options in COMPLETIONS.items()},
    **{name: (CHAT, TALK | options) for name, options in CHATS.items()},
    **{f"{path} {number}": (path, body) for path, bodies in PATHS.items() for number, body in enumerate(bodies)},
}


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    served = served_with(tmp_path_factory.mktemp("flood"), "hermes")
    with served.engine.start(), Running(served) as one:
        for path, body in ((COMPLETION, ASKED), (CHAT, TALK), ("/v1/embeddings", {"model": "tiny", "input": "x"})):
            one.http("POST", path, json.dumps(body))  # compiles what they all need
        yield one


FEW = (
    "many biases",
    "many allowed tokens",
    "many bad words",
    "a huge n",
    "many prompts",
    "variables of a template",
    "/v1/messages 1",
)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FEW else pytest.mark.heavy) for name in ALL])
def test_a_parameter_holds_up_nobody(running, name):
    path, body = ALL[name]
    check(running, name, path, body, (200, 400, 404, 413))
