"""What a server says instead of an answer."""

from __future__ import annotations

from typing import Any


class Refusal(Exception):
    """A request that gets no answer, or no more of it, as OpenAI's API says so.

    Args:
      status: of HTTP.
      message: the name, the value, the constraint and the fix.
      param: the parameter that is wrong; None: none of them is.
      code: for programs; None: by the status.
      headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def left_alone() -> Refusal:
    """What those are told whose texts were made together with a process that is gone."""
    return Refusal(503, "another host is gone: the server must be started again", code="model_failed")
