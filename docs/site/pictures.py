"""Draws the pictures of docs/concepts.md: `python docs/site/pictures.py`; the rooms are read from the imports of the code.

Each has a ground of its own, so that it is read on a light page and on a dark one.
"""

from __future__ import annotations

import ast
import functools
import html
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
WIDTH = 480
_STYLE = """
  text { font: 13px sans-serif; fill: #1c2330; }
  .small { font-size: 11px; fill: #465066; }
  .ground { fill: #f5f7fb; }
  .box { fill: #ffffff; stroke: #6a7690; }
  .strong { fill: #dbe4ff; stroke: #3b55c4; }
  .bad { fill: #ffe0dc; stroke: #b3392b; }
  .arrow { stroke: #465066; stroke-width: 1.5; fill: none; marker-end: url(#head); }
  @media (prefers-color-scheme: dark) {
    text { fill: #e8ecf5; }
    .small { fill: #b5bfd3; }
    .ground { fill: #171b26; }
    .box { fill: #232a3a; stroke: #8f9bb5; }
    .strong { fill: #2b3a78; stroke: #9db0ff; }
    .bad { fill: #5c2721; stroke: #ff9d90; }
    .arrow { stroke: #b5bfd3; }
  }
"""


def text(x: float, y: float, line: str, kind: str = "", anchor: str = "middle") -> str:
    """A line of text whose baseline is at y."""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{kind}">{html.escape(line)}</text>'


def box(x: float, y: float, width: float, height: float, *lines: str, kind: str = "box") -> str:
    """A box with centred lines, the first large and the others small."""
    top = y + height / 2 + 4.5 - 8 * (len(lines) - 1)
    words = [text(x + width / 2, top + 16 * i, line, "small" if i else "") for i, line in enumerate(lines)]
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" class="{kind}"/>' + "".join(words)


def arrow(*points: tuple[float, float]) -> str:
    """A line through points, with a head at the last one."""
    return f'<path d="M{" L".join(f"{x:g} {y:g}" for x, y in points)}" class="arrow"/>'


def picture(title: str, height: float, parts: list[str]) -> str:
    """The text of an SVG file."""
    head = '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    head += '<path d="M0 0 L8 4 L0 8 z" fill="#6a7690"/></marker>'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img">\n<title>{html.escape(title)}</title>\n'
        f"<style>{_STYLE}</style>\n<defs>{head}</defs>\n"
        f'<rect width="{WIDTH}" height="{height:g}" rx="8" class="ground"/>\n{body}\n</svg>\n'
    )


@functools.cache
def imports() -> dict[str, set[str]]:
    """Room -> the rooms that it imports, deferred imports and those for type checkers included; without verbs."""
    rooms = {path.name for path in (ROOT / "capibara").iterdir() if (path / "__init__.py").exists()} - {"cli", "api"}
    found: dict[str, set[str]] = {}
    for room in rooms:
        found[room] = set()
        for path in (ROOT / "capibara" / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.module == "capibara":
                    names = [f"capibara.{alias.name}" for alias in node.names]
                parts = [name.split(".") for name in names if name.startswith("capibara.")]
                found[room] |= {part[1] for part in parts} & rooms - {room}
    return found


@functools.cache
def level(room: str) -> int:
    """The row of a room from below: above all that it imports."""
    return 1 + max((level(other) for other in imports()[room]), default=-1)


def rooms() -> str:
    """The rooms in rows, each above what it imports."""
    count = 1 + max(map(level, imports()))
    parts = [box(20, 14, 440, 30, "cli, api: the verbs, and the same as functions of Python", kind="strong")]
    for row in range(count):
        names = sorted(room for room in imports() if level(room) == row)
        y = 14 + 46 * (count - row)
        width = (440 - 8 * (len(names) - 1)) / len(names)
        parts += [box(20 + (width + 8) * i, y, width, 34, name) for i, name in enumerate(names)]
    y = 14 + 46 * count + 56
    parts.append(text(WIDTH / 2, y, "A room imports rooms of lower rows only.", "small"))
    return picture("The rooms of the code", y + 14, parts)


def batch() -> str:
    """The way of a batch, from documents to an update."""
    steps = [
        ("source", "documents in the order of a seed, by position"),
        ("tokenizer, chat template", "tokens, and a mask: which have loss"),
        ("packing", "rows of Dataset.length tokens, apart from each other"),
        ("batch feed", "each host reads its own rows, ahead of the step"),
        ("mesh", "rows over data, fsdp and expert; tokens over context"),
        ("micro-batches", "Plan.accumulation parts, one after the other"),
        ("forward, loss, backward", "remat: what is recomputed"),
        ("optimizer", "one update; the position goes into the checkpoint"),
    ]
    parts = []
    for i, (name, what) in enumerate(steps):
        y = 16 + 62 * i
        parts.append(box(40, y, 400, 44, name, what, kind="strong" if name == "mesh" else "box"))
        if i:
            parts.append(arrow((240, y - 18), (240, y - 2)))
    return picture("A batch's way", 16 + 62 * len(steps), parts)


def mesh() -> str:
    """A mesh of eight devices with two axes."""
    parts = [text(280, 26, "tensor = 2: heads and hidden units"), text(20, 62, "fsdp = 4:", "", "start")]
    parts += [text(20, 80 + 16 * i, line, "small", "start") for i, line in enumerate(("rows, and", "parameters"))]
    for row in range(4):
        for column in range(2):
            what = (f"rows {4 * row} to {4 * row + 3}", f"quarter {row + 1}, half {column + 1} of a matrix")
            parts.append(box(110 + 178 * column, 40 + 62 * row, 170, 54, f"device {2 * row + column}", *what))
    parts.append(text(WIDTH / 2, 308, "Plan.batch_size = 16, Plan.fsdp = 4, Plan.tensor = 2", "small"))
    return picture("Mesh axes", 322, parts)


def checkpoint() -> str:
    """The folder of a run, and of a step in it."""
    lines = [
        (0, "runs/mine/", "MODEL_DIR"),
        (1, "config.gin", "every value of the run, as data"),
        (1, "manifest.json", "hashes of what is not in checkpoints/"),
        (1, "metrics.jsonl", "one object a line"),
        (1, "tokenizer/", "with its chat template"),
        (1, "checkpoints/", ""),
        (2, "lease.json", "who may write now"),
        (2, "50/", "a whole step"),
        (3, "manifest.json", "size and hash of each file; written last"),
        (3, "run.json", "data position, early stopping"),
        (3, "state/", "arrays in chunks: parameters, optimizer"),
        (2, "40.corrupted/", "quarantined: never resumed from"),
    ]
    parts = []
    for i, (depth, name, what) in enumerate(lines):
        y = 30 + 24 * i
        parts.append(text(24 + 22 * depth, y, name, "", "start"))
        parts.append(text(210, y, what, "small", "start"))
    return picture("A checkpoint's layout", 30 + 24 * len(lines), parts)


def consensus() -> str:
    """One round of consensus."""
    parts = [box(140, 14, 200, 40, "agreed model", "of the last round", kind="strong")]
    for i in range(4):
        x, bad = 16 + 114 * i, i == 3
        parts.append(arrow((240, 54), (x + 52, 84)))
        what = "faulty: any values" if bad else "its own rows"
        parts.append(box(x, 86, 104, 58, f"node {i}", "trains alone", what, kind="bad" if bad else "box"))
        parts.append(arrow((x + 52, 144), (240, 178)))
    chain = [
        ("consensus score", "who has a part: finite, near, good enough"),
        ("aggregation", "a mean, or a rule that withstands Aggregation.faults"),
        ("outer optimizer", "a step from the agreed model to the aggregate"),
        ("vote (optional)", "more than (n + f) / 2 nodes approve, or the round fails"),
    ]
    for i, (name, what) in enumerate(chain):
        y = 180 + 62 * i
        parts.append(box(70, y, 340, 44, name, what))
        if i:
            parts.append(arrow((240, y - 18), (240, y - 2)))
    y = 180 + 62 * len(chain)
    parts.append(arrow((240, y - 18), (240, y - 2)))
    parts.append(box(140, y, 200, 40, "agreed model", "all nodes resume from it", kind="strong"))
    return picture("A round of consensus", y + 56, parts)


PICTURES = {"rooms": rooms, "batch": batch, "mesh": mesh, "checkpoint": checkpoint, "consensus": consensus}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (ROOT / "docs" / f"concept_{name}.svg").write_text(draw())
