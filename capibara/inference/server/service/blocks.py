"""The blocks of an answer: thoughts, text and calls, one after the other, as Anthropic's and OpenAI's newer API have them."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator

from capibara.inference.server.service.reply import Json


class Kind(enum.StrEnum):
    """What a block holds."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


class Change(enum.StrEnum):
    """What happens to a block."""

    BEGIN = "begin"
    EXTEND = "extend"
    END = "end"


@dataclasses.dataclass
class Block:
    """A part of an answer.

    Attributes:
      kind: of the block.
      index: among the answer's blocks.
      text: the thought, the text, or the call's arguments as JSON.
      call_id, name: of a call.
    """

    kind: Kind
    index: int
    text: str = ""
    call_id: str = ""
    name: str = ""


class Blocks:
    """Follows the deltas of a chat's message; the blocks of an answer do not overlap.

    Attributes:
      blocks: all blocks so far.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._is_open = False

    def add(self, delta: Json) -> Iterator[tuple[Change, Block, str]]:
        """What a delta changes, each with the text that it adds."""
        for kind, key in ((Kind.REASONING, "reasoning_content"), (Kind.TEXT, "content")):
            if text := delta.get(key):
                yield from self._extend(kind, text)
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                yield from self._begin(Kind.CALL, call["id"], call["function"]["name"])
            if text := call["function"]["arguments"]:
                yield from self._extend(Kind.CALL, text)

    def close(self) -> Iterator[tuple[Change, Block, str]]:
        """Ends the last block."""
        if self._is_open:
            self._is_open = False
            yield Change.END, self.blocks[-1], ""

    def _extend(self, kind: Kind, text: str) -> Iterator[tuple[Change, Block, str]]:
        if not (self._is_open and self.blocks[-1].kind is kind):
            yield from self._begin(kind)
        self.blocks[-1].text += text
        yield Change.EXTEND, self.blocks[-1], text

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> Iterator[tuple[Change, Block, str]]:
        yield from self.close()
        self.blocks.append(Block(kind, len(self.blocks), call_id=call_id, name=name))
        self._is_open = True
        yield Change.BEGIN, self.blocks[-1], ""


def blocks_of(message: Json) -> list[Block]:
    """The blocks of a whole message."""
    blocks = Blocks()
    for _ in blocks.add({key: message.get(key) for key in ("reasoning_content", "content")}):
        pass
    for call in message.get("tool_calls", ()):
        blocks.blocks.append(
            Block(Kind.CALL, len(blocks.blocks), call["function"]["arguments"], call["id"], call["function"]["name"])
        )
    return blocks.blocks
