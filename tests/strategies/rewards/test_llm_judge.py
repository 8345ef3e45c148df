"""A judge behind OpenAI's API: what is asked, what is read, and what happens where it gives no grade."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading

import pytest

from capibara.core.types import UserError
from capibara.strategies.rewards import llm_judge
from capibara.strategies.rewards.llm_judge import LlmJudge

RECORD = {"answer": "Paris"}


@contextlib.contextmanager
def server(replies):
    """A chat API that gives these replies one after the other, texts or status codes; yields its URL and what was asked."""
    asked, left = [], iter(replies)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, dict(self.headers), body))
            reply = next(left)
            status = reply if isinstance(reply, int) else 200
            text = json.dumps({"choices": [{"message": {"content": reply}}]}) if status == 200 else "no"
            self.send_response(status)
            if status == 302:
                self.send_header("Location", f"{url}/elsewhere")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        url = f"http://127.0.0.1:{served.server_port}"
        threading.Thread(target=served.serve_forever, daemon=True).start()
        try:
            yield f"{url}/v1", asked
        finally:
            served.shutdown()


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(llm_judge, "FIRST_WAIT_S", 0.0)


def test_a_grade_is_a_share_of_the_highest(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "k3y")
    with server(["Fine. Grade: 3\nGrade: 7.5"]) as (url, asked):
        judge = LlmJudge(url=url, model="m", key_variable="JUDGE_KEY", max_tokens=9)
        assert judge("Capital?", "It is {Paris}.", RECORD) == 0.75
    ((path, headers, body),) = asked
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer k3y"
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("m", 9, 0)
    (message,) = body["messages"]
    assert all(text in message["content"] for text in ("Capital?", "It is {Paris}.", "\nParis\n"))


@pytest.mark.parametrize("first", [500, 429, "no idea", "Grade: 11", "Grade: -1", None])
def test_it_asks_again(first):
    with server([first, "Grade: 10"]) as (url, asked):
        assert LlmJudge(url=url, model="m")("", "x", RECORD) == 1.0
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("replies", "tries", "error"),
    [
        ([401], 1, "gives no grade in 1 tries .status 401"),
        ([302], 1, "status 302"),
        (["?"] * 3, 3, "gives no grade in 3 tries .no grade from 0 to 10 in '.'"),
    ],
)
def test_no_answer_gets_a_grade_that_nobody_gave(replies, tries, error):
    with server(replies) as (url, asked), pytest.raises(UserError, match=error):
        LlmJudge(url=url, model="m", tries=3)("", "x", RECORD)
    assert len(asked) == tries


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(UserError, match=r"LlmJudge.url http://127.0.0.1:1/v1 gives no grade in 2 tries \(URLError"):
        LlmJudge(url="http://127.0.0.1:1/v1", model="m", tries=2)("", "x", RECORD)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"url": "localhost:8000"}, "LlmJudge.url is .* must begin with http"),
        ({"most": 0.0}, "LlmJudge.most is 0.0, must be above 0"),
        ({"tries": 0}, "LlmJudge.tries is 0"),
        ({"pattern": "("}, "no regular expression"),
        ({"pattern": "Grade"}, "has no group"),
        ({"template": "{prompt}"}, r"has \{prompt\}, must have \{answer\}"),
        ({"template": "{answer} {other}"}, "must have .answer"),
        ({"template": "{answer} {record.__class__}"}, "must have .answer"),
        ({"template": "{answer"}, "cannot be filled in"),
        ({"key_variable": "NO_SUCH_KEY"}, "is not set: export NO_SUCH_KEY"),
    ],
)
def test_options_are_checked(options, error):
    with pytest.raises(UserError, match=error):
        LlmJudge(**{"url": "http://localhost/v1", "model": "m"} | options)


def test_records_have_what_the_template_asks_for():
    with pytest.raises(UserError, match=r"asks for 'answer' of a record, which has question"):
        LlmJudge(url="http://localhost/v1", model="m").check_record({"question": "?"})
