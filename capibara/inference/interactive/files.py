"""Generates a file of texts from a file of prompts; resumes where it was interrupted."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from capibara.core import limits
from capibara.core.fields import did_you_mean, nearest, short
from capibara.core.types import UserError
from capibara.inference.engine.engine import Engine
from capibara.inference.engine.requests.stream import Completion, Stream, of_search
from capibara.inference.interactive.chat import Chat
from capibara.inference.sampling.sampling import Sampling, changed, of_values
from capibara.inference.thinking.answering import Asked, Thinker
from capibara.storage import outputs, packed

_BEGINS = b'{"prompt": '  # the start of every line of the output
MOST = 1_000_000  # prompts in a file; all are held in memory
_AHEAD = 4  # queued requests per slot, so that no slot is idle while an earlier text is unfinished


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A line of the file.

    It has the prompt, its sampling, other fields of the line (copied to the output), the line number, and the adapter
    to use, None for the model alone.
    """

    text: str
    sampling: Sampling
    rest: dict[str, Any]
    where: str
    adapter: str | None = None


def read_standard_input() -> str:
    """Standard input without its final newline, as a prompt.

    Raises:
      UserError: it is not UTF-8.
    """
    try:
        return sys.stdin.read().rstrip("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not text in UTF-8 ({error}): convert it, or pass --prompt") from None


def read_prompts(path: str, sampling: Sampling, adapters: Sequence[str] = ()) -> list[Prompt]:
    """The prompts of a .jsonl file ({"prompt": ..., "adapter": ..., fields of Sampling}) or the lines of a text file, or a pipe.

    A file may be compressed (.gz, .zst). Blank lines of a .jsonl file are skipped; those of a text are prompts.

    When texts are drawn, a line without its own seed gets the sampling's seed plus its index, so that equal prompts get
    different texts. A line without "adapter" uses the first adapter; null means the model alone.

    Raises:
      UserError: the file cannot be read, or a line is invalid.
    """
    try:
        with open(path, "rb") as file:
            return list(_prompts(file, path, sampling, adapters))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--prompts={path} cannot be read ({type(error).__name__}): name a text or .jsonl file"
        ) from error


def _prompts(file: BinaryIO, path: str, sampling: Sampling, adapters: Sequence[str]) -> Iterator[Prompt]:
    """Yields prompts line by line, so that an error in the first line is found at once."""
    of_json = packed.plain_name(path).endswith((".jsonl", ".ndjson"))
    for index, (number, content) in enumerate(packed.lines_of(file, path, blank=not of_json)):
        line, where = content.decode(), f"{path}:{number}"
        if index == MOST:
            raise UserError(f"--prompts={path} has more than {MOST:,} lines, each a prompt: put them in several files")
        if of_json:
            yield _of_json(where, line, sampling, index, adapters)
        else:
            yield Prompt(line, _of_line(sampling, index), {}, where, next(iter(adapters), None))


def _of_line(sampling: Sampling, index: int) -> Sampling:
    seed = (sampling.seed + index + 2**63) % 2**64 - 2**63
    return sampling if sampling.temperature == 0 else dataclasses.replace(sampling, seed=seed)


def _of_json(where: str, line: str, sampling: Sampling, index: int, adapters: Sequence[str]) -> Prompt:
    try:
        values = limits.parse_json(line, finite=False)
        text = values.pop("prompt")
        if not isinstance(text, str):
            raise TypeError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f'{where} must be a JSON object with a string "prompt": {line[:80]}') from None
    fields = {field.name for field in dataclasses.fields(Sampling)}
    options = {name: values.pop(name) for name in fields & values.keys()}
    adapter = values.pop("adapter", next(iter(adapters), None))
    if adapter is not None and adapter not in adapters:
        known = ", ".join(adapters) or "none: no adapter is loaded, pass --adapter=NAME=PATH"
        raise UserError(f"{where} has adapter = {short(adapter)}, must be null or one of {known}")
    close = next((name for name in values if nearest(name, fields)), None)
    if close is not None:
        raise UserError(f"{where} has {close!r}, which is no field of Sampling{did_you_mean(close, fields)}")
    try:
        sampling = of_values(options, sampling)
        return Prompt(text, sampling if "seed" in options else _of_line(sampling, index), values, where, adapter)
    except (UserError, TypeError) as error:
        raise UserError(f"{where}: {error}") from None


def shown(result: Completion, prompt: str) -> str:
    """A prompt with its text; if several texts were requested, one per line after its score."""
    if len(result.decodes) < 2:
        return (prompt and prompt + result.lead) + result.text
    return "\n".join(f"{item.score:.6f}\t{prompt and prompt + item.lead}{item.text}" for item in result.decodes)


def thought(engine: Engine, prompts: Sequence[Prompt], chat: Chat | None, thinker: Thinker) -> list[dict[str, Any]]:
    """The fields of a thinker's answer to each prompt: its text, what it cost, and how it was chosen."""

    def inputs(text: str) -> tuple[str | Sequence[int], Sequence[int]]:
        return (chat.ids(text), chat.ends) if chat else (text, ())

    answers = thinker.answers(engine, [Asked(item.text, inputs, item.sampling, item.adapter) for item in prompts])
    return [
        {"text": answer.text, "texts": answer.texts, "tokens": answer.tokens, "thinking": answer.about}
        for answer in answers
    ]


def complete(
    engine: Engine,
    prompts: list[Prompt],
    path: str,
    chat: Chat | None = None,
    made_by: Mapping[str, object] | None = None,
    thinker: Thinker | None = None,
) -> Iterator[int]:
    """Writes a line {"prompt", "text", "sampling", ...} for every prompt, in order; yields the number of finished ones.

    Args:
      engine: the engine.
      prompts: the prompts.
      path: output file.
      chat: renders prompts that are a user's turns; None: prompts are texts to continue.
      made_by: the model's identity as JSON values; written to each line, so that the file is not resumed with another.
      thinker: chooses each text among several; None: one is generated.

    Raises:
      UserError: the output has lines of other prompts, another sampling or another model, or cannot be written, or a
        prompt does not fit.
    """
    described = {} if thinker is None else {"thinking": thinker.strategy.described()}
    made_by = json.loads(json.dumps(dict(made_by or {}) | described))
    if thinker is not None:
        for prompt in prompts:
            _check_thinks(thinker, prompt)
    with contextlib.ExitStack() as opened:
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            out = opened.enter_context(open(path, "a", encoding="utf-8", errors="surrogatepass"))
            outputs.lock(out, f"--out={path}")  # before a line is taken for an incomplete one
            done = _resume(path, prompts, made_by)
        except OSError as error:
            raise UserError(f"--out={path} cannot be written ({error.strerror}): name another file") from None
        yield done
        rest = prompts[done:]
        answers = _generated(engine, rest, chat) if thinker is None else _thought(engine, rest, chat, thinker)
        for prompt, answer in zip(rest, answers, strict=True):
            line = _asked(prompt, made_by) | prompt.rest | _asked(prompt, made_by)  # our fields come first, and win
            out.write(json.dumps(line | answer, ensure_ascii=False) + "\n")
            out.flush()
            done += 1
            yield done


def _generated(engine: Engine, prompts: Sequence[Prompt], chat: Chat | None) -> Iterator[dict[str, Any]]:
    """The fields of the text after each prompt."""
    streams: deque[Stream] = deque()
    left = iter(prompts)
    for _ in prompts:
        while len(streams) < _AHEAD * engine.slots and (more := next(left, None)) is not None:
            streams.append(_submitted(engine, more, chat))
        result = streams.popleft().result()
        yield {"text": result.text, "finish": str(result.finish), "tokens": len(result.tokens)} | of_search(result)


def _thought(
    engine: Engine, prompts: Sequence[Prompt], chat: Chat | None, thinker: Thinker
) -> Iterator[dict[str, Any]]:
    """Like `thought`, for as many prompts at a time as the engine has slots."""
    for begin in range(0, len(prompts), engine.slots):
        yield from thought(engine, prompts[begin : begin + engine.slots], chat, thinker)


def _check_thinks(thinker: Thinker, prompt: Prompt) -> None:
    try:
        thinker.strategy.check(prompt.sampling)
    except UserError as error:
        raise UserError(f"{prompt.where}: {error}") from None


def _submitted(engine: Engine, prompt: Prompt, chat: Chat | None) -> Stream:
    try:
        inputs, ends = (chat.ids(prompt.text), chat.ends) if chat else (prompt.text, ())
        return engine.submit(inputs, prompt.sampling, ends=ends, adapter=prompt.adapter)
    except UserError as error:
        raise UserError(f"{prompt.where}: {error}") from None


def _asked(prompt: Prompt, made_by: Mapping[str, object]) -> dict[str, Any]:
    """The fields of a line that describe how its text was made; the prompt first."""
    adapter = {} if prompt.adapter is None else {"adapter": prompt.adapter}
    return {"prompt": prompt.text, **adapter, "sampling": changed(prompt.sampling), "made_by": made_by}


def _resume(path: str, prompts: list[Prompt], made_by: Mapping[str, object]) -> int:
    """Number of complete lines in the output; removes an incomplete one after them if all are ours."""
    with open(path, "rb+") as file:
        *lines, rest = file.read().split(b"\n")
        for number, line in enumerate(lines, 1):
            _check_line(f"--out={path}: line {number}", line, prompts[number - 1 : number], made_by)
        if rest[: len(_BEGINS)] != _BEGINS[: len(rest)]:
            raise UserError(f"--out={path}: line {len(lines) + 1} is not an incomplete line of ours: name another file")
        if _values(rest):  # it is complete, and may be another program's
            _check_line(f"--out={path}: line {len(lines) + 1}", rest, prompts[len(lines) : len(lines) + 1], made_by)
        file.truncate(sum(len(line) + 1 for line in lines))
    return len(lines)


def _values(line: bytes) -> dict[str, Any]:
    """The JSON object in a line; empty if there is none."""
    try:
        result = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return result if isinstance(result, dict) else {}


def _check_line(where: str, line: bytes, prompt: list[Prompt], made_by: Mapping[str, object]) -> None:
    """Raises UserError unless a line of the output has this prompt, and the settings that would be used now."""
    result = _values(line)
    if not prompt or result.get("prompt") != prompt[0].text:
        raise UserError(f"{where} has another prompt than the input's line: name another file")
    for name, now in _asked(prompt[0], made_by).items():
        if result.get(name) != now:
            raise UserError(f"{where} has another {name} ({result.get(name)}) than now ({now}): name another file")
