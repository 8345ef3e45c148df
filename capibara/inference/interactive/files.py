"""A file of prompts in, a file of texts out; where it was stopped it goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from capibara.core import limits
from capibara.core.fields import did_you_mean, nearest, short
from capibara.core.types import UserError
from capibara.inference.engine.engine import Engine
from capibara.inference.engine.stream import Completion, Stream, of_search
from capibara.inference.interactive.chat import Chat
from capibara.inference.sampling.sampling import Sampling, changed, of_values
from capibara.storage import outputs

_BEGINS = b'{"prompt": '  # every line of an output
_MOST = 1_000_000  # prompts of a file, which are all held in memory
_AHEAD = 4  # requests that wait for each slot, so that none is idle while an earlier text is not finished yet


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A line of the file.

    It has the prompt, its sampling, what else the line says (copied to the output), its number, and the adapter that it is
    read with, None for the model alone.
    """

    text: str
    sampling: Sampling
    rest: dict[str, Any]
    where: str
    adapter: str | None = None


def read_standard_input() -> str:
    """The prompt that it is, without the line's end.

    Raises:
      UserError: it is not in UTF-8.
    """
    try:
        return sys.stdin.read().rstrip("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not text in UTF-8 ({error}): convert it, or give --prompt") from None


def read_prompts(path: str, sampling: Sampling, adapters: Sequence[str] = ()) -> list[Prompt]:
    """The prompts of a .jsonl file ({"prompt": ...}, any fields of Sampling, "adapter"), or of the lines of a text file.

    Where texts are drawn and a line has no seed of its own, it is the sampling's for the first line, one more for the
    second, and so on: equal prompts get different texts. A line that says none has the first of the adapters; null is the model alone.

    Raises:
      UserError: there is no such file, or a line is none of these.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return list(_prompts(file, path, sampling, adapters))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--prompts={path} cannot be read ({type(error).__name__}): name a text or .jsonl file"
        ) from error


def _prompts(file: TextIO, path: str, sampling: Sampling, adapters: Sequence[str]) -> Iterator[Prompt]:
    """Read line by line, so that a mistake in the first costs nothing of the others."""
    of_json = path.endswith(".jsonl")
    for index, line in enumerate(_lines(file, path)):
        where = f"{path}:{index + 1}"
        if index == _MOST:
            raise UserError(f"--prompts={path} has more than {_MOST:,} lines, each a prompt: put them in several files")
        if of_json:
            yield _of_json(where, line, sampling, index, adapters)
        else:
            yield Prompt(line, _of_line(sampling, index), {}, where, next(iter(adapters), None))


def _lines(file: TextIO, path: str) -> Iterator[str]:
    """Those of an open file, or of a pipe that the user names, without their ends; also those that are empty."""
    for number in itertools.count(1):
        line = file.readline(limits.LINE_BYTES + 1)
        if not line:
            return
        limits.check_line(len(line), f"--prompts={path}:{number}", limits.LINE_BYTES)
        yield line.removesuffix("\n")


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
    own = {name: values.pop(name) for name in fields & values.keys()}
    adapter = values.pop("adapter", next(iter(adapters), None))
    if adapter is not None and adapter not in adapters:
        known = ", ".join(adapters) or "none: there is none, give --adapter=NAME=PATH"
        raise UserError(f"{where} has adapter = {short(adapter)}, must be null or one of {known}")
    close = next((name for name in values if nearest(name, fields)), None)
    if close is not None:
        raise UserError(f"{where} has {close!r}, which no sampling has{did_you_mean(close, fields)}")
    try:
        sampling = of_values(own, sampling)
        return Prompt(text, sampling if "seed" in own else _of_line(sampling, index), values, where, adapter)
    except (UserError, TypeError) as error:
        raise UserError(f"{where}: {error}") from None


def shown(result: Completion, prompt: str) -> str:
    """A text after its prompt; where a search was to give several a line each, behind their scores."""
    if len(result.decodes) < 2:
        return prompt + result.text
    return "\n".join(f"{one.score:.6f}\t{prompt}{one.text}" for one in result.decodes)


def complete(
    engine: Engine, prompts: list[Prompt], path: str, chat: Chat | None = None, made_by: Mapping[str, Any] | None = None
) -> Iterator[int]:
    """Writes a line {"prompt", "text", "sampling", ...} for every prompt, in their order; gives how many are done.

    Args:
      engine: generates.
      prompts: what to.
      path: of the output.
      chat: for prompts that are turns of a user; None: they are texts to go on with.
      made_by: the model, as JSON values: each line has it, so that no file goes on with another.

    Raises:
      UserError: the output has lines of other prompts, another sampling or another model, or cannot be written, or a
        prompt has no place.
    """
    made_by = json.loads(json.dumps(dict(made_by or {})))
    with contextlib.ExitStack() as opened:
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            out = opened.enter_context(open(path, "a", encoding="utf-8", errors="surrogatepass"))
            outputs.lock(out, f"--out={path}")  # before a line is taken for one that was cut off
            done = _resume(path, prompts, made_by)
        except OSError as error:
            raise UserError(f"--out={path} cannot be written ({error.strerror}): name another file") from None
        yield done
        streams: deque = deque()
        left = iter(prompts[done:])
        for prompt in prompts[done:]:
            while len(streams) < _AHEAD * engine.slots and (more := next(left, None)) is not None:
                streams.append(_submitted(engine, more, chat))
            result = streams.popleft().result()
            line = _asked(prompt, made_by) | prompt.rest | _asked(prompt, made_by)  # first in the line, and ours win
            line |= {"text": result.text, "finish": str(result.finish), "tokens": len(result.tokens)}
            line |= of_search(result)
            out.write(json.dumps(line, ensure_ascii=False) + "\n")
            out.flush()
            done += 1
            yield done


def _submitted(engine: Engine, prompt: Prompt, chat: Chat | None) -> Stream:
    try:
        asked, ends = (chat.ids(prompt.text), chat.ends) if chat else (prompt.text, ())
        return engine.submit(asked, prompt.sampling, ends=ends, adapter=prompt.adapter)
    except UserError as error:
        raise UserError(f"{prompt.where}: {error}") from None


def _asked(prompt: Prompt, made_by: Mapping[str, Any]) -> dict[str, Any]:
    """What a line says of how its text came to be; the prompt first."""
    adapter = {} if prompt.adapter is None else {"adapter": prompt.adapter}
    return {"prompt": prompt.text, **adapter, "sampling": changed(prompt.sampling), "made_by": made_by}


def _resume(path: str, prompts: list[Prompt], made_by: Mapping[str, Any]) -> int:
    """How many whole lines the output has; what follows them (a line cut off) is removed, once all are known as ours."""
    with open(path, "rb+") as file:
        *lines, rest = file.read().split(b"\n")
        for number, line in enumerate(lines, 1):
            _check_line(f"--out={path}: line {number}", line, prompts[number - 1 : number], made_by)
        if rest[: len(_BEGINS)] != _BEGINS[: len(rest)]:
            raise UserError(f"--out={path}: line {len(lines) + 1} is none that was cut off: name another file")
        if _values(rest):  # it is whole, and may be somebody's
            _check_line(f"--out={path}: line {len(lines) + 1}", rest, prompts[len(lines) : len(lines) + 1], made_by)
        file.truncate(sum(len(line) + 1 for line in lines))
    return len(lines)


def _values(line: bytes) -> dict[str, Any]:
    """Of a line; none where it is no JSON object."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _check_line(where: str, line: bytes, prompt: list[Prompt], made_by: Mapping[str, Any]) -> None:
    """Raises UserError unless a line of the output is of this prompt, and made as its text would be made now."""
    found = _values(line)
    if not prompt or found.get("prompt") != prompt[0].text:
        raise UserError(f"{where} is not of the prompt in that line: name another file")
    for name, now in _asked(prompt[0], made_by).items():
        if found.get(name) != now:
            raise UserError(f"{where} has another {name} ({found.get(name)}) than now ({now}): name another file")
