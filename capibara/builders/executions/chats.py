"""Makes conversations for fine-tuning of executions: what `capibara.data.chat` reads."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import re
from collections.abc import Iterator, Sequence

from capibara.builders.executions import explanations, names
from capibara.builders.executions.fixes import Fix
from capibara.builders.executions.runs import Run
from capibara.builders.redaction.redact import Json
from capibara.config import configurable
from capibara.core.types import UserError

# What differs from run to run: addresses of objects, times, durations, temporary files.
_UNSTABLE = re.compile(
    r"0x[0-9a-f]{6,}|\d{4}-\d\d-\d\d[T ]\d\d:\d\d|\d\d:\d\d:\d\d|\d(?:\.\d+)? ?(?:ms|µs|ns|seconds?)\b|/tmp/|\bpid\b", re.IGNORECASE
)  # fmt: skip
_RANDOM = frozenset(
    "random secrets time datetime uuid tempfile threading multiprocessing requests urllib socket os".split()
)
_PLACEHOLDER = re.compile(r"<(?:SECRET|PERSONAL):")
_QUESTIONS: dict[str, tuple[str, ...]] = {
    "explain": ("What does this code do?", "Explain this code.", "Summarise what this code does and shows."),
    "predict": (
        "What does this code print?",
        "What is the output of this code?",
        "Give the exact output of this code.",
    ),
    "value": (
        "What is the value of this code?",
        "What does this code evaluate to?",
        "Give the value of the last line.",
    ),
    "diagnose": ("Why does this code fail?", "What is wrong with this code?", "Find the cause of this error."),
    "fix": ("Fix this code.", "This code fails. Correct it.", "Correct the error in this code."),
}


class ChatKind(enum.StrEnum):
    """What a conversation is about.

    TASK: what the user asked for -> the code that passed. Python's must define every name that it uses.
    EXPLAIN: code that passed -> what it defines, uses and shows.
    PREDICT: Python that passed -> what it printed or its value, where that depends on nothing but the code.
    DIAGNOSE: code that failed, and its error -> the cause.
    FIX: code that failed, and its error -> the cause, the change and the code that passed.
    """

    TASK = "task"
    EXPLAIN = "explain"
    PREDICT = "predict"
    DIAGNOSE = "diagnose"
    FIX = "fix"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutionChats:
    """Which conversations are made.

    Attributes:
      kinds: what they are about.
      min_sentences: the fewest sentences of an explanation; each rests on a fact.
      max_characters: the longest conversation.
    """

    kinds: tuple[ChatKind, ...] = tuple(ChatKind)
    min_sentences: int = 2
    max_characters: int = 20_000

    def __post_init__(self) -> None:
        for name in ("min_sentences", "max_characters"):
            if getattr(self, name) < 1:
                raise UserError(f"ExecutionChats.{name} ({getattr(self, name)}) must be positive: try 2")


def of_run(run: Run, settings: ExecutionChats) -> Iterator[dict[str, Json]]:
    """The conversations about one execution."""
    if run.execution.passed:
        result = (_task(run), _explain(run, settings), _predict(run))
    else:
        result = (_diagnose(run, settings), None, None)
    for chat in result:
        if chat is not None and _is_wanted(chat, settings):
            yield chat


def of_fix(fix: Fix, settings: ExecutionChats) -> dict[str, Json] | None:
    """The conversation about a fix; None: it is not wanted, or the error has neither a name nor a message."""
    shown = _error(fix.before)
    if not shown:
        return None
    explanation_lines = [explanations.of_failure(fix.before).text, explanations.of_fix(fix).text]
    answer = "\n\n".join([*filter(None, explanation_lines), _fenced(fix.after)])
    chat = _chat(ChatKind.FIX, fix.after, f"{_fenced(fix.before)}\n\n{shown}", answer, _QUESTIONS["fix"])
    return chat if _is_wanted(chat, settings) else None


def _is_wanted(chat: dict[str, Json], settings: ExecutionChats) -> bool:
    return chat["kind"] in settings.kinds and len(str(chat["messages"])) <= settings.max_characters


def _task(run: Run) -> dict[str, Json] | None:
    if run.execution.task is None or (run.language.name == "python" and not is_self_contained(run.execution.code)):
        return None
    return _chat(ChatKind.TASK, run, run.execution.task, _fenced(run))


def _explain(run: Run, settings: ExecutionChats) -> dict[str, Json] | None:
    result = explanations.of_code(run)
    if len(result.sentences) < settings.min_sentences:
        return None
    return _chat(ChatKind.EXPLAIN, run, _fenced(run), result.text, _QUESTIONS["explain"])


def _predict(run: Run) -> dict[str, Json] | None:
    execution, value = run.execution, run.execution.value
    shown = execution.stdout.rstrip("\n") if value is None else value
    if not shown.strip() or execution.stderr.strip() or run.language.name != "python" or (value and execution.stdout):
        return None
    if _UNSTABLE.search(shown) or _PLACEHOLDER.search(shown) or _RANDOM & {*run.patterns.imports}:
        return None
    if not is_self_contained(execution.code):
        return None
    answer = f"{_fence(shown)}\n{shown}\n{_fence(shown)}"
    questions = _QUESTIONS["predict" if value is None else "value"]
    return _chat(ChatKind.PREDICT, run, _fenced(run), answer, questions)


def is_self_contained(code: str) -> bool:
    """Whether Python code defines or imports every name that it uses: no other cell must have run before."""
    result = names.of_code(code)
    return result is not None and result.used <= result.bound | names.KNOWN


def _diagnose(run: Run, settings: ExecutionChats) -> dict[str, Json] | None:
    result = explanations.of_failure(run)
    if len(result.sentences) < settings.min_sentences:
        return None
    return _chat(ChatKind.DIAGNOSE, run, f"{_fenced(run)}\n\n{_error(run)}", result.text, _QUESTIONS["diagnose"])


def _error(run: Run) -> str:
    """The error as the user shows it: its last line, or what a command printed to stderr."""
    failure = run.execution.failure
    message = f"{failure.name}: {failure.value}".strip(": \n") if failure is not None else ""
    message = message or run.execution.stderr.strip() or (failure.traceback.strip() if failure is not None else "")
    return f"{_fence(message)}\n{message}\n{_fence(message)}" if message else ""


def _fenced(run: Run) -> str:
    code = run.execution.code.strip("\n")
    return f"{_fence(code)}{run.language.name or ''}\n{code}\n{_fence(code)}"


def _fence(text: str) -> str:
    """A fence that is longer than any in the text."""
    return "`" * max(3, 1 + max(map(len, re.findall(r"^ *(`{3,})", text, re.MULTILINE)), default=0))


def _chat(kind: ChatKind, run: Run, question: str, answer: str, questions: Sequence[str] = ()) -> dict[str, Json]:
    if questions:
        question = f"{_chosen(questions, question)}\n\n{question}"
    messages: list[Json] = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {
        "messages": messages,
        "kind": str(kind),
        "language": run.language.name,
        "quality": run.scores.quality,
        "source": run.source,
        "session": run.execution.session,
        "earlier_imports": list(run.earlier_imports),
    }


def _chosen(options: Sequence[str], key: str) -> str:
    """One of the options, the same for the same text."""
    digest = hashlib.blake2b(key.encode("utf-8", "replace"), digest_size=8).digest()
    return options[int.from_bytes(digest, "little") % len(options)]
