"""Reads the records that a routing set is made of: executions, fixes, conversations, bullets and documents."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from capibara.builders.files import fingerprints
from capibara.builders.routing.labelling.domains import Outcome
from capibara.core.types import UserError
from capibara.data.chat.formats import CHAT_KEYS, Format, is_preference, read_conversation

_LINE = re.compile(r"(.+):\d+")
_FAILED_CHATS, _FIXED_CHATS = ("diagnose",), ("fix",)  # kinds of executions' conversations
_MADE_OF = ("kind", "language", "quality", "source")  # members of executions' conversations
_MOST_ATTEMPTS = 1_000_000


class RecordKind(enum.StrEnum):
    """What a record is, by its members.

    EXECUTION: of `prepare executions`: code and passed.
    FIX: of `prepare executions`: before and after.
    CHAT: messages, or another form of conversations.
    BULLET: of `prepare playbooks`: content, helpful and harmful.
    DOCUMENT: text.
    """

    EXECUTION = "execution"
    FIX = "fix"
    CHAT = "chat"
    BULLET = "bullet"
    DOCUMENT = "document"


class PieceKind(enum.Enum):
    """What a piece of a text is: CODE; PROSE, which may have fenced code; ANY: code or prose."""

    CODE = "code"
    PROSE = "prose"
    ANY = "any"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """A piece of a text.

    Attributes:
      text: the piece.
      kind: what it is.
      language: what the record says; None: nothing.
      confidence: of the language, from 0 to 1.
    """

    text: str
    kind: PieceKind = PieceKind.PROSE
    language: str | None = None
    confidence: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft:
    """A record that was read, not yet redacted or labelled.

    Attributes:
      kind: what it is.
      pieces: of the text, in their order.
      source: the name of its origin: the session, the task or the document.
      origins: names that it shares with other records of its origin; records that share one are in one split.
      declared: the domain that it names; None: none.
      outcome: of its run; None: it passed, or there is none.
      attempts: failing runs of which it speaks.
      imports: modules that earlier cells of its session import, and that its code uses.
    """

    kind: RecordKind
    pieces: tuple[Piece, ...]
    source: str
    origins: tuple[str, ...]
    declared: str | None = None
    outcome: Outcome | None = None
    attempts: int = 0
    imports: frozenset[str] = frozenset()


class Malformed(ValueError):
    """A record that has none of the forms; the message is the reason."""


def read(record: Mapping[str, Any], where: str, source_fields: Sequence[str]) -> Draft:
    """Reads a record.

    Args:
      record: the JSON object.
      where: its file and line, the source of a document that names none.
      source_fields: members of documents and conversations that name their source.

    Raises:
      Malformed: it has none of the forms.
    """
    if isinstance(record.get("before"), dict) and isinstance(record.get("after"), dict):
        return _fix(record)
    if "code" in record and "passed" in record:
        return _execution(record)
    if "helpful" in record and "harmful" in record:
        return _bullet(record)
    if "messages" in record or "conversations" in record:
        return _chat(record, where, source_fields)
    if "text" in record:
        return _document(record, where, source_fields)
    if CHAT_KEYS & record.keys() or is_preference(record):
        return _chat(record, where, source_fields)
    names = ", ".join(sorted(record)[:6]) or "nothing"
    raise Malformed(
        f"has {names}, must have text, messages, code and passed, before and after, or content, helpful and harmful"
    )


def _text(record: Mapping[str, object], name: str) -> str:
    value = record.get(name)
    if not isinstance(value, str) or not value.strip():
        raise Malformed(f"{name} must be a text that is not empty")
    return value


def _optional(record: Mapping[str, Any], name: str) -> str | None:
    value = record.get(name)
    if value is not None and not isinstance(value, str):
        raise Malformed(f"{name} must be a text")
    return value if value and value.strip() else None


def _number(record: Mapping[str, object], name: str, default: float) -> float:
    value = record.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Malformed(f"{name} must be a number")
    return value


def _code(record: Mapping[str, Any]) -> Piece:
    confidence = min(1.0, max(0.0, _number(record, "language_confidence", 1.0)))
    language = _optional(record, "language")
    return Piece(text=_text(record, "code"), kind=PieceKind.CODE, language=language, confidence=confidence)


def _earlier_imports(record: Mapping[str, object]) -> frozenset[str]:
    result = record.get("earlier_imports", [])
    if not isinstance(result, list) or not all(isinstance(item, str) for item in result):
        raise Malformed("earlier_imports must be a list of texts")
    return frozenset(result)


def _prose(*texts: str | None) -> tuple[Piece, ...]:
    return tuple(Piece(text=text) for text in texts if text)


def _error(record: Mapping[str, Any]) -> str | None:
    """The error of a failing run, on one line; or what it printed to stderr."""
    error = record.get("error")
    if isinstance(error, dict):
        message = f"{error.get('name') or ''}: {error.get('value') or ''}".strip(": \n")
        if message:
            return message
    printed = record.get("stderr")
    return printed.strip() if isinstance(printed, str) and printed.strip() else None


def _of_run(record: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """The source and the origins of an execution, or of a conversation about one: its session, else its file."""
    source, session = _text(record, "source"), _optional(record, "session")
    result = _LINE.fullmatch(source)
    name = result[1] if result else source
    if session is not None:
        name = f"{name}#{session}"
    task = _optional(record, "task")
    return name, (f"run {name}", *([f"task {task}"] if task is not None and session is None else []))


def _execution(record: Mapping[str, object]) -> Draft:
    source, origins = _of_run(record)
    if not isinstance(record["passed"], bool):
        raise Malformed("passed must be true or false")
    failed = not record["passed"]
    pieces = (*_prose(_optional(record, "task")), _code(record), *_prose(_error(record) if failed else None))
    return Draft(
        kind=RecordKind.EXECUTION,
        pieces=pieces,
        source=source,
        origins=origins,
        outcome=Outcome.FAILED if failed else None,
        attempts=int(failed),
        imports=_earlier_imports(record),
    )


def _fix(record: Mapping[str, Any]) -> Draft:
    before, after = record["before"], record["after"]
    source, origins = _of_run(after)
    if _optional(before, "source") is not None:
        origins = tuple(dict.fromkeys((*origins, *_of_run(before)[1])))
    prose = _prose(_error(before), _optional(record, "cause"), _optional(record, "explanation"))
    return Draft(
        kind=RecordKind.FIX,
        pieces=(*_prose(_optional(after, "task")), _code(before), *prose, _code(after)),
        source=source,
        origins=origins,
        outcome=Outcome.FIXED,
        attempts=int(min(_MOST_ATTEMPTS, max(1, _number(record, "attempts", 1)))),
    )


def _bullet(record: Mapping[str, object]) -> Draft:
    name = _optional(record, "id") or _text(record, "content")
    return Draft(
        kind=RecordKind.BULLET,
        pieces=_prose(_text(record, "content")),
        source=f"bullet {name}",
        origins=(f"bullet {name}",),
        declared=_optional(record, "domain"),
    )


def _chat(record: Mapping[str, object], where: str, source_fields: Sequence[str]) -> Draft:
    try:
        format = Format.CHOSEN if is_preference(record) else Format.AUTO
        messages = read_conversation(record, where, format).messages
    except UserError as error:
        raise Malformed(str(error).removeprefix(where).strip(": ")) from None
    contents = (message.get("content") for message in messages)
    pieces = _prose(*(text for text in contents if isinstance(text, str) and text.strip()))
    if not pieces:
        raise Malformed("its messages are empty")
    bullets = record.get("bullets")
    kind = record.get("kind")
    outcome, attempts, imports = None, 0, frozenset[str]()
    if isinstance(bullets, list) and bullets and all(isinstance(bullet, str) for bullet in bullets):
        source, origins = f"bullet {bullets[0]}", tuple(f"bullet {bullet}" for bullet in bullets)
    elif all(name in record for name in _MADE_OF) and isinstance(record["source"], str):
        source, origins = _of_run(record)
        outcome = Outcome.FIXED if kind in _FIXED_CHATS else Outcome.FAILED if kind in _FAILED_CHATS else None
        attempts, imports = int(outcome is not None), _earlier_imports(record)
    else:
        source, origins = _named(record, where, source_fields, (piece.text for piece in pieces))
    return Draft(
        kind=RecordKind.CHAT,
        pieces=pieces,
        source=source,
        origins=origins,
        declared=_optional(record, "domain"),
        outcome=outcome,
        attempts=attempts,
        imports=imports,
    )


def _document(record: Mapping[str, object], where: str, source_fields: Sequence[str]) -> Draft:
    text = _text(record, "text")
    source, origins = _named(record, where, source_fields, [text])
    language = _optional(record, "language")
    kind = PieceKind.ANY if language is None else PieceKind.CODE
    return Draft(
        kind=RecordKind.DOCUMENT,
        pieces=(Piece(text=text, kind=kind, language=language),),
        source=source,
        origins=origins,
        declared=_optional(record, "domain"),
    )


def _named(
    record: Mapping[str, object], where: str, source_fields: Sequence[str], texts: Iterable[str]
) -> tuple[str, tuple[str, ...]]:
    """The source and the origins of a document: what its members name, else its text, so that it keeps its split elsewhere."""
    result = []
    for name in source_fields:
        value = record.get(name)
        shown = value if isinstance(value, str) else "" if value is None else fingerprints.canonical(value)
        if shown.strip():
            result.append(shown)
    if not result:
        return where, ("\n".join(("text", *texts)),)
    return result[0], tuple(f"source {item}" for item in result)
