"""What the standard library's docstrings say of its functions."""

from __future__ import annotations

import ast
import functools
import pathlib
import sysconfig


@functools.cache
def summaries() -> dict[str, str]:
    """Name of a public function, such as "shutil.copyfile", -> the first line of its docstring, of those that no two share."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    entries: dict[str, str] = {}
    for path in sorted(root.glob("*.py")):
        if path.stem.startswith("_"):
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if (
                isinstance(node, ast.FunctionDef)
                and not node.name.startswith("_")
                and (text := ast.get_docstring(node))
            ):
                entries[f"{path.stem}.{node.name}"] = text.splitlines()[0]
    lines = [*entries.values()]
    return {name: line for name, line in entries.items() if lines.count(line) == 1 and len(line.split()) > 2}
