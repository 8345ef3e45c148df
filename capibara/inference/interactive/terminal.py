"""A conversation in the terminal: typed lines are turns, answers are streamed."""

from __future__ import annotations

import contextlib
import json
import sys
import unicodedata
from collections.abc import Callable

from capibara.core.fields import did_you_mean
from capibara.core.types import UserError
from capibara.data.chat.formats import Conversation, Message
from capibara.inference.engine.engine import Engine
from capibara.inference.engine.requests.stream import Finish
from capibara.inference.interactive.chat import Chat
from capibara.inference.sampling.sampling import Sampling

_HELP = """/system TEXT  set the system message; without TEXT: remove it
/reset        forget the conversation, but keep the system message
/save FILE    append the conversation to a .jsonl file, as a line {"messages": [...]}
/exit         end, like ctrl-D
//...         a turn that begins with /
ctrl-C stops an answer"""
_COMMANDS = ("/help", "/system", "/reset", "/save", "/exit")
_PROMPT = "> "


class Talk:
    """A conversation of many turns.

    Args:
      engine: an engine with its own thread.
      chat: the model's chat template.
      length: token capacity of a slot.
      sampling: of the answers.
      write: writes text to the terminal.
      adapter: the engine's adapter to answer with; None: the model alone.

    Attributes:
      messages: the conversation so far.
    """

    def __init__(
        self,
        engine: Engine,
        chat: Chat,
        length: int,
        sampling: Sampling,
        write: Callable[[str], None],
        adapter: str | None = None,
    ):
        self._engine, self._chat, self._length, self._sampling = engine, chat, length, sampling
        self._write, self._adapter = write, adapter
        self.messages: list[Message] = []

    def run(self, read: Callable[[str], str] = input) -> None:
        """Runs until the input ends.

        Args:
          read: (prompt) -> a typed line; raises EOFError at the end.
        """
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - with it input() has a line that can be edited
        self._write("/help lists commands, ctrl-D ends\n")
        while True:
            try:
                line = read(_PROMPT)
            except KeyboardInterrupt:
                self._write("\nctrl-D ends\n")
                continue
            except EOFError:
                self._write("\n")
                return
            if line.strip() == "/exit":
                return
            self.take(line)

    def take(self, line: str) -> None:
        """Handles a line: a command, or a turn whose answer it writes."""
        if not line.strip():
            return
        if line.startswith("/") and not line.startswith("//"):
            self._command(*line.strip().split(maxsplit=1))
            return
        before = list(self.messages)
        self.messages.append({"role": "user", "content": line.removeprefix("/") if line.startswith("//") else line})
        try:
            self._answer()
        except UserError as error:  # the template rejects the turn, or it does not fit: drop it
            self.messages = before
            self._write(f"error: {error}\n")
        except KeyboardInterrupt:
            self.messages = before
            self._write(" [stopped]\n")

    def _command(self, name: str, rest: str = "") -> None:
        match name:
            case "/help":
                self._write(f"{_HELP}\n")
            case "/system":
                turns = [message for message in self.messages if message["role"] != "system"]
                self.messages = ([{"role": "system", "content": rest}] if rest else []) + turns
            case "/reset":
                self.messages = self._system
            case "/save":
                self._save(rest)
            case _:
                self._write(f"there is no command {name}{did_you_mean(name, _COMMANDS)}\n")

    @property
    def _system(self) -> list[Message]:
        return [message for message in self.messages if message["role"] == "system"]

    def _save(self, path: str) -> None:
        if not path or not self.messages:
            self._write(
                "/save needs a file, e.g. /save chat.jsonl\n" if self.messages else "the conversation is empty\n"
            )
            return
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n")
            self._write(f"{len(self.messages)} messages in {path}\n")
        except OSError as error:
            self._write(f"error: {path} cannot be written ({error.strerror}): name another file\n")

    def _answer(self) -> None:
        stream = self._engine.submit(self._fitting(), self._sampling, ends=self._chat.ends, adapter=self._adapter)
        try:
            for piece in stream:
                self._write(printable(piece.text))
        except KeyboardInterrupt:
            stream.cancel()
        result = stream.result()
        notes = {Finish.CANCELLED: " [stopped]", Finish.LENGTH: " [cut off]"}
        if result.finish is Finish.CANCELLED and not result.text:
            raise KeyboardInterrupt
        self._write(notes.get(result.finish, "") + "\n")
        self.messages.append({"role": "assistant", "content": result.text})

    def _fitting(self) -> list[int]:
        """The prompt; drops the oldest turns until the prompt and an answer fit."""
        room = min(self._sampling.max_new_tokens, self._length // 4)
        dropped = 0
        while True:
            ids = self._chat.ids_after(Conversation(self.messages), "the conversation")
            turns = [k for k, message in enumerate(self.messages) if message["role"] == "user"]
            if len(ids) + room <= self._length + 1 or len(turns) < 2:
                break
            dropped += turns[1] - turns[0]
            del self.messages[turns[0] : turns[1]]
        if len(ids) > self._length:
            raise UserError(
                f"the message has {len(ids)} tokens with the template, must have at most {self._length}: shorten it"
            )
        if dropped:
            self._write(f"[the first {dropped} messages are forgotten: the context of {self._length} tokens is full]\n")
        return ids


def printable(text: str) -> str:
    """Text without control characters: all except newlines and tabs become U+FFFD."""
    return "".join(
        "\ufffd" if unicodedata.category(character) == "Cc" and character not in "\n\t" else character
        for character in text
    )


def write(text: str) -> None:
    """Writes text to standard output at once; characters that its encoding lacks become question marks."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
