"""The status line of long jobs."""

import io

from capibara.monitoring import status
from capibara.monitoring.status import StatusLine


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_has_one_line_that_is_left_empty():
    terminal = Terminal()
    with StatusLine(terminal) as line:
        line.show("compiling", "1 s")
        line.show("compiling", "2 s")
    text = terminal.getvalue()
    assert "\n" not in text and text.endswith("\r\x1b[K") and "compiling, 2 s" in text


def test_a_log_has_a_line_for_each_topic_and_no_flood(monkeypatch):
    clock_s = [100.0]
    monkeypatch.setattr(status.time, "monotonic", lambda: clock_s[0])
    log = io.StringIO()
    with StatusLine(log) as line:
        for seconds in range(40):
            clock_s[0] = 100.0 + seconds
            line.show("lowering", f"{seconds} s")
        line.show("compiling", "39 s")
    assert log.getvalue().splitlines() == ["lowering, 2 s", "lowering, 32 s", "compiling, 39 s"]


def test_a_log_has_no_line_of_a_job_that_is_done_at_once():
    log = io.StringIO()
    with StatusLine(log) as line:
        line.show("searching", "v5e-1")
    assert log.getvalue() == ""
