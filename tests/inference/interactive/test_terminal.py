"""A conversation in the terminal: turns, commands, what is too long, and a real terminal with ctrl-C and ctrl-D."""

from __future__ import annotations

import json
import os
import pathlib
import pty
import re
import select
import subprocess
import sys
import time

import pytest

from capibara.data.chat.formats import Conversation
from capibara.inference.interactive import terminal
from capibara.inference.sampling.sampling import Sampling

CHECKOUT = pathlib.Path(__file__).resolve().parents[3]
# The terminal sends ctrl-C to whom it controls.
# Workers of pytest-xdist ignore ctrl-C, and their children would with them.
ON_A_TERMINAL = (
    "import fcntl, runpy, signal, termios; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "runpy.run_module('capibara.infer', run_name='__main__')"
)
GREEDY = Sampling(temperature=0.0, max_new_tokens=12)


@pytest.fixture
def talk(served):
    """A conversation, of which `shown` is what was written to the terminal."""
    shown = []
    talk = terminal.Talk(served.engine, served.chat, served.length, GREEDY, shown.append)
    talk.shown = shown
    return talk


def answer(served, messages, sampling=GREEDY):
    ids = served.chat.ids_after(Conversation(messages), "here")
    return served.engine.submit(ids, sampling, ends=served.chat.ends).result().text


def test_each_turn_is_answered_with_all_that_was_said(talk, served):
    lines = iter(["/system Be kind.", "Hello", "", "and then?", "//help"])

    def read(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    talk.run(read)
    said = [{"role": "system", "content": "Be kind."}]
    for turn in ("Hello", "and then?", "/help"):
        said.append({"role": "user", "content": turn})
        said.append({"role": "assistant", "content": answer(served, said)})
        assert terminal.printable(said[-1]["content"]) in "".join(talk.shown)
    assert talk.messages == said


def test_the_commands(talk, tmp_path):
    talk.take("/save")
    talk.take("Hello")
    talk.take("/system Be brief.")
    assert [message["role"] for message in talk.messages] == ["system", "user", "assistant"]
    path = tmp_path / "chat.jsonl"
    for _ in range(2):
        talk.take(f"/save {path}")
    talk.take("/save /nowhere/chat.jsonl")
    talk.take("/save")
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"messages": talk.messages}] * 2
    talk.take("/reset")
    assert talk.messages == [{"role": "system", "content": "Be brief."}]
    talk.take("/system")
    assert talk.messages == []
    talk.shown.clear()
    talk.take("/sysstem x")
    talk.take("/help")
    assert talk.shown[0] == "there is no command /sysstem: did you mean /system?\n" and "/save FILE" in talk.shown[1]


def test_the_oldest_turns_are_forgotten_and_the_system_message_is_not(talk, served):
    talk.take("/system Be kind.")
    for turn in ("one", "two " * 10, "three " * 10):
        talk.take(turn)
    assert "forgotten" not in "".join(talk.shown)
    before = [*talk.messages, {"role": "user", "content": "four " * 10}]
    talk.take(before[-1]["content"])
    note = re.search(
        r"\[the first (\d) messages are forgotten: the context of 256 tokens is full\]", "".join(talk.shown)
    )
    dropped = int(note[1])
    asked = before[:1] + before[1 + dropped :]
    assert talk.messages == [*asked, {"role": "assistant", "content": answer(served, asked)}]
    more = before[:1] + before[dropped - 1 :]
    assert len(served.chat.ids_after(Conversation(more), "here")) + GREEDY.max_new_tokens > served.length + 1


def test_what_cannot_be_said_is_as_if_it_had_not_been(talk):
    talk.take("Hello")
    before = list(talk.messages)
    talk.take("x" * 300)
    assert "must have at most 256: shorten it" in talk.shown[-1] and talk.shown[-1].startswith("error: ")
    assert talk.messages == before
    talk.messages.insert(0, {"role": "judge", "content": "x"})  # of which the template has never heard
    talk.take("Hello")
    assert "the role judge is not known" in talk.shown[-1] and len(talk.messages) == 3


def test_an_answer_that_is_stopped_is_kept_as_far_as_it_came(served, talk, monkeypatch):
    loop = served.engine._loop
    step, calls, pause_s = loop.step, [], 0.04 * served.engine._config.most_steps
    monkeypatch.setattr(loop, "step", lambda: time.sleep(pause_s) or step())

    def write(text):
        calls.append(text)
        if len(calls) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(talk, "_write", write)
    talk.take("Hello")
    text = talk.messages[-1]["content"]
    full = answer(served, talk.messages[:-1])
    assert full.startswith(text) and 0 < len(text) < len(full) and calls[-1] == " [stopped]\n"


def test_nothing_that_a_model_writes_commands_the_terminal():
    assert terminal.printable("a\x1b[2J\x9b\x07\r\n\tä€😀") == "a\ufffd[2J\ufffd\ufffd\ufffd\n\tä€😀"


def test_text_that_the_terminal_has_no_letters_for(monkeypatch, capsys):
    class Ascii:
        encoding = "ascii"
        write = staticmethod(lambda text: sys.__stdout__ and sys.stdout_text.append(text))
        flush = staticmethod(lambda: None)

    monkeypatch.setattr(sys, "stdout_text", [], raising=False)
    monkeypatch.setattr(sys, "stdout", Ascii)
    terminal.write("für 5 €")
    assert sys.stdout_text == ["f?r 5 ?"]


def test_a_terminal(folder):
    """infer --chat without a prompt: ctrl-C stops an answer and not the program, ctrl-D ends it."""
    main, side = pty.openpty()
    arguments = [f"--model={folder}", "--chat", "--gin.Sampling.temperature=0", "--gin.Sampling.max_new_tokens=200"]
    process = subprocess.Popen(
        [sys.executable, "-c", ON_A_TERMINAL, *arguments],
        stdin=side,
        stdout=side,
        stderr=side,
        env=os.environ | {"PYTHONPATH": str(CHECKOUT), "TERM": "dumb"},
        start_new_session=True,
    )
    os.close(side)
    shown, end = b"", time.monotonic() + 240

    def until(pattern):
        nonlocal shown
        while not (found := re.search(pattern, shown, re.DOTALL)):
            ready, _, _ = select.select([main], [], [], end - time.monotonic())
            assert ready, shown
            shown += os.read(main, 1000)
        shown = shown[found.end() :]
        return found[0]

    try:
        until(rb"ctrl-D ends\r\n.*?> ")
        os.write(main, b"Hello\n")
        assert len(until(rb"Hello\r\n.*?\r\n.*?> ")) > 20
        # Readline looks at signals when it has begun to wait: one that comes just before that is seen with the next.
        os.write(main, b"\x03")
        while not select.select([main], [], [], 5)[0] and time.monotonic() < end:
            os.write(main, b"\x03")
        until(rb"ctrl-D ends\r\n.*?> ")
        os.write(main, b"/nothing\n")
        until(rb"there is no command /nothing.*?> ")
        os.write(main, b"\x04")
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(main)
