"""Converts the conversation formats of data sets to the messages that chat templates read.

A conversation is a list of messages {"role", "content"}, as the chat templates of `transformers` expect it; an
assistant's message may have "tool_calls", whose arguments become an object if the data has them as JSON text.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from capibara.core.types import UserError

Message = dict[str, Any]

# ShareGPT's names of the roles. Any other name ("developer") is passed to the template as it is.
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "tool", "function_response", "function"), "tool"),
    "system": "system",
}
_PART_KEYS = ("type", "text", "cache_control", "annotations", "citations", "index", "id")  # which change no text
# Keys of an assistant's reasoning in data sets; templates read the first or the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class Format(enum.StrEnum):
    """The format of a conversation in a record.

    AUTO: the first of the formats below whose keys the record has.
    MESSAGES: "messages" [{"role", "content"}], the format of OpenAI, and of Amazon Bedrock.
    SHAREGPT: "conversations" [{"from", "value"}], from human, gpt, system, function_call, observation.
    CONTENTS: "contents" [{"role", "parts"}], Gemini's format.
    PROMPT_COMPLETION: "prompt" and "completion", text or messages, or "response".
    ALPACA: "instruction", "input" or "context" (may be empty) and "output" or "response".
    QUESTION: "question", "problem" or "query", and "solution", "answer" or "response".
      The last three may have "history" before them, a list of [user, assistant].
    CHOSEN: a preference pair's prompt and its chosen answer.
    """

    AUTO = "auto"
    MESSAGES = "messages"
    SHAREGPT = "sharegpt"
    CONTENTS = "contents"
    PROMPT_COMPLETION = "prompt_completion"
    ALPACA = "alpaca"
    QUESTION = "question"
    CHOSEN = "chosen"


class Conversation(NamedTuple):
    """The input of a chat template.

    Attributes:
      messages: each {"role", "content"}, optionally with tool_calls, tool_call_id, reasoning_content, weight, ...
      tools: the available functions, each {"type": "function", "function": {"name", ...}}; None: there are none.
      variables: what the template is given beside them, such as {"enable_thinking": False}; None: nothing.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] | None = None


class Preference(NamedTuple):
    """A preferred and a rejected conversation that only differ in their last message."""

    chosen: Conversation
    rejected: Conversation


class Unpaired(NamedTuple):
    """A conversation, whose last message is desirable or not."""

    conversation: Conversation
    label: bool


def read_conversation(record: object, where: str, format: Format = Format.AUTO) -> Conversation:
    """Reads the conversation of a JSON object.

    Args:
      record: the parsed JSON.
      where: file and line, for errors.
      format: the record's format.

    Raises:
      UserError: the record does not have this format, or any known one.
    """
    record = _object(record, where)
    if format is Format.AUTO:
        format = _detected(record, where)
    if format is Format.CHOSEN:
        return read_preference(record, where).chosen
    needed = _KEYS[format]
    if not all(any(key in record for key in keys) for keys in needed):
        names = " and ".join("/".join(keys) for keys in needed)
        raise UserError(f"{where} is no {format} record: it needs {names} (it has: {_keys(record)})")
    for key in ("images", "videos", "audios"):
        if record.get(key):
            raise UserError(f"{where} has {key}: only text is supported, remove the record")
    messages = _READERS[format](record, where)
    return _conversation(record, messages, where)


def is_preference(record: object) -> bool:
    """Whether a record has the keys of a preference pair."""
    return isinstance(record, Mapping) and any(
        first in record and second in record
        for first, second in (("chosen", "rejected"), ("preferred_output", "non_preferred_output"))
    )


def read_preference(record: object, where: str) -> Preference:
    """Reads the preference pair of a JSON object: "chosen" and "rejected", and the prompt before them.

    The prompt is in "prompt", "conversations", "messages", "question" or "instruction" and "input". If "chosen" and "rejected"
    are lists of messages, it may also be their common prefix. OpenAI's "input", "preferred_output" and "non_preferred_output"
    are read as well.

    Raises:
      UserError: a key is missing, or the two differ in other messages than the last.
    """
    record = _of_openai(_object(record, where), where)
    if not ("chosen" in record and "rejected" in record):
        hint = ": set Dataset.source = @UnpairedJsonlSource() and Trainer.loss = @Kto()" if "label" in record else ""
        raise UserError(f"{where} is no preference pair: it needs chosen and rejected (it has: {_keys(record)}){hint}")
    prompt = _preference_prompt(record, where)
    endings = [
        _conversation(record, prompt + _answer(record[key], key, where), where) for key in ("chosen", "rejected")
    ]
    chosen, rejected = endings
    if chosen.messages[:-1] != rejected.messages[:-1]:
        raise UserError(f"{where}: chosen and rejected may only differ in their last message: remove the record")
    for key, ending in zip(("chosen", "rejected"), endings):
        if len(ending.messages) < 2 or ending.messages[-1]["role"] != "assistant":
            raise UserError(f"{where}: {key} must end with a message of the assistant after another message")
    return Preference(chosen, rejected)


def read_unpaired(record: object, where: str) -> Unpaired:
    """Reads the labelled answer of a JSON object: a conversation in any format of `read_conversation`, and "label".

    Raises:
      UserError: it is a preference pair, the label is missing or not true or false, or no assistant's message is last.
    """
    record = _object(record, where)
    if is_preference(record):
        raise UserError(
            f"{where} is a preference pair, and an answer with a label is expected: set Dataset.source = "
            "@PreferenceJsonlSource() and another Trainer.loss, such as @Dpo(), or write chosen and rejected as two lines "
            "with completion and label"
        )
    if not isinstance(label := record.get("label"), bool):
        has = f"{_short(label)}" if "label" in record else f"missing (it has: {_keys(record)})"
        raise UserError(f"{where}: label is {has}, must be true (desirable) or false (undesirable)")
    conversation = read_conversation(record, where)
    if len(conversation.messages) < 2 or conversation.messages[-1]["role"] != "assistant":
        raise UserError(f"{where} must end with a message of the assistant after another message")
    return Unpaired(conversation, label)


def read_prompt(record: object, where: str) -> Conversation:
    """Reads the prompt of a JSON object, without an assistant's message at its end.

    It is in "messages", "conversations", "contents", "prompt" (text or messages), "instruction" and "input", or "question",
    "problem" or "query"; other keys are ignored.

    Raises:
      UserError: there is no prompt, or no message of the user.
    """
    record = _object(record, where)
    for key in ("messages", "conversations", "prompt"):
        if isinstance(record.get(key), list):
            messages = _messages(record[key], where, key)
            break
    else:
        question = next((name for name in ("prompt", *_QUESTIONS) if name in record), None)
        if "contents" in record:
            messages = _from_contents(record, where)
        elif question is not None:
            messages = _asked(record, question, where)
        elif "instruction" in record:
            messages = _alpaca_prompt(record, where)
        else:
            known = "messages, conversations, contents, prompt, instruction, question"
            raise UserError(f"{where} has no prompt (it has: {_keys(record)}): known keys are {known}")
    if messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages or not any(message["role"] != "system" for message in messages):
        raise UserError(f"{where} has no message of the user: add one")
    return _conversation(record, messages, where)


def _detected(record: Mapping[str, object], where: str) -> Format:
    for format, needed in _KEYS.items():
        if all(any(key in record for key in keys) for keys in needed):
            return format
    if is_preference(record):
        raise UserError(
            f"{where} is a preference pair: set ChatJsonlSource.format = 'chosen' to train on the chosen answers"
        )
    known = "; ".join(" + ".join("/".join(keys) for keys in needed) for needed in _KEYS.values())
    raise UserError(f"{where} has no conversation (it has: {_keys(record)}): known keys are {known}")


def _conversation(record: Mapping[str, object], messages: list[Message], where: str) -> Conversation:
    if not messages:
        raise UserError(f"{where} has no messages: remove the record")
    if (system := _system(record, where)) and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    if not {*_texts(record.get("history"))} <= {message["content"] for message in messages}:
        raise UserError(
            f"{where} has history beside messages, which are read alone: write it into them, or leave it out"
        )
    _number_calls(messages)
    if record.get("tools") and record.get("functions"):
        raise UserError(f"{where} has tools and functions, which is their older name: leave one of the two out")
    tools = _tools(record.get("tools") or record.get("functions"), where)
    variables = record.get("chat_template_kwargs")
    if isinstance(variables, str):
        variables = _json(variables, where, "chat_template_kwargs")
    if variables is not None and not isinstance(variables, Mapping):
        raise UserError(f"{where}: chat_template_kwargs must be an object, not {_short(variables)}")
    variables = {key: value for key, value in (variables or {}).items() if value is not None}  # Arrow fills in the rest
    if documents := record.get("documents"):  # of transformers' apply_chat_template
        if not isinstance(documents, list) or not all(isinstance(document, Mapping) for document in documents):
            raise UserError(
                f"{where}: documents must be a list of objects such as {{title, text}}, not {_short(documents)}"
            )
        if "documents" in variables:
            raise UserError(f"{where} has documents, and chat_template_kwargs has them too: leave one of the two out")
        variables["documents"] = documents
    return Conversation(messages, tools, variables or None)


def _system(record: Mapping[str, object], where: str) -> str:
    """The system message beside the messages: a text, or a list of {"text"} as Anthropic and Amazon Bedrock have it."""
    for key in ("system", "system_prompt", "systemInstruction", "system_instruction"):
        value = record.get(key)
        if isinstance(value, Mapping):  # Gemini's
            value = value.get("parts")
        if value:
            return _content(value, f"{where}: {key}", False, "system")
    return ""


# The formats.


def _from_messages(record: Mapping[str, object], where: str) -> list[Message]:
    return _messages(record["messages"], where, "messages")


def _from_sharegpt(record: Mapping[str, object], where: str) -> list[Message]:
    key = "conversations" if "conversations" in record else "conversation"
    return _messages(record[key], where, key)


def _from_prompt(record: Mapping[str, object], where: str) -> list[Message]:
    prompt = record["prompt"]
    before = _messages(prompt, where, "prompt") if isinstance(prompt, list) else _asked(record, "prompt", where)
    key = "completion" if "completion" in record else "response"
    return before + _answer(record[key], key, where)


def _from_alpaca(record: Mapping[str, object], where: str) -> list[Message]:
    key = "output" if "output" in record else "response"
    return [*_alpaca_prompt(record, where), _text_message("assistant", record[key], where, key)]


def _alpaca_prompt(record: Mapping[str, object], where: str) -> list[Message]:
    message = _text_message("user", record["instruction"], where, "instruction")
    key = "input" if record.get("input") else "context"
    more = _text_message("user", record.get(key) or "", where, key)["content"]
    text = f"{message['content']}\n\n{more}" if more else message["content"]
    _check_beside(record, "instruction", text, where)
    return [*_history(record, where), {**message, "content": text}]


def _asked(record: Mapping[str, object], key: str, where: str) -> list[Message]:
    """The user's question in a key, after what was said before it."""
    message = _text_message("user", record[key], where, key)
    _check_beside(record, key, message["content"], where)
    return [*_history(record, where), message]


def _history(record: Mapping[str, object], where: str) -> list[Message]:
    history, messages = record.get("history") or [], list[Message]()
    for turn in history if isinstance(history, list) else [history]:
        if not isinstance(turn, list) or len(turn) != 2:
            raise UserError(f"{where}: history must be a list of [instruction, answer], not {_short(turn)}")
        roles = ("user", "assistant")
        messages += [_text_message(role, text, where, "history") for role, text in zip(roles, turn)]
    return messages


def _check_beside(record: Mapping[str, object], key: str, text: str, where: str) -> None:
    """Raises UserError for a passage or choices that a question is about, and that its text does not have."""
    for name in ("context", "passage", "choices", "options"):
        value = record.get(name)
        if any(part.strip() not in text for part in _texts(value)):
            raise UserError(
                f"{where}: {name} ({_short(value)}) is not in {key}, which alone the model would read: write both into {key}, or "
                f"leave {name} out"
            )


def _texts(value: object) -> list[str]:
    """All texts and numbers in a value of JSON."""
    texts, left = list[str](), [value]
    while left:
        match left.pop():
            case list() as items:
                left += items
            case Mapping() as items:
                left += items.values()
            case str() as text:
                texts.append(text)
            case int() | float() as number if not isinstance(number, bool):
                texts.append(json.dumps(number))
    return texts


def _from_question(record: Mapping[str, object], where: str) -> list[Message]:
    question, answer = (next(key for key in keys if key in record) for keys in (_QUESTIONS, _ANSWERS))
    return [*_asked(record, question, where), _text_message("assistant", record[answer], where, answer)]


def _from_contents(record: Mapping[str, object], where: str) -> list[Message]:
    turns = record["contents"]
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) and "parts" in turn for turn in turns):
        raise UserError(f"{where}: contents must be a list of turns with role and parts, not {_short(turns)}")
    return _messages(
        [{"role": turn.get("role", "user"), "content": turn["parts"]} for turn in turns], where, "contents"
    )


def _of_openai(record: Mapping[str, object], where: str) -> Mapping[str, Any]:
    """A record with OpenAI's keys of a preference pair, with those that others have."""
    if not ("preferred_output" in record and "non_preferred_output" in record):
        return record
    prompt = record.get("input")
    if not isinstance(prompt, Mapping) or "messages" not in prompt:
        raise UserError(f"{where}: input must be an object with messages, not {_short(prompt)}")
    answers = {"chosen": record["preferred_output"], "rejected": record["non_preferred_output"]}
    return {**prompt, **answers, "prompt": prompt["messages"]}


_QUESTIONS, _ANSWERS = ("question", "problem", "query"), ("solution", "answer", "response")
# Format -> its keys, each with alternatives, in the order in which formats are tried.
_KEYS: dict[Format, tuple[tuple[str, ...], ...]] = {
    Format.MESSAGES: (("messages",),),
    Format.SHAREGPT: (("conversations", "conversation"),),
    Format.CONTENTS: (("contents",),),
    Format.PROMPT_COMPLETION: (("prompt",), ("completion", "response")),
    Format.ALPACA: (("instruction",), ("output", "response")),
    Format.QUESTION: (_QUESTIONS, _ANSWERS),
}
# One of them is in each form of a conversation or a prompt.
CHAT_KEYS = frozenset(key for needed in _KEYS.values() for key in needed[0]) | {"completion"}
_READERS: dict[Format, Callable[[Mapping[str, Any], str], list[Message]]] = {
    Format.MESSAGES: _from_messages,
    Format.SHAREGPT: _from_sharegpt,
    Format.CONTENTS: _from_contents,
    Format.PROMPT_COMPLETION: _from_prompt,
    Format.ALPACA: _from_alpaca,
    Format.QUESTION: _from_question,
}


def _preference_prompt(record: Mapping[str, object], where: str) -> list[Message]:
    prompt = record.get("prompt")
    answers = [record["chosen"], record["rejected"]]
    if all(isinstance(answer, list) for answer in answers) and not isinstance(prompt, list):
        return []  # the lists contain the whole conversation; a prompt in text only repeats its beginning
    if isinstance(prompt, str):
        return _asked(record, "prompt", where)
    for key in ("prompt", "conversations", "messages"):
        if isinstance(record.get(key), list):
            return _messages(record[key], where, key)
    if "question" in record:
        return _asked(record, "question", where)
    if "instruction" in record:
        return _alpaca_prompt(record, where)
    known = "prompt, conversations, messages, question, instruction"
    raise UserError(f"{where}: chosen and rejected have no prompt (it has: {_keys(record)}): known keys are {known}")


def _answer(value: object, key: str, where: str) -> list[Message]:
    """An assistant's answer: text, one message, or several."""
    if isinstance(value, list):
        return _messages(value, where, key)
    if isinstance(value, Mapping):
        return _messages([value], where, key)
    return [_text_message("assistant", value, where, key)]


# Messages.


def _messages(value: object, where: str, key: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: {key} must be a list of messages, not {_short(value)}")
    return [_message(message, f"{where}: {key}[{i}]") for i, message in enumerate(value)]


def _message(value: object, where: str) -> Message:
    if not isinstance(value, Mapping) or not ("role" in value or "from" in value):
        shown = _keys(value) if isinstance(value, Mapping) else _short(value)
        raise UserError(f"{where} must have role and content, or from and value (it has: {shown})")
    value = {key: item for key, item in value.items() if item is not None}  # Arrow fills in the keys of other messages
    role = value["role"] if "role" in value else value.get("from")
    if not isinstance(role, str):
        raise UserError(f"{where}: the role must be text, not {_short(role)}")
    message = {key: item for key, item in value.items() if key not in ("role", "from", "content", "value")}
    content = value["content"] if "content" in value else value.get("value")
    if role == "function_call":
        message["tool_calls"], content = _json(content, where, "a call"), ""
    reasoning = next((value[key] for key in _REASONING if isinstance(value.get(key), str)), None)
    if reasoning is not None:
        message |= {"thinking": reasoning, "reasoning_content": reasoning}
    calls, call = (message.pop(key, None) for key in ("tool_calls", "function_call"))
    if calls and call:
        raise UserError(
            f"{where} has tool_calls and function_call, which is their older name: leave one of the two out"
        )
    if calls := calls or call:
        message["tool_calls"] = [_call(call, where) for call in (calls if isinstance(calls, list) else [calls])]
    return {"role": _ROLES.get(role, role), "content": _content(content, where, bool(calls), role), **message}


def _content(value: object, where: str, calls: bool, role: str) -> str:
    if isinstance(value, str):
        return value
    if value is None and calls:
        return ""
    if isinstance(value, list) and all(isinstance(part, Mapping) for part in value):
        texts = [part.get("text") for part in value if part.get("type", "text") == "text"]
        if len(texts) == len(value) and all(isinstance(text, str) for text in texts):
            _check_parts(value, where)
            return "".join(texts)
        raise UserError(f"{where}: only parts of type text (with the key text) are supported, not {_short(value)}")
    if _ROLES.get(role) == "tool" and isinstance(value, (Mapping, list)):
        return json.dumps(value, ensure_ascii=False)
    raise UserError(f"{where}: the content must be text, not {_short(value)}")


def _check_parts(parts: list[Mapping[str, Any]], where: str) -> None:
    """Raises UserError for a key of a part that a template could read, as TranslateGemma's does: templates get the text alone."""
    others = {key: item for part in parts for key, item in part.items() if key not in _PART_KEYS and item is not None}
    if others:
        key, item = next(iter(others.items()))
        raise UserError(
            f"{where}: a part of the content has {_short(key)} = {_short(item)}, which no chat template gets here: leave it out"
        )


def _text_message(role: str, value: object, where: str, key: str) -> Message:
    if not isinstance(value, str):
        raise UserError(f"{where}: {key} must be text, not {_short(value)}")
    return {"role": role, "content": value}


def _call(value: Any, where: str) -> dict[str, Any]:
    """{"type": "function", "function": {"name", "arguments"}}, the arguments an object."""
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(f"{where}: a tool call must have a name and arguments, not {_short(value)}")
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _json(arguments or "{}", where, f"the arguments of {function['name']}")
    rest = {key: item for key, item in value.items() if key in ("id", "index")}
    return {**rest, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _number_calls(messages: list[Message]) -> None:
    """Adds ids of 9 letters and digits, as Mistral's templates require, to tool calls without one and to their results."""
    waiting: list[str] = []
    count = 0
    for message in messages:
        if message.get("tool_calls"):
            waiting = []
        for call in message.get("tool_calls", ()):
            count += 1
            call.setdefault("id", f"call{count:05d}")
            waiting.append(call["id"])
        if message["role"] == "tool" and waiting:
            name = waiting.pop(0)
            message.setdefault("tool_call_id", name)


def _has_name(function: object) -> bool:
    return isinstance(function, Mapping) and isinstance(function.get("name"), str) and bool(function["name"])


def _tools(value: object, where: str) -> list[dict[str, Any]] | None:
    if isinstance(value, str):
        value = _json(value, where, "tools") if value.strip() else None
    if not value:
        return None
    value = value if isinstance(value, list) else [value]
    if not all(isinstance(tool, Mapping) and _has_name(tool.get("function", tool)) for tool in value):
        raise UserError(f"{where}: tools must be a list of functions with a name, not {_short(value)}")
    tools = [_without_nulls(tool) for tool in value]
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def _without_nulls(value: object) -> Any:
    """A tool without the null keys that Arrow fills in; a default may be null."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {key: _without_nulls(item) for key, item in value.items() if item is not None or key in ("default", "const")}


def _json(text: object, where: str, subject: str) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{where}: {subject} must be JSON ({error}): {_short(text)}") from None


def _object(record: object, where: str) -> Mapping[str, Any]:
    if not isinstance(record, Mapping):
        kind = type(record).__name__
        hint = ": convert a file that is one list with `capibara prepare instructions`" if kind == "list" else ""
        raise UserError(f"{where} must be a JSON object, not {kind}{hint}")
    return record


def _keys(record: Mapping[str, object]) -> str:
    return ", ".join(map(str, record)) or "nothing"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
