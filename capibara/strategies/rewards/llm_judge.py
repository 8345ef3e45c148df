"""A verifier that asks another language model."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import re
import string
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from capibara.config import configurable
from capibara.core.fields import short
from capibara.core.types import UserError
from capibara.strategies.rewards.verifier import Verifier

_TEMPLATE = (
    "Question:\n{prompt}\n\nReference answer:\n{record[answer]}\n\nAnswer to grade:\n{answer}\n\n"
    "Grade the answer from 0 (wrong) to 10 (right and complete). End with the line: Grade: N"
)
_MOST_BYTES = 2**22  # of a response
FIRST_WAIT_S = 0.5
_AGAIN = {408, 409, 425, 429}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The key is for the address that the user has named."""

    def redirect_request(self, *_: object) -> None:
        return None


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class LlmJudge(Verifier):
    """The grade that a model behind OpenAI's chat API gives an answer, divided by `most`, from 0 to 1.

    A judge can be talked into a grade by what it reads: prefer a verifier where there is one. A server that cannot be reached, or
    a response without a grade, is asked again; then the run ends, and no answer gets a grade that nobody gave.

    Attributes:
      url: of the API, such as "http://host:8000/v1".
      model: name of the model there.
      template: the message, with {prompt}, {answer} and {record[FIELD]}.
      pattern: regular expression whose last match has the grade, in its first group.
      most: the highest grade.
      key_variable: environment variable with the API's key; None: it needs none.
      max_tokens: of a response.
      seconds: of a request, at most.
      tries: requests for a grade, at most.
    """

    url: str
    model: str
    template: str = _TEMPLATE
    pattern: str = r"Grade:\s*(\d+(?:\.\d+)?)"
    most: float = 10.0
    key_variable: str | None = None
    max_tokens: int = 512
    seconds: float = 120.0
    tries: int = 5

    def __post_init__(self) -> None:
        if not re.match(r"https?://[^/]", self.url):
            raise UserError(
                f'LlmJudge.url is {self.url!r}, must begin with http:// or https://: try "http://localhost:8000/v1"'
            )
        for name in ("most", "seconds", "max_tokens", "tries"):
            if not 0 < getattr(self, name) < float("inf"):
                raise UserError(f"LlmJudge.{name} is {getattr(self, name)}, must be above 0: leave it out")
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise UserError(f"LlmJudge.pattern {self.pattern!r} is no regular expression ({error}): mend it") from None
        if groups < 1:
            raise UserError(
                f"LlmJudge.pattern {self.pattern!r} has no group, which holds the grade: try 'Grade: (\\d+)'"
            )
        try:
            names = {
                name.partition("[")[0] for _, name, _, _ in string.Formatter().parse(self.template) if name is not None
            }
        except ValueError as error:
            raise UserError(
                f"LlmJudge.template cannot be filled in ({error}): write {{{{ and }}}} for braces"
            ) from None
        if "answer" not in names or not names <= {"prompt", "answer", "record"}:
            raise UserError(
                f"LlmJudge.template has {', '.join(f'{{{name}}}' for name in sorted(names)) or 'no fields'}, must have {{answer}}, and "
                "beside it {prompt} and {record[FIELD]} alone"
            )
        if self.key_variable is not None and not os.environ.get(self.key_variable):
            raise UserError(
                f"LlmJudge.key_variable is {self.key_variable!r}, which is not set: export {self.key_variable}=KEY"
            )

    def __call__(self, prompt: str, answer: str, record: Mapping[str, Any]) -> float:
        message = self._message(prompt, answer, record)
        error = ""
        for number in range(self.tries):
            if number:
                time.sleep(FIRST_WAIT_S * 2 ** (number - 1))
            try:
                text = self._asked(message)
            except urllib.error.HTTPError as refused:
                error = f"status {refused.code}: {short(refused.read(2000).decode('utf-8', 'replace'))}"
                if refused.code < 500 and refused.code not in _AGAIN:
                    break
                continue
            except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException) as failure:
                error = f"{type(failure).__name__}: {failure}"
                continue
            grades = re.findall(self.pattern, text)
            grade = (
                _number(grades[-1] if not grades or isinstance(grades[-1], str) else grades[-1][0]) if grades else None
            )
            if grade is not None and 0 <= grade <= self.most:
                return grade / self.most
            error = f"no grade from 0 to {self.most:g} in {short(text)}"
        raise UserError(
            f"LlmJudge.url {self.url} gives no grade in {number + 1} tries ({error}): see to that server, and resume"
        )

    def check_record(self, record: Mapping[str, object]) -> None:
        self._message("", "", record)

    def _message(self, prompt: str, answer: str, record: Mapping[str, object]) -> str:
        try:
            return self.template.format(prompt=prompt, answer=answer, record=record)
        except (LookupError, AttributeError, ValueError, TypeError) as error:
            raise UserError(
                f"LlmJudge.template asks for {error} of a record, which has {', '.join(record)}: change {{record[FIELD]}}"
            ) from None

    def _asked(self, message: str) -> str:
        body = {
            "model": self.model, "messages": [{"role": "user", "content": message}], "temperature": 0,
            "max_tokens": self.max_tokens,
        }  # fmt: skip
        headers = {"Content-Type": "application/json"}
        if self.key_variable is not None:
            headers["Authorization"] = f"Bearer {os.environ[self.key_variable]}"
        request = urllib.request.Request(
            f"{self.url.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers, method="POST"
        )
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=self.seconds) as response:
            text = json.loads(response.read(_MOST_BYTES))["choices"][0]["message"]["content"]
        return text if isinstance(text, str) else ""


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
