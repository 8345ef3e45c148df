"""A file of prompts in, a file of texts out; where it was stopped it goes on."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

from capibara.fields import did_you_mean, nearest
from capibara.inference.chat import Chat
from capibara.inference.engine import Engine
from capibara.inference.sampling import Sampling
from capibara.types import UserError

_AHEAD = 4  # requests that wait for each slot, so that none is idle while an earlier text is not finished yet


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A line of the file: the prompt, its sampling, and what else the line says, which is copied to the output."""

    text: str
    sampling: Sampling
    rest: dict[str, Any]


def read_standard_input() -> str:
    """The prompt that it is, without the line's end.

    Raises:
      UserError: it is not in UTF-8.
    """
    try:
        return sys.stdin.read().rstrip("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not text in UTF-8 ({error}): convert it, or give --prompt") from None


def read_prompts(path: str, sampling: Sampling) -> list[Prompt]:
    """The prompts of a .jsonl file ({"prompt": ...} and any fields of Sampling), or of the lines of a text file.

    Raises:
      UserError: there is no such file, or a line is none of these.
    """
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--prompts={path} cannot be read ({type(error).__name__}): name a text or .jsonl file"
        ) from error
    if lines[-1] == "":
        lines.pop()
    if not path.endswith(".jsonl"):
        return [Prompt(line, sampling, {}) for line in lines]
    return [_of_json(f"{path}:{number}", line, sampling) for number, line in enumerate(lines, 1)]


def _of_json(where: str, line: str, sampling: Sampling) -> Prompt:
    try:
        values = json.loads(line)
        text = values.pop("prompt")
        if not isinstance(text, str):
            raise TypeError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f'{where} must be a JSON object with a string "prompt": {line[:80]}') from None
    fields = {field.name for field in dataclasses.fields(Sampling)}
    own = {name: values.pop(name) for name in fields & values.keys()}
    own |= {name: tuple(own[name]) for name in ("stop", "thinking_tags") if isinstance(own.get(name), list)}
    close = next((name for name in values if nearest(name, fields)), None)
    if close is not None:
        raise UserError(f"{where} has {close!r}, which no sampling has{did_you_mean(close, fields)}")
    try:
        return Prompt(text, dataclasses.replace(sampling, **own), values)
    except (UserError, TypeError) as error:
        raise UserError(f"{where}: {error}") from None


def complete(engine: Engine, prompts: list[Prompt], path: str, chat: Chat | None = None) -> Iterator[int]:
    """Writes a line {"prompt", "text", "finish", "tokens", ...} for every prompt, in their order; gives how many are done.

    Args:
      engine: generates.
      prompts: what to.
      path: of the output.
      chat: for prompts that are turns of a user; None: they are texts to go on with.

    Raises:
      UserError: the output has lines that belong to other prompts.
    """
    done = _resume(path, prompts)
    yield done
    streams: deque = deque()
    left = iter(prompts[done:])
    with open(path, "a", encoding="utf-8") as out:
        for prompt in prompts[done:]:
            while len(streams) < _AHEAD * engine.slots and (more := next(left, None)) is not None:
                asked, ends = (chat.ids(more.text), chat.ends) if chat else (more.text, ())
                streams.append(engine.submit(asked, more.sampling, ends=ends))
            result = streams.popleft().result()
            line = prompt.rest | {
                "prompt": prompt.text,
                "text": result.text,
                "finish": str(result.finish),
                "tokens": len(result.tokens),
            }
            out.write(json.dumps(line, ensure_ascii=False) + "\n")
            out.flush()
            done += 1
            yield done


def _resume(path: str, prompts: list[Prompt]) -> int:
    """How many whole lines the output has; what follows them (a line cut off) is removed."""
    if not os.path.exists(path):
        return 0
    with open(path, "rb+") as file:
        lines = file.read().split(b"\n")[:-1]
        file.truncate(sum(len(line) + 1 for line in lines))
    for number, line in enumerate(lines, 1):
        try:
            text = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError):
            text = None
        if number > len(prompts) or text != prompts[number - 1].text:
            raise UserError(f"--out={path}: line {number} is not of the prompt in that line: name another file")
    return len(lines)
