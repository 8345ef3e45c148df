"""The status line of long jobs."""

import io

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


def test_a_log_has_a_line_for_each_topic_and_no_flood():
    log = io.StringIO()
    with StatusLine(log) as line:
        for seconds in range(5):
            line.show("lowering", f"{seconds} s")
        line.show("compiling", "5 s")
    assert log.getvalue().splitlines() == ["lowering, 0 s", "compiling, 5 s"]
