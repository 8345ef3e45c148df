"""Python as a tool: what the model is told of what its code printed, returned and raised."""

from __future__ import annotations

import json

import pytest

from capibara.core.types import UserError
from capibara.sandbox.sandbox import Sandbox
from capibara.strategies.environments.python_tool import PythonTool


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("1 + 1", "2\n"),
        ('print("a", end="")', "a"),
        ('print("a")\nx = 3\nx * 2', "a\n6\n"),
        ("def f():\n    return 7\nf()", "7\n"),
        ("None", ""),
        ('print("so far")\nraise ValueError("no")', "so far\nValueError: no\n"),
        ("x =", "SyntaxError: invalid syntax (<python>, line 1)\n"),
        ("import os\nos._exit(0)", "error: ended before its last line"),
        ('open("/etc/passwd")', "FileNotFoundError: [Errno 2] No such file or directory: '/etc/passwd'\n"),
    ],
)
def test_a_call_has_what_was_printed(code, result):
    call = {"id": "c1", "type": "function", "function": {"name": "python", "arguments": json.dumps({"code": code})}}
    (message,) = PythonTool().begin({}).step([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert message == {"role": "tool", "tool_call_id": "c1", "name": "python", "content": result}


def test_limits_hold():
    assert PythonTool(limits=Sandbox(seconds=1.0)).result("while True: pass") == "error: out of time"
    call = {"id": "c1", "function": {"name": "python", "arguments": {"code": "print('x' * 100)"}}}
    (message,) = PythonTool(result_chars=10).begin({}).step([{"role": "assistant", "tool_calls": [call]}])
    assert message["content"] == "x" * 10
    with pytest.raises(UserError, match="PythonTool.result_chars is 0"):
        PythonTool(result_chars=0)
