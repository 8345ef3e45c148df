"""The package has the types that it says: `make types` shows what mypy finds; pyproject.toml says what it is asked."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
WRONG = """
from capibara.core.types import UserError
from capibara.sharding import Plan

def batch_size(plan):
    return plan.batch_size

raise UserError(Plan(batch_size="8").slice.upper())
"""


def mypy(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "mypy", *arguments]
    return subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)


def test_mypy_sees_what_is_wrong_and_has_nothing_to_say_of_the_package(tmp_path):
    """In one run, of the package and of a file with a wrong type, a missing one and a None."""
    file = tmp_path / "wrong.py"
    file.write_text(WRONG)
    done = mypy("capibara", str(file))
    # By the file's name: mypy's cache keeps the folder in which an equal file was first.
    found = re.findall(r"^(?:.*/)?(.*):\d+: error: .*\[([a-z-]+)\]$", done.stdout, re.MULTILINE)
    assert sorted(found) == [(file.name, kind) for kind in ("arg-type", "no-untyped-def", "union-attr")], done.stdout


def test_an_error_that_is_ignored_says_which_and_why():
    bare = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in (ROOT / "capibara").rglob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if "type: ignore" in line and not re.search(r"# type: ignore\[[a-z, -]+\]  # \w+ .+", line)
    ]
    assert not bare, f"write type: ignore[CODE]  # REASON: {bare}"
