"""The links of a chain of lineage, as text and JSON."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping
from typing import Any

from capibara.builders.files.problems import printable

SHOWN = 20  # unchanged files of a data set that the text names
DIGITS = 12  # of a hash in the text


class Kind(enum.StrEnum):
    """What a node of the chain is."""

    CHECKPOINT = "checkpoint"
    RUN = "run"
    DATASET = "data set"
    FILE = "file"


class State(enum.StrEnum):
    """Whether a node is still as it was when the next one was made of it."""

    WHOLE = "unchanged"
    CHANGED = "changed"
    MISSING = "missing"
    UNKNOWN = "not checked"  # too large, or no hash was recorded


class Check(enum.StrEnum):
    """How files are compared with what was recorded."""

    HASHES = "hashes"
    SIZES = "sizes"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Node:
    """A link of the chain.

    Attributes:
      kind: what it is.
      path: absolute, or an address.
      digest: sha256 of a file, fingerprint of a data set; None: unknown.
      state: whether it is as recorded.
      notes: what is wrong with it, one line each.
      facts: what is recorded of it, such as who built it and when.
      parents: what it was made of.
    """

    kind: Kind
    path: str
    digest: str | None = None
    state: State
    notes: tuple[str, ...] = ()
    facts: Mapping[str, str | int] = dataclasses.field(default_factory=dict)
    parents: tuple[Node, ...] = ()

    def all(self) -> Iterator[Node]:
        """This node, and all behind it."""
        yield self
        for parent in self.parents:
            yield from parent.all()

    @property
    def is_unchanged(self) -> bool:
        """Whether no node of the chain has changed or is missing."""
        return not any(item.state in (State.CHANGED, State.MISSING) for item in self.all())

    def as_json(self) -> dict[str, Any]:
        """A JSON object of this node and all behind it."""
        return {
            "kind": str(self.kind),
            "path": self.path,
            "digest": self.digest,
            "state": str(self.state),
            "notes": list(self.notes),
            "facts": dict(self.facts),
            "parents": [parent.as_json() for parent in self.parents],
        }

    def text(self, indent: str = "") -> str:
        """Lines for the user: this node, then its parents, indented. Of many unchanged files only the first are named."""
        digest = f" {self.digest[:DIGITS]}" if self.digest else ""
        facts = "".join(f", {name} {value}" for name, value in self.facts.items())
        lines = [f"{indent}{printable(f'{self.kind} {self.path}{digest}: {self.state}{facts}')}"]
        inner = f"{indent}  "
        lines += [f"{inner}! {printable(note)}" for note in self.notes]
        files = [item for item in self.parents if item.kind is Kind.FILE and item.state is State.WHOLE]
        hidden = {id(item) for item in files[SHOWN:]}
        lines += [parent.text(inner) for parent in self.parents if id(parent) not in hidden]
        lines += [f"{inner}and {len(hidden):,} more files, all unchanged"] if hidden else []
        return "\n".join(lines)
