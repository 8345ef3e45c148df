"""Error responses of the server."""

from __future__ import annotations

from typing import Any

SOON = {"Retry-After": "1"}  # headers of an error that soon is over
_LONGEST_PARAM = 60
_LONGEST_MESSAGE = 600  # of our own words and values, which are each shortened where they are quoted


class Refusal(Exception):
    """An error response in the format of OpenAI's API; also ends a stream.

    Args:
      status: HTTP status code.
      message: name, value, constraint and fix.
      param: the parameter at fault; None: no parameter.
      code: machine-readable code; None: derived from the status.
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
        message = message if len(message) <= _LONGEST_MESSAGE else message[: _LONGEST_MESSAGE - 3] + "..."
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.param = param if param is None else param[:_LONGEST_PARAM]
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def lost_process() -> Refusal:
    """The error for requests whose texts were computed together with a lost process."""
    return Refusal(503, "another host is gone: the server must be started again", code="model_failed")
