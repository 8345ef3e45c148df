"""Google docstrings as Markdown."""

from __future__ import annotations

import inspect
import re

_SECTIONS = ("Attributes", "Args", "Returns", "Yields", "Raises")


def sections(text: str | None) -> dict[str, str]:
    """The parts of a docstring by the names of their headings; "" is the part before the first."""
    parts, name = {"": ""}, ""
    for line in inspect.cleandoc(text or "").splitlines():
        heading = re.fullmatch(rf"({'|'.join(_SECTIONS)}):", line)
        if heading or (line and not line.startswith(" ")):  # what is not indented ends a section
            name = heading[1] if heading else ""
        parts[name] = parts.get(name, "") + ("" if heading else f"{line}\n")
    return {name: inspect.cleandoc(part) for name, part in parts.items()}


def items(section: str) -> dict[str, str]:
    """Name -> its text, of a section with lines `name: text` or `name, name: text` and indented continuations."""
    texts: dict[str, str] = {}
    names: list[str] = []
    for line in filter(None, section.splitlines()):
        if start := re.match(r"([\w*]+(?:, \w+)*):(?: |$)", line):
            names = [name.strip("*") for name in start[1].split(", ")]
            line = line[start.end() :]
        for name in names:
            texts[name] = f"{texts.get(name, '')} {line.strip()}".strip()
    return texts


def escaped(text: str) -> str:
    """Plain text as Markdown of a table's cell: nothing but code in backticks is markup."""
    # Flags are code: elsewhere a line may end within their dashes.
    text = re.sub(r"(?<![\w`-])--[a-z][\w.-]*(?:=[\w.:]+)?(?![\w`])", r"`\g<0>`", text) if "`" not in text else text
    parts = " ".join(text.split()).split("`")
    plain = [re.sub(r"([\\*_<\[\]])", r"\\\1", part).replace("|", "&#124;") for part in parts[::2]]
    codes = [code(part) for part in parts[1::2]]
    return "".join(part for pair in zip(plain, [*codes, ""]) for part in pair)


def code(text: str) -> str:
    """Text as code within a table's cell, where a bar would end the cell."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")
    return f"<code>{re.sub(r'([*_`[])', lambda sign: f'&#{ord(sign[0])};', text)}</code>"


def prose(text: str) -> str:
    """The paragraphs of a docstring as Markdown; indented lines stay code, and lists stay lists."""
    blocks = []
    for block in re.split(r"\n\s*\n", text):
        is_code = all(line.startswith("    ") for line in block.splitlines())
        is_list = block.lstrip().startswith("- ")
        blocks.append(block if is_code or is_list else escaped(block).replace("&#124;", "|"))
    return "\n\n".join(blocks)


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table of Markdown."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)
