"""Structured output, penalties, embeddings and the like through OpenAI's client, against the engine's own results."""

from __future__ import annotations

import dataclasses
import json
import re

import jax
import numpy as np
import openai
import pytest

from capibara.inference.engine.reading import Pooling
from capibara.inference.interactive.chat import Chat
from capibara.inference.server.service.service import ServerConfig
from tests.inference.server.test_server import Running

HOT = {"model": "tiny", "temperature": 1.0, "max_tokens": 120}
HELLO = [{"role": "user", "content": "Hello"}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "people": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "people"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def running(served):
    with Running(served) as running:
        yield running


@pytest.fixture(scope="module")
def client(running):
    return running.client()


def batch_of(ids):
    positions, segments = np.arange(len(ids), dtype=np.int32)[None], np.ones((1, len(ids)), np.int32)
    return {"tokens": np.array([ids], np.int32), "positions": positions, "segment_ids": segments}


def log_probabilities_of(run, ids):
    """[T, V], by the whole model at once, of the ids that the tokenizer has."""
    logits = run.model.logits(run.params, batch_of(ids))[0, :, : run.tokenizer.size]
    return jax.nn.log_softmax(logits, axis=-1)


def format_of(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@pytest.mark.parametrize("stream", [False, True])
def test_answers_follow_a_schema(client, stream):
    asked = HOT | {"messages": HELLO, "response_format": format_of(CITY), "n": 3, "seed": 1}
    if not stream:
        texts = [choice.message.content for choice in client.chat.completions.create(**asked).choices]
    else:
        texts = ["", "", ""]
        for chunk in client.chat.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    for text in texts:
        about = json.loads(text)
        assert about["city"] in ("Rome", "Oslo") and 0 <= about["people"] <= 9


@pytest.mark.parametrize(
    "options, pattern",
    [
        ({"guided_regex": "[ab]{4}"}, "[ab]{4}"),
        ({"guided_choice": ["red", "green"]}, "red|green"),
        ({"guided_grammar": 'start: "x" "y"+ "z"'}, "xy+z"),
        ({"guided_json": {"const": [1, 2]}}, r"\[\s*1\s*,\s*2\s*\]"),
        ({"structured_outputs": {"choice": ["one"]}}, "one"),
        ({"structured_outputs": {"json": '{"type": "boolean"}'}}, "true|false"),
    ],
    ids=str,
)
def test_completions_follow_what_vllm_calls_guided(client, options, pattern):
    reply = client.completions.create(**HOT, prompt="x", seed=3, extra_body=options)
    assert re.fullmatch(pattern, reply.choices[0].text) and reply.choices[0].finish_reason == "stop"


def test_a_format_of_text_asks_for_nothing(client):
    asked = {"model": "tiny", "temperature": 0, "max_tokens": 12, "messages": HELLO}
    plain = client.chat.completions.create(**asked)
    text = client.chat.completions.create(**asked, response_format={"type": "text"})
    assert text.choices[0].message.content == plain.choices[0].message.content


def test_biases_penalties_and_least_lengths_reach_the_engine(client):
    asked = {"model": "tiny", "temperature": 0, "prompt": "x", "max_tokens": 6}
    assert client.completions.create(**asked, logit_bias={"65": 100}).choices[0].text == chr(65 + 33) * 6
    free = client.completions.create(**asked, logit_bias={"65": 100}, frequency_penalty=2.0, presence_penalty=2.0)
    assert free.choices[0].text == chr(65 + 33) * 6  # a bias of 100 is more than 6 * 2 + 2
    varied = client.completions.create(**asked, frequency_penalty=2.0, presence_penalty=2.0, logprobs=0)
    plain = client.completions.create(**asked, logprobs=0)
    assert len(set(varied.choices[0].logprobs.tokens)) >= len(set(plain.choices[0].logprobs.tokens))


def test_end_tokens_of_a_request_and_ends_that_are_ignored(client):
    asked = {"model": "tiny", "temperature": 0, "prompt": "x", "max_tokens": 9, "logit_bias": {"65": 100}}
    ended = client.completions.create(**asked, extra_body={"stop_token_ids": [65]})
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == ("", "stop")
    later = client.completions.create(
        **asked | {"logit_bias": {"65": 100, "70": 50}}, extra_body={"stop_token_ids": [65], "min_tokens": 4}
    )
    assert (later.choices[0].text, later.choices[0].finish_reason) == (chr(70 + 33) * 4, "stop")
    whole = client.completions.create(
        **asked | {"logit_bias": {"65": 100, "70": 50}}, extra_body={"stop_token_ids": [65], "ignore_eos": True}
    )
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (chr(70 + 33) * 9, "length")


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_and_words_that_are_not_allowed_never_come(client, served, stream):
    asked = {"model": "tiny", "temperature": 1.5, "prompt": "x", "max_tokens": 24, "seed": 3, "n": 2, "stream": stream}
    ids = served.vocabulary.encode("abcd")
    options = {"allowed_token_ids": ids, "bad_words": ["ab", "c"]}
    reply = client.completions.create(**asked, extra_body=options)
    texts = ["", ""]
    for part in reply if stream else [reply]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert all(len(text) == 24 and set(text) <= {*"abd"} and "ab" not in text for text in texts)


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_has_its_stop_and_its_special_tokens_if_asked(client, served, stream):
    """As vLLM: the stop string, and the end token of the text where special tokens are part of it."""
    vocabulary = served.vocabulary
    asked = {"model": "tiny", "temperature": 0, "max_tokens": 6, "messages": HELLO, "stream": stream}

    def text(**options):
        reply = client.chat.completions.create(**asked, extra_body=options)
        parts = [
            choice.delta if stream else choice.message
            for part in (reply if stream else [reply])
            for choice in part.choices
        ]
        return "".join(part.content or "" for part in parts)

    only = {"allowed_token_ids": vocabulary.encode("a"), "stop": "aa"}
    assert (text(**only), text(**only, include_stop_str_in_output=True)) == ("", "aa")
    ends = {"allowed_token_ids": [vocabulary.eos_id], "include_stop_str_in_output": True}
    assert text(**ends) == text(**ends, skip_special_tokens=True) == ""
    assert text(**ends, skip_special_tokens=False) == vocabulary.spelling(vocabulary.eos_id)


def test_special_tokens_within_a_text_are_spelled_if_asked(client, served):
    vocabulary = served.vocabulary
    special = next(
        token for token in range(vocabulary.size) if vocabulary.spelling(token) and token not in vocabulary.end_ids
    )
    asked = {"model": "tiny", "temperature": 0, "max_tokens": 3, "prompt": "x"}
    options = {"allowed_token_ids": [special]}
    assert client.completions.create(**asked, extra_body=options).choices[0].text == ""
    reply = client.completions.create(**asked, extra_body=options | {"skip_special_tokens": False})
    assert reply.choices[0].text == vocabulary.spelling(special) * 3


def test_a_salt_keeps_prompts_of_others_out_of_the_cache(client):
    prompt = "a prompt of one client that others must not find by its time"
    asked = {"model": "tiny", "max_tokens": 1, "prompt": prompt}
    cached = [
        client.completions.create(**asked, extra_body=body).usage.prompt_tokens_details.cached_tokens > 0
        for body in ({"cache_salt": "one"}, {"cache_salt": "other"}, {}, {"cache_salt": "one"})
    ]
    assert cached == [False, False, False, True]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"allowed_token_ids": []}, "allowed_token_ids has 0 ids, must have from 1 to"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids has token 1000000"),
        ({"bad_words": ["a"] * 257}, "bad_words is .*must have at most 256 strings"),
        ({"bad_words": ["a" * 101]}, "bad_words is .*each of 1 to 100 characters"),
        ({"bad_words": [3]}, "bad_words.0 is 3"),
        ({"bad_words": [" "]}, "bad_words has ' ', which has no tokens: leave it out"),
        (
            {"bad_words": ["a"], "allowed_token_ids": [64]},
            "allowed_token_ids and bad_words leave no token: change one of them",
        ),
        ({"cache_salt": ""}, "cache_salt is ''"),
        ({"thinking_token_budget": -2}, "thinking_token_budget is -2"),
        ({"thinking_token_budget": 0}, "thinking_token_budget is 0, must be at least 1, or -1 for no limit"),
        ({"thinking_token_budget": 9, "thinking_tokens": 9}, "mean the same: leave one out"),
        ({"priority": 1}, "priority is not supported"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_restrictions_of_a_request_are_checked(client, options, message):
    with pytest.raises(openai.BadRequestError, match=message) as error:
        client.completions.create(model="tiny", prompt="x", max_tokens=2, extra_body=options)
    assert error.value.param in options


@pytest.mark.parametrize("budget, most", [(3, 3), (-1, 6)])
def test_a_thought_has_at_most_its_budget(client, served, budget, most):
    """`thinking_token_budget` is vLLM's name for `thinking_tokens`; -1: no limit."""
    letter = served.vocabulary.encode("a")
    asked = {"model": "tiny", "temperature": 0, "max_tokens": 6, "prompt": "<think>"}
    reply = client.completions.create(
        **asked, extra_body={"allowed_token_ids": letter, "thinking_token_budget": budget}
    )
    thought, closed, _ = reply.choices[0].text.partition("</")
    assert thought == "a" * most and bool(closed) == (most < 5)


def test_the_best_texts_are_those_with_the_likeliest_tokens(client):
    asked = {"model": "tiny", "temperature": 1.3, "prompt": ["a", "b"], "max_tokens": 5, "seed": 7, "logprobs": 0}
    every = client.completions.create(**asked, n=4)
    best = client.completions.create(**asked, n=2, best_of=4)
    mean = lambda choice: np.mean(choice.logprobs.token_logprobs)  # noqa: E731
    for prompt in (0, 1):
        of_prompt = sorted(every.choices[4 * prompt : 4 * prompt + 4], key=mean, reverse=True)
        assert [choice.text for choice in best.choices[2 * prompt : 2 * prompt + 2]] == [c.text for c in of_prompt[:2]]
    assert best.usage == every.usage and len(best.choices) == 4


def test_a_prompt_that_was_cached_counts_once(client):
    asked = {"model": "tiny", "prompt": "counted and cached", "max_tokens": 1, "n": 3}
    usage = [client.completions.create(**asked).usage for _ in range(2)][1]
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1 > 0


def test_the_best_text_is_not_the_shortest(client):
    """The mean decides, not the sum, which a short text has the largest of."""
    asked = {"model": "tiny", "temperature": 1.5, "prompt": "a", "max_tokens": 9, "seed": 3, "logprobs": 0}
    asked["extra_body"] = {"guided_choice": ["b", "cdefghij", "klmnopqr", "stuvwxyz"]}
    every = client.completions.create(**asked, n=8).choices
    best = client.completions.create(**asked, n=1, best_of=8).choices[0]
    by_sum, by_mean = (
        max(every, key=lambda choice: score(choice.logprobs.token_logprobs)).text for score in (np.sum, np.mean)
    )
    assert best.text == by_mean != by_sum


@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_has_its_log_probabilities(client, served, run, stream):
    """Each is what the model says of that token as the next one of a text."""
    asked = {"model": "tiny", "prompt": "the cat", "echo": True, "logprobs": 2, "max_tokens": 3, "temperature": 0}
    asked["logit_bias"] = {"65": 100}
    reply = client.completions.create(**asked, stream=stream)
    parts = [chunk.choices[0].logprobs for chunk in reply if chunk.choices] if stream else [reply.choices[0].logprobs]
    tokens, log_probabilities, likeliest, offsets = [], [], [], []
    for part in parts:
        if part is not None:
            tokens += part.tokens
            log_probabilities += part.token_logprobs
            likeliest += part.top_logprobs
            offsets += part.text_offset
    ids = served.vocabulary.prompt_ids("the cat")
    assert tokens[: len(ids)] == [served.vocabulary.decode([token]) for token in ids] and len(tokens) == len(ids) + 3
    assert log_probabilities[0] is None and likeliest[0] is None
    scores = np.asarray(log_probabilities_of(run, ids))
    for place, token in enumerate(ids[1:], 1):
        assert log_probabilities[place] == pytest.approx(scores[place - 1, token], abs=1e-4)
        best = {*np.argsort(scores[place - 1])[-2:].tolist(), token}  # the prompt's own token is among them
        assert sorted(likeliest[place].values()) == pytest.approx(sorted(scores[place - 1, [*best]]), abs=1e-4)
    assert offsets == [len(served.vocabulary.decode(ids[:count])) for count in range(len(ids))] + [
        len("the cat") + sum(map(len, tokens[len(ids) : count])) for count in range(len(ids), len(tokens))
    ]


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_prompts_are_scored_as_vllm_does(client, served, run, api):
    """By id, with ranks: the likeliest tokens and the prompt's own."""
    asked = {"model": "tiny", "max_tokens": 1, "extra_body": {"prompt_logprobs": 2, "return_token_ids": True}}
    if api == "chat":
        reply = client.chat.completions.create(messages=HELLO, **asked)
        ids, scored = reply.prompt_token_ids, reply.prompt_logprobs
    else:
        reply = client.completions.create(prompt="the cat", **asked)
        ids, scored = reply.choices[0].prompt_token_ids, reply.choices[0].prompt_logprobs
        assert ids == served.vocabulary.prompt_ids("the cat")
    assert len(reply.choices[0].token_ids) == 1 and len(scored) == len(ids) and scored[0] is None
    scores = np.asarray(log_probabilities_of(run, ids))
    for place, (token, each) in enumerate(zip(ids[1:], scored[1:])):
        order = np.argsort(-scores[place], kind="stable")
        assert {*each} == {*map(str, order[:2]), str(token)}
        own = each[str(token)]
        assert own["rank"] == 1 + int((scores[place] > scores[place, token]).sum())
        assert own["logprob"] == pytest.approx(scores[place, token], abs=1e-4)
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs is not available in a stream"):
        client.completions.create(**asked, prompt="x", stream=True)


def test_a_prompt_is_cut_to_the_tokens_asked_for(client):
    asked = {"model": "tiny", "prompt": [*range(60, 80)], "max_tokens": 1}
    for side, want in (("left", [*range(76, 80)]), ("right", [*range(60, 64)])):
        body = {"return_token_ids": True, "truncate_prompt_tokens": 4, "truncation_side": side}
        assert client.completions.create(**asked, extra_body=body).choices[0].prompt_token_ids == want
    long = asked | {"prompt": [70] * 300}
    cut = client.completions.create(**long, extra_body={"truncate_prompt_tokens": -1, "return_token_ids": True})
    assert len(cut.choices[0].prompt_token_ids) == 256


def test_each_chunk_tells_the_usage_so_far(client):
    asked = {"model": "tiny", "max_tokens": 6, "temperature": 0, "logit_bias": {"65": 100}, "stream": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = [
        *client.completions.create(
            prompt="the cat", stream_options=options, extra_body={"return_token_ids": True}, **asked
        )
    ]
    assert [chunk.usage.completion_tokens for chunk in chunks] == [0, 1, 2, 3, 4, 5, 6, 6, 6]
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {6}
    assert [token for chunk in chunks for choice in chunk.choices for token in choice.token_ids] == [65] * 6
    chat = [*client.chat.completions.create(messages=HELLO, stream_options=options, **asked)]
    assert [chunk.usage.completion_tokens for chunk in chat] == [0, 1, 2, 3, 4, 5, 6, 6, 6]


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_ids_are_those_of_the_whole_row(client, served, api):
    """The prompt's in the first chunk alone; the end token among the answer's, with its log probability."""
    end = served.vocabulary.eos_id
    asked = {"model": "tiny", "max_tokens": 6, "temperature": 0, "logit_bias": {str(end): 100, "65": 99}}
    body = {"return_token_ids": True, "return_tokens_as_token_ids": True, "min_tokens": 2}
    if api == "chat":
        create, asked = client.chat.completions.create, asked | {"messages": HELLO, "logprobs": True}
    else:
        create, asked = client.completions.create, asked | {"prompt": "the cat", "logprobs": 0}
    reply = create(**asked, extra_body=body)
    (choice,), ids = reply.choices, [65, 65, end]
    assert choice.finish_reason == "stop" and choice.token_ids == ids
    names = [f"token_id:{token}" for token in ids]
    prompt = reply.prompt_token_ids if api == "chat" else choice.prompt_token_ids
    first, *chunks = create(**asked, stream=True, extra_body=body)
    of_first = first if api == "chat" else first.choices[0]
    assert of_first.prompt_token_ids == prompt
    for chunk in chunks:
        assert "prompt_token_ids" not in chunk.model_dump() and "prompt_token_ids" not in chunk.choices[0].model_dump()
    assert [token for chunk in chunks for token in chunk.choices[0].token_ids] == ids
    each = [choice.logprobs, *(chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs)]
    named = [[item.token for item in one.content] if api == "chat" else one.tokens for one in each]
    assert named[0] == names and sum(named[1:], []) == names
    plain = create(**asked, extra_body={"min_tokens": 2}).choices[0].logprobs
    assert len(plain.content if api == "chat" else plain.tokens) == 2


def test_a_grammar_of_llama_cpp_is_read(client):
    gbnf = 'root ::= "SELECT " column " FROM " [a-z]{2}\ncolumn ::= "a" | "b"'
    reply = client.completions.create(**HOT, prompt="x", extra_body={"guided_grammar": gbnf})
    assert re.fullmatch("SELECT [ab] FROM [a-z]{2}", reply.choices[0].text)
    with pytest.raises(openai.BadRequestError, match="guided_grammar: Grammar.lark cannot be used"):
        client.completions.create(**HOT, prompt="x", extra_body={"guided_grammar": "root ::= missing"})


def test_an_echoed_prompt_may_have_no_likeliest_tokens(client):
    asked = {"model": "tiny", "prompt": "the cat", "echo": True, "max_tokens": 1, "temperature": 0}
    none, two = (client.completions.create(**asked, logprobs=count).choices[0].logprobs for count in (0, 2))
    assert none.token_logprobs[1:] == pytest.approx(two.token_logprobs[1:], abs=1e-4)
    assert [len(one) for one in none.top_logprobs[1:]] == [1] * (
        len(none.tokens) - 1
    )  # the token itself, as OpenAI does


def test_embeddings_are_of_length_one_and_do_not_depend_on_their_batch(client, served):
    texts = ["the cat", "a", "the dog and the cat", "x" * 70]
    together = np.array([one.embedding for one in client.embeddings.create(model="tiny", input=texts).data])
    alone = [client.embeddings.create(model="tiny", input=text, encoding_format="float") for text in texts]
    np.testing.assert_allclose(together, [reply.data[0].embedding for reply in alone], atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)
    ids = [served.vocabulary.prompt_ids(text) for text in texts]
    given = client.embeddings.create(model="tiny", input=ids, user="me")
    np.testing.assert_allclose(together, [one.embedding for one in given.data], atol=1e-5)
    assert given.usage.prompt_tokens == sum(map(len, ids))


def test_a_text_is_embedded_with_what_the_tokenizer_puts_after_it(client, served, monkeypatch):
    ids = served.vocabulary.prompt_ids("the cat")
    plain, closed = (client.embeddings.create(model="tiny", input=tokens) for tokens in (ids, [*ids, 257]))
    monkeypatch.setattr(type(served.vocabulary), "closing_ids", (257,))
    text, given = (client.embeddings.create(model="tiny", input=prompt) for prompt in ("the cat", ids))
    assert (text.data[0].embedding, text.usage) == (closed.data[0].embedding, closed.usage)
    assert (given.data[0].embedding, given.usage) == (plain.data[0].embedding, plain.usage)


@pytest.mark.parametrize("pooling", Pooling)
def test_an_embedding_is_of_the_hidden_states(served, run, pooling):
    ids = served.vocabulary.prompt_ids("the cat")
    (vector,) = served.engine.reader.embed([ids], pooling)
    hidden = np.asarray(run.model.hidden(run.params, batch_of(ids))[0], np.float32)[0]
    want = {Pooling.FIRST: hidden[0], Pooling.LAST: hidden[-1], Pooling.MEAN: hidden.mean(axis=0)}[pooling]
    np.testing.assert_allclose(vector, want / np.linalg.norm(want), atol=1e-5)


def post(running, path, body):
    status, content, _ = running.http("POST", path, json.dumps(body))
    return status, json.loads(content)


def test_texts_become_tokens_and_tokens_texts(running, served):
    assert post(running, "/tokenize", {"prompt": "the cat"}) == (
        200,
        {"count": 6, "max_model_len": 256, "tokens": served.vocabulary.prompt_ids("the cat"), "token_strs": None},
    )
    status, chat = post(running, "/tokenize", {"model": "tiny", "messages": HELLO})
    assert status == 200
    text = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert post(running, "/detokenize", {"tokens": chat["tokens"]}) == (200, {"prompt": text})


@pytest.mark.parametrize(
    "path, body, param, message",
    [
        ("/v1/embeddings", {"input": []}, "input", "input is [], must be a string, a list"),
        ("/v1/embeddings", {"input": ["a"] * 257}, "input", "input has 257 items: at most 256 texts in all"),
        ("/v1/embeddings", {"input": "x" * 300}, "input", "input has 300 tokens, must have at most 256"),
        ("/v1/embeddings", {"input": "a", "dimensions": 5}, "dimensions", "embeddings of this model have 32"),
        (
            "/v1/embeddings",
            {"input": "a", "encoding_format": "hex"},
            "encoding_format",
            "should be 'float' or 'base64'",
        ),
        ("/v1/embeddings", {"input": "a", "model": "other"}, "model", "the model here is 'tiny'"),
        ("/tokenize", {}, "prompt", "either prompt or messages must be set"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt", "either prompt or messages must be set"),
        ("/tokenize", {"messages": []}, "messages", "at least 1 item"),
        ("/detokenize", {"tokens": [260]}, "tokens", "must be from 0 to 259"),
        ("/detokenize", {"tokens": "a"}, "tokens", "valid list"),
    ],
    ids=range(11),
)
def test_mistakes_of_readings_are_told(running, path, body, param, message):
    status, reply = post(running, path, {"model": "tiny"} | body)
    assert status in (400, 404) and reply["error"]["param"] == param and message in reply["error"]["message"]


def test_variables_reach_the_template(served, folder, tmp_path):
    """Those that it asks for; a value of one request does not stay for the next."""
    from capibara.data.chat.template import ChatTemplate

    path = tmp_path / "template.jinja"
    path.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% if reasoning_effort == 'high' %}think {% endif %}"
        "{% if not thinking | default(true) %}no {% endif %}{% endif %}"
    )
    chat = Chat(served.vocabulary, ChatTemplate(tokenizer=folder, template=str(path)))
    with Running(dataclasses.replace(served, chat=chat)) as running:
        counted = lambda **options: (
            running.client()
            .chat.completions.create(  # noqa: E731
                model="tiny", messages=HELLO, max_tokens=1, **options
            )
            .usage.prompt_tokens
        )
        plain = counted()
        assert counted(reasoning_effort="high") == plain + len("think ") - 1  # "th" is one token
        assert counted(extra_body={"chat_template_kwargs": {"thinking": False}}) == plain + len("no ")
        assert counted() == plain
        with pytest.raises(
            openai.BadRequestError, match="'thinkin', and the template asks for .*: did you mean thinking"
        ):
            counted(extra_body={"chat_template_kwargs": {"thinkin": False}})
        with pytest.raises(openai.BadRequestError, match="'messages', and the template"):
            counted(extra_body={"chat_template_kwargs": {"messages": []}})


def test_a_limit_of_a_server_is_at_least_one():
    from capibara.core.types import UserError

    with pytest.raises(UserError, match="ServerConfig.max_embeddings is 0, must be at least 1"):
        ServerConfig(max_embeddings=0)
