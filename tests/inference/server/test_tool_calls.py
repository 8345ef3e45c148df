"""Calls in a text, whole and streamed in any pieces, and through the server, in the form that a model's template has."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from capibara.data.chat.template import ChatTemplate
from capibara.data.tokenizers.vocabulary import TokenizerJsonVocabulary
from capibara.inference.calls.dialect import dialect_of
from capibara.inference.engine.engine import Engine
from capibara.inference.engine.requests.stream import Finish, Piece, Stream
from capibara.inference.interactive.chat import Chat
from capibara.inference.sampling.text import TextStream
from capibara.inference.server.openai.requests import ChatRequest
from capibara.inference.server.openai.texts import chat_texts
from capibara.inference.server.service.http_errors import Refusal
from capibara.inference.server.service.service import ServerConfig
from tests.inference.server.test_server import GREEDY, HELLO, Running

F = ("f", {"x": 1, "y": "é"})
ONE = '<tool_call>\n{"name": "f", "arguments": {"x": 1, "y": "é"}}\n</tool_call>'
LISTED = '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1, "y": "é"}}'
LLAMA_F = '{"name": "f", "parameters": {"x": 1, "y": "é"}}'


def plain(calls, form):
    assert all(call["type"] == "function" for call in calls) and len({call["id"] for call in calls}) == len(calls)
    for call in calls:  # Mistral's templates refuse other ids when they come back
        nine = len(call["id"]) == 9 and call["id"].isalnum()
        assert nine if form.startswith("mistral") else call["id"].startswith("call_")
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


# How the templates of the families write calls, and the special tokens of their tokenizers. Llama 3.1 and 3.2: the
# latter's template does not name its token. Mistral 7B v0.3, Nemo and Small 3.1; Ministral 3 and Small 3.2.
LLAMA_CALL = """{{ '{"name": "' + call.name + '", ' }}{{ '"parameters": ' }}{{ call.arguments | tojson }}{{ "}" }}"""
FAMILIES = {
    "llama 3.1": ("<|python_tag|>{{ x }}.call(" + LLAMA_CALL, ["<|python_tag|>", "<|eom_id|>"], "llama"),
    "llama 3.2": (LLAMA_CALL, ["<|python_tag|>", "<|eom_id|>"], "llama"),
    "llama 3": ("{{ x }}", ["<|python_tag|>"], None),
    "another that writes parameters": (LLAMA_CALL, [], None),
    "mistral": ('{{- "[TOOL_CALLS] [" }}', ["[TOOL_CALLS]"], "mistral list"),
    "ministral": ("{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"], "mistral"),
    "mistral without the token": ('{{- "[TOOL_CALLS] [" }}', [], None),
    "a mistral that knows no tools": ("[INST]{{ x }}[/INST]", ["[TOOL_CALLS]"], None),
    "qwen": ("<tool_call>\n{{ x }}\n</tool_call>", [], "hermes"),
    "hermes with special tokens": ("<tool_call>\n{{ x }}", ["<tool_call>", "</tool_call>"], "hermes"),
    "chatml": ("<|im_start|>{{ x }}", [], None),
}  # fmt: skip
ANSWER = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}{{ tools }}{# "


def chat_of(folder, template, special):
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in ["<|end|>", *special]])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": template}))
    vocabulary = TokenizerJsonVocabulary(path=str(folder), bos_token="<|end|>", pad_token="<|end|>")
    return Chat(vocabulary, ChatTemplate(tokenizer=str(folder)))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_form_is_that_of_the_models_template_and_tokenizer(tmp_path, family):
    template, special, form = FAMILIES[family]
    chat = chat_of(tmp_path, template, special)
    dialect = dialect_of(chat)
    assert (None if dialect.form is None else dialect.form.name) == form
    if form is not None:
        assert {chat.vocabulary.spelling(token) for token in dialect.spelled} == set(special) - {"<|eom_id|>"}
        ends = [chat.vocabulary.spelling(token) for token in dialect.ends_of(chat)]
        assert ("<|eom_id|>" in ends) == (form == "llama")


SAID = {
    "llama 3.1": f"<|python_tag|>{LLAMA_F}<|eom_id|>",
    "llama 3.2": f"{LLAMA_F}<|end|>",
    "mistral": LISTED + "]<|end|>",
    "ministral": 'Well.[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{"x": 1, "y": "é"}<|end|>',
    "qwen": ONE + "<|end|>",
    "hermes with special tokens": ONE + "<|end|>",
}


@pytest.mark.parametrize("family", SAID)
def test_a_server_gives_the_calls_of_each_family(tmp_path, run, served, monkeypatch, family):
    """The model says a fixed text, token by token; its calls come whole and streamed, and not without tools."""
    template, special, _ = FAMILIES[family]
    chat = chat_of(tmp_path, ANSWER + template.replace("#}", "") + " #}", special)
    ids = chat.vocabulary.encode_rendered(SAID[family])[0].tolist()

    def submit(self, prompt, sampling, *, ends, spelled, **_):
        names = {token: chat.vocabulary.spelling(token) for token in spelled}
        text, stream = TextStream(chat.vocabulary, sampling.stop, names), Stream(lambda: False)
        for token in ids:
            if token in (*chat.vocabulary.end_ids, *ends):
                break
            stream.put(Piece(text.feed(token), token))
        stream.put(Piece(text.close(), None))
        stream.end(Finish.STOP, 1, 0)
        return stream

    monkeypatch.setattr(Engine, "submit", submit)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    with Running(dataclasses.replace(served, vocabulary=chat.vocabulary, chat=chat)) as running:
        create = running.client().chat.completions.create
        (choice,) = create(messages=HELLO, tools=tools, **GREEDY).choices
        assert plain([call.model_dump() for call in choice.message.tool_calls], dialect_of(chat).form.name) == [F]
        assert choice.finish_reason == "tool_calls" and choice.message.content in (None, "Well.")
        chunks = [chunk.choices[0] for chunk in create(messages=HELLO, tools=tools, stream=True, **GREEDY)]
        calls = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
        assert [call.function.name for call in calls if call.id] == ["f"] and {call.index for call in calls} == {0}
        assert json.loads("".join(call.function.arguments for call in calls)) == F[1] and len(calls) > 10
        assert chunks[-1].finish_reason == "tool_calls"
        assert "".join(chunk.delta.content or "" for chunk in chunks) == (choice.message.content or "")
        (without,) = create(messages=HELLO, **GREEDY).choices
        assert without.message.tool_calls is None and without.finish_reason == "stop"
        assert not any(name in without.message.content for name in special)


def test_tools_that_a_template_leaves_out_are_refused(tmp_path, served):
    chat = chat_of(tmp_path, "{% for message in messages %}{{ message.content }}{% endfor %}", [])
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    body = {"model": "tiny", "messages": HELLO, "tools": tools}
    with Running(dataclasses.replace(served, vocabulary=chat.vocabulary, chat=chat)) as running:
        for stream in (False, True):
            status, answer, _ = running.http("POST", "/v1/chat/completions", json.dumps(body | {"stream": stream}))
            error = json.loads(answer)["error"]
            assert status == 400 and error["param"] == "tools", answer
            assert "the model's chat template leaves out tools: leave them out" in error["message"]


def test_messages_that_a_template_leaves_out_are_refused(tmp_path, served):
    only_users = "{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}"
    chat = chat_of(tmp_path, only_users, [])
    check(chat, served, HELLO)
    for role in ("system", "assistant", "developer", "tool", "x" * 500):
        with pytest.raises(
            Refusal, match=r"leaves out the content of messages\[1\]: leave that message out$"
        ) as caught:
            check(chat, served, [*HELLO, {"role": role, "content": "Be brief."}])
        assert caught.value.param == "messages"
    with pytest.raises(Refusal, match="leaves out tool calls: leave them out$"):
        check(chat, served, [*HELLO, {"role": "assistant", "content": None, "tool_calls": [CALL]}])


CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TURNS = "{% for m in messages %}<|end|>{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% else %}CONTENT{% endif %}{% endfor %}"
CONTENTS = (
    "{{ m.content }}",
    "{{ m.content | e }}",
    "{{ m.content | tojson }}",
    "{{ m.content | trim }}",
    "{{ m.content.split('</think>')[-1] }}",
    "{{ m.content.splitlines() | map('trim') | join(' ') }}",
    "{% if 'content' in m.content %}{{ raise_exception('no') }}{% endif %}{{ m.content | e }}",
)


@pytest.mark.parametrize("content", CONTENTS)
def test_contents_that_a_template_writes_in_another_way_are_not_refused(tmp_path, served, content):
    sent = [
        {"role": "user", "content": "What is <|end|>, a < b & 'c', \ufdd0?"},
        {"role": "assistant", "content": 'So it is</think>Yes, \n\n"é" & \\n.'},
        {"role": "assistant", "content": "I look it up.", "tool_calls": [CALL]},  # as Llama 3: the call alone
        {"role": "tool", "tool_call_id": "a", "content": '{"a": "<b>"}'},
        *HELLO,
    ]
    check(chat_of(tmp_path, TURNS.replace("CONTENT", content), []), served, sent)


def test_keys_of_other_servers_and_templates_are_no_mistakes(tmp_path, served):
    """As clients return them in a conversation: OpenAI's own, LiteLLM's, OpenRouter's, Ollama's, Cohere's and Kimi's."""
    chat = chat_of(tmp_path, TURNS.replace("CONTENT", "{{ m.content }}"), [])
    own = {
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
        "name": "a",
        "parsed": None,
    }
    others = (
        "thinking_blocks",
        "reasoning_details",
        "provider_specific_fields",
        "cache_control",
        "tool_name",
        "images",
    )
    more = ("tool_plan", "citations", "tools", "prefix", "partial", "id", "timestamp", "context", "rating", "namespace")
    given = dict.fromkeys((*others, *more), "x") | own
    check(chat, served, [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "Hi"}], **given}, *HELLO])
    for key in ("tool_cals", "tool_call", "toolCalls", "contents", "contnet", "Name", "reasoning-content"):
        with pytest.raises(Refusal, match=rf"messages\[1\] has '{key}', which is no key of a message: did you mean \w"):
            check(chat, served, [*HELLO, {"role": "user", "content": "Hi", key: "x"}])


def test_many_keys_of_a_message_take_no_longer(tmp_path, served):
    chat = chat_of(tmp_path, TURNS.replace("CONTENT", "{{ m.content }}"), [])
    config = ServerConfig(max_prompt_chars=10**6)
    begin = time.process_time()
    check(chat, served, [{"role": "user", "content": "Hi", **{f"k{i:06}": 0 for i in range(20_000)}}], config)
    assert time.process_time() - begin < 1  # some 0.1 s; with each of them compared 2 s


def check(chat, served, messages, config=ServerConfig()):
    """Raises Refusal if the server refuses a chat."""
    request = ChatRequest(model="tiny", messages=messages, max_tokens=1)
    chat_texts(request, dataclasses.replace(served, vocabulary=chat.vocabulary, chat=chat), config)
