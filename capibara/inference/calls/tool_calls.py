"""Tool calls in a model's text, in the form that its chat template and its tokenizer have.

Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Mistral: `[TOOL_CALLS] [{"name": ...,
"arguments": {...}}, ...]`, later `[TOOL_CALLS]NAME[ARGS]{...}` for each call, with `[CALL_ID]ID` after the name in some.
Llama 3: the whole text is `{"name": ..., "parameters": {...}}`, or that follows `<|python_tag|>`.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import re
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import Any

from capibara.data.tokenizers.vocabulary import Vocabulary
from capibara.inference.interactive.chat import Chat

_ID_CHARS = 9  # of a call's id in Mistral's templates, which refuse others
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_NAMED = re.compile(r"\s*([^\s\[{]+)(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(\{.*\})\s*", re.DOTALL)
_BETWEEN = " \t\r\n;"  # calls of Llama


class CallForm(enum.StrEnum):
    """A form of calls, as the text with which they begin."""

    HERMES = "<tool_call>"
    MISTRAL = "[TOOL_CALLS]"
    LLAMA = "<|python_tag|>"


_TOKENS = {
    CallForm.HERMES: ("<tool_call>", "</tool_call>"),
    CallForm.MISTRAL: ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    CallForm.LLAMA: ("<|python_tag|>",),
}
_LLAMA_END = "<|eom_id|>"  # of a call whose result is waited for


@dataclasses.dataclass(frozen=True)
class CallTokens:
    """How a model writes calls.

    Attributes:
      form: of the calls.
      spelled: ids of its special tokens, which are otherwise no part of a text.
      ends: ids that end a text with calls.
    """

    form: CallForm
    spelled: tuple[int, ...]
    ends: tuple[int, ...]


def tokens_of(chat: Chat) -> CallTokens | None:
    """How a model writes calls, of its template's text and its special tokens; None: in no known form."""
    form = _form_of(chat)
    if form is None:
        return None
    ids = _special_ids(chat.vocabulary)
    ends = (_LLAMA_END,) if form is CallForm.LLAMA else ()
    return CallTokens(form, *(tuple(ids[name] for name in names if name in ids) for names in (_TOKENS[form], ends)))


def _form_of(chat: Chat) -> CallForm | None:
    mentions, special = chat.template.mentions, _special_ids(chat.vocabulary)
    if mentions(CallForm.MISTRAL) and CallForm.MISTRAL in special:
        return CallForm.MISTRAL
    if mentions(CallForm.HERMES):
        return CallForm.HERMES
    # The template of Llama 3.2 writes calls without the token, which its tokenizer has.
    return CallForm.LLAMA if mentions('"parameters":') and CallForm.LLAMA in special else None


def _special_ids(vocabulary: Vocabulary) -> dict[str, int]:
    return {name: token for token in range(vocabulary.size) if (name := vocabulary.spelling(token))}


def names_of(tools: Sequence[Any]) -> set[str]:
    """The names of a request's tools."""
    return {str((tool.get("function") or tool).get("name")) for tool in tools if isinstance(tool, dict)}


def split(text: str, names: Collection[str], form: CallForm) -> tuple[str, list[dict[str, Any]]]:
    """The text without its calls, and the calls in OpenAI's form; the whole text and none if one of them is not well-formed.

    Args:
      text: of the model.
      names: of the tools that it may call.
      form: of its calls.
    """
    try:
        rest, found = _FINDERS[form](text)
    except (ValueError, RecursionError):  # no JSON
        return text, []
    if not found or not all(_is_call(one, names) for one in found):
        return text, []
    size = _ID_CHARS if form is CallForm.MISTRAL else None
    return rest.strip(), [_call(one, size) for one in found]


def _is_call(value: Any, names: Collection[str]) -> bool:
    is_named = isinstance(value, dict) and isinstance(value.get("name"), str) and value["name"] in names
    return is_named and isinstance(value.get("arguments", {}), dict)


def _call(value: dict[str, Any], id_chars: int | None) -> dict[str, Any]:
    function = {"name": value["name"], "arguments": json.dumps(value.get("arguments", {}), ensure_ascii=False)}
    number = uuid.uuid4().hex
    return {"id": number[:id_chars] if id_chars else f"call_{number[:24]}", "type": "function", "function": function}


def _of_hermes(text: str) -> tuple[str, list[Any]]:
    return _CALL.sub("", text), [json.loads(match[1]) for match in _CALL.finditer(text)]


def _of_mistral(text: str) -> tuple[str, list[Any]]:
    rest, _, calls = text.partition(CallForm.MISTRAL)
    if calls.lstrip().startswith("["):
        return rest, json.loads(calls)
    matches = [_NAMED.fullmatch(call) for call in calls.split(CallForm.MISTRAL)]
    return rest, [match and {"name": match[1], "arguments": json.loads(match[2])} for match in matches]


def _of_llama(text: str) -> tuple[str, list[Any]]:
    rest, tag, calls = text.partition(CallForm.LLAMA)
    if not tag:
        rest, calls = "", text
    found, at = [], 0
    while calls[at:].strip(_BETWEEN):
        at += len(calls[at:]) - len(calls[at:].lstrip(_BETWEEN))
        value, at = json.JSONDecoder().raw_decode(calls, at)
        if not isinstance(value, dict) or not {"parameters", "arguments"} & set(value):
            return text, []
        found.append({"name": value.get("name"), "arguments": value.get("parameters", value.get("arguments"))})
    return rest, found


_FINDERS: dict[CallForm, Callable[[str], tuple[str, list[Any]]]] = {
    CallForm.HERMES: _of_hermes,
    CallForm.MISTRAL: _of_mistral,
    CallForm.LLAMA: _of_llama,
}


class CallStream:
    """Holds back the rest of a streamed text from where a call begins, or may begin.

    Args:
      form: of the calls.
    """

    def __init__(self, form: CallForm):
        self._form, self._text = form, ""
        self._may_be_bare = form is CallForm.LLAMA  # until a text begins with something else than a brace

    def add(self, text: str) -> str:
        """What may be sent of the text until now, with its next part."""
        self._text += text
        if self._may_be_bare:
            self._may_be_bare = self._text.lstrip()[:1] in ("", "{")
            if self._may_be_bare:
                return ""
        end = self._text.find(self._form)
        if end < 0:
            longest = min(len(self._form) - 1, len(self._text))
            partial = (size for size in range(longest, 0, -1) if self._text.endswith(self._form[:size]))
            end = len(self._text) - next(partial, 0)
        sent, self._text = self._text[:end], self._text[end:]
        return sent

    def rest(self, names: Collection[str]) -> tuple[str, list[dict[str, Any]]]:
        """What was held back, as of `split`."""
        return split(self._text, names, self._form)
