"""A bullet of a playbook, and the normal forms of its text, identifier, section and domain."""

from __future__ import annotations

import dataclasses
import re
import textwrap
import unicodedata

GENERAL = "GENERAL"  # the section of bullets before any header; ACE names it so, too
MOST_VOTES = 999_999_999
MOST_CHARACTERS = 100_000  # of a bullet
_MOST_NAME = 100  # characters of a section or an identifier
_AND = re.compile(r"\bAND\b")
_BEFORE_NAME, _AFTER_NAME = re.compile(r"^[\W_]+"), re.compile(r"[\s:*`#_]+$")
_PLACEHOLDER = re.compile(r"<(SECRET|PERSONAL):(\w+):\d+>")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bullet:
    """A piece of advice with its votes.

    Attributes:
      id: its identifier in its playbook, such as "str-00001"; "" if it has none.
      section: the text of the header above it.
      content: the advice in its normal form (see `normalised`).
      helpful, harmful: how often it helped, and how often it did harm.
      domain: the domain that an export names; None: none.
      agent: the agent that an export names; None: none.
      line: of its file, or its item of a list, from 1.
    """

    id: str
    section: str
    content: str
    helpful: int = 0
    harmful: int = 0
    domain: str | None = None
    agent: str | None = None
    line: int = 0


def normalised(content: str) -> str:
    """The text of a bullet as playbooks can hold it: reading what was written gives the same text.

    Line ends become line feeds. Spaces at line ends, blank lines around the text, byte order marks, and what all lines but
    the first have as indentation are dropped. A NUL becomes U+FFFD.
    """
    text = content.replace("\r\n", "\n").replace("\r", "\n").replace("\ufeff", "").replace("\0", "\ufffd")
    first, _, rest = "\n".join(line.rstrip() for line in text.split("\n")).strip().partition("\n")
    return "\n".join([first.rstrip(), textwrap.dedent(rest)]) if rest else first


def section_name(header: str) -> str:
    """The name of a section: "strategies_and_insights" and "Strategies & Insights:" are "STRATEGIES & INSIGHTS"."""
    text, before = one_line(unicodedata.normalize("NFC", header).replace("_", " ").replace("-", " ")), None
    while text != before:
        before = text
        text = _AND.sub("&", unicodedata.normalize("NFC", text.upper()))
        text = _AFTER_NAME.sub("", _BEFORE_NAME.sub("", text)[:_MOST_NAME])
    return text or GENERAL


def identifier(value: str) -> str:
    """An identifier as it stands in brackets."""
    return one_line(value.replace("[", "(").replace("]", ")"))[:_MOST_NAME].rstrip()


def domain_name(value: str) -> str:
    """The name of a domain: lower case, without spaces."""
    words = re.findall(r"[\w+#.]+", one_line(value).lower())
    return "_".join(words).strip("._")[:_MOST_NAME].rstrip("._") or GENERAL.lower()


def one_line(text: str) -> str:
    """The text with single spaces, without characters that do not print."""
    return " ".join("".join(item if item.isprintable() else " " for item in text).split())


def unnumbered(content: str) -> str:
    """The text with placeholders of secrets that do not depend on how many there are in its file."""
    return _PLACEHOLDER.sub(r"<\1:\2>", content)
