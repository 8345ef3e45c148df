"""Logs of executions, made up: agents that fail, mend their code, and print secrets."""

from __future__ import annotations

import json
import pathlib
import random

from tests.builders.redaction import planted


def traceback(code: str, line: int, name: str, value: str) -> str:
    """As IPython writes it, with colours."""
    text = code.split("\n")[line - 1]
    head = f"\x1b[0;31m{name}\x1b[0m      Traceback (most recent call last)\nCell \x1b[0;32mIn[1], line {line}\x1b[0m\n"
    return f"{'-' * 75}\n{head}\x1b[0;32m----> {line}\x1b[0m {text}\n\n\x1b[0;31m{name}\x1b[0m: {value}"


def execution(code, stdout=(), *, error=None, line=1, value=None, encoded=False, **about):
    """A record; `encoded` as E2B's to_json has it."""
    failure = error and {"name": error[0], "value": error[1], "traceback": traceback(code, line, *error)}
    results = [] if value is None else [{"text": value, "is_main_result": True}]
    logs = {"stdout": list(stdout), "stderr": []}
    if not encoded:
        return {"code": code, "results": results, "logs": logs, "error": failure, **about}
    inner = {"results": results, "logs": json.dumps(logs), "error": failure and json.dumps(failure)}
    return {"code": code, "execution": json.dumps(inner), **about}


def session(number: int) -> list[dict]:
    """An agent's session: a mistake, its fix, and two other cells."""
    draw = random.Random(number)
    first, second = draw.sample(range(100), 2)
    wrong = f"def area(width, height):\n    return width * heigth\n\nprint(area({first}, {second}))\n"
    about = {"session_id": f"s{number}", "timestamp": 1_700_000_000 + number, "language": "python"}
    encoded = bool(number % 2)
    return [
        execution(
            wrong, error=("NameError", "name 'heigth' is not defined"), line=2, encoded=encoded, task="Area.", **about
        ),
        execution(
            wrong.replace("heigth", "height"), [f"{first * second}\n"], encoded=encoded, task=f"Area {first}.", **about
        ),
        execution(f"total_{number} = {first} + {second}\ntotal_{number}", value=str(first + second), **about),
        {"command": f"ls /srv/{number}", "exit_code": number % 3, "stdout": "a\n", "stderr": "", **about},
    ]


def secret_session() -> tuple[list[dict], list[str]]:
    """A session in whose every field stands a secret, and these secrets."""
    kinds = list(planted.TOKENS)
    tokens = [planted.TOKENS[kind](planted.Make(number)) for number, kind in enumerate(kinds)]
    records = []
    for number, token in enumerate(tokens):
        half = len(token) // 2
        code = f'key = "{token}"\nprint(key[:8])\nopen("/home/asmith/{token}.txt")'
        records.append(
            execution(
                code,
                [f"using {token[:half]}", f"{token[half:]} now\n"],
                error=("FileNotFoundError", f"[Errno 2] No such file or directory: '/home/asmith/{token}.txt'"),
                line=3,
                encoded=bool(number % 2),
                value=f"Client('{token}')",
                session_id=f"asmith@acme-corp.io {token}",
                task=f"Use {token}.",
            )
        )
    passwords = [planted.IN_CONTEXT["password_in_code"](planted.Make(number)) for number in range(3)]
    records += [execution(text, [f"{secret}\n"], session_id="p") for text, secret in passwords]
    return records, [*tokens, *(secret for _, secret in passwords), "asmith"]


def write(path: pathlib.Path, records: list[dict]) -> str:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return str(path)


def folder(path: pathlib.Path, files: int = 3, sessions: int = 5) -> list[str]:
    """Logs with so many sessions each."""
    path.mkdir(parents=True, exist_ok=True)
    return [
        write(path / f"log{number}.jsonl", [one for i in range(sessions) for one in session(number * sessions + i)])
        for number in range(files)
    ]
